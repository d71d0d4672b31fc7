"""Compiled steps beside each other: rounds in which each has its turn, medians, and ratios with their intervals."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.timing.clock import Run
from ejkernel.ops.timing.profiler import ProfilerClock, ProfilerUnavailable

# Seconds that one program's turn lasts at least, and the most steps in it.
TURN, MOST_STEPS = 0.1, 20


class Steps:
    """A compiled step that goes on from where it was; what it may overwrite is its own."""

    def __init__(self, name: str, step: Callable[..., Any], args: tuple[Any, ...], program: Any) -> None:
        def named(*given: Any) -> Any:
            return step(*given)

        named.__name__ = named.__qualname__ = self.name = name
        start = time.perf_counter()
        lowered = jax.jit(named, donate_argnums=program.donated).lower(*args)
        # Equal programs need no race: what they differ by is noise.
        self.text = lowered.as_text().replace(name, "")
        self._compiled = lowered.compile()
        self.compile_s = time.perf_counter() - start
        self._args = tuple(
            jax.tree_util.tree_map(jnp.copy, arg) if at in program.donated else arg for at, arg in enumerate(args)
        )
        self._program = program

    def __call__(self) -> Any:
        out = self._compiled(*self._args)
        self._args = self._program.following(self._args, out)
        return self._program.value(out)


def _walled(steps: Steps, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = steps()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def race(forms: dict[str, Steps], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by clock (`device` where there is a profiler for it, and `wall`) and form, a sample a round."""
    jax.block_until_ready([steps() for steps in forms.values()])
    names, shuffled = list(forms), random.Random(0)
    calls = {name: min(max(1, math.ceil(TURN / _walled(forms[name], 1))), MOST_STEPS) for name in names}
    found: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in names} for clock in ("device", "wall")}
    profiler = None if jax.default_backend() == "cpu" else ProfilerClock()
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            found["wall"][name].append(_walled(forms[name], calls[name]))
        if profiler is None:
            continue
        turns = [Run(at, forms[name].name, forms[name], (), calls[name]) for at, name in enumerate(names)]
        try:
            seconds = profiler.round(turns)
        except ProfilerUnavailable as error:
            print(f"no device time: {error}", flush=True)
            profiler = None
            continue
        for at, name in enumerate(names):
            if isinstance(seconds[at], Exception):
                raise seconds[at]
            found["device"][name].append(seconds[at])
    return {clock: samples for clock, samples in found.items() if all(samples.values())}


def ratio(over: list[float], under: list[float]) -> tuple[float, float, float]:
    """The median of the rounds' ratios, and the order statistics between which it lies in 95 of 100 cases."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    count = len(ratios)
    place = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return median(ratios), ratios[place], ratios[count - 1 - place]


def spelled(three: tuple[float, float, float]) -> str:
    """`0.982 (0.980 to 0.985)`."""
    return f"{three[0]:.4f} ({three[1]:.4f} to {three[2]:.4f})"


PAIRS = [
    ("heuristics", "plain"),
    ("tuned", "plain"),
    ("tuned", "heuristics"),
    ("tuned", "medians"),
    ("tuned", "tuned before"),
]


def compared(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians in milliseconds and ratios, by clock."""
    return {
        clock: {
            "ms": {name: 1e3 * median(taken) for name, taken in forms.items()},
            "ratios": {
                f"{one} / {other}": ratio(forms[one], forms[other])
                for one, other in PAIRS
                if one in forms and other in forms
            },
        }
        for clock, forms in samples.items()
    }


def show(title: str, found: dict[str, Any]) -> None:
    """The lines of a race."""
    for clock, row in found.items():
        print(f"{title}, {clock}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in row["ms"].items()))
        for name, three in row["ratios"].items():
            print(f"   {name} {spelled(three)}")
    print(end="", flush=True)
