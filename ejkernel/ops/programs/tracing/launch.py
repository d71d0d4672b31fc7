"""Starts the processes that trace and compile candidates: how many, and the calls that they are sent."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ... import _jax
from ...core.cfg import distinct, same
from ...core.codec import encode
from ...core.errors import OpsError
from ...core.request import ask, candidates, revived
from ...core.trace_context import TraceContext
from ...settings import Settings
from ...timing.cost import free_memory
from ...tuning.tuner import IsolationWarning, Tuner
from ...tuning.worker.limits import Isolation
from ...tuning.worker.runner import worker_settings
from ..found_call import FoundCall
from ..pool.serialization import asked_call
from .tracers import Tracers

# Processors that stay free for this process and its worker, and the most processes that still saved time.
_RESERVED = 4
_MOST = 12
# The memory of a GPU that one process holds, and the share of the free memory that all of them may hold.
_BYTES_EACH = 600 << 20
_MEMORY_SHARE = 0.15
# With fewer candidates no process is started: they are traced here in the seconds that its start takes.
_LEAST = 24
# JAX settings that change a program and are not in a call's text; the processes get them with a worker's settings.
_SETTINGS = (
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_numpy_dtype_promotion"),
    *("jax_numpy_rank_promotion", "jax_softmax_custom_jvp", "jax_use_shardy_partitioner"),
)


def process_count(calls: Sequence[FoundCall]) -> int:
    """The number of processes: as told, else none on a CPU, where they would disturb what is timed."""
    told = Settings.read().tracers
    if told is not None:
        return told
    if not calls or any(str(call.device.platform) == "cpu" for call in calls):
        return 0
    free = [memory for call in calls if (memory := free_memory(call.device)) is not None]
    fitting = int(_MEMORY_SHARE * min(free) / _BYTES_EACH) if free else _MOST
    found = min(_MOST, (os.cpu_count() or 1) - _RESERVED, fitting)
    return found if found > 1 else 0


@contextlib.contextmanager
def traced_elsewhere(calls: Sequence[FoundCall]) -> Iterator[Callable[[Sequence[FoundCall]], None]]:
    """Processes that trace and compile the candidates of these calls, for a `with` block.

    They start at once, and begin when they are told the order of the calls.
    """
    count = process_count(calls)
    wanted = {call.key: cfgs for call in calls if (cfgs := _candidates(call))} if count else {}
    if sum(map(len, wanted.values())) < _LEAST and Settings.read().tracers is None:
        wanted = {}
    if not wanted:
        yield lambda order: None
        return
    settings = worker_settings(next(call.device for call in calls if call.key in wanted), Isolation())
    more = {name: _jax.setting(name) for name in _SETTINGS}
    settings["settings"] |= {name: value for name, value in more.items() if value is not None}
    # On a CPU a loaded executable is not quite the one that was compiled, so processes only trace there.
    tracers = Tracers(settings, count, compiles=settings["platform"] != "cpu")

    def want(order: Sequence[FoundCall]) -> None:
        for call in order:
            if call.key in wanted:
                _want(tracers, call, wanted[call.key])

    with tracers.in_force():
        yield want
    for why in dict.fromkeys(tracers.failures):
        # A warning, not an error: candidates that no process traced are traced here.
        warnings.warn(f"a process that traced candidates gave up: {why}", IsolationWarning, stacklevel=2)


def _candidates(call: FoundCall) -> list[object]:
    """The candidates that can be named to another process; none where the tuning would not race them all."""
    selector = call.selectors[0]
    tuner = selector.tuner
    if type(tuner) is not Tuner or tuner.isolate is False or tuner.clock is not None or selector.tuning_is_off():
        return []
    if call.inv.method is not None:
        return []
    try:
        with call.restored():
            request = ask(replace(call.inv, override_cfg=None), call.kernel, "forward")
            cfgs = distinct(candidates(request))
            if len(cfgs) < 2 or tuner.searches(len(cfgs)):
                return []
            return [cfg for cfg in cfgs if same(revived(request, json.loads(json.dumps(encode(cfg)))), cfg)]
    # The call's own tuning raises the error again, and tells it.
    except OpsError:
        return []


def _want(tracers: Tracers, call: FoundCall, cfgs: Sequence[object]) -> None:
    # A call inside a mesh, and one that cannot be written as text, is traced by the process that tunes it.
    if (call.trace_context or TraceContext.now()).mesh is not None:
        return
    try:
        asked, _ = asked_call(call)
    except OpsError:
        return
    tracers.want(asked, cfgs)
