"""The end of a choice: an answer is kept and told as it says of itself, and what a selector tuned is remembered.

Choices from memory are recalled: a program makes the same call in every layer, and a user's functions are traced many
times. What the tiers answered from memory holds until a cache, a store or a policy of this process changes, which
`core.invalidation` counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from .. import _jax
from ..core import invalidation
from ..core.device import target_in_force
from ..core.invocation import Invocation
from ..core.kernel import Kernel, key_builder_of
from ..core.key import Key
from ..core.record import Objective, Record
from ..core.request import Decision, Hit, Keep, Request
from ..store.persistent import StoreWarning
from ..store.store import KeepsRecords, StoredEntry
from . import call_log
from .cache import lock_in_force, overlay_in_force
from .policy import frames
from .selector_parts import SelectorParts
from .tiers import OTHER_CODE
from .tuning_budget import TuningWarning
from .walk import Misses


class KeptAnswers:
    """Keeps and tells the answers of one selector."""

    def __init__(self, parts: SelectorParts[Any, Any]) -> None:
        self._parts = parts
        # What this selector tuned, for what, and in which life of the cache.
        self.tuned: dict[Key, tuple[int, Objective, type]] = {}
        # What tunings left behind where no store keeps it.
        self.records: dict[Key, Record] = {}
        self._unwritable: set[str] = set()
        self._said_code: set[str] = set()

    def accept(self, request: Request, hit: Hit, misses: Misses) -> None:
        """Does with an answer what it says of itself."""
        key = request.key
        if hit.record is not None:
            self.tuned[key] = self._life(request)
        if hit.keep is not Keep.NOTHING:
            self._parts.cache.keep_entry(key, hit.cfg, objective=hit.objective, call=request.call, code=hit.code)
        if "code" in hit.data:
            self._say_of_other_code(key, misses)
        if hit.keep is Keep.MEMORY_AND_STORE and self._parts.persist_autotune:
            self._write(request, hit)
        stores_records = self._parts.persist_autotune and isinstance(self._parts.store, KeepsRecords)
        if hit.record is not None and not stores_records:
            self.records[key] = hit.record
        if hit.event:
            data = hit.data
            if hit.event == "heuristics" and "reason" not in data:
                # A guess says why nothing was measured.
                data = {"reason": dict(misses).get("autotune", ""), **data}
            self._parts.tell(hit.event, key, hit.tier, cfg=hit.cfg, **data)

    def _write(self, request: Request, hit: Hit) -> None:
        key, record = request.key, hit.record
        if hit.entry is not None:
            entry = replace(hit.entry, cfg=hit.cfg)
        elif record is None:
            entry = StoredEntry(hit.cfg, request.environment, "imported", hit.objective, call=request.call)
        else:
            known = StoredEntry(hit.cfg, record.environment, "autotune", hit.objective)
            entry = replace(known, summary=record.summary(), call=request.call, record=record)
        store, remote = self._parts.store, self._parts.remote
        try:
            if store is not None:
                store.keep(key, entry)
            if remote is not None and remote.write and record is not None and "confirmed" not in hit.data:
                remote.keep_later(key, entry)
        # A cfg that is not JSON, or a store that cannot take it: this process has the answer all the same.
        except (OSError, TypeError, ValueError) as error:
            if key.op_id not in self._unwritable:
                self._unwritable.add(key.op_id)
                warnings.warn(
                    f"the tuned cfg of {key} could not be kept in {store or remote}, so the next process will tune "
                    f"again: {type(error).__name__}: {error}",
                    StoreWarning,
                    stacklevel=2,
                )

    def _say_of_other_code(self, key: Key, misses: Misses) -> None:
        if key.op_id not in self._said_code:
            self._said_code.add(key.op_id)
            why = dict(misses).get("autotune", "") or "nothing was measured"
            warnings.warn(
                f"{key} runs with a cfg that {OTHER_CODE}, and is not tuned again: {why}. Tune it, or give the "
                "kernel a version, which then says alone what entries are for",
                TuningWarning,
                stacklevel=2,
            )

    def record_of(self, key: Key) -> Record | None:
        """The record of the tuning behind the entry of a key, where it was kept."""
        record = self.records.get(key)
        if record is None and isinstance(self._parts.persistent, KeepsRecords):
            record = self._parts.persistent.record(*key)
        return record

    def refusal(self, request: Request) -> str:
        """The reason why a tuning of this request would be an error; else empty."""
        if not self._parts.forbid_reautotune or self.tuned.get(request.key) != self._life(request):
            return ""
        # An entry that was put for other code meanwhile, as by a reloaded module, is not this selector's own any more.
        if any("code" in seed.data for seed in request.seeds):
            return ""
        return (
            f"{request.key} was tuned by this selector before and is not in its cache any more; "
            "keep the entry, call cache.clear(), or pass forbid_reautotune=False"
        )

    def _life(self, request: Request) -> tuple[int, Objective, type]:
        # A class that was defined anew, as in a notebook, may need other configs than the one before.
        return self._parts.cache.generation, request.objective, type(request.kernel)


# Questions that are remembered; each is a few hundred bytes.
_MOST = 4096
# Static values that equality and type tell apart.
_PLAIN = frozenset((int, bool, str, type(None)))


class _Known(NamedTuple):
    decision: Decision
    epoch: int


class Recall:
    """Answers of one selector from memory, by everything that they depend on."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def find(self, question: Hashable) -> Decision | None:
        """The decision, where nothing has changed since."""
        known = self._known.get(question)
        return known.decision if known is not None and known.epoch == invalidation.epoch else None

    def keep(self, question: Hashable, decision: Decision, epoch: int) -> None:
        """Remembers a decision that was made at this epoch, if it came from memory."""
        if decision.tier != "memory":
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[question] = _Known(decision, epoch)


def question_of(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Hashable | None:
    """Everything that the answer to a plain call inside a program depends on; None for any other call."""
    if inv.override_cfg is not None or inv.method is not None or inv.batch_axes is not None:
        return None
    # A key builder may look at anything; a program that is looked through, or collected from, needs every step.
    if (
        key_builder_of(kernel) is not None
        or call_log.is_watching()
        or overlay_in_force()
        or lock_in_force() is not None
    ):
        return None
    types = []
    for arg in inv.args:
        if type(arg) is not _jax.JaxprTracer:
            return None
        types.append(arg.aval)
    static: list[Any] = []
    for name, value in (*vars(kernel).items(), *inv.kwargs.items()):
        if type(value) not in _PLAIN:
            return None
        static += (name, type(value), value)
    return (
        *(type(kernel), kernel.op_id, kernel.version, tuple(types), tuple(static), len(inv.kwargs)),
        *(target_in_force(), frames.get(), jax.sharding.get_abstract_mesh()),
        *(_jax.setting("jax_default_matmul_precision"), _jax.setting("jax_default_device")),
    )
