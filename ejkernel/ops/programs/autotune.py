"""Tuning outside the program: a whole function, what the registry or a file saw, or what a lowered program holds."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import jax

from .. import _jax
from ..config.cache import refresh
from ..core.codec import describe
from ..core.device import default_device, device_fingerprint
from ..core.errors import KernelError, SettingError
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.request import ask
from ..execution.labels import find_labels_in_lowered, parse_label
from ..programs.recorded import check_there, read_calls
from ..registry import recorded_calls, trace_context_of
from ..timing.inputs import is_concrete
from ..tuning.tuner import Tuner
from .batch import AutotuneOptions as AutotuneOptions
from .batch import BatchTuner
from .find import find
from .found_call import FoundCall
from .results import AutotuningResult
from .user_function import unbound

# A tuned cfg may bring kernels inside it that the traced one had not; each round goes one kernel deeper.
_ROUNDS = 4


def benchmark(fn: Callable[..., Any], *args: Any, warmup: int = 1, iters: int = 5, **kwargs: Any) -> float:
    """Median seconds of a call."""
    return Tuner[Any](warmup, iters).measure(fn, *args, **kwargs)


def autotune(program: Any, /, *args: Any, tuning: AutotuneOptions | None = None, **kwargs: Any) -> AutotuningResult:
    """Tunes every kernel call of a program, each once, without running the program.

    The program is a function with its arguments (arrays or shapes), a lowered or compiled program, a file of recorded
    calls, or `(kernel, invocation)` pairs; the latter three need `AutotuneOptions(selector=...)`. `tuning` is the only
    keyword that does not reach the function.
    """
    options = _checked(tuning) or AutotuneOptions()
    if callable(program) and not _is_lowered(program):
        return _tune_function(program, args, kwargs, options)
    if not isinstance(program, (str, os.PathLike, Iterable)) and not _is_lowered(program):
        raise _no_program(program)
    if args or kwargs:
        raise SettingError(f"only a function takes arguments, and {type(program).__qualname__} is none")
    if isinstance(program, (str, os.PathLike)):
        check_there(program)
    if options.selector is None:
        raise SettingError(
            "which selector tunes? A function's calls know it; else pass tuning=AutotuneOptions(selector=...)"
        )
    if _is_lowered(program):
        return autotune_lowered(options.selector, program, tuning=options)
    if isinstance(program, (str, os.PathLike)):
        return autotune_recorded(options.selector, recording=program, tuning=options)
    return tune_calls(_given(program, options.selector), options)


def autotune_recorded(
    selector: Any,
    *,
    show_progress: bool = False,
    repetition_count: int = 1,
    recording: str | os.PathLike[str] | None = None,
    tuning: AutotuneOptions | None = None,
) -> AutotuningResult:
    """Tunes every call that the registry, or a file of recorded calls, saw on this device, known or not.

    Of several repetitions the fastest winner stays.
    """
    if not isinstance(repetition_count, int) or isinstance(repetition_count, bool) or repetition_count < 1:
        raise SettingError(f"repetition_count={repetition_count!r} is not a whole number of at least 1")
    options = _checked(tuning) or AutotuneOptions(again=True, repetitions=repetition_count, progress=show_progress)
    if recording is None:
        return tune_calls(_registered(selector), options)
    calls, left_out = read_calls(recording, selector, elsewhere=options.pool is not None)
    return tune_calls(calls, options, left_out)


def autotune_lowered(selector: Any, lowered: Any, *, tuning: AutotuneOptions | None = None) -> AutotuningResult:
    """Tunes the labelled calls of a lowered program, as far as the registry saw them."""
    options = _checked(tuning) or AutotuneOptions(again=True, progress=False)
    program = lowered.lower() if isinstance(lowered, jax.stages.Traced) else lowered
    wanted = {parse_label(name) for name in find_labels_in_lowered(program)}
    calls = [call for call in _registered(selector) if call.key[1:] in wanted]
    unknown = sorted(wanted - {call.key[1:] for call in calls})
    left_out = [f"{op} (call {key}): not tuned: it was not recorded; set EJKERNEL_OPS_RECORD" for op, key in unknown]
    return tune_calls(calls, options, left_out)


def _checked(tuning: AutotuneOptions | None) -> AutotuneOptions | None:
    if tuning is None or isinstance(tuning, AutotuneOptions):
        return tuning
    raise SettingError(
        f"tuning={tuning!r} is no AutotuneOptions; write tuning=AutotuneOptions(seconds=60), or leave it out"
    )


def _tune_function(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: AutotuneOptions
) -> AutotuningResult:
    _refuse_misplaced(fn, kwargs)
    confirms = _would_be_confirmed(args, kwargs) if options.confirm is None else options.confirm
    tuner = _batch_tuner(options, confirms=confirms)
    found = find(fn, args, kwargs)
    for _ in range(_ROUNDS):
        changed = len(tuner.changed)
        tuner.run([_as_asked(call, options) for call in found.calls if not tuner.has_seen(call.key)])
        late = time.perf_counter() >= tuner.deadline
        if tuner.interrupted or len(tuner.changed) == changed or late:
            break
        # The program is another one now, and may hold other calls.
        try:
            found = find(fn, args, kwargs)
        except KeyboardInterrupt:
            tuner.interrupted = True
            break
    if not tuner.entries and not found.calls and not found.unseen and not tuner.interrupted:
        nothing = f"{_name(fn)} makes no kernel call that a selector answers; there is nothing to tune"
        tuner.say(f"{nothing}. Functions of ejkernel.library and of @tunable make such calls, and so does an executor")
    if found.unseen:
        tuner.notes.append(f"calls of an executor with a chooser of its own: {found.unseen}, not tuned")
    if confirms and not tuner.interrupted and (options.confirm or tuner.changed):
        tuner.confirm(fn, args, kwargs)
    if tuner.changed and options.refresh:
        refresh()
    return tuner.finish()


def _would_be_confirmed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is the program confirmed by default: a device with its own clock, one process, and arrays that can be read?"""
    if default_device().platform == "cpu" or _jax.distributed() is not None:
        return False
    leaves = [leaf for leaf in jax.tree_util.tree_leaves((args, kwargs)) if hasattr(leaf, "dtype")]
    return all(is_concrete(leaf) and not (isinstance(leaf, jax.Array) and leaf.is_deleted()) for leaf in leaves)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(unbound(fn, (), {})[0], "__qualname__", None) or f"a {type(fn).__qualname__}"


