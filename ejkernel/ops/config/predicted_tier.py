"""The tier that predicts: what the records of an operation's other calls say of the candidates of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from ..core import invalidation
from ..core.description import described_in, one_line
from ..core.errors import ConfigTypeError, KernelError
from ..core.key import Key
from ..core.record import Objective, Record
from ..core.request import Hit, Miss, Request, candidates
from ..core.times import read_times
from ..store.store import Store, peek
from .walk import Tier

if TYPE_CHECKING:
    from ..tuning.prediction.example import Example
    from ..tuning.prediction.learned import Learned
    from ..tuning.prediction.predict import Prediction

# The nearest calls that an event and an explanation name.
_SHOWN = 3
# More tunings of one operation teach little, and reading them takes time.
_MOST_EXAMPLES = 1000
# Records hold a few dozen candidates, so a large space has next to none of theirs.
_MOST_CANDIDATES = 1000


@final
@dataclass(eq=False)
class Predictions:
    """The models of a selector's operations, each learned anew once there are other records."""

    stores: Callable[[], Sequence[Store]]
    # Tunings of this process that no store keeps.
    records: Mapping[Key, Record]
    _learned: dict[str, tuple[Any, Learned | str]] = field(default_factory=dict)

    def ask(self, request: Request, offered: Sequence[Any] | None = None) -> Prediction | str:
        """The prediction for a call, from candidates that are known already or from its own; else why there is none."""
        learned = self._model(request)
        if isinstance(learned, str):
            return learned
        try:
            cfgs = candidates(request) if offered is None else offered
        # Where candidates cannot be listed there is a heuristic cfg all the same.
        except KernelError as error:
            return str(error)
        if len(cfgs) > _MOST_CANDIDATES:
            return f"{len(cfgs):,} candidates are a space to search"
        from ..tuning.prediction.predict import predict

        parts = _parts(request.call, request.objective, request.key.device)
        try:
            return predict(learned, parts, cfgs)
        except ConfigTypeError as error:
            return f"the candidates cannot be compared with those of records: {error}"

    def _model(self, request: Request) -> Learned | str:
        stores = list(self.stores())
        op = request.key.op_id
        keys = [[key for key in store.keys() if key[1] == op] for store in stores]
        # An entry that is put again moves the epoch; one of another process shows as a key.
        state = (invalidation.epoch, keys, len(self.records), request.code)
        known = self._learned.get(op)
        if known is None or known[0] != state:
            known = self._learned[op] = state, self._learn(request, stores, keys)
        return known[1]

    def _learn(
        self, request: Request, stores: Sequence[Store], keys: Sequence[Sequence[tuple[str, str, str]]]
    ) -> Learned | str:
        platform = request.key.device.partition("|")[0]
        found: dict[tuple[Key, Objective], Example] = {}
        without = other_code = 0
        # What the user's own store says of a call counts before what a pack says.
        for store, mine in zip(stores, keys, strict=True):
            for key in map(Key._make, mine[:_MOST_EXAMPLES]):
                entry = peek(store, key) if key.device.partition("|")[0] == platform else None
                if entry is None:
                    continue
                if _is_of_other_code(entry.environment, request):
                    other_code += 1
                    continue
                example = _example(key, entry.call, entry.objective or "forward", entry.summary)
                without += example is None
                if example is not None:
                    found.setdefault((key, entry.objective or "forward"), example)
        for key, record in list(self.records.items()):
            if key.op_id == request.key.op_id and not _is_of_other_code(record.environment, request):
                example = _example(key, described_in(record), record.objective, record.summary())
                if example is not None:
                    found.setdefault((key, record.objective), example)
        if not found:
            return self._nothing(request, without, other_code)
        from ..tuning.prediction.predict import learn

        return learn(list(found.values()))

    def _nothing(self, request: Request, without: int, other_code: int) -> str:
        if other_code:
            return f"{other_code} records of {request.key.op_id} are of other code of the kernel"
        if without:
            return f"none of {without} entries of {request.key.op_id} has the times of its candidates"
        op = request.key.op_id.partition("@v")[0]
        others = {k[1] for store in self.stores() for k in store.keys() if k[1].partition("@v")[0] == op}
        others.discard(request.key.op_id)
        if others:
            return f"the records are of {', '.join(sorted(others))}, and this is {request.key.op_id}"
        return f"no records of {request.key.op_id}"


@final
@dataclass(frozen=True, eq=False)
class PredictedTier(Tier):
    """A cfg that the records of other calls predict, where they are sure of it: a guess, never measured."""

    predictions: Predictions
    name = "predicted"

    def find(self, request: Request) -> Hit | Miss:
        """The prediction, where the records are sure enough."""
        if request.none_ran:
            return Miss("all candidates failed")
        found = self.predictions.ask(request)
        if isinstance(found, str):
            return Miss(found)
        data = {
            "source": self.name,
            "confidence": round(found.chance, 3),
            # The time over the best's is below this in nine of ten.
            "within": round(found.bound, 3),
            "calls": tuple(
                f"{one_line(near.key.op_id, near.call)} on {near.key.device}, {near.distance:.1f} away"
                for near in found.near[:_SHOWN]
            ),
        }
        return Hit(found.cfg, self.name, "heuristics", data)


def _example(key: Key, call: Mapping[str, str], objective: Objective, summary: Mapping[str, Any]) -> Example | None:
    times = read_times(summary)
    if not call or sum(seconds is not None for _, seconds in times) < 2:
        return None
    from ..tuning.prediction.example import Example

    return Example(key, _parts(call, objective, key.device), times)


def _is_of_other_code(kept: Mapping[str, str], request: Request) -> bool:
    # A kernel without a version of its own is known by its code.
    return bool(request.code) and kept.get("code", request.code) != request.code


def _parts(call: Mapping[str, str], objective: Objective, device: str) -> dict[str, str]:
    # What a call is tuned for, and where, are parts like the others: the records show how much they matter.
    return {**call, "passes": objective, "device": device}
