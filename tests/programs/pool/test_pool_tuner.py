"""Whole programs on a pool: order, budgets, interrupts, kernels inside kernels, and calls of other devices.

Covers `programs/pool/absent_devices.py` and `programs/pool/keeper.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest
from fakes_pool import Adding, Inline, Other, Turns, calls_of, on, selecting
from fakes_programs import Timed

from ejkernel.ops import (
    AutotuneOptions,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    OperationStores,
    Tuner,
    autotune,
    autotune_recorded,
)
from ejkernel.ops.core import device as devices
from ejkernel.ops.execution.recording import Recording
from ejkernel.ops.programs import batch_progress
from ejkernel.ops.programs.found_call import FoundCall
from ejkernel.ops.programs.pool.schedule import ScheduleRules
from ejkernel.ops.programs.pool.task import Reply, Task, TaskOutcome
from ejkernel.ops.programs.pool.worker import run_task

EXECUTOR = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1, isolate=False)))


class Around(Adding):
    """A kernel that calls another one."""

    op_id = "around"

    def run(self, x, *, cfg):
        return EXECUTOR(Other(), super().run(x, cfg=cfg))


def untuned(text):
    """A worker that names every call."""
    return Reply("fake", tuple(TaskOutcome(call.key, why="not today") for call in Task.loads(text).calls)).dumps()


def sizes(pool):
    """The sizes of the calls' arrays, in the order in which they were sent."""
    asked = [call for text in pool.texts for call in json.loads(text)["calls"]]
    return [call["signature"]["args"][0]["array"][1][0] for call in asked]


def test_a_function_is_tuned_on_a_pool():
    """Its calls are found here, tuned there, and in force here."""
    executor = Executor(selecting())
    result = autotune(
        lambda x: executor(Adding(), x), jnp.ones(64), tuning=AutotuneOptions(pool=Inline(), progress=False)
    )
    (entry,) = result.entries
    assert entry.is_measured
    assert executor.chooser.cache.get(*next(iter(result.by_key()))) == entry.cfg


def test_the_costliest_call_goes_first():
    """A pool is waiting least for the last task when that is a small one."""
    pool = Inline()
    autotune(
        [*calls_of(1, least=10), *calls_of(1, least=10_000), *calls_of(1, least=100)], tuning=on(pool, selecting())
    )
    assert sizes(pool) == [10_000, 100, 10]


def test_calls_of_one_kernel_share_a_task_where_the_pool_asks_for_it():
    """Such as where each task is a job that waits in a queue."""
    pool = Inline(untuned)
    pool.calls_per_task = 3
    autotune([*calls_of(4), *calls_of(2, Other())], tuning=on(pool, selecting()))
    kernels = [[call["key"][1] for call in json.loads(text)["calls"]] for text in pool.texts]
    assert sorted(kernels) == [["adding@v1"], ["adding@v1"] * 3, ["other@v1"] * 2]


def test_a_kernel_inside_a_kernel_goes_first_and_its_cfg_with_the_outer_one():
    """The worker traces the outer kernel with the cfg that was found for the inner one."""
    pool = Inline()
    result = autotune(lambda x: EXECUTOR(Around(), x), jnp.ones(40), tuning=AutotuneOptions(pool=pool, progress=False))
    texts = {json.loads(text)["calls"][0]["key"][1]: json.loads(text)["calls"][0] for text in pool.texts}
    assert list(texts)[:2] == ["other@v1", "around@v1"]
    inner = next(entry for entry in result.entries if entry.op_id_v == "other@v1")
    assert texts["around@v1"]["inside"] == [["other@v1", inner.call_key, {"turns": inner.cfg.turns}]]


def test_a_tuner_of_the_users_own_does_not_travel():
    """The calls are named with the reason before anything is sent."""
    pool = Inline()
    result = autotune(calls_of(2), tuning=on(pool, selecting(tuner=Timed())))
    assert pool.texts == []
    assert len(result.notes) == 2
    assert "its tuner is a Timed" in result.notes[0]


def test_the_settings_of_the_tuner_and_the_repetitions_travel():
    """A worker tunes as this process would."""
    pool = Inline()
    selector = selecting(tuner=Tuner(2, 5, isolate=False, effort="quick", seed=3))
    autotune(calls_of(1), tuning=on(pool, selector, repetitions=2, objective="forward+backward"))
    sent = Task.loads(pool.texts[0])
    assert (sent.tuner["warmup"], sent.tuner["iters"], sent.tuner["effort"], sent.tuner["seed"]) == (2, 5, "quick", 3)
    assert (sent.calls[0].repetitions, sent.calls[0].objective) == (2, "forward+backward")


