"""Processes that were stopped (SIGSTOP, Ctrl-Z) and may never be continued."""

from __future__ import annotations

# A process that is stopped for so long is not waited for: a person or a scheduler has stopped it.
STOPPED_SECONDS = 5.0


def is_stopped(pid: int) -> bool:
    """Has a signal or a debugger stopped this process? False where that is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read(4096).rpartition(")")[2].split()[0] in ("T", "t")
    # It is gone, or this is not Linux.
    except (OSError, IndexError):
        return False
