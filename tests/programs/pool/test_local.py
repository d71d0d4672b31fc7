"""Processes of this machine as a pool.

Covers `programs/pool/serve.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from fakes_pool import calls_of, is_gone, on, selecting

from ejkernel.ops import LocalPool, autotune
from ejkernel.ops.core.errors import IsolationError


def process_of(text):
    """The worker's own number, and what it was given."""
    return f"{os.getpid()} {text}"


def die(text):
    """Ends the worker as the system does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(text):
    """Raises, as a kernel may."""
    raise LookupError(f"no {text}")


def wait_for(text):
    """Returns once there is a file of this name."""
    Path(f"{text}.begun").write_text(str(os.getpid()))
    while not Path(text).exists():
        time.sleep(0.01)
    return "seen"


def seen_devices(text):
    """The variable that says which devices a process sees."""
    return os.environ[text]


def begun(path):
    """The process of a worker that waits for a file, once it does."""
    file = Path(f"{path}.begun")
    for _ in range(12000):
        if file.exists() and file.read_text():
            return int(file.read_text())
        time.sleep(0.01)
    raise AssertionError("the worker did not begin")


@pytest.fixture(scope="module")
def pool():
    """A pool of one process."""
    with LocalPool(1) as pool:
        yield pool


def test_one_process_has_one_task_after_the_other(pool):
    """It is not started anew."""
    first, second = (pool.submit(process_of, text) for text in ("a", "b"))
    assert first.result(120).partition(" ")[2] == "a"
    assert first.result().split()[0] == second.result(120).split()[0]
    assert first.result().split()[0] in first.worker


def test_a_worker_that_dies_is_replaced(pool):
    """Its task has the reason, the next one another process."""
    before = pool.submit(process_of, "").result(120)
    with pytest.raises(IsolationError, match="SIGKILL"):
        pool.submit(die, "").result(120)
    assert pool.submit(process_of, "").result(120) != before


def test_an_exception_of_a_function_is_its_words(pool):
    """No class of the user's is needed to read it."""
    with pytest.raises(IsolationError, match=r"LookupError.*no such"):
        pool.submit(fail, "such").result(120)


def test_a_task_that_runs_is_cancelled_with_its_process(pool, tmp_path):
    """So Ctrl-C and stragglers leave nothing at work."""
    future = pool.submit(wait_for, str(tmp_path / "never"))
    process = begun(tmp_path / "never")
    assert future.cancel()
    assert is_gone(process)
    assert pool.submit(process_of, "next").result(120).endswith("next")


def test_a_worker_that_says_nothing_is_replaced(tmp_path):
    """The bound on silence ends it."""
    with LocalPool(1, silence_seconds=0.2) as pool:
        future = pool.submit(wait_for, str(tmp_path / "never"))
        with pytest.raises(IsolationError, match=r"nothing for 0\.2 s"):
            future.result(120)


def test_the_processes_end_with_their_parent(tmp_path):
    """Also where it is killed, and while a worker is at work."""
    code = (
        f"import sys; from test_local import *\nLocalPool(1).submit(wait_for, {str(tmp_path / 'never')!r}).result()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        worker = begun(tmp_path / "never")
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(worker)


def test_a_process_without_the_package_is_named_as_such(tmp_path, monkeypatch):
    """A Python that finds no installed package: nothing died, and the words are what to install."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with LocalPool(1) as pool:
        with pytest.raises(IsolationError, match="No module named 'ejkernel'"):
            pool.submit(process_of, "").result(120)
        result = autotune(calls_of(2), tuning=on(pool, selecting()))
    assert list(result.entries) == []
    assert len(result.notes) == 2
    assert all("a worker cannot import ejkernel; install ejkernel-ops" in note for note in result.notes)


def test_each_worker_sees_its_own_device(monkeypatch):
    """Of those that this process sees; a processor's worker sees no other platform."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    # What JAX would find there is not looked for: no test needs a GPU for this.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with LocalPool(devices=["gpu:1"]) as pool:
        assert pool.submit(seen_devices, "CUDA_VISIBLE_DEVICES").result(120) == "7"


def test_a_closed_pool_takes_no_task():
    """Python's own words for that are an error of the same class."""
    pool = LocalPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(process_of, "")


def test_tasks_that_wait_are_dropped_when_asked(pool, tmp_path):
    """A shutdown with cancel_futures waits for those alone that run."""
    with LocalPool(1) as own:
        running = own.submit(wait_for, str(tmp_path / "go"))
        waiting = own.submit(process_of, "")
        begun(tmp_path / "go")
        closing = threading.Thread(target=own.shutdown, kwargs={"cancel_futures": True})
        closing.start()
        # Only the shutdown can end it: the worker is at the other task until the file is there.
        with pytest.raises(CancelledError):
            waiting.result(120)
        (tmp_path / "go").touch()
        closing.join(120)
        assert running.result(120) == "seen"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "whole number"),
        ({"workers": True}, "whole number"),
        ({"devices": "gpu:0"}, "no list"),
        ({"devices": []}, "no list"),
        ({"devices": ["cuda"]}, "no device"),
        ({"devices": ["gpu:x"]}, "no device"),
        ({"silence_seconds": 0}, "no bound"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    """With what to write instead."""
    with pytest.raises(ValueError, match=message):
        LocalPool(**settings)


@pytest.mark.parametrize("arguments", [(lambda text: text, "a"), (process_of, 3)])
def test_what_cannot_be_sent_is_refused(arguments):
    """Functions by their names and texts: nothing is pickled."""
    with pytest.raises(ValueError, match="cannot be sent"):
        LocalPool(1).submit(*arguments)
