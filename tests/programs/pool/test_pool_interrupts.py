"""Ctrl-C while a pool is at work, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from fakes_pool import Troubled, is_gone

from ejkernel.ops import OperationStores

PROGRAM = """
import sys
from fakes_pool import Troubled, calls_of, on, selecting
from ejkernel.ops import LocalPool, autotune

folder = sys.argv[1]
with LocalPool(1) as pool:
    troubled = Troubled(pool, f"{folder}/log", "hung@1")
    result = autotune(calls_of(3), tuning=on(troubled, selecting(f"{folder}/store")))
print(result.interrupted, len(result.entries), len(result.notes))
"""


def wait_for(condition, process):
    """Waits until something is so, or the process has ended."""
    for _ in range(12000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(True, id="its terminal's processes"),
        pytest.param(False, id="its process", marks=pytest.mark.engines),
    ],
)
def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(tmp_path, whole_group):
    """One call is done and one hangs: the program goes on at once, with the rest named and the worker ended."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, process_group=0)
    log = tmp_path / "log"
    try:
        wait_for(lambda: log.exists() and len(list(log.glob("hung@1.[0-9]*"))) == 1, process)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert out.split() == ["True", "1", "2"]
    assert len(OperationStores(tmp_path / "store").keys()) == 1
    workers = {worker for worker, _ in Troubled(None, log).log()}
    assert len(workers) == 1
    assert all(map(is_gone, workers))
