"""A kernel's variants: the most specific one that its class defines runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import KernelError

PLATFORMS = ("gpu", "tpu", "cpu")
SUFFIXES = ("", "_shard_map", *(f"_{p}" for p in PLATFORMS), *(f"_shard_map_{p}" for p in PLATFORMS))


def levels(platform: str, method: str | None) -> tuple[str, ...]:
    """The suffixes that apply to a call, most specific first."""
    sharded = (f"_shard_map_{platform}", "_shard_map") if method == "shard_map" else ()
    return (*sharded, f"_{platform}", "")


def has_any(cls: type, name: str) -> bool:
    """Does the class define the method at any level?"""
    return any(_defines(cls, name + suffix) for suffix in SUFFIXES)


def variant(kernel: Any, name: str, *, platform: str, method: str | None = None) -> Callable[..., Any]:
    """The most specific variant of one method."""
    for suffix in levels(platform, method):
        if _defines(type(kernel), name + suffix):
            return getattr(kernel, name + suffix)  # type: ignore[no-any-return]
    raise KernelError(
        f"kernel {type(kernel).__qualname__} has no {name} for {platform}"
        f"{' under shard_map' if method == 'shard_map' else ''}; define {name} or {name}_{platform}"
    )


def gradient(kernel: Any, *, platform: str, method: str | None = None) -> tuple[Any, Any] | None:
    """Forward with residuals and its `vjp`, from the most specific level that has both."""
    for suffix in levels(platform, method):
        if _defines(type(kernel), "fwd_with_residuals" + suffix) and _defines(type(kernel), "vjp" + suffix):
            return getattr(kernel, "fwd_with_residuals" + suffix), getattr(kernel, "vjp" + suffix)
    return None


def lonely_half(cls: type) -> str:
    """A forward pass or a `vjp` where no level of the class has both; empty where there is none."""
    pairs = [("fwd_with_residuals" + suffix, "vjp" + suffix) for suffix in SUFFIXES]
    if any(_defines(cls, one) and _defines(cls, other) for one, other in pairs):
        return ""
    either = [pair for pair in pairs for pair in (pair, pair[::-1])]
    return next((f"{one} without {other}" for one, other in either if _defines(cls, one)), "")


def _defines(cls: type, name: str) -> bool:
    found = getattr(cls, name, None)
    return callable(found) and not getattr(found, "_is_absent", False)
