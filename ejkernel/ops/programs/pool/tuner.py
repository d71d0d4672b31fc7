"""Tunes many calls on a pool: each travels to a worker, and this process keeps every record that comes back."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jaxlib.version

from ..._version import __version__
from ...core import codec, formatting
from ...core.cfg import same
from ...core.errors import OpsError, SignatureError
from ...core.key import Key
from ..batch import AutotuneOptions, BatchTuner
from ..budget_split import allotted
from ..found_call import FoundCall
from ..interrupts import Interrupts
from ..results import Entry
from ..trace_ahead import TracedAhead
from .absent_devices import kept_entry, known_entry
from .client import Arrived, PoolBroken, PoolClient, broke, check_pool, workers_of
from .engines import suited
from .keeper import RecordKeeper
from .plan import PoolPlan, planned, seeds_for, together_for
from .schedule import Schedule, Work, rules_of
from .serialization import asked_call, plain_tuner, rebuilt_record
from .task import AskedCall, Reply, Task, TaskOutcome
from .totals import PoolTotals, WorkerTotals
from .worker import run_task

# How long this process waits at most before it looks at its own state: Ctrl-C, deadlines, stragglers.
_POLL_SECONDS = 0.5
# Answers that come so late are still taken: a worker ends its tuning when its own time is up.
_GRACE_SECONDS = 0.5
# The share of a call's seconds for its tuning; the rest is for the way, the import of the kernel's module included.
_FOR_TUNING = 0.9
# Workers that the line of the whole names.
_MOST_PLACES = 4
# A worker that refuses waits before it says so, longer each time, up to so many seconds.
_LONGEST_PAUSE = 1.0


@dataclass(frozen=True)
class _PoolRun:
    """One round of sending: what goes, in which order, and the pool."""

    plan: PoolPlan
    schedule: Schedule
    client: PoolClient


@final
class PoolTuner(BatchTuner):
    """The tuning of some calls on a pool; this process alone writes to stores."""

    def __init__(
        self,
        device: str,
        options: AutotuneOptions,
        *,
        deadline: float = math.inf,
        confirms: bool = False,
    ) -> None:
        check_pool(options.pool)
        super().__init__(device, options, deadline=deadline, confirms=confirms)
        # A pool with workers that begin late, such as jobs in a queue, brings rules of its own.
        self._pool = suited(options.pool)
        self._rules = rules_of(self._pool)
        self._totals = PoolTotals()
        self._keeper = RecordKeeper()

    def _worker_lines(self) -> list[str]:
        return self._totals.lines()

    def _tune_all(self, calls: Sequence[FoundCall], interrupts: Interrupts, ahead: TracedAhead) -> None:
        pool = self._pool
        plan = self._plan(calls, interrupts)
        works = plan.works(self._together)
        schedule = Schedule(works, inner=plan.inner, workers=workers_of(pool), rules=self._rules)
        with contextlib.closing(PoolClient(pool, run_task)) as client:
            run = _PoolRun(plan, schedule, client)
            try:
                while schedule.is_busy:
                    interrupts.check()
                    self._turn(run)
            except KeyboardInterrupt:
                self._save(run)
                raise
            finally:
                self._keeper.keep_again()

    def _together(self, left: int) -> int:
        """The number of calls that share a task while so many are left."""
        workers, asked_for = workers_of(self._pool), getattr(self._pool, "calls_per_task", None)
        # Under a budget the seconds of a call are known when it is sent.
        together = together_for(left, workers) if self.deadline == math.inf else 1
        if isinstance(asked_for, int) and asked_for > 0:
            # A task that is dear to start has many calls, as long as every worker gets one.
            together = max(together, min(asked_for, math.ceil(left / (workers or 1))))
        return together

    def _plan(self, calls: Sequence[FoundCall], interrupts: Interrupts) -> PoolPlan:
        """The calls that can travel; the others are named, or answered here where there is nothing to measure."""
        asked: dict[Key, tuple[AskedCall, int | None]] = {}
        tuners: dict[Key, dict[str, Any]] = {}
        for call in calls:
            interrupts.check()
            try:
                tuners[call.key] = plain_tuner(call.selectors[0].tuner)
                asked[call.key] = asked_call(call)
            # A kernel that is not written as it should be is named like one that cannot travel.
            except OpsError as error:
                self._name(call.key, f"it cannot be sent to another process: {error}")
                continue
            if asked[call.key][1] == 1:
                # Nothing to measure.
                self.entries[call.key] = entry = self._tuned(call, None)
                self._progress.tuned(entry, "this process")
                del asked[call.key]
        going = {call.key: call for call in calls if call.key in asked}
        return planned(going, asked, tuners, exact=self.deadline < math.inf)

    def _turn(self, run: _PoolRun) -> None:
        """Sends what can be sent, and takes what came back."""
        schedule, client = run.schedule, run.client
        now = time.perf_counter()
        try:
            while (work := schedule.next(now)) is not None:
                self._send(run, work)
                # An executor without threads has answered already.
                while (arrived := client.receive(0.0)) is not None:
                    self._take(run, arrived)
        except PoolBroken as error:
            self._close(run, str(error))
        self._give_up(run, schedule.overdue(now))
        if now > self.deadline - self._kept + _GRACE_SECONDS:
            self._end(run, schedule.left, f"the budget of {self.options.seconds:g} s was spent")
        if schedule.under_way:
            self._show(run)
            # While workers are busy there is time to find out which call is worth most.
            if run.plan.estimate({key for work in schedule.waiting() for key in work.calls}):
                schedule.reorder(run.plan.rank())
                now = time.perf_counter()
            until = min(_POLL_SECONDS, schedule.seconds_until_late(now), max(0.0, self._left() + _GRACE_SECONDS))
            arrived = client.receive(until)
            if arrived is not None:
                self._take(run, arrived)

    def _send(self, run: _PoolRun, work: Work) -> None:
        plan, schedule = run.plan, run.schedule
        seconds = None
        if self.deadline < math.inf:
            seconds = self._seconds_for(run, work)
            if seconds is None:
                self._end(run, [work], self._no_time())
                return
        task = Task(
            work.calls[0].device,
            tuple(self._asked(plan, key, seconds) for key in work.calls),
            plan.tuners[work.calls[0]],
            jaxlib.version.__version__,
            min(_LONGEST_PAUSE, 0.05 * work.doubled) if work.refusals else 0.0,
        )
        number = schedule.sent(work, time.perf_counter())
        self._begun = True
        try:
            run.client.send(number, task.dumps())
        except PoolBroken:
            schedule.unsent(number)
            raise

    def _seconds_for(self, run: _PoolRun, work: Work) -> float | None:
        """The seconds of each call of work, of what all workers have left; None where that is not enough."""
        plan, left = run.plan, self._left()
        first = plan.calls[work.calls[0]]
        rest = [plan.calls[key] for other in (work, *run.schedule.waiting()) for key in other.calls]
        if allotted(first, rest, plan.shares, left, self._taken) is None:
            return None
        part = allotted(first, rest, plan.shares, left * (run.schedule.workers or 1), self._taken) or left
        return max(0.1, min(part, left / len(work.calls)) * _FOR_TUNING)

    def _asked(self, plan: PoolPlan, key: Key, seconds: float | None) -> AskedCall:
        """A call as it travels now: with what similar calls found, and the cfgs of the kernels inside it."""
        inside = [
            (other.op_id, other.call_key, codec.encode(self.entries[other].cfg))
            for other in plan.inner[key]
            if other in self.entries
        ]
        return replace(
            plan.asked[key],
            seconds=seconds,
            repetitions=self.options.repetitions,
            seeds=seeds_for(plan, key),
            inside=inside,
        )

    def _save(self, run: _PoolRun) -> None:
        """Keeps the answers that have arrived and were not taken, or not to the end."""
        for arrived in run.client.ended():
            with contextlib.suppress(ValueError):
                reply = Reply.loads(arrived.text)
                for outcome in reply.outcomes:
                    if outcome.record is not None and outcome.key not in self.entries:
                        self._keep(run, outcome, reply.worker, self._totals.of(reply.worker))

    def _take(self, run: _PoolRun, arrived: Arrived) -> None:
        self._read(run, arrived)
        run.client.forget(arrived.number)

    def _read(self, run: _PoolRun, arrived: Arrived) -> None:
        work = run.schedule.came_back(arrived.number)
        if work is None:
            return
        if arrived.broke:
            self._close(run, broke(arrived.error), work)
            return
        if arrived.lacks:
            # Another worker may have it: the call is not at fault, and no worker died of it.
            why = f"a worker cannot import {arrived.lacks}; install ejkernel-ops {__version__} where workers run"
            self._give_up(run, run.schedule.refused(work, why, time.perf_counter()))
            return
        try:
            if arrived.error:
                raise ValueError(arrived.error)
            reply = Reply.loads(arrived.text)
        except ValueError as error:
            self._give_up(run, run.schedule.died(work, f"its worker ended without an answer: {error}"))
            return
        self._sort(run, work, reply)

    def _sort(self, run: _PoolRun, work: Work, reply: Reply) -> None:
        """Takes every outcome of a reply: answers are kept, refused calls are sent elsewhere."""
        schedule = run.schedule
        totals = self._totals.of(reply.worker)
        totals.seconds += reply.seconds
        outcomes = {outcome.key: outcome for outcome in reply.outcomes}
        done = [outcomes[key] for key in work.calls if key in outcomes and not outcomes[key].refused]
        for outcome in done:
            self._keep(run, outcome, reply.worker, totals)
        missing = [key for key in work.calls if key not in outcomes]
        left = [outcomes[key] for key in work.calls if key in outcomes and outcomes[key].refused]
        totals.refused += len(left)
        if not left and not missing:
            self._cancel(run, schedule.answered(work, [outcome.seconds for outcome in done]))
            return
        schedule.took_some(work, [outcome.key for outcome in done])
        if missing:
            self._give_up(run, schedule.died(work, f"the worker {reply.worker} did not answer for it"))
        else:
            self._give_up(run, schedule.refused(work, left[0].why, time.perf_counter()))

    def _keep(self, run: _PoolRun, outcome: TaskOutcome, worker: str, totals: WorkerTotals) -> None:
        call = run.plan.calls[outcome.key]
        if call.is_elsewhere and outcome.record is None:
            totals.failed += 1
            self._name(call.key, outcome.why)
            return
        try:
            entry = self._entry_of(call, outcome)
        except (OpsError, TypeError, ValueError) as error:
            totals.failed += 1
            self._name(call.key, f"the record of worker {worker} cannot be read: {error}")
            return
        if entry.is_measured:
            totals.tuned += 1
            self._taken.append(outcome.seconds)
        else:
            totals.failed += 1
        self.entries[call.key] = entry
        self._progress.tuned(entry, worker)

    def _known(self, call: FoundCall) -> Entry | None:
        return known_entry(call) if call.is_elsewhere else super()._known(call)

    def _entry_of(self, call: FoundCall, outcome: TaskOutcome) -> Entry:
        first = call.selectors[0]
        if call.is_elsewhere and outcome.record is not None:
            return kept_entry(call, outcome.record)
        if outcome.record is None:
            failed = None if outcome.failed is None else rebuilt_record(call, outcome.failed)
            with call.restored():
                found = first.decide_untuned(call.inv, call.kernel)
            failed = None if failed is None else replace(failed, winner=None)
            return self._untuned(call, found, failed, outcome.why)
        record = rebuilt_record(call, outcome.record)
        if record.winner is None:
            raise SignatureError("it has no winner")
        with call.restored():
            before = first.decide_untuned(call.inv, call.kernel)
        self._keeper.keep(call, record)
        if not same(record.cfg, before.cfg):
            self.changed[call.key] = call, before.cfg
        return self._entry(call, record.cfg, record=record, source="autotune")

    def _close(self, run: _PoolRun, why: str, *works: Work) -> None:
        """Sends nothing more to a pool that ended; what is under way may still be answered."""
        why = f"{why}; open another pool and run it again"
        self._end(run, [*works, *run.schedule.close(why)], why)

    def _give_up(self, run: _PoolRun, works: Iterable[Work]) -> None:
        for work in works:
            self._end(run, [work], work.reason)

    def _end(self, run: _PoolRun, works: Iterable[Work], why: str) -> None:
        """Ends work without an answer: its calls are named, and attempts at it stop."""
        for work in works:
            for key in work.calls:
                if not self.has_seen(key):
                    self._name(key, why)
            self._cancel(run, run.schedule.give_up(work))

    def _cancel(self, run: _PoolRun, numbers: Iterable[int]) -> None:
        for number in numbers:
            run.client.cancel(number)

    def _name(self, key: Key, why: str) -> None:
        """Leaves a call as it is, and says why."""
        self._skipped.add(key)
        self.notes.append(f"{key}: not tuned: {why}")
        self._progress.skipped(key, why)

    def _show(self, run: _PoolRun) -> None:
        """One line of the whole: how much is done, running where, failed, what it gave so far, and the time left."""
        if not self._progress.is_due:
            return
        numbers = run.schedule.numbers
        places = sorted(set(filter(None, map(run.client.where, numbers)))) or sorted(self._totals.workers)
        where = (
            f" ({', '.join(places[:_MOST_PLACES])}{', ...' if len(places) > _MOST_PLACES else ''})" if places else ""
        )
        totals = self._result().totals
        gain = totals.heuristic_s / totals.tuned_s if totals.tuned_s else None
        failed = len(self._skipped) + sum(bool(entry.note) for entry in self.entries.values())
        self._progress.under_way(len(numbers), where, failed, gain, self._time_left(run.schedule))

    def _time_left(self, schedule: Schedule) -> str:
        """The rest of the budget, else an estimate by the calls so far."""
        if self.deadline < math.inf:
            return f"{formatting.duration(max(0.0, self._left()), 0)} left"
        if not self._taken:
            return ""
        calls = sum(len(work.calls) for work in schedule.left)
        left = calls * sum(self._taken) / len(self._taken) / max(1, schedule.under_way)
        return f"about {formatting.duration(left, 0)} left"
