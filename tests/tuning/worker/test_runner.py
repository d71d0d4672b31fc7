"""Candidates that crash, hang or exhaust memory in a worker process, and what is told of them.

Covers `tuning/worker/limits.py` and `tuning/worker/main.py`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Isolation, Kernel, Tuner, autotune_recorded
from ejkernel.ops.core.errors import IsolationError, SettingError, TuningError
from ejkernel.ops.timing import inputs, program
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.tuner import IsolationWarning
from ejkernel.ops.tuning.worker import process, watchdog
from ejkernel.ops.tuning.worker.watchdog import Watchdog

X = jnp.arange(1.0, 9.0)
LIMITS = Isolation(run_seconds=15, imports=["faults"])
REPOSITORY = Path(__file__).resolve().parents[3]


def doubling(name):
    """A candidate by name; every right one gives twice its argument."""
    known = {
        # A hundred times as slow: a busy machine must not turn that round.
        "slow": lambda x: faults.slow(x, 60_000),
        "endless": faults.endless,
        "wrong": lambda x: x * 3,
        "untraceable": lambda x: x * 2 if x[0] > 0 else x,
        "callback": lambda x: jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    }
    if name in faults.FAULTS:
        return faults.faulty(name)
    return known.get(name, lambda x: x * 2)


def outcome(tuner):
    """What became of each candidate."""
    return {trial.cfg: trial.status for trial in tuner.record.trials}


def alive(pid):
    """Is there such a process, and not just its remains?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def workers(monkeypatch):
    """The process ids of the workers that a test starts."""
    pids = []
    begin = process.WorkerProcess._begin

    def noting(self):
        pids.append(self.pid)
        begin(self)

    monkeypatch.setattr(process.WorkerProcess, "_begin", noting)
    return pids


# Real faults, in real processes.


def test_whoever_takes_the_process_down_is_out_and_the_race_goes_on(workers, monkeypatch):
    """`os._exit`, a segfault and one that sleeps for ever: each is named for it."""
    names = ["slow", "exit", "segfault", "sleep", "fast"]
    hands, poll = SimpleNamespace(ahead=0.0), Watchdog.poll
    hands.perf_counter = lambda: time.perf_counter() + hands.ahead

    def hours_later(self, held, **how):
        # The limit is long, for a machine that is busy: only for the one that sleeps does the time pass at once.
        turn = self.at_work.get(names.index("sleep"))
        hands.ahead = 3600.0 if turn is not None and turn.doing == "check" else 0.0
        try:
            return poll(self, held, **how)
        finally:
            hands.ahead = 0.0

    monkeypatch.setattr(watchdog, "time", hands)
    monkeypatch.setattr(Watchdog, "poll", hours_later)
    tuner = Tuner(isolate=replace(LIMITS, run_seconds=120))

    winner = tuner.autotune(doubling, (X,), {}, names)

    assert winner == "fast"
    assert outcome(tuner) == {"slow": "ok", "exit": "crash", "segfault": "crash", "sleep": "timeout", "fast": "ok"}
    said = {trial.cfg: trial.message for trial in tuner.record.trials}
    assert "exit status 3" in said["exit"]
    assert "SIGSEGV" in said["segfault"]
    assert "120 s" in said["sleep"]
    # One for each that died, and the one that was left.
    assert len(workers) == 4
    assert not any(map(alive, workers))


def test_whoever_takes_too_much_memory_is_out():
    """The process is ended when it holds more than is allowed, long before the machine has none left."""
    tuner = Tuner(isolate=Isolation(run_seconds=600, memory_bytes=1 << 30, imports=["faults"]))

    assert tuner.autotune(doubling, (X,), {}, ["hog", "fast"]) == "fast"
    assert outcome(tuner) == {"hog": "memory", "fast": "ok"}
    assert "1,024 are allowed" in tuner.record.trials[0].message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"), [("abort", "crash"), ("killed", "crash"), ("endless", "timeout")], ids=["abort", "kill", "loop"]
)
def test_other_ends(name, status):
    """An abort, a kill from inside that happens twice, and a loop of the program itself."""
    tuner = Tuner(isolate=LIMITS)

    assert tuner.autotune(doubling, (X,), {}, ["slow", name, "fast"]) == "fast"
    assert outcome(tuner) == {"slow": "ok", name: status, "fast": "ok"}


