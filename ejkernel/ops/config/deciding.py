"""Who decides: this process by itself, or all processes of a `jax.distributed` program together."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from .. import _jax
from ..core.record import Record
from ..settings import Settings
from .cache import is_shadowed
from .request import Hit, Request


@dataclass(frozen=True)
class Decision:
    """What was chosen for a request, by which tier, and why the earlier ones had no answer."""

    cfg: Any
    tier: str
    misses: tuple[tuple[str, str], ...] = ()
    record: Record | None = None
    # The record of a tuning that left no candidate.
    failed: Record | None = None


class Proposal(Protocol):
    """What one process can say about a request by itself."""

    @property
    def request(self) -> Request:
        """The question."""

    @property
    def is_tuning(self) -> bool:
        """Was a tuning asked for, whatever is known already?"""

    def known(self) -> Hit | None:
        """What memory or a store answers; nothing is measured, kept or told."""

    def make(self, seconds: float | None = None) -> Decision:
        """The answer of all tiers, kept and told; a tuning takes at most so many seconds."""

    def guess(self) -> Hit:
        """The heuristic cfg, where the policy allows it."""

    def keep(self, hit: Hit, misses: Sequence[tuple[str, str]] = ()) -> Decision:
        """Keeps and tells an answer that was found elsewhere."""


def decide(proposal: Proposal, settings: Settings) -> Decision:
    """The proposal itself in a program of one process, else what its processes agree on."""
    if not _is_shared(settings) or _is_program_text(proposal):
        return proposal.make()
    return cast(Decision, _fleet().agree(proposal, settings.agree_seconds))


def agreed(request: Request, settings: Settings) -> Hit | None:
    """What the processes of this program agreed on already, as far as this one asked; None where it is alone."""
    return cast("Hit | None", _fleet().standing(request)) if _is_shared(settings) else None


def _is_shared(settings: Settings) -> bool:
    return settings.agree and _jax.distributed() is not None


def _fleet() -> Any:
    # By name: `fleet` builds on this room, and a program of one process never imports it.
    return importlib.import_module("..fleet.agreement", __package__)


def _is_program_text(proposal: Proposal) -> bool:
    # `cfg=` and overlays are written in the program, which all processes share: there is nothing to find out.
    request = proposal.request
    return not proposal.is_tuning and (request.inv.override_cfg is not None or is_shadowed(request.key))
