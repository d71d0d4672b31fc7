"""The order of a pool's work: what is sent next, what is sent again, and what is given up. No clock, no pool here."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from ...core.errors import RulesTypeError
from ...core.key import Key


@dataclass(frozen=True)
class ScheduleRules:
    """Limits of a schedule."""

    # Work that runs so many times as long as usual is sent once more, where nothing else waits; seconds at least.
    straggler_times: float = 3.0
    straggler_seconds: float = 60.0
    # Work without an answer after so many seconds is given up, where it was sent twice or no worker answers any more.
    silent_seconds: float = 1800.0
    # Attempts that may end with their worker.
    deaths: int = 2
    # Times that work may be refused while no worker takes work of its kind, and rounds in which all work of a kind
    # was refused, where none was ever taken and no worker is left that may take it.
    refusals: int = 40
    rounds: int = 3
    # After so many refusals work is under way once more, since an engine may hand it to the same worker each time.
    unlucky: int = 3
    # Refused work is sent again when a worker of use is free, and at the latest after these seconds, doubled each time.
    refused_seconds: float = 0.1
    refused_longest: float = 5.0
    # Tasks that wait in the pool for each worker that is at work, so that it need not wait for this process.
    ahead: float = 0.25


def rules_of(pool: Any) -> ScheduleRules:
    """The rules that a pool brings, else the usual ones."""
    rules = getattr(pool, "rules", None)
    if rules is not None and not isinstance(rules, ScheduleRules):
        raise RulesTypeError(
            f"the pool's rules are {rules!r}; give ScheduleRules(...) of ejkernel.ops.programs.pool.schedule, or none"
        )
    return rules or ScheduleRules()


@dataclass(eq=False)
class Work:
    """Some calls of one kernel that travel together, and the attempts at them."""

    calls: tuple[Key, ...]
    # Kernel and device: workers that refuse one call of it refuse all.
    kind: str = ""
    # Attempts under way, and when each was sent.
    sent: dict[int, float] = field(default_factory=dict)
    attempts: int = 0
    deaths: int = 0
    refusals: int = 0
    # Refusals since a worker has taken work of this kind.
    in_vain: int = 0
    # Refused: the latest time for another attempt.
    again_at: float = 0.0
    reason: str = ""

    @property
    def doubled(self) -> float:
        """Two to the number of refusals, as a number that is never too large."""
        return 2.0 ** min(self.refusals, 32)

    @property
    def was_repeated(self) -> bool:
        """Is it under way twice, or was it?"""
        return self.attempts > self.deaths + self.refusals + 1


@final
class Schedule:
    """Work by its state: waiting, refused for now, under way; what is none of them is done or given up."""

    def __init__(
        self,
        works: Iterable[Work],
        *,
        inner: Mapping[Key, Iterable[Key]] | None = None,
        workers: int | None = None,
        rules: ScheduleRules | None = None,
    ) -> None:
        self.rules = rules or ScheduleRules()
        # None: the pool does not say; then everything is sent at once, and the pool keeps the order.
        self.workers = workers
        self._waiting = list(works)
        self._refused: list[Work] = []
        self._under_way: dict[int, Work] = {}
        # Calls that have to be known before a call is sent: its kernel makes them.
        self._inner = {key: set(keys) for key, keys in (inner or {}).items()}
        self._open = {key for work in self._waiting for key in work.calls}
        self._number = 0
        # In order, so that the median is in the middle.
        self._seconds: list[float] = []
        # Answers when they were counted last, and when there were more of them for the last time.
        self._counted, self._heard_at = 0, -math.inf
        # Kinds of work that some worker took, and how often all attempts at a kind were refused.
        self._taken: set[str] = set()
        self._rounds: dict[str, int] = {}
        # Attempts under way when one was taken last: about the number of workers that are of use.
        self._useful = 1
        # Why the pool takes no more; empty while it does.
        self._closed = ""

    @property
    def is_busy(self) -> bool:
        """Is there anything to send or to wait for?"""
        return bool(self._waiting or self._refused or self._under_way)

    @property
    def under_way(self) -> int:
        """Attempts that were sent and not answered."""
        return len(self._under_way)

    @property
    def numbers(self) -> list[int]:
        """The numbers of these attempts."""
        return list(self._under_way)

    @property
    def left(self) -> list[Work]:
        """Work that is not done."""
        return [*self._waiting, *self._refused, *dict.fromkeys(self._under_way.values())]

    def waiting(self) -> Sequence[Work]:
        """Work that was not sent yet, in order."""
        return (*self._waiting, *self._refused)

    def reorder(self, rank: Mapping[Key, int]) -> None:
        """Puts the work that waits into the order of its first calls."""
        self._waiting.sort(key=lambda work: min(rank[key] for key in work.calls))

    def next(self, now: float) -> Work | None:
        """The work to send now; None where that has to wait."""
        if self._closed:
            return None
        room = self.workers is None or self.under_way < self.workers + math.ceil(self.rules.ahead * self.workers)
        ready = next(filter(self._is_ready, self._waiting), None) if room else None
        if ready is not None:
            self._waiting.remove(ready)
            return ready
        again = self._refused_next(now)
        if again is not None:
            self._refused.remove(again)
            return again
        idle = self.workers is None or self.under_way < self.workers
        if not idle or self._waiting or self._refused:
            return None
        # Up to a limit: while one attempt is under way the refusal of another gives nothing up.
        some = [work for work in dict.fromkeys(self._under_way.values()) if work.in_vain < self.rules.refusals]
        late = (work for work in some if len(work.sent) == 1 and not work.was_repeated and self._is_late(work, now))
        return next(late, None) or next(filter(self._is_unlucky, some), None)

    def _is_unlucky(self, work: Work) -> bool:
        """Does the wrong worker get it again and again, though there is a right one?

        An engine that prefers an idle worker hands it over to that one each time. So more and more attempts are under
        way at once: the wrong workers have one each, and another worker gets the next.
        """
        return work.kind in self._taken and len(work.sent) <= work.in_vain // self.rules.unlucky

    def _refused_next(self, now: float) -> Work | None:
        """Refused work to be sent now: a worker of use is free, or it has waited long enough."""
        if not self._refused:
            return None
        first = min(self._refused, key=lambda work: work.again_at)
        return first if self.under_way < self._useful or now >= first.again_at else None

    def _is_ready(self, work: Work) -> bool:
        before = (inner for key in work.calls for inner in self._inner.get(key, ()))
        return not any(inner in self._open and inner not in work.calls for inner in before)

    def _is_late(self, work: Work, now: float) -> bool:
        return now - max(work.sent.values()) > self._patience(work)

    def _patience(self, work: Work) -> float:
        if not self._seconds:
            return self.rules.silent_seconds
        # It is asked for all work under way at each answer, so the median must cost next to nothing.
        count = len(self._seconds)
        usual = (self._seconds[(count - 1) // 2] + self._seconds[count // 2]) / 2 * len(work.calls)
        return max(self.rules.straggler_times * usual, self.rules.straggler_seconds)

    def sent(self, work: Work, now: float) -> int:
        """Notes that work is under way; the number of the attempt."""
        self._number += 1
        work.attempts += 1
        work.sent[self._number] = now
        self._under_way[self._number] = work
        return self._number

    def unsent(self, number: int) -> None:
        """Takes back an attempt that the pool did not take."""
        work = self.came_back(number)
        if work is not None:
            self._waiting.insert(0, work)

    def close(self, why: str) -> list[Work]:
        """Sends nothing more, and the first reason stays; the work that is not under way."""
        self._closed = self._closed or why
        return [*self._waiting, *self._refused]

    def came_back(self, number: int) -> Work | None:
        """Ends an attempt; None where the work is done already."""
        work = self._under_way.pop(number, None)
        if work is not None:
            del work.sent[number]
        return work

    def answered(self, work: Work, seconds: Iterable[float]) -> list[int]:
        """Ends work with the seconds of its calls; the attempts at it that are of no use any more."""
        self._taken.add(work.kind)
        self._useful = max(1, self.under_way + 1)
        for one in seconds:
            insort(self._seconds, one)
        # There is a worker for it, which was busy.
        for other in self.left:
            if other.kind == work.kind:
                other.in_vain = 0
        return self._take_out(work)

    def took_some(self, work: Work, done: Iterable[Key]) -> None:
        """Leaves the other calls of work to be sent again: a worker could tune only some of them."""
        gone = set(done)
        self._open -= gone
        work.calls = tuple(key for key in work.calls if key not in gone)

    def refused(self, work: Work, reason: str, now: float) -> list[Work]:
        """Notes that a worker refused; the work that is hopeless now."""
        pause = min(self.rules.refused_longest, self.rules.refused_seconds * work.doubled)
        work.refusals, work.again_at = work.refusals + 1, now + pause
        work.in_vain += 1
        # Where nothing is sent again, the end of the pool is the reason, whatever this worker said.
        work.reason = self._closed or reason
        if work.sent:
            return []
        self._refused.append(work)
        if self._closed or work.in_vain >= self.rules.refusals:
            hopeless = [work]
        elif work.kind in self._taken or not self._is_vain(work.kind):
            hopeless = []
        else:
            hopeless = [other for other in self._refused if other.kind == work.kind]
        for one in hopeless:
            self.give_up(one)
        return hopeless

    def _is_vain(self, kind: str) -> bool:
        """Will no worker take work of this kind, which none has ever taken?

        So it is after some rounds in which all of it was refused, or once every piece was refused as often while the
        attempts overlap. Work that was never refused is under way at a worker that starts or is busy, and that may be
        the right one.
        """
        mine = [work for work in self.left if work.kind == kind]
        if not all(work.refusals for work in (*self._under_way.values(), *mine)):
            return False
        if not any(work.sent for work in mine):
            self._rounds[kind] = self._rounds.get(kind, 0) + 1
        often = all(work.refusals >= self.rules.rounds for work in mine)
        return often or self._rounds.get(kind, 0) >= self.rules.rounds

    def died(self, work: Work, reason: str) -> list[Work]:
        """Notes that an attempt ended without an answer; the work that gets no other attempt."""
        work.deaths += 1
        work.reason = self._closed or reason
        if work.sent:
            return []
        if self._closed or work.deaths >= self.rules.deaths:
            self.give_up(work)
            return [work]
        # One by one, so that a call which ends its worker takes no other with it.
        parts = [Work((key,), work.kind, attempts=1, deaths=work.deaths, reason=reason) for key in work.calls]
        self._waiting[:0] = parts
        return []

    def overdue(self, now: float) -> list[Work]:
        """The work that was repeated in vain, or was sent to workers none of which answers any more."""
        limit = self.rules.silent_seconds
        if len(self._seconds) > self._counted:
            self._counted, self._heard_at = len(self._seconds), now
        works = dict.fromkeys(self._under_way.values())
        late = [work for work in works if now - self._last_sign(work) > max(limit, self._patience(work))]
        for work in late:
            work.reason = f"no worker answered within {limit:.0f} s"
        return late

    def _last_sign(self, work: Work) -> float:
        """The latest time from which an answer to work is waited for."""
        sent = max(work.sent.values())
        # While workers answer, work that was sent once gets its second attempt after the work that waits.
        return sent if work.was_repeated else max(sent, self._heard_at)

    def give_up(self, work: Work) -> list[int]:
        """Ends work without an answer; the attempts at it that are under way."""
        return self._take_out(work)

    def _take_out(self, work: Work) -> list[int]:
        self._open -= set(work.calls)
        for works in (self._waiting, self._refused):
            if work in works:
                works.remove(work)
        others = list(work.sent)
        for number in others:
            del self._under_way[number]
        work.sent.clear()
        return others

    def seconds_until_late(self, now: float) -> float:
        """Seconds until some work becomes late or is to be sent again; infinite where there is none."""
        works = dict.fromkeys(self._under_way.values())
        lates = [max(work.sent.values()) + self._patience(work) - now for work in works if not work.was_repeated]
        # What is late already waits for a worker, and not for a time.
        times = [late for late in lates if late > 0] + [work.again_at - now for work in self._refused]
        return max(0.0, min(times, default=math.inf))
