"""One way of another package to compute a case, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Opponent:
    """A function of the call's arrays, with its name.

    It returns what ours returns; where the call has a cotangent, the result and the gradients of every float array.
    """

    name: str
    fn: Callable[..., Any]
    # Arrays that it takes in place of the call's own: another dtype or layout, made before anything is timed.
    prepare: Callable[..., tuple[Any, ...]] | None = None
    # Is `fn` a function of torch's tensors rather than of JAX's arrays?
    by_torch: bool = False
    # Does `fn` compute forward alone, so that JAX pulls the gradients back?
    derived: bool = True


@dataclass(frozen=True)
class Call:
    """A call as opponents see it: the operation, its arrays without the cotangent, and its static keywords."""

    op: str
    arrays: tuple[Any, ...]
    static: dict[str, Any]
    backward: bool


# Opponents of a call; raises ImportError, with a reason, where the package is missing.
Source = Callable[[Call], Iterator[Opponent]]
