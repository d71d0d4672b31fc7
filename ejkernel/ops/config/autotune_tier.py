"""The tier that measures: candidates, what is not worth measuring, and what became of it.

Calls of which all candidates failed are remembered for the process, so that nothing tries them again.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakKeyDictionary

from ..core.cfg import distinct, same
from ..core.errors import OutOfTimeError, TuningError
from ..core.kernel import check_cfg_type
from ..core.key import Key
from ..core.record import Record
from ..core.request import Hit, Keep, Miss, Offer, Planned, Request, offer
from ..tuning.job import TuningJob
from ..tuning.tuner import Tuner
from .tunability import untunable_because
from .tuning_budget import TuningWarning
from .tuning_job import job_for
from .walk import Tier

# A call that does not fit its kernel's parameters, as Python says it.
_ARGUMENTS = re.compile(
    r"TypeError: .*\(\) (missing \d+ required|got an unexpected keyword|got multiple values|takes \d+ .*positional)"
)
Tune = Callable[[Request, TuningJob], Record]
_Say = Callable[[tuple[str, str], str], None]


@final
@dataclass(frozen=True, eq=False)
class AutotuneTier(Tier):
    """Measures the candidates."""

    # Runs a job and tells the listener; raises TuningError where no candidate can be used.
    tune: Tune
    # Why a tuning of this request would be an error; empty where it would not.
    refusal: Callable[[Request], str]
    # Calls without a candidate that could run, with the reasons.
    failed: dict[Failure, str]
    # What was said of which operation.
    said: set[tuple[str, str]]
    # Answer with a sole candidate, unmeasured: where no heuristics tier comes behind.
    sole_answers: bool = False
    name = "autotune"
    exclusive = True

    def find(self, request: Request) -> Hit | Miss:
        """The winner of a tuning."""
        offered = self._offered(request, self._say_once)
        if not isinstance(offered, Offer):
            return offered
        failure = (request.key, type(request.kernel))
        try:
            record = self.tune(request, job_for(request, offered.cfgs, offered.refused))
        except OutOfTimeError as error:
            # Another process, with more time, may do better.
            self.failed[failure] = OutOfTime(error)
            return Miss(str(error), None, error.record)
        except TuningError as error:
            self.failed[failure] = f"all {len(error.reasons)} candidates failed; first: {error.reasons[0]}"
            _warn_of_failure(request, error)
            return Miss(self.failed[failure], (), error.record)
        return tuned(request, record, check_cfg_type(request.kernel, record.cfg, "the tuner's choice"))

    def confirm(self, request: Request, cfg: Any, where: str) -> Hit | Miss:
        """A cfg of unknown origin, once it was checked and was faster than the heuristic cfg in a race of the two."""
        offered = self._pair(request, cfg, where)
        if isinstance(offered, Miss):
            return offered
        try:
            # Without the seeds of other tiers: they are measured with all candidates, should this one not win.
            record = self.tune(request, job_for(replace(request, seeds=()), offered.cfgs, offered.refused))
        except TuningError as error:
            return Miss(f"the entry in {where} is not signed, and measuring it failed: {error}")
        if same(record.cfg, cfg):
            check_cfg_type(request.kernel, cfg, f"the entry in {where}")
            # It beat the heuristic cfg and no more: this machine does not vouch for it to others.
            return replace(tuned(request, record, cfg), data={"confirmed": where})
        return Miss(f"the entry in {where} is not signed, and was not faster than the heuristic cfg when measured")

    def preview_of(self, request: Request, cfg: Any, where: str) -> Miss | Planned:
        """The race that `confirm` would run."""
        offered = self._pair(request, cfg, where)
        return offered if isinstance(offered, Miss) else Planned(len(offered.cfgs), self.refusal(request))

    def _pair(self, request: Request, cfg: Any, where: str) -> Offer | Miss:
        """The heuristic cfg and a cfg of unknown origin, where the two can be raced."""
        offered = self._offered(request, _say_nothing)
        if not isinstance(offered, Offer):
            return Miss(f"the entry in {where} is not signed, and cannot be measured here")
        if same(offered.cfgs[0], cfg):
            return Miss(f"the entry in {where} is not signed, and is the heuristic cfg")
        return Offer([offered.cfgs[0], cfg], offered.refused)

    def job(self, request: Request) -> TuningJob | None:
        """The tuning that would be run; None where there is nothing to measure."""
        offered = self._offered(request, _say_nothing)
        return job_for(request, offered.cfgs, offered.refused) if isinstance(offered, Offer) else None

    def preview(self, request: Request) -> Hit | Miss | Planned:
        """The number of candidates that would be measured, or the answer without that."""
        offered = self._offered(request, _say_nothing)
        if not isinstance(offered, Offer):
            return offered
        cfgs = distinct([*offered.cfgs, *(seed.cfg for seed in request.seeds)])
        return Planned(len(cfgs), self.refusal(request))

    def _offered(self, request: Request, say: _Say) -> Offer | Hit | Miss:
        """The candidates that would be measured, or the answer without that."""
        failure = (request.key, type(request.kernel))
        if failure in self.failed:
            reason = self.failed[failure]
            return Miss(f"failed before in this process: {reason}", None if isinstance(reason, OutOfTime) else ())
        offered = offer(request, empty=lambda message: say(("empty", request.key.op_id), message))
        cfgs = offered.cfgs
        if len(distinct(cfgs)) == 1:
            why = "one candidate, nothing to measure"
            if self.sole_answers:
                # It is the heuristic cfg, so that is what it is called.
                return Hit(cfgs[0], "heuristics", "heuristics", {"reason": why})
            return Miss(why + (f" ({len(offered.refused)} ruled out by valid_cfg)" if offered.refused else ""))
        found = untunable_because(request, cfgs[0])
        if found is None:
            return offered
        if found.surprising:
            message = f"{request.key} is not tuned: {found.reason}. Until then stores and heuristics serve"
            say(("obstacle", request.key.op_id), message)
        return Miss(found.reason)

    def _say_once(self, what: tuple[str, str], message: str) -> None:
        if what not in self.said:
            self.said.add(what)
            _warn(message)


def tuned(request: Request, record: Record, cfg: Any) -> Hit:
    """The answer of a tuning, which has told of itself."""
    # Where another process put its answer into the store meanwhile, that stays there.
    keep = Keep.MEMORY if record.stop == "settled" else Keep.MEMORY_AND_STORE
    # What was asked for, even where the tuner had to time less: asking again would find no more.
    objective = request.objective
    known = {"objective": objective, "record": record, "code": request.code}
    return Hit(cfg, AutotuneTier.name, keep=keep, measured=True, **known)  # type: ignore[arg-type]


def _say_nothing(what: tuple[str, str], message: str) -> None:
    """Says nothing, in place of a warning."""


def _warn_of_failure(request: Request, error: TuningError) -> None:
    messages = {trial.message for trial in error.record.failures} if error.record is not None else set()
    alike = messages.pop() if len(messages) == 1 else ""
    if _ARGUMENTS.match(alike):
        # The heuristic cfg fails with the same words in a moment: Python's own error says it best.
        return
    reasons = "\n  ".join(error.reasons)
    advice = (
        "All of them fail alike: look at the call and the kernel's run first"
        if alike and len(error.reasons) > 1
        else "Correct the kernel's candidate_cfgs, or rule out what cannot run with valid_cfg"
    )
    _warn(f"tuning {request.key} left no candidate, so the heuristic cfg is used from now on:\n  {reasons}\n{advice}")


def _warn(message: str) -> None:
    warnings.warn(message, TuningWarning, stacklevel=2)


# By class as well: a corrected one may have what the old one lacked.
Failure = tuple[Key, type]


class OutOfTime(str):
    """The reason of a tuning that ran out of time: its candidates may be as good as any."""

    __slots__ = ()


# By tuner: another one may do what this one could not. Our own are all alike.
_of_ours: dict[Failure, str] = {}
_of_others: WeakKeyDictionary[Any, dict[Failure, str]] = WeakKeyDictionary()
_lock = threading.Lock()


def failures_of(tuner: Any) -> dict[Failure, str]:
    """The failed calls of a tuner, with the reasons."""
    if type(tuner) is Tuner:
        return _of_ours
    try:
        with _lock:
            return _of_others.setdefault(tuner, {})
    # Neither hashable nor weakly referable: then by its type.
    except TypeError:
        return _of_others.setdefault(type(tuner), {})