def test_failures_that_are_no_accidents_are_the_same_as_without_a_worker():
    """Wrong results and errors while tracing are outcomes, and the gradients are checked with the output."""

    def make_fn(name):
        if name == "raises":
            return lambda x: (_ for _ in ()).throw(ValueError("no such block"))
        return {"wrong": lambda x: x**2 * 1.5, "gradient": bent}.get(name, lambda x: x**2)

    @jax.custom_vjp
    def bent(x):
        return x**2

    bent.defvjp(lambda x: (x**2, x), lambda x, dy: (x * dy,))
    job = TuningJob(make_fn, (X,), {}, ["usual", "raises", "wrong", "gradient"], objective="forward+backward")
    tuner = Tuner(isolate=True)
    record = tuner.tune(job)

    assert record.objective == "forward+backward"
    assert outcome(tuner) == {"usual": "ok", "raises": "compile", "wrong": "wrong", "gradient": "wrong"}
    assert record.clock == "wall (in a worker process)"


@pytest.mark.parametrize("objective", ["forward", "forward+backward"])
def test_a_reference_is_what_the_worker_compares_with(objective):
    """Also beside candidates with gradients, whose cotangents are none of its arguments; structures are compared."""

    def make_fn(name):
        return {"other": lambda x: {"z": x * 2}, "off": lambda x: {"y": x}}.get(name, lambda x: {"y": x * 2})

    tuner = Tuner(isolate=True)
    cfgs = ["off", "other", "right"]
    job = TuningJob(make_fn, (X,), {}, cfgs, reference=lambda x: {"y": x * 2}, objective=objective)

    assert tuner.tune(job).cfg == "right"
    assert outcome(tuner) == {"off": "wrong", "other": "wrong", "right": "ok"}


def test_both_runs_of_a_reference_happen_in_the_worker():
    """A worker knows what is more exact than the reference as it was written, and the noise of that."""

    def halves(x, y):
        return (x @ y) * 8 - (x @ y) * 8 * (1 - 2.0**-6)

    def make_fn(name):
        return {"other order": lambda x, y: (x * 8) @ y - (x @ y) * 8 * (1 - 2.0**-6)}.get(name, halves)

    tuner = Tuner(isolate=True)
    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),) * 2
    job = TuningJob(make_fn, shapes, {}, ["usual", "other order"], reference=halves, objective="forward+backward")
    record = tuner.tune(job)

    assert outcome(tuner) == {"usual": "ok", "other order": "ok"}
    assert all(trial.check.widened > 0 for trial in record.trials)


def test_a_pallas_kernel_runs_in_a_worker():
    """Blocks of every size are exported, and the one that leaves part of its output unwritten is found out."""

    def make_fn(block):
        def kernel(x, out):
            out[...] = x[...] * 2

        spec = pl.BlockSpec((block,), lambda i: (i,))
        shape = jax.ShapeDtypeStruct((8,), jnp.float32)
        steps = 8 // block if block < 4 else 1
        return pl.pallas_call(kernel, out_shape=shape, grid=(steps,), in_specs=[spec], out_specs=spec, interpret=True)

    tuner = Tuner(isolate=True)
    tuner.autotune(make_fn, (X,), {}, [1, 2, 4])

    assert outcome(tuner) == {1: "ok", 2: "ok", 4: "wrong"}