def test_ctrl_c_keeps_what_is_done_and_stops_the_pool(tmp_path):
    """One call is done, two are under way and are cancelled; the rest is named."""
    under_way = []

    class Slow(Inline):
        workers = 3

        def submit(self, function, text):
            if len(self.texts) == 3:
                raise KeyboardInterrupt
            if not self.texts:
                return super().submit(function, text)
            self.texts.append(text)
            under_way.append(Future())
            return under_way[-1]

    result = autotune(calls_of(5), tuning=on(Slow(), selecting(tmp_path)))
    assert result.interrupted
    assert len(result.entries) == len(OperationStores(tmp_path).keys()) == 1
    assert all(future.cancelled() for future in under_way)
    assert sum("not tuned: interrupted" in note for note in result.notes) == 4


def test_an_answer_that_is_being_read_when_ctrl_c_comes_is_kept(tmp_path):
    """It has arrived, so it is done: it is read once more before the rest is named."""
    selector = selecting(tmp_path)
    adopt, times = selector.adopt, iter(range(1))

    def interrupted(*args):
        if next(times, None) is not None:
            raise KeyboardInterrupt
        return adopt(*args)

    selector.adopt = interrupted
    result = autotune(calls_of(2), tuning=on(Inline(), selector))
    assert result.interrupted
    assert len(result.entries) == len(OperationStores(tmp_path).keys()) == 1
    assert len(result.notes) == 1


def test_a_budget_ends_the_whole():
    """A pool that does not answer is left when the time is up, and its calls are named."""

    class Never:
        workers = 2

        def submit(self, function, text):
            assert json.loads(text)["calls"][0]["seconds"] <= 2.0
            return Future()

    result = autotune(calls_of(3), tuning=on(Never(), selecting(), seconds=2.0))
    assert list(result.entries) == []
    assert len(result.notes) == 3
    assert all("budget of 2 s" in note for note in result.notes)


def test_a_log_tells_of_the_whole(monkeypatch, capsys):
    """With the worker's name from the future that is under way, and what came of the calls so far."""
    monkeypatch.setattr(batch_progress, "_LOG_SECONDS", 0.0)

    class Later(Future):
        """A future that is answered when it is asked for the second time."""

        worker = "node:7"
        asked = 0

        def __init__(self, text):
            super().__init__()
            self.text = text

        add_done_callback = None

        def done(self):
            self.asked += 1
            if self.asked == 2:
                self.set_result(run_task(self.text))
            return super().done()

    class One:
        workers = 1

        def submit(self, function, text):
            return Later(text)

    autotune(calls_of(3), tuning=AutotuneOptions(pool=One(), selector=selecting(), progress=True))
    told = [line for line in capsys.readouterr().err.splitlines() if " running (node:7)" in line]
    assert re.fullmatch(r"2 of 3 done, 1 running \(node:7\), \d+\.\d\dx so far, about \d+ s left", told[-1])


class Alone(Adding):
    """A kernel with one cfg."""

    op_id = "alone"

    def candidate_cfgs(self, inv):
        return [Turns(2)]


def test_a_call_with_nothing_to_measure_is_not_sent():
    """It is settled here, with the reason."""
    pool = Inline(untuned)
    result = autotune(calls_of(1, Alone()), tuning=on(pool, selecting()))
    assert pool.texts == []
    assert "nothing to measure" in result.entries[0].note


def test_what_is_under_way_counts_where_the_pool_takes_no_more():
    """A pool that was shut down answers for what it took; the rest is named."""
    pool = Inline()

    def submit(function, text):
        if pool.texts:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return Inline.submit(pool, function, text)

    pool.submit = submit
    result = autotune(calls_of(3), tuning=on(pool, selecting()))
    assert len(result.entries) == 1
    assert len(result.notes) == 2
    assert all("after shutdown" in note and "run it again" in note for note in result.notes)


@pytest.mark.parametrize("rules", [{"deaths": 3}, type("Rules", (), {})(), ScheduleRules])
def test_rules_of_another_type_are_refused(rules):
    """They would else be left out without a word; nothing is sent."""
    pool = Inline()
    pool.rules = rules
    with pytest.raises(TypeError, match=r"rules are .* give ScheduleRules\(\.\.\.\)"):
        autotune(calls_of(1), tuning=on(pool, selecting()))
    assert pool.texts == []


