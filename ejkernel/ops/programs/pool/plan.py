"""The calls that go to a pool: as they travel, by their cost, and which of them travel together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from ...config.warm_start import warm_start_configs
from ...core import codec
from ...core.errors import ConfigTypeError
from ...core.key import Key
from ...core.request import ask, candidates
from ...tuning.search.effort import FEW
from ..budget_split import Share, in_order, share_of
from ..found_call import FoundCall
from .schedule import Work
from .task import AskedCall

# Seconds of tracing for better estimates at a time, while workers are busy.
_ESTIMATE_SECONDS = 0.05
# Calls of one kernel that travel together at most, and how many tasks each worker gets at least.
_TOGETHER, _TASKS_EACH = 8, 4


@dataclass(frozen=True)
class PoolPlan:
    """The calls of a program that can travel."""

    calls: Mapping[Key, FoundCall]
    asked: Mapping[Key, AskedCall]
    # Plain settings of the tuners.
    tuners: Mapping[Key, Mapping[str, Any]]
    # By the sizes of arrays until the call was traced.
    shares: dict[Key, Share]
    # Candidates of each call, where that is known here.
    counts: Mapping[Key, int | None]
    # Calls to be estimated better, the next one last.
    rough: list[Key]

    @cached_property
    def inner(self) -> dict[Key, set[Key]]:
        """The calls that each call's kernel makes, which have to be known before it is sent."""
        found: dict[Key, set[Key]] = {key: set() for key in self.calls}
        for call in self.calls.values():
            for outer in call.outer & found.keys():
                found[outer].add(call.key)
        return found

    def rank(self) -> dict[Key, int]:
        """The place of each call in the order: the costliest first, kernels inside kernels before those."""
        ordered = in_order(list(self.calls.values()), self.shares)
        return {call.key: place for place, call in enumerate(ordered)}

    def estimate(self, waiting: Set[Key]) -> bool:
        """Traces some calls that wait, to know their cost better; False where none is left."""
        until = time.perf_counter() + _ESTIMATE_SECONDS
        was_rough = bool(self.rough)
        while self.rough and time.perf_counter() < until:
            key = self.rough.pop()
            if key in waiting:
                self.shares[key] = share_of(self.calls[key])
        return was_rough

    def works(self, together: Callable[[int], int]) -> list[Work]:
        """The calls in tasks, the costliest first; how many of one kernel share one, by the number of calls left."""
        inner = self.inner
        works: list[Work] = []
        latest: dict[tuple[str, str], Work] = {}
        left = len(self.calls)
        for key in self.rank():
            call = self.calls[key]
            kind = f"{self.asked[call.key].signature['kernel']} on {call.key.device}"
            # Calls with different tuners cannot share a task.
            found = latest.get((kind, repr(self.tuners[call.key])))
            # Kernels inside kernels go by themselves, since others wait for them.
            alone = bool(inner[call.key] or call.outer)
            if found is None or alone or len(found.calls) >= together(left + len(found.calls)):
                found = Work((), kind)
                works.append(found)
                if not alone:
                    latest[kind, repr(self.tuners[call.key])] = found
            found.calls = (*found.calls, call.key)
            left -= 1
        return works


def together_for(left: int, workers: int | None) -> int:
    """Calls of one kernel that share a task: one, unless many more calls are left than there are workers.

    Tasks get smaller towards the end, so that the workers end together.
    """
    return 1 if not workers else max(1, min(_TOGETHER, left // (_TASKS_EACH * workers)))


def planned(
    calls: Mapping[Key, FoundCall],
    asked: Mapping[Key, tuple[AskedCall, int | None]],
    tuners: Mapping[Key, Mapping[str, Any]],
    *,
    exact: bool,
) -> PoolPlan:
    """The plan for some calls; `exact`: a budget is split, so that every cost has to be known first."""
    shares = {
        key: share_of(call) if exact and not call.is_elsewhere else Share(_bytes_of(call) * call.count, 1)
        for key, call in calls.items()
    }
    counts = {key: count for key, (_, count) in asked.items()}
    plan = PoolPlan(calls, {key: one for key, (one, _) in asked.items()}, tuners, shares, counts, [])
    if not exact:
        plan.rough.extend(key for key in reversed(plan.rank()) if not calls[key].is_elsewhere)
    return plan


def _bytes_of(call: FoundCall) -> float:
    leaves = [leaf for leaf in jax.tree_util.tree_leaves((call.inv.args, call.inv.kwargs)) if hasattr(leaf, "dtype")]
    return float(sum(math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves))


def seeds_for(plan: PoolPlan, key: Key) -> list[Any]:
    """Cfgs of similar calls, as text; a race of few candidates needs none."""
    if (plan.counts[key] or 0) <= FEW:
        return []
    call = plan.calls[key]
    with call.restored():
        request = ask(replace(call.inv, override_cfg=None), call.kernel, plan.asked[key].objective)
        found = warm_start_configs(call.selectors[0].stores(), request, candidates(request))
    try:
        return [codec.encode(cfg) for cfg in found]
    except ConfigTypeError:
        return []
