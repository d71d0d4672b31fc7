"""One walk over the tiers: they are asked in order, and the first answer wins.

Choosing, previews, `explain` and the agreement of processes walk the same list; they differ in the question that each
tier is asked (`find` or `preview`) and in what they do with the answer. A tier says in its `Hit` where its answer is
kept and which event tells of it, so that a new tier is one class here or elsewhere and one line in the selector's list.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ..core.errors import NoConfigError
from ..core.key import Key
from ..core.record import Record
from ..core.request import Hit, Miss, Planned, Request

Misses = tuple[tuple[str, str], ...]


class Tier(abc.ABC):
    """One place a cfg can come from."""

    # As messages, counters and `explain` call it; no two tiers of a list share one.
    name: str
    # Does it hold cfgs that were measured before, here or elsewhere? Then other processes may be told its answer.
    remembers = False
    # Does one thread at a time work on a key here? The others wait, and then ask again from the first tier on.
    exclusive = False

    @abc.abstractmethod
    def find(self, request: Request) -> Hit | Miss:
        """The answer, or why there is none."""

    def preview(self, request: Request) -> Hit | Miss | Planned:
        """The answer that `find` would give; nothing is measured, kept, changed or told."""
        return self.find(request)


@final
@dataclass(frozen=True, eq=False)
class Off(Tier):
    """A tier that policy or settings turned off."""

    name: str
    reason: str

    def find(self, request: Request) -> Miss:
        """The reason."""
        return Miss(self.reason)


Ask = Callable[[Tier, Request], Hit | Miss | Planned]


def find(tier: Tier, request: Request) -> Hit | Miss:
    """Asks a tier for its answer."""
    return tier.find(request)


def preview(tier: Tier, request: Request) -> Hit | Miss | Planned:
    """Asks a tier what it would answer."""
    return tier.preview(request)


class Walked(NamedTuple):
    """The first answer of the tiers, if any, and why the tiers before it had none."""

    # With the seeds that were left on the way.
    request: Request
    hit: Hit | None
    misses: Misses
    # The answer to a preview where a tier would have to measure first.
    planned: Planned | None = None
    # The tier that gave the answer.
    tier: str = "error"
    # The record of a tuning that left no candidate.
    failed: Record | None = None


def walk(tiers: Sequence[Tier], request: Request, ask: Ask = find, *, hold: Callable[[], bool] | None = None) -> Walked:
    """Asks the tiers in order until one has an answer.

    `hold` is called before the first tier that one thread at a time works in. It waits for its turn, and says whether
    another thread has worked on this key: its answer is in an earlier tier by now, so the walk begins again.
    """
    misses: list[tuple[str, str]] = []
    failed: Record | None = None
    for tier in tiers:
        if tier.exclusive and hold is not None:
            begin_again, hold = hold(), None
            if begin_again:
                return walk(tiers, replace(request, seeds=(), none_ran=False), ask)
        answer = ask(tier, request)
        if isinstance(answer, Hit):
            return Walked(request, answer, tuple(misses), None, answer.tier, failed)
        if isinstance(answer, Planned):
            return Walked(request, None, tuple(misses), answer, tier.name, failed)
        failed = answer.record or failed
        if answer.seeds is not None:
            # An empty tuple drops the seeds: they were measured with the candidates and failed.
            seeds = (*request.seeds, *answer.seeds) if answer.seeds else ()
            request = replace(request, seeds=seeds, none_ran=request.none_ran or not answer.seeds)
        if answer.reason:
            misses.append((tier.name, answer.reason))
    return Walked(request, None, tuple(misses), failed=failed)


# The reason of each tier that is not asked under a lock file.
LOCKED = "not asked: locked"


def nothing_left(key: Key, misses: Misses) -> NoConfigError:
    """The error that says for each tier why it had no answer, and what to do."""
    width = max((len(name) for name, _ in misses), default=0)
    lines = "".join(f"  {name:<{width}}  {reason}\n" for name, reason in misses)
    if LOCKED in (reason for _, reason in misses):
        advice = "Freeze the program again and review the change, or pass cfg=...; without the lock other tiers answer."
    else:
        advice = "Pass cfg=..., put one into a cache, or allow autotuning or heuristics in the policy."
    return NoConfigError(f"no configuration for {key}\n{lines}{advice}")
