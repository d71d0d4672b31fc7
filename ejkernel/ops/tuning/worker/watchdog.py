"""The watchdog of a worker: candidates at work, how long that may last, and which is to blame for a worker's end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from ...core import formatting
from ...core.errors import IsolationError
from ...core.record import Status
from ..journal.observer import Doing
from .limits import Isolation
from .process import FROM_OUTSIDE

# A compilation, and the end of a trace, may take so many times as long as a run.
_LONGER_TIMES = 5.0
# Grace for a worker to end by itself once its time is up: a share of that time, and the least and the most seconds.
_GRACE, _LEAST_GRACE_SECONDS, _MOST_GRACE_SECONDS = 0.05, 0.8, 2.0
# Under a deadline a check hangs if it takes so many times as long as the quickest one, and at least so many seconds.
_HOPELESS_TIMES = 100.0
_HOPELESS_SECONDS = 5.0
# After so many deaths with no candidate at work the worker itself cannot be used.
_UNEXPLAINED = 3


@dataclass(frozen=True)
class KillReason:
    """The reason that we ended a worker; the number of the candidate at fault, where that is known."""

    status: Literal["timeout", "memory", "deadline", "silence"]
    message: str
    number: int | None = None


class Blame(NamedTuple):
    """The candidate that is out, and for what."""

    number: int
    status: Status
    message: str


class _Turn(NamedTuple):
    """The step that a candidate is at, its start by our clock and by the worker's own: messages may wait."""

    doing: Doing
    since: float
    began: float


@final
class Watchdog:
    """The turns of the candidates of one tuning, over all its workers."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        # Are candidates compiled one by one, so that a death has one suspect?
        self.one_by_one = False
        self.at_work: dict[int, _Turn] = {}
        # Candidates that were at work when a worker was killed from outside (by the system for want of memory, or by a
        # person). The second time such a candidate is out.
        self._struck: set[int] = set()
        self._unexplained = 0
        self._memory_limit = math.inf
        self._deadline = self._end = math.inf
        self._grace = _MOST_GRACE_SECONDS
        # Seconds of the shortest check in this worker; its first check takes longer, since it loads what all need.
        self._quickest = math.inf
        # The time of the worker's last message.
        self._heard = time.perf_counter()

    def begin(self, deadline: float, end: float | None = None) -> None:
        """Begins a batch: suspicions of the last one are dropped. At `end` it ends even with nothing measured."""
        self._deadline = deadline
        self._end = deadline if end is None else max(deadline, end)
        share = _GRACE * (deadline - time.perf_counter())
        self._grace = min(max(share, _LEAST_GRACE_SECONDS), _MOST_GRACE_SECONDS)
        self.hears()
        self.one_by_one, self._unexplained = False, 0

    def new_worker(self) -> None:
        """Sets the limits of a new worker: its memory limit is taken from what is free now."""
        self._memory_limit, self._quickest = self.isolation.memory_limit, math.inf
        self.hears()

    def hears(self) -> None:
        """Notes that a message has come from the worker."""
        self._heard = time.perf_counter()

    def starts(self, number: int, doing: Doing, began: float) -> None:
        """Notes that a candidate begins a step."""
        if doing != "compile":
            self.rest()
        self.at_work[number] = _Turn(doing, time.perf_counter(), began)

    def ends(self, number: int, at: float) -> Doing | None:
        """Notes that a candidate's step is over; returns the step."""
        turn = self.at_work.pop(number, None)
        if turn is not None and turn.doing == "check":
            self._quickest = min(self._quickest, at - turn.began)
        return None if turn is None else turn.doing

    def rest(self) -> None:
        """Ends the check or the run at work: there is one at a time, so the next beginning ends the last."""
        self.at_work = {number: turn for number, turn in self.at_work.items() if turn.doing == "compile"}

    def poll(self, held: int, *, usable: bool, falls_back: bool = False) -> KillReason | None:
        """Decides whether the worker has to end, for its memory or its time; None where it may go on.

        The deadline counts once one candidate has passed the check, and is usable. With a cfg to fall back on the end
        counts in any case.
        """
        now = time.perf_counter()
        if held > self._memory_limit:
            allowed = self._memory_limit / 2**20
            return KillReason("memory", f"the process held {held / 2**20:,.0f} MiB where {allowed:,.0f} are allowed")
        running = any(turn.doing != "compile" for turn in self.at_work.values())
        for number, (doing, since, _) in self.at_work.items():
            limit = self._limit(doing)
            # A candidate that compiles while another one runs holds nothing up, and is left alone.
            if now - since > limit and (doing != "compile" or not running):
                return KillReason("timeout", f"did not end within {limit:g} s ({doing}){self._compared(limit)}", number)
        if not self.at_work and now - self._heard > self.silence:
            return KillReason("silence", f"said nothing for {self.silence:g} s, with no candidate at work")
        return self.too_late(usable=usable, falls_back=falls_back)

    def too_late(self, *, usable: bool, falls_back: bool) -> KillReason | None:
        """The reason to end the worker once its deadline and its grace are over; else None."""
        until = self._deadline if usable else self._end if falls_back else math.inf
        late = time.perf_counter() > until + self._grace
        return KillReason("deadline", "still at work when the time was up") if late else None

    @property
    def silence(self) -> float:
        """The longest that a worker may say nothing while no candidate is at work: it makes inputs, or a reference."""
        return self.isolation.run_seconds * _LONGER_TIMES

    def _limit(self, doing: Doing) -> float:
        if doing in ("lower", "compile", "trace"):
            return self.isolation.run_seconds * _LONGER_TIMES
        if math.isinf(self._deadline) or math.isinf(self._quickest):
            return self.isolation.run_seconds
        return min(self.isolation.run_seconds, max(_HOPELESS_SECONDS, _HOPELESS_TIMES * self._quickest))

    def _compared(self, limit: float) -> str:
        shortened = limit < self.isolation.run_seconds
        return f" where another one took {formatting.seconds(self._quickest)}" if shortened else ""

    def blame(self, ended: KillReason | None, status: int, words: str, *, beside: bool = False) -> Blame | None:
        """The candidate that ended the worker; None where the next worker has to show which it was.

        With several at work, candidates are tried one by one from then on. A kill from outside, or a death in a worker
        that compiled programs of later tunings `beside` them, is forgiven once.
        """
        suspects, self.at_work = self.at_work, {}
        if ended is not None and ended.number is not None:
            return Blame(ended.number, "timeout", ended.message)
        if not suspects:
            self._unexplained += 1
            if self._unexplained >= _UNEXPLAINED:
                raise IsolationError(f"the worker process dies while no candidate is at work ({words})")
            return None
        if len(suspects) > 1 and not self.one_by_one:
            self.one_by_one = True
            return None
        # Candidates tried one by one: the latest to begin is at work, and an earlier one can at most be compiling.
        number = max(suspects, key=lambda n: suspects[n].since)
        doing = suspects[number].doing
        if (beside or (ended is None and status in FROM_OUTSIDE)) and number not in self._struck:
            self._struck.add(number)
            return None
        if ended is not None:
            return Blame(number, "memory", f"{ended.message} ({doing})")
        return Blame(number, "crash", f"the process died ({doing}; {words})")