def test_rules_of_a_pool_are_followed():
    """An answer that is none is asked for as often as they say."""
    pool = Inline(lambda text: "")
    pool.rules = ScheduleRules(deaths=4)
    autotune(calls_of(1), tuning=on(pool, selecting()))
    assert len(pool.texts) == 4


@pytest.mark.parametrize("answer", ["", "[]", 7, None, "{}", Reply("w", ()).dumps()])
def test_an_answer_that_is_none_costs_one_retry(answer):
    """Then the call is named: a pool may run anything."""
    pool = Inline(lambda text: answer)
    result = autotune(calls_of(1), tuning=on(pool, selecting()))
    assert len(pool.texts) == 2
    assert len(result.notes) == 1


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'ejkernel'"),
        RuntimeError("System error: No module named 'ejkernel.ops'\ntraceback: ..."),
        ModuleNotFoundError("No module named 'jax'"),
    ],
)
def test_a_worker_without_the_package_is_named_as_such(error):
    """It is sent elsewhere like a refused call, costs no retry, and the words are what to install."""

    def run(text):
        raise error

    pool = Inline(run)
    result = autotune(calls_of(2), tuning=on(pool, selecting()))
    assert list(result.entries) == []
    assert len(result.notes) == 2
    for note in result.notes:
        assert "a worker cannot import" in note
        assert "install ejkernel-ops" in note
        assert "without an answer" not in note


def test_calls_go_to_the_workers_that_have_the_package():
    """Every third attempt gets to one of them: each call is tuned, and none is named."""

    def run(text):
        if len(pool.texts) % 3:
            raise ModuleNotFoundError("No module named 'ejkernel'")
        return run_task(text)

    pool = Inline(run)
    result = autotune(calls_of(3), tuning=on(pool, selecting()))
    assert len(result.entries) == 3
    assert list(result.notes) == []


def test_a_record_that_is_damaged_is_named():
    """Its cfg is none of the kernel's; the other call is kept."""

    def run(text):
        reply = json.loads(run_task(text))
        if '"other@v1"' in text:
            reply["outcomes"][0]["record"]["trials"][0]["cfg"] = {"wings": 2}
        return json.dumps(reply)

    result = autotune([*calls_of(1), *calls_of(1, Other())], tuning=on(Inline(run), selecting()))
    assert [entry.op_id_v for entry in result.entries] == ["adding@v1"]
    assert "cannot be read" in result.notes[0]


@contextlib.contextmanager
def another_processor():
    """Has this process name its processor otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "cpu_kind", lambda: "another processor")
        yield


def test_recorded_calls_of_another_device_are_tuned_by_workers_that_have_it(tmp_path):
    """Each kind for itself: their entries are kept under their own device, and are known afterwards."""
    path = str(tmp_path / "recorded.json")
    for where in (contextlib.nullcontext(), another_processor()):
        with where:
            for kernel, inv in calls_of(2):
                call = FoundCall(devices_key(kernel, inv), kernel, inv, (), jax.devices()[0])
                Recording(path).add(call.key, kernel, inv, devices_context())

    def run(text):
        """Two workers, one of each kind: the task goes to the right one at the second attempt."""
        wanted = json.loads(text)["device"] == "cpu|another processor"
        with another_processor() if wanted == bool(len(pool.texts) % 2) else contextlib.nullcontext():
            return run_task(text)

    pool = Inline(run)
    result = autotune_recorded(selecting(tmp_path / "store"), recording=path, tuning=on(pool, None))
    assert len(result.entries) == 4
    assert list(result.notes) == []
    kept = OperationStores(tmp_path / "store").keys()
    assert sorted({key[0] for key in kept}) == sorted({devices.device_fingerprint(), "cpu|another processor"})
    assert len(kept) == 4
    assert {type(entry.cfg) for key, entry in result.by_key().items() if "another" in key[0]} == {dict}
    assert {type(entry.cfg) for key, entry in result.by_key().items() if "another" not in key[0]} == {Turns}

    again = Inline()
    autotune_recorded(selecting(tmp_path / "store"), recording=path, tuning=on(again, None))
    assert again.texts == []


def devices_key(kernel, inv):
    """The key of a call here."""
    from ejkernel.ops.core.request import ask

    return ask(inv, kernel, "forward").key


def devices_context():
    """What is around a call here."""
    from ejkernel.ops.core.trace_context import TraceContext

    return TraceContext.now()
