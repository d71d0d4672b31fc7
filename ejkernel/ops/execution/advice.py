"""Warnings about calls that work, but not as well as they could: each is said once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable
from typing import Any

from ..core.kernel import Kernel, versioned
from .arguments import Taken

# So many different values of one static argument mean that it should have been an array.
_MANY_STATICS = 64


class ExecutorWarning(UserWarning):
    """A call that works, but not as well as it could."""


class Advice:
    """Keeps what one executor has said, and the static values that its calls have had."""

    def __init__(self) -> None:
        self._statics: dict[tuple[str, str], set[Hashable]] = {}
        self._said: set[Hashable] = set()

    def count_statics(self, kernel: Kernel[Any, Any], taken: Taken) -> None:
        """Warns of an argument that compiles a program for each of too many values."""
        for path, value in taken.statics:
            seen = self._statics.setdefault((versioned(kernel), path), set())
            if len(seen) > _MANY_STATICS:
                continue
            seen.add(value)
            if len(seen) > _MANY_STATICS:
                self.give(
                    ("statics", versioned(kernel), path),
                    f"{path} of kernel {versioned(kernel)} has had more than {_MANY_STATICS} different static values, "
                    "and each compiles a program of its own; pass it as an array if the kernel can take one",
                )

    def give(self, what: Hashable, message: str) -> None:
        """Warns, at the line that called this package, unless it has before."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(message, ExecutorWarning, stacklevel=_outside())


def _outside() -> int:
    """The `stacklevel` of the line that called this package: a warning belongs there, however it was reached."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("ejkernel."):
        frame, level = frame.f_back, level + 1
    return level
