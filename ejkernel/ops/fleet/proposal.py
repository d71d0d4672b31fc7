"""A process's own answers to a request, before the processes agree."""

from __future__ import annotations

from typing import Protocol

from ..core.request import Decision, Hit, Request


class Proposal(Protocol):
    """A process's own answers to a request."""

    @property
    def request(self) -> Request:
        """The question."""

    @property
    def is_tuning(self) -> bool:
        """Was a tuning asked for, whatever is known already?"""

    def known(self) -> Hit | None:
        """The answer of memory or a store; nothing is measured or kept, and no event is sent."""

    def make(self, seconds: float | None = None) -> Decision:
        """The answer of all tiers, kept and reported as an event; a tuning takes at most so many seconds."""

    def guess(self) -> Hit:
        """The heuristic cfg, where the policy allows it."""

    def keep(self, hit: Hit, misses: tuple[tuple[str, str], ...] = ()) -> Decision:
        """Keeps and tells an answer: this process's own, or what the processes agreed on."""
