"""Two interfaces of a tuning: an observer of its steps and outcomes, and the results of earlier tunings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, final

from ...core.cfg import places
from ...core.record import Trial

# Several candidates compile at once; all else is done by the thread that tunes, one candidate after the other. The end
# of a trace, which takes longer than any run, is a step of its own.
Doing = Literal["lower", "compile", "check", "race", "trace"]
# Begins the name of a program that its text does not tell apart: another cfg's text may look the same.
OWN = "own "


class StepObserver(Protocol):
    """An observer that is told of every step before it is taken, and of every outcome; from any thread."""

    def trying(self, cfg: Any, doing: Doing, program: str = "") -> None:
        """A candidate is about to take a step, which may end the process; `program` names what is compiled."""

    def came_back(self, cfg: Any, doing: Doing) -> None:
        """A candidate's step is over and the process still runs, whatever the outcome."""

    def failed(self, trial: Trial, program: str) -> None:
        """A candidate is out; `program` names what was lowered, empty where nothing was."""

    def lost(self, trial: Trial, program: str) -> None:
        """A candidate took its process with it, or that process had to be ended: it is not to run again."""

    def dropped(self, cfg: Any, program: str, *, seconds: float, ratio: float, clock: str) -> None:
        """A candidate was timed and is out of its race, this many times as slow as the best."""


@final
class NoObserver:
    """An observer that keeps nothing."""

    def trying(self, cfg: Any, doing: Doing, program: str = "") -> None:
        """Keeps nothing."""

    def came_back(self, cfg: Any, doing: Doing) -> None:
        """Keeps nothing."""

    def failed(self, trial: Trial, program: str) -> None:
        """Keeps nothing."""

    def lost(self, trial: Trial, program: str) -> None:
        """Keeps nothing."""

    def dropped(self, cfg: Any, program: str, *, seconds: float, ratio: float, clock: str) -> None:
        """Keeps nothing."""


class PriorResults(Protocol):
    """Results that are known of the candidates before a tuning begins."""

    def barred(self, cfg: Any) -> Trial | None:
        """The outcome of a candidate that crashed or hung: it is not even traced."""

    def known(self, cfg: Any, program: str) -> Trial | None:
        """The outcome of a candidate that need not run again, as long as it has this program."""

    def seconds(self, cfgs: Sequence[Any]) -> Mapping[int, float]:
        """Places of cfgs that a search which was killed has timed, and their seconds then."""

    def suspected(self, cfg: Any) -> bool:
        """Was this candidate at work when a process died for an unknown reason?"""

    def in_worker(self) -> PriorResults:
        """The results for candidates in a worker process, where suspects may run."""

    def without(self, lost: Sequence[Trial]) -> PriorResults:
        """The results with candidates barred that took a worker down just now."""

    def without_drops(self) -> PriorResults:
        """The results with the dropped candidates racing again."""


@final
@dataclass(frozen=True)
class NoPriorResults:
    """A first tuning."""

    lost: Sequence[Trial] = ()

    def barred(self, cfg: Any) -> Trial | None:
        """The outcome of a candidate that ended a worker in this tuning."""
        return next((trial for trial in self.lost if places([cfg], [trial.cfg])), None)

    def known(self, cfg: Any, program: str) -> None:
        """Gives no outcome."""

    def seconds(self, cfgs: Sequence[Any]) -> Mapping[int, float]:
        """Gives no seconds: no cfg was timed."""
        return {}

    def suspected(self, cfg: Any) -> bool:
        """Suspects no candidate."""
        return False

    def in_worker(self) -> NoPriorResults:
        """Gives no results for a worker either."""
        return self

    def without(self, lost: Sequence[Trial]) -> NoPriorResults:
        """Bars these candidates, and gives no other results."""
        return replace(self, lost=(*self.lost, *lost))

    def without_drops(self) -> NoPriorResults:
        """Gives the results unchanged: nothing was dropped."""
        return self
