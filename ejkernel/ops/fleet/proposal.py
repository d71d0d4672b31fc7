"""What one process can say about a request by itself, before its processes agree."""

from __future__ import annotations

from typing import Protocol

from ..core.request import Decision, Hit, Request


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

    def keep(self, hit: Hit, misses: tuple[tuple[str, str], ...] = ()) -> Decision:
        """Keeps and tells an answer: this process's own, or what the processes agreed on."""
