"""A door kept for one release: the upkeep of stores lives in `ejkernel.ops.store.maintenance`."""

import warnings
from typing import Any

from ..store import maintenance as _moved


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_moved, name)
    warnings.warn(
        f"ejkernel.ops.config.maintenance.{name} is ejkernel.ops.store.maintenance.{name} now; "
        "the old path goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
