"""Tunes many calls: each key once, kernels inside kernels first, within one budget; what is done stays done."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .. import _jax
from ..config.cache import overlay_cache
from ..config.preview import record_behind
from ..config.tiers import OverrideTier
from ..core.cfg import same
from ..core.errors import SettingError
from ..core.key import Key
from ..core.record import Record
from ..core.request import Decision
from ..core.shown import Shown
from ..timing.race import low_end
from ..tuning.job import program_end
from ..tuning.progress import told_elsewhere
from ..tuning.worker.process import kept_workers
from .batch_progress import BatchProgress
from .budget_split import Share, allotted, in_order, quick_to_trace_first, share_of
from .confirm import Change, Confirmation, confirm
from .found_call import FoundCall
from .interrupts import Interrupts, noting_interrupts
from .left_behind import is_worth_more, raced
from .results import AutotuningResult, Entry, seconds_of
from .trace_ahead import TracedAhead, start_worker
from .tracing.launch import traced_elsewhere

# The share of a budget for running the program before and after: its two forms are compiled side by side.
_FOR_CONFIRMING = 0.12
# Seconds of that share which stay as long as no call has another cfg, and there is nothing to confirm: the last worker
# and the processes that trace take a second to end.
_FOR_ENDING = 1.0


@dataclass(frozen=True, repr=False)
class AutotuneOptions(Shown):
    """Options for tuning the calls of a program."""

    # For all of it, tracing included; None: no limit.
    seconds: float | None = None
    # The selector that tunes, instead of the one of each call; needed for calls that have none.
    selector: Any = None
    # Tune what is known already, too.
    again: bool = False
    # Of several tunings of a call the fastest winner stays.
    repetitions: int = 1
    progress: bool = True
    # Have functions that were jitted and run before use the new cfgs at their next call.
    refresh: bool = True
    # What a tuning covers; auto: forward and backward for calls that the program differentiates.
    objective: Literal["auto", "forward", "forward+backward"] = "auto"
    # Run the program itself before and after, and take back what does not make it faster; None: on a GPU or TPU, where
    # the arguments have values.
    confirm: bool | None = None
    # An executor with workers that tune in place of this process: `LocalPool(4)`, or any object with `submit`.
    pool: Any = None

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        if not isinstance(self.repetitions, int) or isinstance(self.repetitions, bool) or self.repetitions < 1:
            raise SettingError(f"repetitions={self.repetitions!r} is not a whole number of at least 1")
        if self.seconds is not None and not (isinstance(self.seconds, (int, float)) and self.seconds > 0):
            raise SettingError(f"seconds={self.seconds!r} is no budget; use a positive number, or None for no limit")
        if self.objective not in ("auto", "forward", "forward+backward"):
            raise SettingError(f"objective={self.objective!r} is unknown; use auto, forward or forward+backward")
        if self.pool is not None:
            # A process without a pool imports none of it.
            from .pool.client import check_pool

            check_pool(self.pool)


class BatchTuner:
    """The tuning of some calls; entries come as they are done."""

    def __init__(
        self, device: str, options: AutotuneOptions, *, deadline: float = math.inf, confirms: bool = False
    ) -> None:
        self.device = device
        self.options = options
        self.deadline = deadline
        # Seconds that are kept for running the program before and after.
        self._kept = _FOR_CONFIRMING * options.seconds if confirms and options.seconds is not None else 0.0
        self.entries: dict[Key, Entry] = {}
        self.notes: list[str] = []
        self.interrupted = False
        # Calls that have another cfg now than the one they were traced with, and that one.
        self.changed: dict[Key, tuple[FoundCall, Any]] = {}
        self.confirmation: Confirmation | None = None
        # Calls for which there was no time.
        self._skipped: set[Key] = set()
        # Was there time for any call?
        self._begun = False
        # Seconds of each tuning so far that measured something, and of the first one of each call, whatever it found.
        self._taken: list[float] = []
        self._took: dict[Key, float] = {}
        self._progress = BatchProgress(on=options.progress)

    def run(self, calls: Sequence[FoundCall]) -> None:
        """Tunes what is not known; Ctrl-C ends it and keeps what is done."""
        try:
            if not self.options.again:
                self.entries |= {call.key: entry for call in calls if (entry := self._known(call)) is not None}
            waiting = [call for call in calls if call.key not in self.entries]
            self._progress.total += len(waiting)
            with (
                kept_workers(),
                told_elsewhere(),
                noting_interrupts() as interrupts,
                contextlib.closing(TracedAhead()) as ahead,
            ):
                self._tune_all(waiting, interrupts, ahead)
                interrupts.check()
        except KeyboardInterrupt:
            self.interrupted = True
            left = [call.key for call in calls if not self.has_seen(call.key)]
            self.notes += [f"{key}: not tuned: interrupted" for key in left]

    def say(self, note: str) -> None:
        """Notes something about the whole program, and says it at once."""
        self.notes.append(note)
        self._progress.note(note)

    def finish(self) -> AutotuningResult:
        """Ends the tuning: says the outcome and returns the result."""
        result = self._result()
        self._progress.finished(result)
        return result

    def _result(self) -> AutotuningResult:
        return AutotuningResult(
            self.device,
            tuple(self.entries.values()),
            self.interrupted,
            tuple(self.notes),
            self.confirmation,
            tuple(self._worker_lines()),
        )

    def confirm(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Runs the program before and after, and takes back what does not make it faster; Ctrl-C keeps everything."""
        if not self.changed:
            why = "every call kept the cfg that it had" if self.entries else "no call was tuned"
            self.confirmation = Confirmation(note=why)
            return
        if _jax.distributed() is not None:
            self.confirmation = Confirmation(note="processes could take back different cfgs; confirm in one process")
            return
        total = sum(e.count * (seconds_of(e, "winner") or 0.0) for e in self.entries.values())
        changes: dict[Key, Change] = {}
        # New cfgs that cannot be taken back: the earlier cfg is no candidate any more, or failed.
        fixed: dict[tuple[str, str, str], Any] = {}
        for key, (_, before) in self.changed.items():
            entry = self.entries[key]
            place = _place_of(entry, before)
            if place is None:
                fixed[key] = entry.cfg
            else:
                changes[key] = Change(before, entry.cfg, _saving(entry, total), _surely_gained(entry.record, place))
        if not changes:
            self.confirmation = Confirmation(note="no call has an earlier cfg that works and could be brought back")
            return
        self._progress.confirming(len(changes))
        try:
            with overlay_cache(fixed), noting_interrupts() as interrupts:
                found = confirm(fn, args, kwargs, changes, self.deadline)
                interrupts.check()
        except KeyboardInterrupt:
            self.interrupted = True
            found = Confirmation(note="interrupted")
        self.confirmation = found
        # Without times the program was not run to the end.
        seen = "was not seen to be" if math.isnan(found.before_s) else "was not"
        for key in found.taken_back:
            self._take_back(key, f"taken back: the program itself {seen} faster with the cfg that was fastest alone")

    def _take_back(self, key: Key, note: str) -> None:
        call, before = self.changed.pop(key)
        entry = self.entries[key]
        place = _place_of(entry, before)
        if entry.record is None or place is None:
            return
        gain = (1.0, 1.0, 1.0) if place == entry.record.heuristic else None
        record = replace(entry.record, winner=place, runner_up=entry.record.winner, gain=gain, note=note)
        self._adopt(call, replace(entry, cfg=record.cfg, record=record, note=note))

    def _adopt(self, call: FoundCall, entry: Entry) -> None:
        """Gives a call the cfg of an entry, in place of the one that its last tuning found."""
        with call.restored():
            for selector in call.selectors:
                selector.adopt(call.inv, call.kernel, entry.record)
        self.entries[call.key] = entry
        self._note_change(call, entry.cfg)

    def _note_change(self, call: FoundCall, cfg: Any, before: Any = None) -> None:
        """Notes whether a call has another cfg now than the one that it was traced with."""
        before = self.changed[call.key][1] if call.key in self.changed else before
        self.changed.pop(call.key, None)
        if before is not None and not same(cfg, before):
            self.changed[call.key] = call, before

    def has_seen(self, key: Key) -> bool:
        """Has this call had its turn, or been passed over?"""
        return key in self.entries or key in self._skipped

    def _known(self, call: FoundCall) -> Entry | None:
        with call.restored():
            found = call.selectors[0].decide_untuned(call.inv, call.kernel)
        # An entry that is good enough answers before the tier that tunes is asked.
        if not found.measured or "autotune" in dict(found.misses):
            return None
        return self._entry(
            call, found.cfg, record=record_behind(call.selectors[0], call.key, found.cfg), source=found.tier
        )

    def _tune_all(self, calls: Sequence[FoundCall], interrupts: Interrupts, ahead: TracedAhead) -> None:
        # The worker and the tracing processes take seconds to start, and the shares are computed before either is
        # needed.
        start_worker(calls)
        with traced_elsewhere(calls) as want:
            shares = self._shares(calls)
            waiting = list(calls) if shares is None else in_order(calls, shares)
            if shares is not None and all(map(ahead.pays, waiting)):
                waiting = quick_to_trace_first(waiting, shares, self._left())
            want(waiting)
            self._tune_in_order(list(waiting), shares, interrupts, ahead)
            if shares is not None:
                self._tune_left_behind(waiting, interrupts)

    def _tune_in_order(
        self,
        waiting: list[FoundCall],
        shares: Mapping[Key, Share] | None,
        interrupts: Interrupts,
        ahead: TracedAhead,
    ) -> None:
        while waiting:
            interrupts.check()
            ahead.wait(waiting[0], math.inf if shares is None else self._tuning_end())
            seconds = None if shares is None else self._part(waiting, shares)
            call = waiting.pop(0)
            if shares is not None and seconds is None:
                why = self._no_time()
                self._skipped.add(call.key)
                self.notes.append(f"{call.key}: not tuned: {why}")
                self._progress.skipped(call.key, why)
                continue
            self._progress.tuning(call.key)
            self._begun = True
            start = time.perf_counter()
            if self.options.repetitions == 1:
                ahead.trace(call, seconds)
                seconds = seconds and seconds - (time.perf_counter() - start)
                ahead.begin(call, waiting, None if shares is None else self._left())
            token = program_end.set(None if shares is None else self._tuning_end())
            try:
                self.entries[call.key] = entry = self._tuned(call, seconds)
            finally:
                program_end.reset(token)
            self._took[call.key] = time.perf_counter() - start
            if entry.is_measured:
                self._taken.append(self._took[call.key])
            self._progress.tuned(entry)

    def _part(self, waiting: Sequence[FoundCall], shares: Mapping[Key, Share]) -> float | None:
        """Seconds of the next call; None where what is left is not enough for it."""
        return allotted(waiting[0], waiting, shares, self._left(), self._taken)

    def _tune_left_behind(self, calls: Sequence[FoundCall], interrupts: Interrupts) -> None:
        """Tunes once more, in the time that is left, calls of which many candidates were never compiled."""
        unmeasured = {call.key for call in calls if call.key in self.entries and not self.entries[call.key].is_measured}
        # First those of which nothing is known; a kernel inside another one stays before that one.
        for call in sorted(calls, key=lambda call: unmeasured.isdisjoint((call.key, *call.outer))):
            interrupts.check()
            before, took = self.entries.get(call.key), self._took.get(call.key)
            if before is None or took is None or not is_worth_more(before, took, self._left()):
                continue
            self._progress.again(call.key)
            noted = self.changed.get(call.key)
            token = program_end.set(self._tuning_end())
            try:
                entry = self._tuned(call, self._left())
            finally:
                program_end.reset(token)
            if not before.is_measured or (entry.is_measured and raced(entry) >= raced(before)):
                self.entries[call.key] = entry
                self._progress.tuned(entry)
                continue
            if noted is not None:
                self.changed[call.key] = noted
            self._adopt(call, before)

    def _worker_lines(self) -> list[str]:
        """A line for each worker of a pool."""
        return []

    def _shares(self, calls: Sequence[FoundCall]) -> dict[Key, Share] | None:
        """Shares of the calls in the program's time; None where there is time to tune all of them."""
        return None if self.deadline == math.inf else {call.key: share_of(call) for call in calls}

    def _no_time(self) -> str:
        """The reason that a call is passed over."""
        why = "was spent on calls that cost more" if self._begun else "is too short to tune any call"
        return f"the budget of {self.options.seconds:g} s {why}"

    def _left(self) -> float:
        return self._tuning_end() - time.perf_counter()

    def _tuning_end(self) -> float:
        """The end of the tunings; those have what is kept for confirming while there is nothing to confirm."""
        return self.deadline - (self._kept if self.changed else min(self._kept, _FOR_ENDING))

    def _tuned(self, call: FoundCall, seconds: float | None) -> Entry:
        first, *others = call.selectors
        with call.restored():
            before = first.decide_untuned(call.inv, call.kernel)
            decision = first.tune(call.inv, call.kernel, self.options.repetitions, seconds=seconds)
            if decision.record is None:
                # The entry may go into an overlay, where a guess would take precedence over a known cfg.
                found, why = first.decide_untuned(call.inv, call.kernel), dict(decision.misses).get("autotune", "")
                failed = None if decision.failed is None else replace(decision.failed, winner=None)
                return self._untuned(call, found, failed, why)
            for other in others:
                other.adopt(call.inv, call.kernel, decision.record)
        self._note_change(call, decision.cfg, before.cfg)
        return self._entry(call, decision.cfg, record=decision.record, source="autotune")

    def _untuned(self, call: FoundCall, found: Decision, failed: Record | None, why: str) -> Entry:
        """The entry of a call that keeps the answer that it has without a tuning."""
        guessed = not found.measured and found.tier != OverrideTier.name
        return self._entry(call, found.cfg, record=failed, source=found.tier, note=why, guessed=guessed)

    def _entry(self, call: FoundCall, cfg: Any, **about: Any) -> Entry:
        device = "" if call.key.device == self.device else call.key.device
        return Entry(call.key.op_id, call.key.call_key, cfg, count=call.count, device=device, **about)


def _place_of(entry: Entry, cfg: Any) -> int | None:
    """The place of a cfg among a tuning's candidates that work; None where it was none of them, or failed."""
    trials = () if entry.record is None else entry.record.trials
    return next((i for i, trial in enumerate(trials) if trial.status == "ok" and same(trial.cfg, cfg)), None)


def _surely_gained(record: Record | None, place: int) -> float:
    """The low end of a winner's gain over the candidate at this place, by rounds of both; one where it is unknown."""
    if record is None or record.winner is None:
        return 1.0
    if place == record.heuristic and record.gain is not None:
        return record.gain[1]
    before, winner = (record.trials[n].samples_s for n in (place, record.winner))
    ratios = sorted(one / other for one, other in zip(before, winner, strict=False) if other > 0)
    return ratios[low_end(len(ratios))] if ratios else 1.0


def _saving(entry: Entry, total: float) -> float:
    """The share of the program's time that a call's gain promises to save."""
    gain = 1.0 if entry.record is None or entry.record.gain is None else entry.record.gain[0]
    return entry.count * (seconds_of(entry, "winner") or 0.0) * (gain - 1.0) / total if total else 0.0
