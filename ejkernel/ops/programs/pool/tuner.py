"""Tunes many calls on a pool: each travels to a worker, and this process keeps every record that comes back."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jaxlib.version

from ...config.warm_start import warm_start_configs
from ...core import codec
from ...core.candidates import candidates
from ...core.cfg import same
from ...core.errors import ConfigTypeError, OpsError, SignatureError
from ...core.key import Key
from ...core.request import ask
from ...tuning.search.effort import FEW
from ..ahead import TracedAhead
from ..batch import AutotuneOptions, BatchTuner
from ..budget_split import Share, allotted, in_order, share_of
from ..found_call import FoundCall
from ..interrupts import Interrupts
from .courier import Arrived, Courier, PoolBroken, check_pool, workers_of
from .schedule import Rules, Schedule, Work
from .task import AskedCall, Outcome, Reply, Task
from .travelling import asked_call, plain_tuner, rebuilt_record
from .worker import run_task

# How long this process waits at most before it looks at its own state: Ctrl-C, deadlines, stragglers.
_LOOK_SECONDS = 0.5
# Answers that come so late are still taken: a worker ends its tuning when its own time is up.
_GRACE_SECONDS = 0.5
# The share of a task's seconds for its way, the import of a kernel's module included.
_FOR_THE_WAY = 0.9
# Estimating costs by tracing may take so long; other calls are estimated by the size of their arrays.
_ESTIMATE_SECONDS = 2.0
# Calls of one kernel that travel together at most, and how many tasks each worker gets at least.
_TOGETHER, _TASKS_EACH = 8, 4
# A store that is full is tried again after so many seconds each.
_STORE_PAUSES = (0.0, 0.2, 1.0)
# A worker that refuses waits before it says so, longer each time, up to so many seconds.
_LONGEST_PAUSE = 1.0


@dataclass
class WorkerTotals:
    """The part of one worker in the whole."""

    device: str = ""
    tuned: int = 0
    failed: int = 0
    refused: int = 0
    seconds: float = 0.0

    def text(self, name: str) -> str:
        """The totals in a line."""
        more = [f"{count} {word}" for count, word in ((self.failed, "failed"), (self.refused, "refused")) if count]
        calls = "1 call" if self.tuned == 1 else f"{self.tuned} calls"
        return f"worker {name}: {', '.join([f'{calls} tuned', *more])} in {self.seconds:.1f} s"


@dataclass
class _Campaign:
    """The state of one round of sending."""

    schedule: Schedule
    courier: Courier
    calls: dict[Key, FoundCall]
    asked: dict[Key, AskedCall]
    tuners: dict[Key, dict[str, Any]]
    shares: dict[Key, Share]
    inner: dict[Key, set[Key]] = field(default_factory=dict)


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
        rules = getattr(options.pool, "rules", None)
        self._rules = rules if isinstance(rules, Rules) else Rules()
        self._workers: dict[str, WorkerTotals] = {}
        # Records that a store could not take when they came.
        self._unkept: list[tuple[FoundCall, Any]] = []

    def _worker_lines(self) -> list[str]:
        return [totals.text(name) for name, totals in sorted(self._workers.items())]

    def _tune_all(self, calls: Sequence[FoundCall], interrupts: Interrupts, ahead: TracedAhead) -> None:
        asked: dict[Key, AskedCall] = {}
        tuners: dict[Key, dict[str, Any]] = {}
        for call in calls:
            interrupts.check()
            try:
                tuners[call.key] = plain_tuner(call.selectors[0].tuner)
                asked[call.key] = asked_call(call)
            # A kernel that is not written as it should be is named like one that cannot travel.
            except OpsError as error:
                self._name(call.key, f"it cannot be sent to another process: {error}")
        going = [call for call in calls if call.key in asked]
        shares = _shares(going, exact=self.deadline < math.inf)
        inner = {call.key: {other.key for other in going if call.key in other.outer} for call in going}
        pool = self.options.pool
        works = self._works(in_order(going, shares), workers_of(pool), inner)
        schedule = Schedule(works, inner=inner, workers=workers_of(pool), rules=self._rules)
        by_key = {call.key: call for call in going}
        with contextlib.closing(Courier(pool, run_task)) as courier:
            campaign = _Campaign(schedule, courier, by_key, asked, tuners, shares, inner)
            try:
                while schedule.is_busy:
                    interrupts.check()
                    self._turn(campaign)
            except PoolBroken as error:
                self._name_rest(schedule.left, f"{error}; open another pool and run it again")
            finally:
                self._keep_again()

    def _works(self, calls: Sequence[FoundCall], workers: int | None, inner: dict[Key, set[Key]]) -> list[Work]:
        """The calls in tasks: those of one kernel together where there are many more calls than workers."""
        hint = getattr(self.options.pool, "calls_per_task", None)
        most = len(calls) // (_TASKS_EACH * workers) if workers and self.deadline == math.inf else 1
        most = hint if isinstance(hint, int) and hint > 0 else min(most, _TOGETHER)
        works: list[Work] = []
        open_works: dict[tuple[str, int, bool], Work] = {}
        for call in calls:
            kind = f"{type(call.kernel).__module__}:{type(call.kernel).__qualname__} on {call.key.device}"
            # Kernels inside kernels go by themselves, since others wait for them.
            if inner[call.key] or call.outer or most <= 1:
                works.append(Work((call.key,), kind))
                continue
            # Calls with different settings of their tuner cannot share a task.
            found = open_works.get((kind, id(call.selectors[0]), False))
            if found is None or len(found.calls) >= most:
                found = open_works[kind, id(call.selectors[0]), False] = Work((), kind)
                works.append(found)
            found.calls = (*found.calls, call.key)
        return works

    def _turn(self, campaign: _Campaign) -> None:
        """Sends what can be sent, and takes what came back."""
        schedule, courier = campaign.schedule, campaign.courier
        now = time.perf_counter()
        while (work := schedule.next(now)) is not None:
            self._send(campaign, work)
            # An executor without threads has answered already.
            while (arrived := courier.receive(0.0)) is not None:
                self._take(campaign, arrived)
        for late in schedule.overdue(now):
            self._give_up(campaign, [late])
        if now > self.deadline - self._kept + _GRACE_SECONDS:
            self._name_rest(schedule.left, f"the budget of {self.options.seconds:g} s was spent")
            for work in schedule.left:
                self._cancel(campaign, schedule.give_up(work))
            return
        if schedule.under_way:
            self._show(campaign)
            until = min(_LOOK_SECONDS, schedule.seconds_until_late(now), max(0.0, self._left() + _GRACE_SECONDS))
            arrived = courier.receive(until)
            if arrived is not None:
                self._take(campaign, arrived)

    def _send(self, campaign: _Campaign, work: Work) -> None:
        calls = [campaign.calls[key] for key in work.calls]
        asked = [self._asked(campaign, call, work) for call in calls]
        if None in asked:
            for call in calls:
                why = f"the budget of {self.options.seconds:g} s was spent on calls that cost more"
                self._name(call.key, why)
            campaign.schedule.give_up(work)
            return
        task = Task(
            calls[0].key.device,
            tuple(one for one in asked if one is not None),
            campaign.tuners[work.calls[0]],
            jaxlib.version.__version__,
            min(_LONGEST_PAUSE, 0.05 * 2**work.refusals) if work.refusals else 0.0,
        )
        number = campaign.schedule.sent(work, time.perf_counter())
        campaign.courier.send(number, task.dumps())

    def _asked(self, campaign: _Campaign, call: FoundCall, work: Work) -> AskedCall | None:
        """The call as it travels now: its seconds, what similar calls found, and the cfgs of the kernels inside it."""
        seconds = None
        if self.deadline < math.inf:
            rest = [call, *(campaign.calls[k] for other in campaign.schedule.waiting() for k in other.calls)]
            workers = campaign.schedule.workers or 1
            usual = [taken * workers for taken in self._taken]
            found = allotted(call, rest, campaign.shares, self._left() * workers, usual)
            if found is None:
                return None
            seconds = max(0.1, min(found / len(work.calls), self._left()) * _FOR_THE_WAY)
        inside = [
            (key.op_id, key.call_key, codec.encode(self.entries[key].cfg))
            for key in campaign.inner[call.key]
            if key in self.entries
        ]
        return replace(
            campaign.asked[call.key],
            seconds=seconds,
            repetitions=self.options.repetitions,
            seeds=_seeds(call, campaign.asked[call.key]),
            inside=inside,
        )

    def _take(self, campaign: _Campaign, arrived: Arrived) -> None:
        work = campaign.schedule.came_back(arrived.number)
        if work is None:
            return
        if arrived.broke:
            self._name_rest([work, *campaign.schedule.left], f"the pool broke ({arrived.error}); open another one")
            for one in [work, *campaign.schedule.left]:
                self._cancel(campaign, campaign.schedule.give_up(one))
            return
        try:
            if arrived.error:
                raise ValueError(arrived.error)
            reply = Reply.loads(arrived.text)
        except ValueError as error:
            self._give_up(campaign, campaign.schedule.died(work, f"its worker ended without an answer: {error}"))
            return
        self._sort(campaign, work, reply)

    def _sort(self, campaign: _Campaign, work: Work, reply: Reply) -> None:
        """Takes every outcome of a reply: answers are kept, refused calls are sent elsewhere."""
        schedule = campaign.schedule
        totals = self._workers.setdefault(reply.worker, WorkerTotals())
        totals.device = reply.device or totals.device
        totals.seconds += reply.seconds
        outcomes = {outcome.key: outcome for outcome in reply.outcomes}
        done = [outcomes[key] for key in work.calls if key in outcomes and not outcomes[key].refused]
        for outcome in done:
            self._keep(campaign, outcome, reply.worker, totals)
        missing = [key for key in work.calls if key not in outcomes]
        left = [outcomes[key] for key in work.calls if key in outcomes and outcomes[key].refused]
        totals.refused += len(left)
        if not left and not missing:
            self._cancel(campaign, schedule.answered(work, [outcome.seconds for outcome in done]))
            return
        schedule.took_some(work, [outcome.key for outcome in done])
        if missing:
            self._give_up(campaign, schedule.died(work, f"the worker {reply.worker} did not answer for it"))
        else:
            self._give_up(campaign, schedule.refused(work, left[0].why))

    def _keep(self, campaign: _Campaign, outcome: Outcome, worker: str, totals: WorkerTotals) -> None:
        call = campaign.calls[outcome.key]
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

    def _entry_of(self, call: FoundCall, outcome: Outcome) -> Any:
        first = call.selectors[0]
        if outcome.record is None:
            failed = None if outcome.failed is None else rebuilt_record(call, outcome.failed)
            with call.restored():
                found = first.look(call.inv, call.kernel)
            failed = None if failed is None else replace(failed, winner=None)
            return self._entry(call, found.cfg, record=failed, source=found.tier, note=outcome.why)
        record = rebuilt_record(call, outcome.record)
        if record.winner is None:
            raise SignatureError("it has no winner")
        with call.restored():
            before = first.look(call.inv, call.kernel)
        self._adopt(call, record)
        if any(_why_unkept(selector) for selector in call.selectors):
            self._unkept.append((call, record))
        if not same(record.cfg, before.cfg):
            self.changed[call.key] = call, before.cfg
        return self._entry(call, record.cfg, record=record, source="autotune")

    def _adopt(self, call: FoundCall, record: Any) -> None:
        with call.restored():
            for selector in call.selectors:
                selector.adopt(call.inv, call.kernel, record)

    def _keep_again(self) -> None:
        """Writes once more what a store could not take: it may have been full for a while."""
        for pause in _STORE_PAUSES:
            late = [(call, record) for call, record in self._unkept if any(map(_why_unkept, call.selectors))]
            if not late:
                break
            time.sleep(pause)
            for call, record in late:
                self._adopt(call, record)
        self._unkept.clear()

    def _give_up(self, campaign: _Campaign, works: Iterable[Work]) -> None:
        for work in works:
            self._name_rest([work], work.reason)
            self._cancel(campaign, campaign.schedule.give_up(work))

    def _cancel(self, campaign: _Campaign, numbers: Iterable[int]) -> None:
        for number in numbers:
            campaign.courier.cancel(number)

    def _name_rest(self, works: Iterable[Work], why: str) -> None:
        for work in works:
            for key in work.calls:
                if not self.has_seen(key):
                    self._name(key, why)

    def _name(self, key: Key, why: str) -> None:
        """Leaves a call as it is, and says why."""
        self._skipped.add(key)
        self.notes.append(f"{key}: not tuned: {why}")
        self._progress.skipped(key, why)

    def _show(self, campaign: _Campaign) -> None:
        """One passing line: how much is done, running where, failed, what it gave so far, and the time left."""
        if not self._progress.is_live:
            return
        numbers = campaign.schedule.numbers
        places = Counter(filter(None, map(campaign.courier.where, numbers)))
        where = f" ({', '.join(sorted(places))})" if places else f" ({len(self._workers)} workers)"
        totals = self._result().totals
        gain = totals.heuristic_s / totals.tuned_s if totals.tuned_s else None
        failed = len(self._skipped) + sum(bool(entry.note) for entry in self.entries.values())
        self._progress.under_way(len(numbers), where if self._workers or places else "", failed, gain, self.deadline)


def _shares(calls: Sequence[FoundCall], *, exact: bool) -> dict[Key, Share]:
    """Costs of the calls to a run of the program: traced where that is quick or a budget needs it, else by arrays."""
    until = time.perf_counter() + _ESTIMATE_SECONDS
    return {
        call.key: share_of(call) if exact or time.perf_counter() < until else Share(_bytes_of(call) * call.count)
        for call in calls
    }


def _bytes_of(call: FoundCall) -> float:
    import jax

    leaves = [leaf for leaf in jax.tree_util.tree_leaves((call.inv.args, call.inv.kwargs)) if hasattr(leaf, "dtype")]
    return float(sum(math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves))


def _seeds(call: FoundCall, asked: AskedCall) -> list[Any]:
    """Cfgs of similar calls, as text; a race of few candidates needs none."""
    with call.restored():
        request = ask(replace(call.inv, override_cfg=None), call.kernel, asked.objective)
        offered = candidates(request)
        if len(offered) <= FEW:
            return []
        found = warm_start_configs(call.selectors[0].stores(), request, offered)
    try:
        return [codec.encode(cfg) for cfg in found]
    except ConfigTypeError:
        return []


def _why_unkept(selector: Any) -> str:
    return str(getattr(selector.persistent, "reason", "") or "")
