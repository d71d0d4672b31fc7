"""The set-up of a child process: Ctrl-C, core files and the end of memory. No JAX here."""

from __future__ import annotations

import contextlib
import faulthandler
import resource
import signal


def set_up_child() -> None:
    """Leaves Ctrl-C to the parent, writes no core files, and is the first process to go when memory ends."""
    faulthandler.enable()
    # A terminal's Ctrl-C reaches every process that it started: whether that is the end is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first to go when memory ends, instead of its parent. Elsewhere than on Linux there is no such file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