# What JAX deprecates is what this runs.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.skipif(all(device.platform != "gpu" for device in jax.devices()), reason="there is no GPU here")
def test_a_pallas_kernel_of_a_gpu_runs_in_a_worker():
    """Its custom call is exported, and the device's own clock serves there too."""

    def make_fn(block):
        def kernel(x, out):
            out[...] = x[...] * 2

        spec = pl.BlockSpec((block,), lambda i: (i,))
        shape = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, grid=((1 << 16) // block,), in_specs=[spec], out_specs=spec)

    tuner = Tuner(isolate=True)
    tuner.autotune(make_fn, (jnp.ones(1 << 16),), {}, [128, 1024, 4096])

    assert set(outcome(tuner).values()) == {"ok"}
    assert tuner.record.clock == "profiler (in a worker process)"


# What cannot be sent.


def test_what_cannot_be_exported_is_reported_where_a_worker_was_demanded():
    """It has no place in this race; the reason is in the record."""
    tuner = Tuner(isolate=True)

    assert tuner.autotune(doubling, (X,), {}, ["callback", "untraceable", "fast"]) == "fast"
    assert outcome(tuner) == {"callback": "compile", "untraceable": "compile", "fast": "ok"}
    assert "callback" in tuner.record.trials[0].message


def test_what_cannot_be_exported_runs_here_where_a_worker_was_not_demanded(workers):
    """Times of two processes do not compare: all run here, and the record says why."""
    tuner = Tuner()
    record = tuner.tune(TuningJob(doubling, (X,), {}, ["callback", "fast"], offline=True))

    assert workers == []
    assert {trial.status for trial in record.trials} == {"ok"}
    assert record.clock.startswith("wall (not in a worker process: ")
    assert "callback" in record.clock


def test_a_foreign_function_needs_the_module_that_registers_it():
    """A fresh process does not have it; the reason names it and what to do."""
    tuner = Tuner(isolate=True)
    with pytest.raises(TuningError, match=r"ejk_test_exit.*Isolation\(imports="):
        tuner.autotune(doubling, (X,), {}, ["exit"])


def test_arrays_on_several_devices_are_not_sent():
    """A worker has no share of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spread = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    record = Tuner().tune(TuningJob(doubling, (spread,), {}, ["fast", "slow"], offline=True))

    assert "several devices" in record.clock


# When there is a worker.


class Scale(Kernel[str, jax.Array]):
    """Twice the argument."""

    op_id = "scale_in_worker"

    def run(self, x, *, cfg):
        return doubling(cfg)(x)

    def heuristic_cfg(self, inv):
        return "slow"

    def candidate_cfgs(self, inv):
        return ["slow", "fast"]


def test_offline_tuning_uses_a_worker_and_a_call_does_not(workers, monkeypatch):
    """Ahead of the program its start is well spent; a call waits for its answer."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 2))
    for x in (X, jnp.ones(64)):
        Executor(selector)(Scale(), x)
    assert workers == []

    result = autotune_recorded(selector)

    assert [entry.cfg for entry in result.entries] == ["fast", "fast"]
    # One serves for all.
    assert len(workers) == 1
    assert not alive(workers[0])


def test_sixty_four_bits_are_sixty_four_bits_there():
    """Settings that a program depends on are those of this process."""
    with jax.enable_x64(True):
        tuner = Tuner(isolate=True)
        tuner.autotune(lambda n: lambda x: x * n * 2 / n, (jnp.arange(4, dtype=jnp.float64),), {}, [1.0, 3.0])

    assert outcome(tuner) == {1.0: "ok", 3.0: "ok"}


# A worker that cannot start.


@pytest.fixture
def no_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))


def test_without_a_worker_a_demand_is_an_error(no_python):
    """Isolation that was asked for is not left out silently."""
    with pytest.raises(IsolationError, match="no worker process can be started"):
        Tuner(isolate=True).autotune(doubling, (X,), {}, ["slow", "fast"])


def test_without_a_worker_and_without_a_demand_it_is_done_here(no_python):
    """With a warning, and the record says so."""
    with pytest.warns(IsolationWarning, match="run in this process"):
        record = Tuner().tune(TuningJob(doubling, (X,), {}, ["slow", "fast"], offline=True))

    assert record.cfg == "fast"
    assert "not in a worker process" in record.clock


def test_a_worker_that_is_killed_before_it_is_ready_is_started_again(monkeypatch):
    """Once or twice is a kill from outside; three times is an error."""
    start = process.WorkerProcess.__init__
    kills = [signal.SIGTERM, signal.SIGHUP, None]

    def killing(self, *args, **kwargs):
        start(self, *args, **kwargs)
        # At once: on a busy machine it may be ready by the time that it is waited for.
        if (kill := kills.pop(0)) is not None:
            os.kill(self.pid, kill)

    monkeypatch.setattr(process.WorkerProcess, "__init__", killing)
    tuner = Tuner(isolate=True)
    assert tuner.autotune(doubling, (X,), {}, ["slow", "fast"]) == "fast"

    kills[:] = [signal.SIGKILL] * 3
    with pytest.raises(IsolationError, match="SIGKILL"):
        tuner.autotune(doubling, (X,), {}, ["slow", "fast"])


def test_an_interrupt_of_the_terminal_does_not_end_a_worker():
    """Ctrl-C reaches all processes of a terminal; a program that handles it goes on, and so do its candidates."""
    head = {"platform": "cpu", "device": 0, "settings": {}, "imports": []}
    worker = process.worker_for(**head)
    try:
        worker.ready()
        os.kill(worker.pid, signal.SIGINT)
        worker.send("start", **head)
        while (answer := worker.hear()) is None:
            pass
    finally:
        worker.end()

    assert answer.verb == "hello"


