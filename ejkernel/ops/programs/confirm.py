"""Is the program itself faster with what was tuned? It is run before and after, in turns, on the caller's arguments.

What is fastest alone need not be fastest in the program: neighbours share caches, and the compiler fuses across calls.
All changes are tried together first. They stay if the interval's upper end is at most `NOT_SLOWER` and the median is
below one. Otherwise several are tried one by one, those that promise most first, each on top of those that were kept;
one that does not make the program faster is taken back. A change that was not tried in time is taken back too, where
all of them together did not help; where there was no time to run the program at all, those stay that gained much alone.
"""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

import jax

from ..config.cache import overlay_cache, traced_anew
from ..config.call_log import CallLog, noting_calls
from ..core import formatting
from ..core.device import default_device
from ..core.errors import ProgramArgumentError
from ..core.key import Key
from ..core.shown import Shown
from ..timing.clock import Run
from ..timing.compile_pool import CompilePool
from ..timing.inputs import FlatCall, is_concrete
from ..timing.profiler import ProfilerClock, ProfilerUnavailable
from ..timing.program import first_line
from .user_function import flatten_program, holds_arrays, of_arrays

# A sample is long beside launches and clocks.
_SAMPLE_SECONDS = 0.05
_MOST_CALLS = 64
# A trace takes some tenths of a second by itself, and holds so many rounds, unless those take longer than this.
_ROUNDS_A_TRACE, _TRACE_SECONDS = 9, 0.7
_LEAST_ROUNDS, _MOST_ROUNDS = 9, 61
# Surely not slower: the upper end of the interval may be above one by so much, as far as noise goes.
NOT_SLOWER = 1.005
# Beyond this an interval says nothing more that a verdict needs.
_NARROW = 0.002
# The longest that one comparison takes, where there is no budget.
_COMPARE_SECONDS = 10.0
# Where the program was not run in time a change stays with so much gain alone: products that were 1.06 to 1.33 times as
# fast alone made a decode step on an H200 slower, so such gains are none until the program shows them.
_MUCH = 1.35
_TOO_NOISY = "too noisy to tell for some of them: confirm on an idle machine, or keep them without confirm=True"


class NotConfirmedError(Exception):
    """The program could not be run before and after."""


class NotInTimeError(NotConfirmedError):
    """The time was up before the program was run before and after."""


@dataclass(frozen=True)
class Change:
    """A call's cfg before and after tuning, and what share of the program's time that promises to save."""

    before: Any
    after: Any
    saving: float
    # Times as fast alone, at the low end of the interval.
    gain: float = math.inf


@dataclass(frozen=True, repr=False)
class Confirmation(Shown):
    """The program before and after tuning."""

    before_s: float = math.nan
    after_s: float = math.nan
    # Time before over time after: middle, low and high end.
    gain: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    rounds: int = 0
    # Calls that have their earlier cfg again.
    taken_back: tuple[Key, ...] = ()
    # Why the program was not run, or not to the end.
    note: str = ""

    def in_short(self) -> str:
        """The value in a few words."""
        return str(self)

    def __str__(self) -> str:
        """One line for tables and logs."""
        back = f"; taken back: {', '.join(f'{key.op_id} {key.call_key}' for key in self.taken_back)}"
        back = back if self.taken_back else ""
        if math.isnan(self.before_s):
            return f"not confirmed: {self.note}{back}"
        times = f"{formatting.seconds(self.before_s)} before, {formatting.seconds(self.after_s)} after"
        middle, low, high = self.gain
        found = f"the program takes {times} ({middle:.3f}x, {low:.3f} to {high:.3f}, {self.rounds} rounds in turns)"
        return found + back + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Ratio:
    """Time of one program over another's in the same rounds: middle and an interval of about 95%."""

    middle: float
    low: float
    high: float
    seconds: tuple[float, float]
    rounds: int

    @property
    def is_noisy(self) -> bool:
        """Is the interval too wide to tell a gain from a loss?"""
        return self.low < 1.0 < NOT_SLOWER < self.high

    @property
    def is_improvement(self) -> bool:
        """Is the first program surely not slower, and no slower in the middle?"""
        return self.high <= NOT_SLOWER and self.middle < 1.0


@final
@dataclass(frozen=True)
class Form:
    """A compiled program and the arrays that it runs on."""

    call: Callable[..., Any]
    leaves: Sequence[Any]
    name: str

    def __call__(self) -> Any:
        """Runs the program."""
        return self.call(*self.leaves)


