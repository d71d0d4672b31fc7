"""Is a rival faster than what is kept? A decision over paired samples that hardly ever raises a false alarm.

Rounds have a sample of both, so that drift hits both alike. They are put into blocks of rounds that follow each other,
and a block says how far the two are apart; the spread of blocks contains slow changes that single rounds would hide.
Sampling goes on until the error of the mean is small beside the loss that has to be found, or rounds are used up. An
alarm needs a mean that is over the least loss and many errors above zero, twice, in samples of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

# A loss of so much has to be found, and less than half of it is no reason to tune again.
TO_FIND = 0.03
LEAST = 0.015
# An error of the mean that is small enough, and how many of them above zero an alarm needs.
_PRECISE = 0.0035
_ERRORS = 3.5
LEAST_ROUNDS, MOST_ROUNDS = 24, 480
_BLOCKS = 12


@dataclass(frozen=True)
class Loss:
    """Loss of the kept cfg against a rival, as a logarithm of their times, with its error."""

    middle: float
    error: float
    rounds: int

    @property
    def is_sure(self) -> bool:
        """Is enough known to say that there is a loss, or that there is none?"""
        if self.rounds < LEAST_ROUNDS:
            return False
        # Clearly no loss: a rival that is far behind needs no more rounds.
        return self.error <= _PRECISE or self.middle + 2 * _ERRORS * self.error < 0 or self.rounds >= MOST_ROUNDS

    @property
    def is_found(self) -> bool:
        """Is the rival surely faster?"""
        return self.is_sure and self.middle > max(LEAST, _ERRORS * self.error)

    @property
    def is_too_noisy(self) -> bool:
        """Is the error still so large that the loss that has to be found could hide in it?"""
        return self.rounds >= MOST_ROUNDS and not self.is_found and self.middle + _ERRORS * self.error > TO_FIND

    def as_ratio(self) -> tuple[float, float, float]:
        """Time of the kept cfg over the rival's: middle, low and high end with 95%."""
        return tuple(math.exp(self.middle + side * self.error) for side in (0, -1.96, 1.96))  # type: ignore[return-value]


def loss_of(kept: Sequence[float], rival: Sequence[float]) -> Loss:
    """The loss of the kept cfg by samples of the same rounds."""
    pairs = [(math.log(one), math.log(other)) for one, other in zip(kept, rival, strict=True) if one > 0 and other > 0]
    if len(pairs) < 4:
        return Loss(0.0, math.inf, len(pairs))
    size = max(2, len(pairs) // _BLOCKS)
    blocks = [pairs[start : start + size] for start in range(0, len(pairs) - size + 1, size)]
    # Where drift is large, pairs of a round tell most; where spikes are, which only ever add, the faster quarter does.
    found = (
        [median(one - other for one, other in block) for block in blocks],
        [_lower([one for one, _ in block]) - _lower([other for _, other in block]) for block in blocks],
    )
    # Few blocks say little of their own spread: as Student's distribution has it, roughly.
    wider = 1 + 2 / len(blocks)
    error, middle = min((wider * stdev(some) / math.sqrt(len(some)), fmean(some)) for some in found)
    return Loss(middle, error, len(pairs))


def _lower(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]
