"""Resuming from a journal: the results that a new tuning takes over, and the candidates that it runs again."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np

from ...core.cfg import places
from ...core.record import Trial
from ...core.stable import short_hash
from ...timing.inputs import flatten_call, is_concrete, is_float
from ..job import TuningJob
from .file import Journal, cfg_id, journal_for
from .observer import OWN, NoPriorResults, PriorResults
from .replay import JournalContent

# A longer array of the caller's own integers counts by its shape, which is in the key.
_LARGEST_HASHED = 1 << 20

# One death of a process may be anything: a scheduler's kill, or the system's for want of memory.
_NO_ACCIDENT = 2

AGAIN = "forget_crashes() has it run again"


@final
@dataclass(frozen=True)
class Remembered:
    """Results of an earlier tuning, as its journal tells them."""

    history: JournalContent
    # Ids of the candidates that were dropped and do not race again; a search has none.
    dropped: frozenset[str] = frozenset()
    # Do candidates run in a worker? Then no candidate is barred on suspicion alone.
    isolated: bool = False
    # Candidates that ended a worker in this tuning; the journal has only cfgs with a stable form.
    gone: Sequence[Trial] = ()

    def suspected(self, cfg: Any) -> bool:
        """Was this candidate at work when a process died for an unknown reason? In a worker it may run all the same."""
        # Mostly there are no suspects, and to name each of tens of thousands of cfgs takes long.
        return not self.isolated and bool(self.history.suspects) and cfg_id(cfg) in self.history.suspects

    def in_worker(self) -> Remembered:
        """The results with no candidate barred on suspicion."""
        return replace(self, isolated=True)

    def without(self, lost: Sequence[Trial]) -> Remembered:
        """The results with these candidates barred."""
        return replace(self, gone=(*self.gone, *lost))

    def without_drops(self) -> Remembered:
        """The results with the dropped candidates racing again."""
        return replace(self, dropped=frozenset())

    def barred(self, cfg: Any) -> Trial | None:
        """The outcome of a candidate that crashed or hung; outside a worker two deaths while it was at work suffice."""
        one = cfg_id(cfg)
        if one in self.history.lost:
            return _lost(cfg, self.history.lost[one])
        deaths = 0 if self.isolated else len(self.history.suspects.get(one or "", ()))
        if deaths < _NO_ACCIDENT:
            return next((trial for trial in self.gone if places([cfg], [trial.cfg])), None)
        return Trial(cfg, "crash", f"at work when the processes of {deaths} earlier tunings died; {AGAIN}")

    def known(self, cfg: Any, program: str) -> Trial | None:
        """A crash, a failure, or a drop of this very program, whichever candidate had it."""
        one = cfg_id(cfg)
        for outcomes in (self.history.lost, self.history.failed, self._drops()):
            for other, line in outcomes.items():
                if line.get("program") == program and (other == one or not program.startswith(OWN)):
                    return _outcome(cfg, line)
        return None

    def _drops(self) -> Mapping[str, Mapping[str, Any]]:
        return {one: line for one, line in self.history.dropped.items() if one in self.dropped}

    def seconds(self, cfgs: Sequence[Any]) -> Mapping[int, float]:
        """Places of cfgs that a search which was killed has timed, and their seconds then."""
        known = self.history.dropped
        if not known:
            return {}
        ids = {cfg_id(cfg): place for place, cfg in enumerate(cfgs)}
        return {ids[one]: line["seconds"] for one, line in known.items() if one in ids}


def _outcome(cfg: Any, line: Mapping[str, Any]) -> Trial:
    if "lost" in line:
        return _lost(cfg, line)
    if "failed" in line:
        return Trial(cfg, **line["trial"])
    return Trial(cfg, "skipped", f"took {line['ratio']:.3g} times as long as the best in an earlier tuning")


def _lost(cfg: Any, line: Mapping[str, Any]) -> Trial:
    trial = line["trial"]
    said = trial.get("message", "took its process with it")
    return Trial(cfg, trial.get("status", "crash"), f"{said}; in an earlier tuning, {AGAIN}")


@contextlib.contextmanager
def journalled(
    job: TuningJob, cfgs: Sequence[Any], seed: int, clock: str
) -> Iterator[tuple[Journal | None, PriorResults]]:
    """The open journal of a job, and what it remembers; a search names no cfgs."""
    if job.journal is None or "key" not in job.about:
        yield None, NoPriorResults()
        return
    about = job.about
    journal = journal_for(job.journal, about["key"], job.objective, about.get("environment", {}))
    with journal:
        identity = _identity(job, seed)
        fresh = _is_fresh(journal.history, identity, cfgs)
        journal.begin(identity, cfgs, fresh=fresh)
        if fresh:
            journal.history.forget()
        # Times of two clocks do not compare; what failed has failed by any clock.
        history = journal.history
        history.dropped = {one: line for one, line in history.dropped.items() if line["clock"] == clock}
        yield journal, Remembered(history, _stay_dropped(history, cfgs, job))


def _is_fresh(history: JournalContent, identity: str, cfgs: Sequence[Any]) -> bool:
    """Is everything but crashes measured anew?"""
    if history.identity != identity:
        return True
    if history.winner is None:
        return False
    # Over and asked for again: measured again, unless there is something new to measure against the old winner.
    ids = {cfg_id(cfg) for cfg in cfgs}
    return history.winner not in ids or ids <= set(history.candidates)


def _stay_dropped(history: JournalContent, cfgs: Sequence[Any], job: TuningJob) -> frozenset[str]:
    """The candidates that were dropped and do not race again; the heuristic cfg and an old winner always do."""
    if history.crashed:
        return frozenset()
    ids = [cfg_id(cfg) for cfg in cfgs]
    again = {history.winner, *(ids[:1] if job.heuristic_first else ())}
    return frozenset(one for one in ids if one is not None and one in history.dropped and one not in again)


def _identity(job: TuningJob, seed: int) -> str:
    """Identity of the inputs' values: samples depend on it besides key, environment and program."""
    parts = [f"seed {seed}", f"example {job.example is not None}", f"fresh {job.fresh_floats}"]
    for leaf in flatten_call(job.args, job.kwargs).leaves:
        if is_concrete(leaf) and not is_float(leaf) and leaf.size <= _LARGEST_HASHED and _is_plain(leaf):
            parts.append(f"{zlib.crc32(np.asarray(leaf).tobytes()):08x}")
    return short_hash(" ".join(parts))


def _is_plain(leaf: Any) -> bool:
    # Typed keys have dtypes of JAX's own.
    return not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.dtype.kind in "biu"
