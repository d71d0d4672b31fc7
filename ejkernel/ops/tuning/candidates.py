"""The candidates of a tuning, their states, and the one place that moves a candidate from state to state.

    entered -> traced -> compiled -> checked -> timed
                  |           ^                   |
                  |           +--- for speed -----+
                  +-> twin: its lowered program is an earlier candidate's, which runs for both

A candidate leaves for good with a status of `core.record` that says why: compile, memory, runtime, wrong, timeout,
crash or skipped. It may do so from every state but `twin`, and no candidate comes back. `NEXT` has every step that is
allowed; `advance` refuses any other, keeps what is known of the candidate as a `Trial`, lets go of the program of one
that is out, and tells the observer, which may be a journal. Compiling, checking and racing are elsewhere: they read
this set and call `advance`, all on the thread that tunes, so that there is no lock here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final, get_args

from ..core import formatting
from ..core.record import Record, Status, Trial
from ..timing.program import CompiledProgram, first_line
from .journal.observer import NoObserver, StepObserver

Stage = Literal["entered", "traced", "compiled", "checked", "timed", "twin"]
State = Stage | Status

_OUT: frozenset[State] = frozenset(get_args(Status)) - {"ok", "invalid"}
NEXT: Mapping[State, frozenset[State]] = {
    "entered": _OUT | {"traced"},
    # What is known of its program, or of an equal one, may be any end.
    "traced": _OUT | {"compiled", "twin"},
    "compiled": _OUT | {"checked"},
    # What was compiled quickly is compiled once more, for speed, where it may be among the fastest.
    "checked": _OUT | {"timed", "compiled"},
    # A first look and a race are two measurements of one candidate.
    "timed": _OUT | {"timed", "compiled"},
    "twin": frozenset(),
    **dict.fromkeys(_OUT, frozenset[State]()),
}
# A candidate in one of these has a program that may run.
RUNNING: frozenset[State] = frozenset({"compiled", "checked", "timed"})
# Ends that say nothing about the candidate's program: the next tuning finds out.
_OF_CHANCE: frozenset[State] = frozenset({"timeout", "skipped"})


class TransitionError(AssertionError):
    """A step of a candidate that `NEXT` does not have: a defect of the tuner."""


@final
class CandidateSet:
    """Candidates by number, in the order in which they entered."""

    def __init__(self, observer: StepObserver | None = None) -> None:
        self._observer: StepObserver = observer or NoObserver()
        self._trials: list[Trial] = []
        self._states: list[State] = []
        self._programs: dict[int, CompiledProgram] = {}
        self._twins: dict[int, int] = {}
        # What each candidate's lowered program is called.
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def enter(self, cfgs: Sequence[Any]) -> range:
        """Adds candidates; their numbers."""
        start = len(self._trials)
        self._trials += [Trial(cfg) for cfg in cfgs]
        self._states += ["entered"] * len(cfgs)
        return range(start, len(self._trials))

    def advance(
        self,
        number: int,
        to: State,
        *,
        program: CompiledProgram | None = None,
        name: str | None = None,
        twin: int | None = None,
        lost: bool = False,
        known: bool = False,
        **facts: Any,
    ) -> None:
        """Takes a candidate one step further; `facts` are fields of its trial.

        `lost`: it took its process with it, or that process had to be ended. `known`: from an earlier tuning.
        """
        state = self._states[number]
        if to not in NEXT[state]:
            raise TransitionError(f"candidate {number} cannot go from {state!r} to {to!r}")
        out = to in _OUT
        if out:
            facts["status"] = to
        trial = replace(self._trials[number], **facts)
        self._trials[number], self._states[number] = trial, to
        if name is not None:
            self._names[number] = name
        if twin is not None:
            self._twins[number] = twin
        if program is not None:
            self._programs[number] = program
        if not out:
            return
        self._programs.pop(number, None)
        if lost:
            self._observer.lost(trial, self.program_name(number))
        elif not known and to not in _OF_CHANCE:
            self._observer.failed(trial, self.program_name(number))

    def fail(self, number: int, error: BaseException, status: Status, **facts: Any) -> None:
        """Takes a candidate out, for the error that it raised."""
        self.advance(number, status_of(error, status), message=first_line(error), **facts)

    def cfg(self, number: int) -> Any:
        """The cfg of a candidate."""
        return self._trials[number].cfg

    def state(self, number: int) -> State:
        """The state of a candidate."""
        return self._states[number]

    def trial(self, number: int) -> Trial:
        """The candidate's own trial, not that of a twin with the same program."""
        return self._trials[number]

    def program(self, number: int) -> CompiledProgram:
        """The program of a candidate that may run."""
        return self._programs[number]

    def program_name(self, number: int) -> str:
        """The name of a candidate's lowered program; empty before it is lowered."""
        return self._names.get(number, "")

    def having(self, *states: State) -> list[int]:
        """The numbers of the candidates that are in one of these states."""
        return [number for number, state in enumerate(self._states) if state in states]

    @property
    def running(self) -> dict[int, CompiledProgram]:
        """The programs that may run, in the order of their candidates."""
        return {number: self._programs[number] for number in self.having(*RUNNING)}

    def runs(self, number: int) -> bool:
        """Has it a program that may run?"""
        return self._states[number] in RUNNING

    def runs_as(self, number: int) -> int:
        """The candidate that runs in place of this one: itself, or an earlier one with the same program."""
        return self._twins.get(number, number)

    def trials(self) -> tuple[Trial, ...]:
        """All trials; equal programs have what was found out for one of them."""
        return tuple(self._shared(number) for number in range(len(self)))

    def _shared(self, number: int) -> Trial:
        own = self._trials[number]
        if number not in self._twins:
            return own
        shared = self._trials[self._twins[number]]
        message = f"the same program as {formatting.short(shared.cfg)}" + (
            f": {shared.message}" if shared.message else ""
        )
        return replace(shared, cfg=own.cfg, compile_s=own.compile_s, message=message)


def found_meanwhile(record: Record, trials: Sequence[Trial], cfg: Any) -> Record:
    """The record of a tuning that another process was faster with."""
    found = Trial(cfg, "skipped", "found by another process meanwhile")
    return replace(record, stop="settled", trials=(*trials, found), winner=len(trials))


def status_of(error: BaseException, default: Status) -> Status:
    """The kind of failure that an error is."""
    if isinstance(error, MemoryError):
        return "memory"
    text = str(error)
    # Registers and shared memory are what a program has, whatever the device has free.
    if default == "compile" and ("ptxas" in text or "shared memory" in text.lower()):
        return default
    return "memory" if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower() else default
