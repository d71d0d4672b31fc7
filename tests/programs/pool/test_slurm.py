"""SLURM by submitit, with jobs as processes of this machine: their ends, their files, their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes_pool import calls_of, is_gone, on, selecting

from ejkernel.ops import SlurmPool, autotune
from ejkernel.ops.programs.pool.engines import opened, suited

pytestmark = pytest.mark.engines
submitit = pytest.importorskip("submitit", reason="needs the extra `slurm`")


def wait_for(folder):
    """Says which process it is, and does not end."""
    Path(folder, "process").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(10_000)


def die(text):
    """Ends without an answer."""
    print(text, file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def shout(text):
    """A function of text."""
    return text.upper()


def number_in(file):
    """The number that a process writes once it runs."""
    while not (file.exists() and file.read_text(encoding="utf-8")):
        time.sleep(0.01)
    return int(file.read_text(encoding="utf-8"))


@pytest.fixture
def pool(tmp_path):
    """A pool whose jobs are ended with it."""
    with SlurmPool(2, folder=tmp_path / "jobs", cluster="local") as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def test_the_files_of_a_job_that_ended_well_are_removed(pool, tmp_path):
    """Hundreds of calls leave no hundreds of files."""
    assert pool.submit(shout, "a").result() == "A"
    pool.shutdown()
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_job_that_ends_without_an_answer_says_its_last_words(pool):
    """At once: the future does not wait for a result that cannot come."""
    with pytest.raises(RuntimeError, match=r"job \d+ ended without a result.*I am going"):
        pool.submit(die, "I am going").result()


def test_a_job_that_is_cancelled_ends(pool, tmp_path):
    """With its process, although that hangs."""
    future = pool.submit(wait_for, str(tmp_path))
    process = number_in(tmp_path / "process")
    assert future.cancel()
    pool.shutdown()
    assert is_gone(process)


def test_a_job_of_this_machine_ends_with_its_owner(tmp_path):
    """The process that opened the pool is killed: submitit alone would let the job run on."""
    here = Path(__file__).parent
    script = (
        "from test_slurm import *\n"
        f"SlurmPool(1, folder={str(tmp_path / 'jobs')!r}, cluster='local').submit(wait_for, {str(tmp_path)!r}).result()"
    )
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    owner = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    try:
        process = number_in(tmp_path / "process")
    finally:
        owner.kill()
        owner.wait()
    assert is_gone(process)


def test_an_executor_of_submitit_is_a_pool_with_its_own_parameters(tmp_path):
    """Given as it is to `autotune`."""
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    assert isinstance(suited(executor), SlurmPool)
    result = autotune(calls_of(2), tuning=on(executor, selecting()))
    assert len(result.entries) == 2


def test_options_are_those_of_submitit(tmp_path, monkeypatch):
    """Numbers are numbers; an option that submitit does not know is refused in its words."""
    monkeypatch.chdir(tmp_path)
    with opened("slurm:cluster=local,workers=3,timeout_min=5") as pool:
        assert pool.workers == 3
        assert "3 jobs at once" in repr(pool)
    with pytest.raises(ValueError, match=r"no jobs can be submitted .*parti"):
        opened("slurm:cluster=local,parti=gpu")


def test_a_machine_without_slurm_is_named(monkeypatch, tmp_path):
    """With the way to run the jobs here."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"srun.*cluster=local"):
        opened("slurm")
