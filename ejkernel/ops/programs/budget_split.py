"""Splits a tuning budget: what each call is worth, known from shapes alone, and the seconds that it gets.

A call is worth what it costs a run of the program: the larger of its memory traffic and its products, as its trace
shows them, times the runs. Measuring that first would compile every heuristic cfg once more, and
spend what the budget is for. The order and the parts of a budget need no more than a rough estimate: what a call leaves
of its part goes to those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.cache import traced_anew
from ..config.call_log import CallLog, noting_calls
from ..config.tunability import untunable_because
from ..config.tuning_job import job_for
from ..core.cfg import distinct
from ..core.kernel import has_any
from ..core.key import Key
from ..core.record import Objective
from ..core.request import ask, candidates
from ..timing.cost import traffic_and_operations
from .found_call import FoundCall

# Operations that take as long as moving one byte: 184 on an H200, 208 on an A100 in bfloat16; processors have fewer.
_OPERATIONS_A_BYTE = {"gpu": 200.0, "tpu": 200.0, "cpu": 20.0}
# A backward pass takes about twice as long as the forward pass.
_WITH_BACKWARD = 3.0
# The least that is worth beginning with, in seconds, as long as no tuning has shown what one takes.
_LEAST = 1.0
# The same on a GPU or TPU, where a worker takes the device and compiles for seconds before anything is measured: the
# first call of a training step on an H200 took ten. One that is cut off takes its worker along, and the next call waits
# five seconds for another.
_FIRST = 12.0
# A call is begun with where so many seconds are left, whatever others took: those of a decode step on an H200 took two.
_ENOUGH = 3.0
# The call that is traced while none is measured may be worth so little of the one that is worth most.
_WORTH_BEGINNING = 0.25
# With so many seconds for each call all of them are measured, and those that are quickly traced go first: those of a
# training step on an H200 took two to six each.
_FOR_EACH = 4.0


@dataclass(frozen=True)
class Share:
    """Cost of a call to a run of the program, in bytes of memory traffic that would take as long."""

    cost: float
    # Candidates to trace.
    count: int = 0


def share_of(call: FoundCall) -> Share:
    """The estimate for one call; a call with nothing to measure is worth nothing."""
    selector = call.selectors[0]
    # Settings have turned tuning off, or the process has had its share.
    if selector.tuning_is_off():
        return Share(0.0)
    # Nothing is tuned yet, kernels inside this one neither.
    with call.restored(), traced_anew(), noting_calls(CallLog()):
        objective: Objective = "forward+backward" if selector.policy.validate_backward else "forward"
        request = ask(replace(call.inv, override_cfg=None), call.kernel, objective)
        cfgs = candidates(request)
        if len(distinct(cfgs)) == 1 or untunable_because(request, cfgs[0]) is not None:
            return Share(0.0)
        job = job_for(request, cfgs[:1])
        with job.room():
            fn = job.reference or job.make_fn(cfgs[0])
            traffic, operations = traffic_and_operations(fn, job.args, job.kwargs)
        if has_any(type(call.kernel), "operations"):
            operations = call.kernel.operations(call.inv) * _examples(call.inv.batch_axes)
    cost = max(traffic, operations / _OPERATIONS_A_BYTE.get(request.platform, 200.0))
    return Share(cost * call.count * (_WITH_BACKWARD if objective == "forward+backward" else 1.0), len(distinct(cfgs)))


def _examples(axes: Any) -> int:
    """The calls that the vmaps around make of one."""
    return math.prod(level[0] for level in axes if isinstance(level[0], int)) if isinstance(axes, tuple) else 1


def in_order(calls: Sequence[FoundCall], shares: Mapping[Key, Share]) -> list[FoundCall]:
    """The costliest first; a kernel inside another one before that one, whatever it costs itself."""
    by_key = {call.key: call for call in calls}

    def weight(key: Key) -> float:
        return max([shares[key].cost, *(weight(outer) for outer in by_key[key].outer if outer in by_key)])

    return sorted(calls, key=lambda call: (-weight(call.key), call.order))


def quick_to_trace_first(ordered: Sequence[FoundCall], shares: Mapping[Key, Share], left: float) -> list[FoundCall]:
    """The calls with the fewest candidates first, where what is left of the budget may do for all of them.

    While a call is measured the next ones are traced, and while the first is traced nothing is measured. A call with
    many candidates before the others would have them wait for seconds, and be cut off at the end of the budget. Where
    there is less time the most useful calls stay in front; only the first of all is quick to trace, and worth much. A
    kernel inside another one stays before that one.
    """
    if not ordered:
        return []
    by_key = {call.key: call for call in ordered}

    def count(key: Key) -> int:
        return min([shares[key].count, *(count(outer) for outer in by_key[key].outer if outer in by_key)])

    if left >= _FOR_EACH * sum(shares[call.key].cost > 0.0 for call in ordered):
        # The order of those with equally many stays as it is.
        return sorted(ordered, key=lambda call: count(call.key))
    outer = {key for call in ordered for key in call.outer}
    least = _WORTH_BEGINNING * max(shares[call.key].cost for call in ordered)
    free = [call for call in ordered if call.key not in outer and shares[call.key].cost >= max(least, 1e-9)]
    first = min(free, key=lambda call: shares[call.key].count, default=ordered[0])
    return [first, *(call for call in ordered if call is not first)]


def allotted(
    call: FoundCall, rest: Sequence[FoundCall], shares: Mapping[Key, Share], left: float, taken: Sequence[float] = ()
) -> float | None:
    """The seconds of a call among those still to do; None where what is left is not enough for it.

    No call is begun with in less than half of what tunings of this program `taken` so far took in the middle, unless
    some seconds are left: less would measure nothing but the heuristic cfg. Where all calls may be measured each has an
    equal part at least: what it leaves goes to the others.
    """
    first = 2 * _LEAST if call.device.platform == "cpu" else _FIRST
    usual = sorted(taken)[len(taken) // 2] if taken else first
    if left < min(usual / 2, _ENOUGH):
        return None
    total = sum(shares[other.key].cost for other in rest)
    part = left * shares[call.key].cost / total if total else left
    count = sum(shares[other.key].cost > 0.0 for other in rest)
    if call.device.platform == "cpu" or not shares[call.key].cost or left < _FOR_EACH * count:
        return min(left, max(part, usual))
    # The others keep what each of them needs, unless this one needs it.
    return min(left, max(usual, min(max(part, left / count), left - _FOR_EACH * (count - 1))))
