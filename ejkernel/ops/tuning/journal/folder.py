"""The journals of all tunings: how a candidate that crashed gets another chance."""

from __future__ import annotations

import os
import warnings

from ...core.errors import BadNameError
from ...core.folder_walk import folder_of
from ...core.plain_file import Timeout, lock_at
from ...settings import journal_folder
from .file import SUFFIX, JournalWarning


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
            removed += _remove(str(path))
    return removed


def _remove(path: str) -> int:
    try:
        # Another user's journal says nothing here, and is that user's to remove.
        if os.lstat(path).st_uid != os.getuid():
            return 0
        with lock_at(f"{path}.lock", timeout=0), folder_of(path) as (folder, name):
            os.unlink(name, dir_fd=folder)
    # It is in use, or gone already.
    except (Timeout, FileNotFoundError):
        return 0
    except OSError as error:
        warnings.warn(f"{path} stays as it is, and what it says of crashes too: {error}", JournalWarning, stacklevel=3)
        return 0
    return 1