@final
class ProgramStep:
    """A program with arguments to run it on, compiled under one choice of cfgs or another."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], deadline: float) -> None:
        self._call = _flattened(fn, args, kwargs)
        self._deadline = deadline
        # A device's own clock leaves out launches; None: the host's.
        self._clock = ProfilerClock() if default_device().platform in ("gpu", "tpu") else None
        # The rounds that were run last at one go, and the seconds that they took. A device's first trace, which alone
        # may take seconds to end, says nothing about the next one.
        self._last = (1, 0.0)
        self._has_traced = False
        for leaf in self._call.leaves:
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
                raise NotConfirmedError("an argument was donated or deleted; pass arrays that can be read")
            if not is_concrete(leaf):
                raise NotConfirmedError("it needs arguments with values, and got shapes")

    def compiled(self, choices: Sequence[Mapping[Key, Any]]) -> list[Form]:
        """The program under each of these choices, compiled side by side; nothing that it donates is used up."""
        lowered: list[tuple[str, Any]] = []
        took = 0.0
        for cfgs in choices:
            start = time.perf_counter()
            # Tracing cannot be stopped half-way: what the last one took, the next one takes too.
            if start + took >= self._deadline:
                raise NotInTimeError("the time would be up before the program was compiled")
            lowered.append(self._lowered(cfgs))
            took = time.perf_counter() - start
        with CompilePool(len(lowered)) as pool:
            for number, (_, one) in enumerate(lowered):
                pool.give(number, one.compile)
            found = {b.number: b for b in pool.results(self._deadline, latest=self._deadline) if b is not None}
        if len(found) < len(lowered):
            raise NotInTimeError("the program was still being compiled when the time was up")
        for built in found.values():
            if built.failed:
                raise NotConfirmedError(f"the program cannot be compiled: {first_line(built.outcome)}")
        return [_bound(found[n].outcome, self._call.leaves, name) for n, (name, _) in enumerate(lowered)]

    def _lowered(self, cfgs: Mapping[Key, Any]) -> tuple[str, Any]:
        # A call that has not been tuned has its heuristic cfg here: the tuning is over.
        with overlay_cache(dict(cfgs.items())), traced_anew(), noting_calls(CallLog()):
            try:
                # Inside another jitted function a donation means nothing. A profiler's trace knows it by its name.
                program, name = of_arrays(self._call), f"ejk_step_{secrets.token_hex(4)}"
                program.__name__ = program.__qualname__ = name
                return name, jax.jit(program).lower(*self._call.leaves)
            # Whatever the program raises is its own.
            except Exception as error:
                raise NotConfirmedError(f"the program cannot be traced: {first_line(error)}") from error

    def compare(self, one: Form, other: Form) -> Ratio:
        """Runs two programs in turns until the interval is narrow, or the time would be up."""
        until = time.perf_counter() + _COMPARE_SECONDS
        first, second = _seconds(one, 1), _seconds(other, 1)
        longest = max(first, second, 1e-9)
        calls = max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / longest)))
        pairs: list[tuple[float, float]] = []
        while len(pairs) < _MOST_ROUNDS:
            start = time.perf_counter()
            rounds_left = max(1, _LEAST_ROUNDS - len(pairs))
            is_late = start + max(self._seconds_for(rounds_left), rounds_left * (first + second)) >= self._deadline
            if len(pairs) < _LEAST_ROUNDS:
                if is_late:
                    raise NotInTimeError("the time would be up before the program was run often enough")
            elif is_late or start >= until or _is_narrow(pairs):
                break
            rounds = self._by_the_device(one, other, longest) or [_in_turn(one, other, calls, len(pairs))]
            if self._clock is None or self._has_traced:
                self._last = len(rounds), time.perf_counter() - start
            self._has_traced = True
            pairs += rounds
        return _ratio(pairs)

    def _seconds_for(self, rounds: int) -> float:
        """Seconds for so many rounds: those that are run at one go cannot be stopped half-way."""
        count, seconds = self._last
        return seconds * math.ceil(rounds / count)

    def leaving_time_to_compare(self) -> ProgramStep:
        """A copy with an earlier deadline, so that one comparison can follow."""
        sooner = copy.copy(self)
        sooner._deadline -= self._seconds_for(_LEAST_ROUNDS)
        return sooner

    def _by_the_device(self, one: Form, other: Form, seconds: float) -> list[tuple[float, float]]:
        """Pairs by the device's own clock, some in one trace; none where it cannot be had."""
        if self._clock is None:
            return []
        both = [Run(number, form.name, form.call, form.leaves) for number, form in enumerate((one, other))]
        rounds = max(2, min(_ROUNDS_A_TRACE, int(_TRACE_SECONDS / (2 * seconds))))
        try:
            found = self._clock.rounds([both if turn % 2 else both[::-1] for turn in range(rounds)])
        except ProfilerUnavailable:
            self._clock = None
            return []
        for row in found:
            for outcome in row.values():
                if isinstance(outcome, Exception):
                    raise NotConfirmedError(f"the program fails with these arguments: {first_line(outcome)}")
        return [(float(row[0]), float(row[1])) for row in found]  # type: ignore[arg-type]