def tune_calls(calls: Iterable[FoundCall], options: AutotuneOptions, left_out: Iterable[str] = ()) -> AutotuningResult:
    """Tunes calls that were found elsewhere; notes name what was left out of them."""
    tuner = _batch_tuner(options)
    tuner.notes += left_out
    tuner.run([call.tuned_for(options.objective) for call in calls])
    return tuner.finish()


def _batch_tuner(options: AutotuneOptions, *, confirms: bool = False) -> BatchTuner:
    deadline = math.inf if options.seconds is None else time.perf_counter() + options.seconds
    if options.pool is not None:
        # A process without a pool imports none of it.
        from .pool.tuner import PoolTuner

        return PoolTuner(device_fingerprint(), options, deadline=deadline, confirms=confirms)
    return BatchTuner(device_fingerprint(), options, deadline=deadline, confirms=confirms)


def _as_asked(call: FoundCall, options: AutotuneOptions) -> FoundCall:
    mine = call if options.selector is None else call.by(options.selector)
    return mine.tuned_for(options.objective)


def _registered(selector: Any) -> list[FoundCall]:
    device = default_device()
    calls = recorded_calls(device_fingerprint(device))
    return [FoundCall(key, kernel, inv, (selector,), device, trace_context_of(key)) for key, kernel, inv in calls]


def _given(program: Any, selector: Any) -> list[FoundCall]:
    calls: dict[Key, FoundCall] = {}
    for item in program:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Invocation)):
            raise KernelError(f"calls are (kernel, invocation) pairs, got {item!r}")
        kernel: Kernel[Any, Any] = item[0]
        request = ask(item[1], kernel, "forward")
        calls.setdefault(request.key, FoundCall(request.key, kernel, item[1], (selector,), request.device))
    return list(calls.values())


def _no_program(program: Any) -> KernelError:
    return KernelError(
        f"{describe(program)} is no program; pass a function and its arguments, as in autotune(step, x), a lowered "
        "program, a file of recorded calls, or (kernel, invocation) pairs"
    )


def _refuse_misplaced(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises where an option of the tuning was given as if it were an argument of the function."""
    options = {field.name for field in fields(AutotuneOptions)} & kwargs.keys()
    if not options:
        return
    try:
        parameters = inspect.signature(unbound(fn, (), {})[0]).parameters.values()
    # Some built-in callables have no signature; calling them tells.
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or options <= {p.name for p in parameters}:
        return
    given = ", ".join(f"{name}={kwargs[name]!r}" for name in sorted(options))
    raise SettingError(
        f"{given} is no argument of {_name(fn)}; options of the tuning go into tuning=AutotuneOptions({given})"
    )


def _is_lowered(program: Any) -> bool:
    # Some of these can be called as well.
    return isinstance(program, (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled))
