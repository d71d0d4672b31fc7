"""Workers that are stopped, leave children, write garbage or lose their parent: the tuning ends, nothing is left.

Covers `tuning/worker/child_setup.py`, `tuning/worker/process.py` and `tuning/worker/start.py`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import faults
import jax.numpy as jnp
import pytest

from ejkernel.ops import Isolation, Tuner
from ejkernel.ops.core.errors import IsolationError
from ejkernel.ops.tuning.worker import process, protocol
from ejkernel.ops.tuning.worker.protocol import GarbageError, Receiver

X = jnp.arange(1.0, 9.0)
LIMITS = Isolation(run_seconds=30, imports=["faults"])
SLOW = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[3]
# How they start is a part of it.
pytestmark = pytest.mark.usefixtures("fresh_workers")


@pytest.fixture(autouse=True)
def alarm():
    """A hang is an error, not a wait for ever."""

    def late(*about):
        raise TimeoutError("hangs")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(900)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def doubling(name):
    """A candidate by name; every one gives twice its argument, if it comes to that."""
    if name in faults.FAULTS:
        return faults.faulty(name)
    return {"slow": lambda x: faults.slow(x, 60_000)}.get(name, lambda x: x * 2)


def alive(pid):
    """Is there such a process, and not just its remains?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pid):
    """Waits for the end of a process that is no child of this one; the alarm is its limit."""
    while alive(pid):
        threading.Event().wait(0.02)


@pytest.fixture
def quick(monkeypatch):
    """A worker that was stopped is not waited for."""
    monkeypatch.setattr(process, "STOPPED_SECONDS", 0.2)


@pytest.mark.parametrize("seconds", [None, pytest.param(60.0, marks=SLOW)], ids=["no deadline", "deadline"])
def test_a_stopped_worker_is_ended_and_another_one_goes_on(monkeypatch, quick, seconds):
    """Stopped between turns, with no candidate at work: no limit of a turn would ever end it."""
    stopped = []
    begin = process.WorkerProcess._begin

    def stopping(self):
        begin(self)
        if not stopped:
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(process.WorkerProcess, "_begin", stopping)
    tuner = Tuner(isolate=LIMITS, seconds=seconds)

    assert tuner.autotune(doubling, (X,), {}, ["slow", "fast"]) == "fast"
    assert [trial.status for trial in tuner.record.trials] == ["ok", "ok"]
    assert not alive(stopped[0])


@SLOW
def test_a_worker_that_is_stopped_before_it_is_ready_is_ended(monkeypatch, quick):
    """Another one is started in its place."""
    stopped = []
    made = process.WorkerProcess.__init__

    def stopping(self, head):
        made(self, head)
        if not stopped:
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(process.WorkerProcess, "__init__", stopping)

    assert Tuner(isolate=LIMITS).autotune(doubling, (X,), {}, ["slow", "fast"]) == "fast"
    assert not alive(stopped[0])


def test_a_candidates_own_children_end_with_it(tmp_path, monkeypatch):
    """A process that it forked holds the pipe to the parent open: the crash is seen, and nothing is left."""
    monkeypatch.setenv("EJK_TEST_MARKS", str(tmp_path / "marks"))
    tuner = Tuner(isolate=LIMITS)

    assert tuner.autotune(doubling, (X,), {}, ["child", "fast"]) == "fast"
    assert [trial.status for trial in tuner.record.trials] == ["crash", "ok"]
    (child,) = map(int, (tmp_path / "marks").read_text().split())
    until_gone(child)


@SLOW
def test_garbage_on_the_pipe_is_one_sentence():
    """A candidate that writes into the pipe ends the tuning with an error that says so."""
    with pytest.raises(IsolationError, match="what came over its pipe is no message"):
        Tuner(isolate=LIMITS).autotune(doubling, (X,), {}, ["garbage", "fast"])


def received(data, longest):
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    receiver = Receiver(reading, longest)
    try:
        return receiver.receive()
    finally:
        receiver.close()


FRAMES = {
    "text": b"hello world, this is a log line\n",
    "no json": b"\0\0\0\3abc",
    "no object": b"\0\0\0\2[]",
    "no verb": b'\0\0\0\x0b{"parts":0}',
    "no parts": b'\0\0\0\x0e{"verb":"run"}',
    "odd parts": b'\0\0\0\x1b{"verb":"run", "parts":"3"}',
    "minus one part": b'\0\0\0\x1a{"verb":"run", "parts":-1}',
    "a number": b"\0\0\0\x011",
}


@pytest.mark.parametrize("name", FRAMES)
def test_what_is_no_message_is_named_as_such(name):
    """Whatever a frame holds, or claims as its length."""
    with pytest.raises(GarbageError):
        received(FRAMES[name], protocol.LONGEST_ANSWER)


def test_no_bytes_on_the_pipe_are_anything_else_than_a_message_garbage_or_the_end():
    """Random frames with right and wrong lengths."""
    dice = random.Random(7)
    for _ in range(2000):
        body = bytes(dice.choice(b'{}[]":,verbparts0129 x') for _ in range(dice.randint(0, 30)))
        size = dice.choice([len(body), len(body) + 1, 1 << 30, dice.randint(0, 40)])
        try:
            received(size.to_bytes(4, "big") + body, 1 << 20)
        except GarbageError:
            continue


PARENT = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from ejkernel.ops.tuning.worker.process import WorkerProcess
worker = WorkerProcess({"platform": "cpu", "device": 0, "settings": {}, "imports": []})
print(worker.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("when", ["before JAX is imported", "at once"])
def test_a_worker_dies_with_its_parent_before_it_is_ready(tmp_path, when):
    """Killed while the worker still imports, its parent leaves nothing behind."""
    # An import that takes for ever, in place of one that takes seconds.
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        textwrap.dedent("""
        import os, sys, threading
        if sys.argv[0].endswith("start.py"):
            open(os.path.join(os.path.dirname(__file__), "importing"), "w").close()
            threading.Event().wait()
        """)
    )
    # The parent imports nothing of JAX.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        while when != "at once" and not (tmp_path / "jax" / "importing").exists():
            assert alive(worker)
        parent.kill()

    until_gone(worker)
