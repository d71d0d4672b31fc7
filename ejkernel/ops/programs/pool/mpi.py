"""MPI as a pool: the executor of mpi4py fits as it is, where `mpiexec` started its workers with this process."""

from __future__ import annotations

import contextlib
from typing import Any

from ...core.errors import MissingExtraError, SettingError
from .by_name import places
from .engines import engine

_COMMAND = "mpiexec -n 5 python -m mpi4py.futures -m ejkernel.cli tune ... --pool mpi"


def opened(rest: str) -> contextlib.AbstractContextManager[Any]:
    """The executor over all processes of the MPI program but this one."""
    if rest:
        raise SettingError(f"pool 'mpi:{rest}' is unknown; mpiexec says how many processes there are: {_COMMAND}")
    futures = engine("mpi4py.futures", "mpi")
    try:
        world = engine("mpi4py.MPI", "mpi").COMM_WORLD
    # mpi4py finds no library of MPI: that is no part of its package.
    except RuntimeError as error:
        raise MissingExtraError(
            f"mpi4py finds no MPI library here ({error}); install one, such as `pip install mpich`"
        ) from error
    # The library would start processes itself, and end this one where it cannot.
    if world.Get_size() < 2:
        raise SettingError(f"this process is alone: start it and its workers as one MPI program, {_COMMAND}")
    # Workers need the kernels' modules, and not the program itself.
    found: contextlib.AbstractContextManager[Any] = futures.MPIPoolExecutor(main=False, path=places())
    return found