def _in_turn(one: Form, other: Form, calls: int, turn: int) -> tuple[float, float]:
    """A pair by the host's clock; drift, and what one leaves in the caches for the other, hit both alike."""
    if turn % 2:
        first = _seconds(one, calls)
        return first, _seconds(other, calls)
    second = _seconds(other, calls)
    return _seconds(one, calls), second


def _flattened(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    try:
        call = flatten_program(fn, args, kwargs)
    except ProgramArgumentError as error:
        raise NotConfirmedError(str(error)) from error
    opaque = [type(constant).__name__ for constant in call.constants if holds_arrays(constant)]
    # A function that changes such an object would change the caller's own, and leave values of a trace in it.
    if opaque:
        raise NotConfirmedError(f"the {opaque[0]} that it is given holds arrays and is no pytree; make it one")
    return call


def _bound(compiled: Any, leaves: Sequence[Any], name: str) -> Form:
    run = Form(compiled, leaves, name)
    try:
        jax.block_until_ready(run())
    # Whatever the program raises is its own.
    except Exception as error:
        raise NotConfirmedError(f"the program fails with these arguments: {first_line(error)}") from error
    return run


def _seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def _is_narrow(pairs: Sequence[tuple[float, float]]) -> bool:
    ratio = _ratio(pairs)
    return ratio.high - ratio.low < _NARROW


def _ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    ratios = sorted(one / other for one, other in pairs)
    # An interval for the median from the order of the ratios: about 95% by the normal approximation.
    half = math.ceil(0.98 * math.sqrt(len(ratios)))
    at = len(ratios) // 2
    low, high = ratios[max(0, at - half)], ratios[min(len(ratios) - 1, at + half)]
    seconds = median(one for one, _ in pairs), median(other for _, other in pairs)
    return Ratio(median(ratios), low, high, seconds, len(pairs))


def confirm(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    changes: Mapping[Key, Change],
    deadline: float = math.inf,
) -> Confirmation:
    """Runs the program under the old and the new cfgs, and says which changes are to be taken back."""
    old = {key: change.before for key, change in changes.items()}
    new = {key: change.after for key, change in changes.items()}
    kept, note, is_compared = set(changes), "", False
    try:
        step = ProgramStep(fn, args, kwargs, deadline)
        before, after = step.compiled([old, new])
        found = step.compare(after, before)
        is_compared = True
        if not found.is_improvement:
            # One change alone has been tried by now.
            alone = len(changes) == 1
            sooner = step.leaving_time_to_compare()
            kept, after, note = (set(), before, "") if alone else _one_by_one(sooner, before, changes)
            note = _TOO_NOISY if alone and found.is_noisy else note
            found = step.compare(after, before) if kept else replace(found, middle=1.0, low=1.0, high=1.0)
    except NotConfirmedError as error:
        if isinstance(error, NotInTimeError) and not is_compared:
            kept = {key for key, change in changes.items() if change.gain >= _MUCH}
        # What was found not to help by then is taken back all the same.
        return Confirmation(note=str(error), taken_back=_others(changes, kept))
    after_s, before_s = found.seconds if kept else (found.seconds[1], found.seconds[1])
    gain = (1 / found.middle, 1 / found.high, 1 / found.low)
    return Confirmation(before_s, after_s, gain, found.rounds, _others(changes, kept), note)


def _others(changes: Mapping[Key, Change], kept: Collection[Key]) -> tuple[Key, ...]:
    return tuple(key for key in changes if key not in kept)


def _one_by_one(step: ProgramStep, before: Form, changes: Mapping[Key, Change]) -> tuple[set[Key], Form, str]:
    """The changes that make the program faster, each on top of those before it; and why not all were tried."""
    kept: set[Key] = set()
    best, noisy = before, False
    for key in sorted(changes, key=lambda key: -changes[key].saving):
        cfgs = {k: c.after if k in kept or k == key else c.before for k, c in changes.items()}
        try:
            (tried,) = step.compiled([cfgs])
            found = step.compare(tried, best)
            noisy = noisy or found.is_noisy
            if found.is_improvement:
                kept.add(key)
                best = tried
        except NotConfirmedError as error:
            return kept, best, f"not every change was tried: {error}"
    return kept, best, _TOO_NOISY if noisy else ""
