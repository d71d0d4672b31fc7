"""A call to be tuned outside the program that makes it, with all that was around it there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..config import policy
from ..core.device import device_fingerprint, target_device
from ..core.invocation import Invocation
from ..core.key import Key
from ..core.trace_context import TraceContext


@dataclass(frozen=True)
class FoundCall:
    """A kernel call that a program makes: its arguments, its selectors, and how often a run of the program makes it."""

    key: Key
    kernel: Any
    inv: Invocation[Any, Any]
    # The first one tunes; the others keep what it found.
    selectors: tuple[Any, ...]
    device: jax.Device
    # None: whatever is in force where it is tuned.
    trace_context: TraceContext | None = None
    frames: tuple[policy.Frame, ...] = ()
    # Runs of it in one run of the program, as far as the program shows them.
    count: int = 1
    # Kernels inside kernels come first.
    order: int = 0
    # The calls that this one is inside of: their kernels make it.
    outer: frozenset[Key] = frozenset()
    # Does the program have a backward pass of it?
    is_differentiated: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Was it made on a kind of device that this process would not tune it on?"""
        return self.key.device != device_fingerprint(self.device)

    def by(self, selector: Any) -> FoundCall:
        """The call, tuned by another selector: never for less than the program asks."""
        with self.restored():
            both = any(each.policy.validate_backward for each in self.selectors)
        more = (policy.Frame(selector, (("validate_backward", True),)),) if both else ()
        return replace(self, selectors=(selector,), frames=(*self.frames, *more))

    def tuned_for(self, objective: str) -> FoundCall:
        """The call, to be tuned for this objective; auto: for what the program runs of it, and what its policy asks."""
        if objective == "auto" and not self.is_differentiated:
            return self
        both = objective != "forward"
        frames = (policy.Frame(selector, (("validate_backward", both),)) for selector in self.selectors)
        return replace(self, frames=(*self.frames, *frames))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Puts back what was around the call, for a `with` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(target_device(self.device))
            if self.trace_context is not None:
                stack.enter_context(self.trace_context.entered())
            token = policy.frames.set((*policy.frames.get(), *self.frames))
            stack.callback(policy.frames.reset, token)
            yield
