"""A case as programs that can be compared: plain JAX, what it has ready-made, our heuristic choice, our tuned one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from library_cases import Case, make

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Tuner

HEURISTIC, TUNED = "heuristic", "tuned"


@dataclass(frozen=True)
class Study:
    """A case that was tuned: its programs by name, their arrays, and what was chosen."""

    programs: dict[str, Callable[..., Any]]
    arrays: tuple[Any, ...]
    chosen: Any
    record: Any
    # Of choosing, and of the first run after it.
    seconds: float
    first_run: float
    static: dict[str, Any] = field(default_factory=dict)
    # Why the tuned choice is the heuristic one, where nothing was measured.
    note: str = ""


def is_float(array: Any) -> bool:
    """Has it a gradient?"""
    return bool(jax.numpy.issubdtype(array.dtype, np.floating))


def both_passes(fn: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[..., Any]:
    """Forward and backward as one function; the cotangent, of the result's form, is its last argument."""
    places = [at for at, array in enumerate(arrays) if is_float(array)]

    def run(*given: Any) -> Any:
        *arguments, dy = given

        def of_floats(*floats: Any) -> Any:
            whole = list(arguments)
            for at, value in zip(places, floats, strict=True):
                whole[at] = value
            return fn(*whole)

        out, pull = jax.vjp(of_floats, *(arguments[at] for at in places))
        # The plain function may compute in a precision of its own.
        return out, pull(jax.tree.map(lambda given, like: given.astype(like.dtype), dy, out))

    return run


def cotangent(fn: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """Random values like the result, or like each of several."""
    leaves, form = jax.tree.flatten(jax.eval_shape(fn, *arrays))
    made = [jax.random.normal(jax.random.key(7 + at), x.shape).astype(x.dtype) for at, x in enumerate(leaves)]
    return jax.tree.unflatten(form, made)


def study(case: Case, *, seconds: float | None = None, store: Any = None) -> Study:
    """Tunes the case, unless the store has it, and makes its programs, unjitted."""
    arrays, static = make(case)
    jax.block_until_ready(arrays)
    records: list[Any] = []
    notes: list[str] = []

    def listen(event: str, **data: Any) -> None:
        if event == "autotune_finish":
            records.append(data["record"])
        elif event == "heuristics":
            notes.append(str(data.get("reason") or ""))

    policy = AutotunePolicy(validate_backward=case.backward)
    tuner = Tuner(seconds=seconds)
    tuned = Executor(ConfigSelectorChain(ConfigCache(), policy, tuner, persistent=store, on_event=listen))
    untuned = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))

    start = time.perf_counter()
    if case.is_kernel:
        chosen = tuned.choose_config(case.kernel(), *arrays, **static)
    else:
        # The first call tunes each of its kernels.
        jax.block_until_ready(case.ours(tuned)(*arrays, **static))
        chosen = [record.cfg for record in records]
    taken = time.perf_counter() - start
    jax.block_until_ready(case.ours(tuned)(*arrays, **static))
    first_run = time.perf_counter() - start - taken
    ways: dict[str, Any] = {"plain": case.plain, **case.ready, HEURISTIC: case.ours(untuned), TUNED: case.ours(tuned)}
    ways = {name: functools.partial(fn, **static) for name, fn in ways.items()}
    if case.backward:
        dy = cotangent(ways["plain"], arrays)
        ways = {name: both_passes(fn, arrays) for name, fn in ways.items()}
        arrays = (*arrays, dy)
    record = records[-1] if records else None
    return Study(ways, arrays, chosen, record, taken, first_run, static, next(filter(None, notes), ""))


def compiled(name: str, fn: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[..., Any]:
    """A program with a name of its own, by which a profile knows it."""
    return lowered(name, fn, arrays).compile()


def lowered(name: str, fn: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """A program with a name of its own, before it is compiled."""

    def named(*given: Any) -> Any:
        return fn(*given)

    named.__name__ = named.__qualname__ = name
    return jax.jit(named).lower(*arrays)
