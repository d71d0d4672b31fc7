"""Calls, tuners and cfgs on their way: what of them can be written as text, and how it is rebuilt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, final

from ...core import codec
from ...core.abstract import abstractify
from ...core.cfg import distinct, same
from ...core.errors import ConfigTypeError, SignatureError
from ...core.invocation import Invocation
from ...core.kernel import versioned
from ...core.kernel_code import code_of
from ...core.record import Objective, Record
from ...core.request import Request, ask, candidates, revived
from ...core.trace_context import TraceContext
from ...execution import signatures
from ...execution.recording import call_key_of, check_round_trip
from ...tuning.job import TuningJob
from ...tuning.tuner import Tuner
from ...tuning.worker.limits import Isolation
from ..found_call import FoundCall
from .task import AskedCall

# Settings of a tuner that are plain values.
_SETTINGS = ("warmup", "iters", "seed", "seconds", "effort")


def asked_call(call: FoundCall) -> tuple[AskedCall, int | None]:
    """A call as it travels, and its number of candidates where that is known here.

    A `SignatureError` says why it cannot travel.
    """
    count = None
    selector = call.selectors[0]
    with call.restored():
        objective: Objective = "forward+backward" if selector.policy.validate_backward else "forward"
        trace_context = call.trace_context or TraceContext.now()
        inv = replace(call.inv, override_cfg=None, args=abstractify(call.inv.args), kwargs=abstractify(call.inv.kwargs))
        signature = signatures.written(call.kernel, inv, trace_context)
        check_round_trip(signature, call.key)
        if not call.is_elsewhere:
            request = ask(inv, call.kernel, objective)
            cfgs = candidates(request)
            _check_cfg(request, cfgs[0])
            count = len(distinct(cfgs))
    return AskedCall(call.key, signature, objective, code_of(call.kernel)), count


def _check_cfg(request: Request, cfg: Any) -> None:
    """Raises unless a cfg comes back from its text as it was."""
    try:
        back = revived(request, json.loads(json.dumps(codec.encode(cfg))))
    except ConfigTypeError as error:
        raise SignatureError(f"its cfgs cannot be written as text: {error}") from error
    if not same(back, cfg):
        raise SignatureError(f"its cfg {codec.describe(cfg)} comes back as {codec.describe(back)}; declare a cfg_type")


def rebuilt_call(asked: AskedCall, device: str) -> tuple[Any, Invocation[Any, Any], TraceContext]:
    """Kernel, call and trace context behind what travelled; a `SignatureError` where they are others here."""
    kernel, inv, trace_context = signatures.rebuilt(asked.signature, device.partition("|")[0])
    if versioned(kernel) != asked.key.op_id:
        raise SignatureError(f"the kernel is {versioned(kernel)} there, and the call is one of {asked.key.op_id}")
    if asked.code and code_of(kernel) != asked.code:
        raise SignatureError(
            f"kernel {versioned(kernel)} has other code there; install the same code, or give it a version"
        )
    with trace_context.entered():
        found = call_key_of(kernel, inv)
    if found != asked.key.call_key:
        raise SignatureError(f"kernel {versioned(kernel)} makes another key of the call there, {found}")
    return kernel, inv, trace_context


def plain_tuner(tuner: Any) -> dict[str, Any]:
    """The settings of a tuner; a `SignatureError` where it is more than settings."""
    if type(tuner) is not Tuner:
        raise SignatureError(
            f"its tuner is a {type(tuner).__qualname__} of the program's own, and only a Tuner travels"
        )
    if tuner.clock is not None or tuner.strategy is not None:
        raise SignatureError("its Tuner has a clock or a strategy of the program's own, and only plain settings travel")
    isolate = asdict(tuner.isolate) if isinstance(tuner.isolate, Isolation) else tuner.isolate
    return {**{name: getattr(tuner, name) for name in _SETTINGS}, "isolate": isolate}


@final
class SeededTuner(Tuner[Any]):
    """A tuner that also measures the cfgs that came with a task."""

    seeds: Sequence[Any] = ()

    def tune(self, job: TuningJob, **around: Any) -> Record:
        """The record of the job with these seeds."""
        return super().tune(replace(job, seeds=[*job.seeds, *self.seeds]), **around)


def rebuilt_tuner(settings: Mapping[str, Any], seeds: Sequence[Any] = ()) -> Tuner[Any]:
    """The tuner behind its settings."""
    plain = dict(settings)
    isolate = plain.get("isolate")
    made = SeededTuner(**{**plain, "isolate": Isolation(**isolate) if isinstance(isolate, dict) else isolate})
    made.seeds = seeds
    return made


def revived_all(request: Request, cfgs: Sequence[Any]) -> list[Any]:
    """The cfgs that the kernel can rebuild from their text."""
    found = []
    for cfg in cfgs:
        # A seed that does not fit is no candidate; the others are.
        with contextlib.suppress(ConfigTypeError, TypeError, ValueError):
            found.append(revived(request, cfg))
    return found


def rebuilt_record(call: FoundCall, data: Mapping[str, Any]) -> Record:
    """The record that a worker sent, with cfgs of the kernel's type; an error where it is damaged."""
    with call.restored():
        request = ask(call.inv, call.kernel, "forward")
        return Record.from_json(data, lambda cfg: revived(request, cfg))
