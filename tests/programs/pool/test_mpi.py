"""MPI: the executor of mpi4py as it is, in a program that `mpiexec` started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes_pool import Other, Troubled, calls_of, on, selecting

from ejkernel.ops import OperationStores, autotune
from ejkernel.ops.programs.pool.engines import opened

HERE = Path(__file__).parent
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs the extra `mpi`"),
    pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec: pip install mpich"),
]


def mpi(processes, *arguments, **variables):
    """Runs Python under `mpiexec`: one process is the program, the others are its workers."""
    command = [MPIEXEC, "-n", str(processes), sys.executable, "-m", "mpi4py.futures", *arguments]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        # Whatever happened, nothing of it is left.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, said


def tune(folder, *troubles):
    """Tunes six calls on MPI, in the process that `mpiexec` gave the program."""
    selector = selecting(f"{folder}/store")
    adopt = selector.adopt

    def noting(*args):
        adopt(*args)
        Path(folder, "log", "kept").touch()

    selector.adopt = noting
    with opened("mpi") as pool:
        troubled = Troubled(pool, f"{folder}/log", *troubles)
        result = autotune([*calls_of(3), *calls_of(3, Other())], tuning=on(troubled, selector))
    print(len(result.entries), "entries,", len(result.notes), "notes,", len(result.workers), "workers")


def test_the_contract_of_pools_holds(tmp_path):
    """The same suite as for every other pool, in the process that `mpiexec` gave the program."""
    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "engines", "-k", "[mpi]"]
    files = ["--rootdir", str(HERE.parents[2]), str(HERE / "test_pool_contract.py")]
    code, said = mpi(3, *suite, *files, EJKERNEL_TESTS_MPI="1", TMPDIR=str(tmp_path))
    assert code == 0, said
    assert "6 passed" in said


def test_a_worker_that_is_killed_ends_the_program_and_the_next_run_tunes_the_rest(tmp_path):
    """MPI has no worker to replace it by; what was tuned is in the store."""
    code, said = mpi(3, "-c", f"from test_mpi import *; tune({str(tmp_path)!r}, 'killed-late@3')")
    assert code != 0, said
    kept = len(OperationStores(tmp_path / "store").keys())
    assert 0 < kept < 6, said
    code, said = mpi(3, "-c", f"from test_mpi import *; tune({str(tmp_path)!r})")
    assert code == 0, said
    assert "6 entries, 0 notes" in said
    assert len(OperationStores(tmp_path / "store").keys()) == 6


def test_a_process_without_workers_is_refused():
    """It would start processes by itself, which some libraries of MPI answer with its end."""
    code, said = mpi(1, "-c", "from test_mpi import *; opened('mpi')")
    assert code != 0
    assert "this process is alone: start it and its workers as one MPI program, mpiexec -n 5" in said
