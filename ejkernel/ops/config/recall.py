"""Choices from memory that are made again and again while programs are traced: they are recalled, and told as ever.

A program makes the same call in every layer, and a user's functions are traced many times. What the tiers answered from
memory holds until a cache, a store or a policy of this process changes, which `core.invalidation` counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from .. import _jax
from ..core import invalidation
from ..core.device import target_in_force
from ..core.invocation import Invocation
from ..core.kernel import Kernel, key_builder_of
from ..core.request import Decision
from . import call_log
from .cache import lock_in_force, overlay_in_force
from .policy import frames

# Questions that are remembered; each is a few hundred bytes.
_MOST = 4096
# Static values that equality and type tell apart.
_PLAIN = frozenset((int, bool, str, type(None)))


class _Known(NamedTuple):
    decision: Decision
    epoch: int


class Recall:
    """Answers of one selector from memory, by everything that they depend on."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def find(self, question: Hashable) -> Decision | None:
        """The decision, where nothing has changed since."""
        known = self._known.get(question)
        return known.decision if known is not None and known.epoch == invalidation.epoch else None

    def keep(self, question: Hashable, decision: Decision, epoch: int) -> None:
        """Remembers a decision that was made at this epoch, if it came from memory."""
        if decision.tier != "memory":
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[question] = _Known(decision, epoch)


def question_of(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Hashable | None:
    """Everything that the answer to a plain call inside a program depends on; None for any other call."""
    if inv.override_cfg is not None or inv.method is not None or inv.batch_axes is not None:
        return None
    # A key builder may look at anything; a program that is looked through, or collected from, needs every step.
    if (
        key_builder_of(kernel) is not None
        or call_log.is_watching()
        or overlay_in_force()
        or lock_in_force() is not None
    ):
        return None
    types = []
    for arg in inv.args:
        if type(arg) is not _jax.JaxprTracer:
            return None
        types.append(arg.aval)
    static: list[Any] = []
    for name, value in (*vars(kernel).items(), *inv.kwargs.items()):
        if type(value) not in _PLAIN:
            return None
        static += (name, type(value), value)
    return (
        *(type(kernel), kernel.op_id, kernel.version, tuple(types), tuple(static), len(inv.kwargs)),
        *(target_in_force(), frames.get(), jax.sharding.get_abstract_mesh()),
        *(_jax.setting("jax_default_matmul_precision"), _jax.setting("jax_default_device")),
    )
