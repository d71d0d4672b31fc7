"""A door kept for one release: layered and read-only stores live in `ejkernel.ops.store.layered`."""

import warnings
from typing import Any

from ..store import layered as _moved


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_moved, name)
    warnings.warn(
        f"ejkernel.ops.config.wrappers.{name} is ejkernel.ops.store.layered.{name} now; "
        "the old path goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
