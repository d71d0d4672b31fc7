"""The first lines of a worker process: it ends with its parent from here on, before JAX is imported."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(life: int, parent: int) -> None:
    """Serves until the other side is gone."""
    settle_in(life, parent)
    from .main import main as serve

    serve()


def settle_in(life: int, parent: int) -> None:
    """Sees to it that nothing of this process outlives its parent."""
    if sys.platform == "linux":
        # The end of a pipe ends this process too, but not while a candidate holds Python's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It has ended between the start of this process and now.
        os._exit(0)
    _guard(life)
    faulthandler.enable()
    # A terminal's Ctrl-C reaches every process that it started: whether that is the end is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first to go when memory ends, instead of its parent. Elsewhere than on Linux there is no such file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


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
    main(int(sys.argv[1]), int(sys.argv[2]))