def test_of_two_workers_that_are_alike_one_is_kept_and_none_left_behind(monkeypatch):
    """A kernel inside a kernel is tuned while the worker of the outer one waits for its next batch."""
    ended = []
    monkeypatch.setattr(process.WorkerProcess, "end", lambda self: ended.append(self))
    inner, outer = (process.WorkerProcess.__new__(process.WorkerProcess) for _ in range(2))
    inner._head = outer._head = {"platform": "cpu"}

    with process.kept_workers():
        inner.leave()
        outer.leave()

    assert ended == [outer, inner]


def test_a_worker_that_breaks_while_it_starts_says_why():
    """A module that it cannot import is named."""
    with pytest.raises(IsolationError, match="no_such_module"):
        Tuner(isolate=Isolation(imports=["no_such_module"])).autotune(doubling, (X,), {}, ["slow", "fast"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Isolation(run_seconds=0),
        lambda: Isolation(memory_bytes=-1),
        lambda: Isolation(imports="faults"),
        lambda: Tuner(isolate="yes"),
        lambda: Tuner(isolate=True, clock=faults),
    ],
    ids=["no time", "no memory", "one name", "unknown", "clock"],
)
def test_settings_that_mean_nothing_are_refused(make):
    """Each with what to use instead."""
    with pytest.raises(SettingError):
        make()


# Nothing of the user's program runs again, and no process is left behind.


def script(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(body))
    found = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "tuning")])
    return [sys.executable, "-W", "error", str(path)], {**os.environ, "PYTHONPATH": found}


def test_the_users_program_is_not_run_again(tmp_path):
    """A script without a `__main__` guard is executed once, though it starts workers."""
    command, env = script(
        tmp_path,
        f"""
        open({str(tmp_path / "runs")!r}, "a").write("run\\n")
        import jax.numpy as jnp
        from ejkernel.ops import Tuner
        tuner = Tuner(isolate=True)
        tuner.autotune(lambda n: lambda x: x * n * 2 / n, (jnp.ones(8),), {{}}, [1.0, 3.0])
        print(tuner.record.clock)
        """,
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    assert done.stdout.strip() == "wall (in a worker process)", done.stderr
    assert (tmp_path / "runs").read_text() == "run\n"


def test_the_end_of_the_parent_is_the_end_of_its_worker(tmp_path):
    """Killed while a candidate hangs in the worker: no process is left."""
    command, env = script(
        tmp_path,
        """
        import jax.numpy as jnp, faults
        from ejkernel.ops import Isolation, Tuner
        from ejkernel.ops.tuning.worker import process
        begin = process.WorkerProcess._begin
        def telling(self):
            print(self.pid, flush=True)
            begin(self)
            print("begun", flush=True)
        process.WorkerProcess._begin = telling
        fns = {"fast": lambda x: x * 2, "endless": faults.endless}
        Tuner(isolate=Isolation(run_seconds=3600)).autotune(fns.get, (jnp.ones(8),), {}, list(fns))
        """,
    )
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert parent.stdout.readline() == "begun\n"
        watched = os.pidfd_open(worker)
        assert select.select([watched], [], [], 0)[0] == []
        parent.send_signal(signal.SIGKILL)
    # Readable once the process has ended.
    assert select.select([watched], [], [], 300)[0] == [watched]
    os.close(watched)


@pytest.mark.parametrize("objective", ["forward", "forward+backward"])
def test_inputs_are_drawn_in_the_worker_alone(monkeypatch, objective):
    """Tracing needs shapes: this process keeps its device and its memory for the program."""
    drawn = []
    monkeypatch.setattr(inputs, "draw", lambda leaves, seed: drawn.append(leaves))
    monkeypatch.setattr(program, "draw", lambda leaves, seed: drawn.append(leaves))
    shapes = (jax.ShapeDtypeStruct((8,), jnp.float32),)
    job = TuningJob(doubling, shapes, {}, ["right", "other"], reference=lambda x: x * 2, objective=objective)
    record = Tuner(isolate=True).tune(job)
    assert [trial.status for trial in record.trials] == ["ok", "ok"]
    assert drawn == []
