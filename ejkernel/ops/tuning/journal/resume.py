"""What a new tuning takes over from a journal, and what it runs again."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import numpy as np

from ...core.record import Trial
from ...core.stable import short_hash
from ...timing.inputs import flatten_call, is_concrete, is_float
from ..job import TuningJob
from .file import Journal, cfg_id, path_for
from .observer import OWN, Rounds
from .replay import JournalContent

# A longer array of the caller's own integers counts by its shape, which is in the key.
_LARGEST_HASHED = 1 << 20

# Anybody can have ended a process once: a scheduler, or the system for want of memory.
_NO_ACCIDENT = 2

# What the record says of one whose samples are taken over.
CARRIED = "timed by an earlier tuning"
AGAIN = "forget_crashes() has it run again"


@final
@dataclass
class Remembered:
    """The past of one tuning, as its journal tells it."""

    history: JournalContent
    cfgs: Sequence[Any]
    # Ids of those whose samples are taken over instead of being measured again.
    carried: frozenset[str] = frozenset()
    # Runs in a process of its own: then nobody is barred on suspicion.
    isolated: bool = False
    # Who took a worker down just now: a history knows no cfg that has no stable form.
    gone: Sequence[Trial] = ()
    _changed: set[str] = field(default_factory=set)

    def suspected(self, cfg: Any) -> bool:
        """Was it at work when a process died that it shared with others?"""
        # There are mostly none, and a space may have tens of thousands of cfgs.
        return not self.isolated and bool(self.history.suspects) and cfg_id(cfg) in self.history.suspects

    def elsewhere(self) -> Remembered:
        """The same, with nobody barred on suspicion."""
        return replace(self, isolated=True)

    def afresh(self) -> Remembered:
        """The same, with nobody's samples taken over."""
        return replace(self, carried=frozenset())

    def without(self, lost: Sequence[Trial]) -> Remembered:
        """These are not run again."""
        return replace(self, gone=(*self.gone, *lost))

    def barred(self, cfg: Any) -> Trial | None:
        """Who crashed or hung; outside a process of its own also who was at work at two deaths."""
        one = cfg_id(cfg)
        if one in self.history.lost:
            return _lost(cfg, self.history.lost[one])
        deaths = 0 if self.isolated else len(self.history.suspects.get(one or "", ()))
        if deaths < _NO_ACCIDENT:
            return next((trial for trial in self.gone if repr(trial.cfg) == repr(cfg)), None)
        return Trial(cfg, "crash", f"at work when the processes of {deaths} earlier tunings died; {AGAIN}")

    def known(self, cfg: Any, program: str) -> Trial | None:
        """A crash, a failure, or the samples of one that was dropped; of this very program, whoever had it."""
        one = cfg_id(cfg)
        same = {other for other in self._with(program) if other == one or not program.startswith(OWN)}
        if one is not None and self.history.programs.get(one) != program:
            self._changed.add(one)
        for other in sorted(same, key=lambda other: (other not in self.history.lost, other)):
            if other in self.history.lost:
                return _lost(cfg, self.history.lost[other])
            if other in self.history.failed:
                return Trial(cfg, **self.history.failed[other]["trial"])
            if other in self.carried:
                return Trial(cfg, message=CARRIED, samples_s=self._samples(other))
        return None

    def samples(self, cfg: Any) -> tuple[float, ...]:
        """What was timed of the same program."""
        one = cfg_id(cfg)
        return () if one is None or one in self._changed else self._samples(one)

    def _samples(self, one: str) -> tuple[float, ...]:
        return tuple(s for row in self.history.rounds for who, s in row if who == one)

    def _with(self, program: str) -> Iterator[str]:
        """Whose program this was."""
        for known in (self.history.lost, self.history.failed):
            yield from (one for one, line in known.items() if line["program"] == program)
        yield from (one for one in self.carried if self.history.programs.get(one) == program)

    @property
    def rounds(self) -> Rounds:
        """What was timed of the others."""
        cfgs = {cfg_id(cfg): cfg for cfg in self.cfgs}
        left_out = self._changed | self.carried
        rows = [
            [(cfgs[one], s) for one, s in row if one in cfgs and one not in left_out] for row in self.history.rounds
        ]
        return Rounds(self.history.clock, [row for row in rows if row])


def _lost(cfg: Any, line: Mapping[str, Any]) -> Trial:
    trial = line["trial"]
    return Trial(cfg, trial["status"], f"{trial['message']}; in an earlier tuning, {AGAIN}")


@contextlib.contextmanager
def journalled(
    job: TuningJob, cfgs: Sequence[Any], seed: int, clock: str
) -> Iterator[tuple[TuningJob, Journal | None]]:
    """The job with its journal open, and with what that remembers; a search names no cfgs."""
    if job.journal is None or "key" not in job.about:
        yield job, None
        return
    about = job.about
    journal = Journal(path_for(job.journal, about["key"], job.objective, about.get("environment", {})))
    with journal:
        identity = _identity(job, seed)
        carried = _carried(journal.history, identity, cfgs, job)
        if carried and journal.history.clock != clock:
            # Times of two clocks do not compare; what failed has failed by any clock.
            carried = frozenset()
        journal.begin(identity, cfgs, fresh=carried is None)
        if carried is None:
            journal.history.forget()
        past = Remembered(journal.history, cfgs, carried or frozenset())
        yield replace(job, witness=journal, past=past), journal


def _carried(history: JournalContent, identity: str, cfgs: Sequence[Any], job: TuningJob) -> frozenset[str] | None:
    """Whose samples are taken over; None where everything is measured anew."""
    if history.identity != identity:
        return None
    ids = [cfg_id(cfg) for cfg in cfgs]
    timed = {one for row in history.rounds for one, _ in row}
    if history.winner is not None:
        # Over and asked for again: measured again, unless there is something new to measure against the old winner.
        if history.winner not in ids or set(ids) <= set(history.candidates):
            return None
        return frozenset(timed - {history.winner, *(ids[:1] if job.heuristic_first else ())})
    last = {one for one, _ in history.rounds[-1]} if history.rounds else set()
    if not ids:
        # A search drops nobody: whatever was timed before its last batch counts by itself. The first candidate, with
        # which every search begins, runs again: it shows whether times of then are times of now.
        return frozenset(one for one in timed - last if one != cfg_id(job.candidates[0]))
    # Who was dropped was dropped against these: should one of them turn out to crash, the others are needed.
    if last & (history.suspects.keys() | history.lost.keys()) or not last & set(ids):
        return frozenset()
    return frozenset(timed - last - ({ids[0]} if job.heuristic_first and ids[0] else set()))


def _identity(job: TuningJob, seed: int) -> str:
    """What samples depend on besides key, environment and program: the values of the inputs."""
    parts = [f"seed {seed}", f"example {job.example is not None}", f"fresh {job.fresh_floats}"]
    for leaf in flatten_call(job.args, job.kwargs).leaves:
        if is_concrete(leaf) and not is_float(leaf) and leaf.size <= _LARGEST_HASHED and _is_plain(leaf):
            parts.append(f"{zlib.crc32(np.asarray(leaf).tobytes()):08x}")
    return short_hash(" ".join(parts))


def _is_plain(leaf: Any) -> bool:
    # Typed keys have dtypes of JAX's own.
    return not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.dtype.kind in "biu"
