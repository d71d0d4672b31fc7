"""The calls that go to a pool: as they travel, by their cost, and which of them travel together."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from ...config.warm_start import warm_start_configs
from ...core import codec
from ...core.candidates import candidates
from ...core.errors import ConfigTypeError
from ...core.key import Key
from ...core.request import ask
from ...tuning.search.effort import FEW
from ..budget_split import Share, in_order, share_of
from ..found_call import FoundCall
from .schedule import Work
from .task import AskedCall

# Estimating costs by tracing may take so long; other calls are estimated by the size of their arrays.
_ESTIMATE_SECONDS = 2.0
# Calls of one kernel that travel together at most, and how many tasks each worker gets at least.
_TOGETHER, _TASKS_EACH = 8, 4


@dataclass(frozen=True)
class Plan:
    """The calls of a program that can travel."""

    calls: Mapping[Key, FoundCall]
    asked: Mapping[Key, AskedCall]
    # Plain settings of the tuners.
    tuners: Mapping[Key, Mapping[str, Any]]
    shares: Mapping[Key, Share]

    @cached_property
    def inner(self) -> dict[Key, set[Key]]:
        """The calls that each call's kernel makes, which have to be known before it is sent."""
        found: dict[Key, set[Key]] = {key: set() for key in self.calls}
        for call in self.calls.values():
            for outer in call.outer & found.keys():
                found[outer].add(call.key)
        return found

    def works(self, together: int) -> list[Work]:
        """The calls in tasks, the costliest first; up to so many calls of one kernel in one."""
        inner = self.inner
        works: list[Work] = []
        latest: dict[tuple[str, str], Work] = {}
        for call in in_order(list(self.calls.values()), self.shares):
            kind = f"{self.asked[call.key].signature['kernel']} on {call.key.device}"
            # Calls with different tuners cannot share a task.
            found = latest.get((kind, repr(self.tuners[call.key])))
            # Kernels inside kernels go by themselves, since others wait for them.
            alone = bool(inner[call.key] or call.outer)
            if found is None or alone or len(found.calls) >= together:
                found = Work((), kind)
                works.append(found)
                if not alone:
                    latest[kind, repr(self.tuners[call.key])] = found
            found.calls = (*found.calls, call.key)
        return works


def together_for(calls: int, workers: int | None) -> int:
    """Calls of one kernel that share a task: one, unless there are many more calls than workers."""
    return 1 if not workers else max(1, min(_TOGETHER, calls // (_TASKS_EACH * workers)))


def shares_of(calls: Sequence[FoundCall], *, exact: bool) -> dict[Key, Share]:
    """Costs of the calls to a run of the program: traced where that is quick or a budget needs it, else by arrays."""
    until = time.perf_counter() + _ESTIMATE_SECONDS
    found = {}
    for call in calls:
        traced = not call.is_elsewhere and (exact or time.perf_counter() < until)
        found[call.key] = share_of(call) if traced else Share(_bytes_of(call) * call.count, 1)
    return found


def _bytes_of(call: FoundCall) -> float:
    leaves = [leaf for leaf in jax.tree_util.tree_leaves((call.inv.args, call.inv.kwargs)) if hasattr(leaf, "dtype")]
    return float(sum(math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves))


def seeds_for(call: FoundCall, asked: AskedCall) -> list[Any]:
    """Cfgs of similar calls, as text; a race of few candidates needs none."""
    if call.is_elsewhere:
        return []
    with call.restored():
        request = ask(replace(call.inv, override_cfg=None), call.kernel, asked.objective)
        offered = candidates(request)
        if len(offered) <= FEW:
            return []
        found = warm_start_configs(call.selectors[0].stores(), request, offered)
    try:
        return [codec.encode(cfg) for cfg in found]
    except ConfigTypeError:
        return []
