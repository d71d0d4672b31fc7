"""One question to what the records have taught, and the answer with its confidence. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ...core import codec
from ...core.cfg import distinct
from ...core.key import Key
from .calls import point_of
from .example import Example
from .learned import LEAST, Learned

# With a lower chance to be near the best there is no answer: the kernel's author may know better. Most answers are
# much surer: nine of ten come true.
LEAST_CHANCE = 0.7
# Times that differ by less are equal: what is left is noise.
_EQUAL = 0.005


@final
@dataclass(frozen=True)
class NearCall:
    """A tuned call that an answer comes from, and how far it is: in lengths over which times change."""

    key: Key
    call: Mapping[str, str]
    distance: float


@final
@dataclass(frozen=True)
class Prediction:
    """A cfg that was not measured for this call."""

    cfg: Any
    # That it is within 5% of the best.
    chance: float
    # Its time over that of the best is at most this, in nine of ten.
    bound: float
    near: tuple[NearCall, ...]


def learn(examples: Sequence[Example]) -> Learned | str:
    """A model of some records of an operation; else why nothing can be learned from them."""
    if len(examples) < LEAST:
        count = f"{len(examples)} call{'s' if len(examples) > 1 else ''}"
        return f"there are records of {count} alone; it takes {LEAST}"
    if all(float(example.slower.max()) < _EQUAL for example in examples):
        return "in all records all candidates take the same time"
    with np.errstate(all="ignore"):
        try:
            return Learned(examples)
        # Sizes of a damaged record may be anything.
        except np.linalg.LinAlgError as error:
            return f"nothing can be learned from the records: {error}"


def predict(learned: Learned, parts: Mapping[str, str], cfgs: Sequence[Any]) -> Prediction | str:
    """The prediction for a call from its valid candidates, the heuristic's first; else why there is none."""
    found = distinct(cfgs)
    if len(found) < 2:
        return "one candidate, nothing to predict"
    with np.errstate(all="ignore"):
        choice = learned.ask(point_of(parts), [codec.encode(cfg) for cfg in found], 0)
    if isinstance(choice, str):
        return choice
    if choice.chance < LEAST_CHANCE:
        nearest = learned.examples[choice.near[0]]
        return (
            f"not sure enough: the best guess is within 5% of the best with a chance of {choice.chance:.0%} "
            f"(the nearest of {len(learned.examples)} records is call {nearest.key.call_key})"
        )
    near = [
        NearCall(learned.examples[i].key, _readable(learned.examples[i].call), distance)
        for i, distance in zip(choice.near, choice.distances, strict=True)
    ]
    return Prediction(found[choice.place], choice.chance, math.exp(choice.bound), tuple(near))


def _readable(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in parts.items() if name != "device"}
