"""The first lines of a worker process: it ends with its parent from here on, before JAX is imported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(life: int, parent: int, serves: str) -> None:
    """Sees to it that nothing of this process outlives its parent, then serves."""
    if sys.platform == "linux":
        # The end of a pipe ends this process too, but not while a candidate holds Python's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It has ended between the start of this process and now.
        os._exit(0)
    _guard(life)
    importlib.import_module(serves).main()


def _guard(life: int) -> None:
    """Leaves a process behind that ends the whole group, children of candidates included, once the parent is gone."""
    if os.fork() != 0:
        os.close(life)
        return
    # The pipes are the worker's alone.
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    # What is sent to the group is for the worker.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.read(life, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
