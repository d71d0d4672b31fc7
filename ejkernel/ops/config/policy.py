"""The policy of a selector: what it may do, and how that is changed for a while."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

from ..core.errors import PolicyFieldError, PolicyValueError, ScopeError
from ..core.shown import Shown

Fallback = Literal["autotune", "heuristics"]


@dataclass(frozen=True, repr=False)
class AutotunePolicy(Shown):
    """Settings of a selector: the tiers that may answer, and what a tuning has to cover."""

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    validate_backward: bool = False
    # Answers from the records of other calls, where nothing was measured; off where heuristics are.
    allow_predictions: bool = False

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        if self.cache_miss_fallback not in get_args(Fallback):
            raise PolicyValueError(
                f"cache_miss_fallback={self.cache_miss_fallback!r} is unknown; use 'autotune' or 'heuristics'"
            )
        for name in ("allow_autotune", "allow_heuristics", "validate_backward", "allow_predictions"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyValueError(f"{name}={getattr(self, name)!r} is unknown; use True or False")


@dataclass(frozen=True)
class Frame:
    """One change in force; equal changes of one selector are equal, so that what was built under them is shared."""

    # None: for every selector.
    selector: object
    updates: tuple[tuple[str, Any], ...]


# The changes around this context, outermost first.
frames: ContextVar[tuple[Frame, ...]] = ContextVar("ejkernel_policy", default=())


# Has any change ever been in force? Until then a call need not look; a copied context keeps its changes for good.
used = False


def in_force(selector: object, base: AutotunePolicy) -> AutotunePolicy:
    """The selector's policy as this context sees it."""
    around = frames.get()
    if not around:
        return base
    mine = [f for f in around if f.selector is None or f.selector is selector]
    # What holds for every selector holds whatever the overrides of one of them say.
    for frame in sorted(mine, key=lambda f: f.selector is None):
        base = replace(base, **dict(frame.updates))
    return base


class _Change:
    """Policy updates for a `with` block of this context."""

    def __init__(self, selector: object, updates: dict[str, Any]) -> None:
        self._frame = Frame(selector, tuple(updates.items()))

    def __enter__(self) -> Self:
        global used
        used = True
        frames.set((*frames.get(), self._frame))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = frames.get()
        if not entered or entered[-1] is not self._frame:
            raise ScopeError(f"{type(self).__name__} was left in another order than it was entered, or elsewhere")
        frames.set(entered[:-1])


class policy_override(_Change):
    """Changes fields of a selector's policy inside a `with` block; other threads do not see it."""

    def __init__(self, selector: Any, **updates: Any) -> None:
        known = [f.name for f in fields(AutotunePolicy)]
        for name in updates:
            if name not in known:
                raise PolicyFieldError(f"a policy has no field {name!r}; it has {', '.join(known)}")
        # Checked here, so that a wrong value fails where it is written.
        AutotunePolicy(**updates)
        super().__init__(selector, updates)


class forward_autotune_only(_Change):
    """Tunings inside measure the forward pass alone, whatever the policy says."""

    def __init__(self) -> None:
        super().__init__(None, {"validate_backward": False})
