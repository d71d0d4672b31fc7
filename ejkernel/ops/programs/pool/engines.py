"""Pools by name, as `ejkernel tune --pool` has them: an engine is one line here and one file beside it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from ...core.errors import MissingExtraError, SettingError

# The module beside this one for each name; its `opened(rest)` gives a context manager of an executor, where `rest` is
# the text behind the name and its colon. A module imports its engine where it is used, so that the others do without.
ENGINES = {
    "dask": "dask",
    "mpi": "mpi",
    "processes": "local",
    "ray": "ray",
    "slurm": "slurm",
}
# Packages with pools of their own that need more than `submit` to serve well; the module's `adapted(pool)` gives that.
_ADAPTED = {"distributed": "dask", "submitit": "slurm"}


def engine(module: str, extra: str) -> Any:
    """An engine's module, imported where it is used; the error names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"this pool needs {module}, which cannot be imported here ({error}); pip install 'ejkernel-ops[{extra}]'"
        ) from error


def suited(pool: Any) -> Any:
    """The pool as work is sent to it: an engine's own one is wrapped, any other is used as it is."""
    beside = _ADAPTED.get(type(pool).__module__.partition(".")[0])
    if beside is None:
        return pool
    module: Any = importlib.import_module(f"{__package__}.{beside}")
    return module.adapted(pool)


def opened(text: str) -> contextlib.AbstractContextManager[Any]:
    """The pool behind `4`, `processes:4` or `engine:address`, open for a `with` block."""
    name, _, rest = ("processes", "", text) if text.isdecimal() else text.partition(":")
    if name not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise SettingError(
            f"pool {text!r} is unknown; write a number of processes, or one of {known}, as in processes:4"
        )
    module: Any = importlib.import_module(f"{__package__}.{ENGINES[name]}")
    found: Callable[[str], contextlib.AbstractContextManager[Any]] = module.opened
    return found(rest)
