"""The kernel calls inside a JAX function, found by tracing it; nothing is run, tuned or kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from .. import _jax
from ..config.cache import traced_anew
from ..config.call_log import MARK, CallLog, SeenCall, noting_calls
from ..core.key import Key
from ..timing.program import UNTRACEABLE
from .found_call import FoundCall
from .user_function import trace


@dataclass(frozen=True)
class FoundCalls:
    """The calls of a program, each key once, and how many calls are beyond reach."""

    calls: tuple[FoundCall, ...]
    # Answered by a chooser of the user's own, which cannot be tuned for.
    unseen: int = 0


def find(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FoundCalls:
    """Traces a function under a key of its own in JAX's caches, so that no program of it is left behind."""
    finder = CallLog()
    with traced_anew(), noting_calls(finder):
        try:
            traced = trace(fn, args, kwargs)
        except UNTRACEABLE as error:
            error.add_note(
                "autotune traces the whole function to find its kernel calls; give it the part that you jit, "
                "and static arguments as jax.jit's static_argnames"
            )
            raise
    runs, backward = _jax.runs_of(traced.jaxpr, MARK), _jax.differentiated(traced.jaxpr, MARK)
    return FoundCalls(_by_key(finder, runs, backward), finder.unseen)


def find_while(run: Callable[[], Any]) -> tuple[FoundCalls, Any]:
    """Runs a function and notes the calls that it makes, jitted or not; also gives what it returned."""
    finder = CallLog()
    with traced_anew(), noting_calls(finder):
        made = run()
    # How often a call ran cannot be seen from here: each counts once.
    return FoundCalls(_by_key(finder, {}, set()), finder.unseen), made


def _by_key(finder: CallLog, runs: Mapping[int, int], backward: Set[int]) -> tuple[FoundCall, ...]:
    groups: dict[Key, list[SeenCall]] = {}
    for seen in finder.sightings:
        # What the caller gave is the caller's choice.
        if seen.request.inv.override_cfg is None:
            groups.setdefault(seen.request.key, []).append(seen)
    calls = [_call(key, group, runs, backward, finder.sightings) for key, group in groups.items()]
    return tuple(sorted(calls, key=lambda call: call.order))


def _call(
    key: Key,
    group: Sequence[SeenCall],
    runs: Mapping[int, int],
    backward: Set[int],
    everything: Sequence[SeenCall],
) -> FoundCall:
    # Of equal calls the one that asks for most stands for all.
    first = max(group, key=lambda seen: seen.request.objective == "forward+backward")
    selectors = {id(seen.selector): seen.selector for seen in (first, *group)}
    outer = {everything[number].request.key for seen in group for number in seen.outer}
    return FoundCall(
        key,
        first.request.kernel,
        first.request.inv,
        tuple(selectors.values()),
        first.request.device,
        first.trace_context,
        first.frames,
        # JAX may trace a loop's body more than once and keep one of the traces.
        count=max(1, sum(runs.get(seen.number, 0) for seen in group)),
        order=min(seen.order for seen in group),
        outer=frozenset(outer - {key}),
        is_differentiated=any(seen.number in backward for seen in group),
    )
