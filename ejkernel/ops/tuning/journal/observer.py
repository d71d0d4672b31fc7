"""Who is told what a tuning is about to do and what came of it, and what an earlier one already knew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, final

from ...core.record import Trial

# Compiling happens to several candidates at once; a check or a run is one candidate's alone. So is the end of a trace,
# which takes longer than any run: who ran last is the first to be suspected should it go wrong.
Doing = Literal["compile", "check", "run", "trace"]
Timed = Sequence[tuple[Any, float]]
# Begins the name of a program whose text does not tell all: another cfg's may look the same.
OWN = "own "


class StepObserver(Protocol):
    """Hears of every step before it is taken; from any thread."""

    def starts(self, cfg: Any, doing: Doing) -> None:
        """This may be the last thing that the process does."""

    def ends(self, cfg: Any, program: str = "") -> None:
        """It came back, whatever the outcome; `program` names what was compiled."""

    def failed(self, trial: Trial, program: str) -> None:
        """A candidate is out; `program` names what was compiled, empty where nothing was."""

    def lost(self, trial: Trial, program: str) -> None:
        """A candidate took its process with it, or that process had to be ended: it is not to run again."""

    def timed(self, found: Timed, clock: str) -> None:
        """One round: seconds of each that took part and did not fail."""


@final
class NoObserver:
    """Nobody listens."""

    def starts(self, cfg: Any, doing: Doing) -> None:
        """Nothing."""

    def ends(self, cfg: Any, program: str = "") -> None:
        """Nothing."""

    def failed(self, trial: Trial, program: str) -> None:
        """Nothing."""

    def lost(self, trial: Trial, program: str) -> None:
        """Nothing."""

    def timed(self, found: Timed, clock: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of an earlier race, and the clock that they were timed by."""

    clock: str = ""
    rounds: Sequence[Timed] = ()


class PriorResults(Protocol):
    """What is known of the candidates before a tuning begins."""

    def barred(self, cfg: Any) -> Trial | None:
        """The outcome of one that crashed or hung: it is not even traced."""

    def known(self, cfg: Any, program: str) -> Trial | None:
        """The outcome of one that need not run again, as long as it is this program."""

    @property
    def rounds(self) -> Rounds:
        """What was timed of those that run again."""

    def samples(self, cfg: Any) -> Sequence[float]:
        """What was timed of one, whether it runs again or not."""

    def suspected(self, cfg: Any) -> bool:
        """Was it at work when a process died, nobody knows of what?"""

    def elsewhere(self) -> PriorResults:
        """The same for candidates in a process of their own, where suspects may run."""

    def afresh(self) -> PriorResults:
        """The same for a final race, in which everybody runs: crashes and failures stay."""

    def without(self, lost: Sequence[Trial]) -> PriorResults:
        """The same, with those barred that took a worker with them just now."""


@final
@dataclass(frozen=True)
class NoPriorResults:
    """A first tuning, or one that is told only what was timed before."""

    rounds: Rounds = field(default_factory=Rounds)
    lost: Sequence[Trial] = ()

    def samples(self, cfg: Any) -> Sequence[float]:
        """None that anybody asks for."""
        return ()

    def suspected(self, cfg: Any) -> bool:
        """Nobody is."""
        return False

    def elsewhere(self) -> NoPriorResults:
        """The same."""
        return self

    def afresh(self) -> NoPriorResults:
        """The same."""
        return self

    def without(self, lost: Sequence[Trial]) -> NoPriorResults:
        """These are not run again."""
        return replace(self, lost=(*self.lost, *lost))

    def barred(self, cfg: Any) -> Trial | None:
        """Who was lost just now."""
        return next((trial for trial in self.lost if repr(trial.cfg) == repr(cfg)), None)

    def known(self, cfg: Any, program: str) -> None:
        """Nothing is."""
