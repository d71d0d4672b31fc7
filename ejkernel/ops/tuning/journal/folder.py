"""The journals of all tunings: where they lie, and how a candidate that crashed gets another chance."""

from __future__ import annotations

import contextlib
from pathlib import Path

import filelock

from ...core.errors import BadNameError
from ...settings import default_folder
from .file import SUFFIX


def journal_folder() -> Path:
    """Beside the stores."""
    return default_folder() / "journal"


def forget_crashes(op_id: str | None = None) -> int:
    """Lets what crashed or hung run again, of one operation or of all; says how many journals went.

    Everything else in them goes as well, so a killed tuning begins anew. A tuning that is under way keeps its own.
    """
    if op_id is not None and (not op_id or "/" in op_id or "*" in op_id):
        raise BadNameError(f"op_id={op_id!r} is no operation; use a kernel's op_id, with or without its @version")
    removed = 0
    for path in sorted(journal_folder().glob(f"*{SUFFIX}")):
        name = path.name.rpartition("-")[0]
        if op_id in (None, name, name.rpartition("@v")[0]):
            with contextlib.suppress(filelock.Timeout), filelock.FileLock(f"{path}.lock", timeout=0):
                path.unlink(missing_ok=True)
                removed += 1
    return removed
