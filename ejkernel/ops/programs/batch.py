"""Tunes many calls: each key once, kernels inside kernels first, within one budget; what is done stays done."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config.preview import record_behind
from ..core.cfg import same
from ..core.errors import SettingError
from ..core.key import Key
from ..tuning.worker.process import kept_workers
from .budget_split import Share, allotted, in_order, known_shares, share_of
from .found_call import FoundCall
from .interrupts import Interrupts, noting_interrupts
from .progress import Progress
from .results import AutotuningResult, Entry


@dataclass(frozen=True)
class AutotuneOptions:
    """How the calls of a program are tuned."""

    # For all of it, tracing included; None: no limit.
    seconds: float | None = None
    # Who tunes, instead of the selector of each call; needed for calls that have none.
    selector: Any = None
    # Tune what is known already, too.
    again: bool = False
    # Of several tunings of a call the fastest winner stays.
    repetitions: int = 1
    progress: bool = True
    # Have functions that were jitted and run before use the new cfgs at their next call.
    refresh: bool = True

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        if not isinstance(self.repetitions, int) or isinstance(self.repetitions, bool) or self.repetitions < 1:
            raise SettingError(f"repetitions={self.repetitions!r} is not a whole number of at least 1")
        if self.seconds is not None and not (isinstance(self.seconds, (int, float)) and self.seconds > 0):
            raise SettingError(f"seconds={self.seconds!r} is no budget; use a positive number, or None for no limit")


class BatchTuner:
    """The tuning of some calls; entries come as they are done."""

    def __init__(self, device: str, options: AutotuneOptions, *, deadline: float = math.inf) -> None:
        self.device = device
        self.options = options
        self.deadline = deadline
        self.entries: dict[Key, Entry] = {}
        self.notes: list[str] = []
        self.interrupted = False
        # Calls that have another cfg now than the one they were traced with.
        self.changed: set[Key] = set()
        # Calls for which there was no time.
        self._skipped: set[Key] = set()
        self._progress = Progress(on=options.progress)

    def run(self, calls: Sequence[FoundCall]) -> None:
        """Tunes what is not known; Ctrl-C ends it and keeps what is done."""
        try:
            if not self.options.again:
                self.entries |= {call.key: entry for call in calls if (entry := self._known(call)) is not None}
            waiting = [call for call in calls if call.key not in self.entries]
            self._progress.total += len(waiting)
            with kept_workers(), noting_interrupts() as interrupts:
                self._tune_all(waiting, interrupts)
                interrupts.check()
        except KeyboardInterrupt:
            self.interrupted = True
            left = [call.key for call in calls if not self.has_seen(call.key)]
            self.notes += [f"{key}: not tuned: interrupted" for key in left]

    def finish(self) -> AutotuningResult:
        """What was done, said and given."""
        result = AutotuningResult(self.device, tuple(self.entries.values()), self.interrupted, tuple(self.notes))
        self._progress.finished(result)
        return result

    def has_seen(self, key: Key) -> bool:
        """Has this call had its turn, or been passed over?"""
        return key in self.entries or key in self._skipped

    def _known(self, call: FoundCall) -> Entry | None:
        with call.restored():
            found = call.selectors[0].look(call.inv, call.kernel)
        # An entry that is good enough answers before the tier that tunes is asked.
        if not found.measured or "autotune" in dict(found.misses):
            return None
        return self._entry(
            call, found.cfg, record=record_behind(call.selectors[0], call.key, found.cfg), source=found.tier
        )

    def _tune_all(self, calls: Sequence[FoundCall], interrupts: Interrupts) -> None:
        shares = self._shares(calls)
        waiting = list(calls) if shares is None else in_order(calls, shares)
        while waiting:
            interrupts.check()
            seconds = None if shares is None else allotted(waiting[0], waiting, shares, self._left())
            call = waiting.pop(0)
            if shares is not None and seconds is None:
                why = f"the budget of {self.options.seconds:g} s was spent on calls that cost more"
                self._skipped.add(call.key)
                self.notes.append(f"{call.key}: not tuned: {why}")
                self._progress.skipped(call.key, why)
                continue
            self._progress.tuning(call.key)
            self.entries[call.key] = entry = self._tuned(call, seconds)
            self._progress.tuned(entry)

    def _shares(self, calls: Sequence[FoundCall]) -> dict[Key, Share] | None:
        """What each call costs; None where there is time for all of them."""
        if self.deadline == math.inf:
            return None
        shares = {}
        for call in calls:
            self._progress.measuring(call.key)
            left = self._left()
            # What was not measured in time has its turn last, if at all.
            shares[call.key] = share_of(call, left) if left > 0 else Share(0.0, math.inf)
        return known_shares(shares)

    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    def _tuned(self, call: FoundCall, seconds: float | None) -> Entry:
        first, *others = call.selectors
        with call.restored():
            before = first.look(call.inv, call.kernel)
            decision = first.tune(call.inv, call.kernel, self.options.repetitions, seconds=seconds)
            if decision.record is None:
                # In an overlay a guess would stand before what is known already.
                found, why = first.look(call.inv, call.kernel), dict(decision.misses).get("autotune", "")
                return self._entry(call, found.cfg, record=decision.failed, source=found.tier, note=why)
            for other in others:
                other.adopt(call.inv, call.kernel, decision.record)
        if not same(decision.cfg, before.cfg):
            self.changed.add(call.key)
        return self._entry(call, decision.cfg, record=decision.record, source="autotune")

    def _entry(self, call: FoundCall, cfg: Any, **about: Any) -> Entry:
        device = "" if call.key.device == self.device else call.key.device
        return Entry(call.key.op_id, call.key.call_key, cfg, count=call.count, device=device, **about)
