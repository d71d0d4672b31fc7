"""Errors of every way of every operation against float64, beside plain JAX: results and gradients, in each dtype.

A way that is a kernel of JAX's own is compared with that kernel. Without a GPU, Pallas kernels are interpreted where
the tests do so. Exit code 1 where some way is over twice as far off as plain JAX and as rounding makes the exact
result, by the root mean square of its errors, or over four times by the largest.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from library_accuracy_cases import CASES, Case
from library_programs import both_passes, is_float

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor

# By the mean, and by the largest: which element is the worst is luck, and differs by twice from seed to seed.
LIMITS = (2.0, 4.0)
DTYPES = ("float32", "bfloat16", "float16")
# The mean differs by half from one to the next, too.
SEEDS = (0, 1, 2)
INTERPRETED = ("triton", "pallas")


class Asked:
    """A chooser that remembers what it was asked for."""

    def __init__(self) -> None:
        self.selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False))
        self.inv: Any = None
        self.kernel: Any = None

    def choose(self, inv: Any, kernel: Any) -> Any:
        """The heuristic cfg."""
        self.inv, self.kernel = inv, kernel
        return self.selector.choose(inv, kernel)


def refusals(case: Case, arrays: tuple[Any, ...]) -> dict[str, str]:
    """Reasons why ways cannot run this call here; empty for those that can."""
    asked = Asked()
    jax.eval_shape(functools.partial(case.call, executor=Executor(asked)), *arrays)
    found = {}
    for way, cfg in case.ways.items():
        verdict = asked.kernel.valid_cfg(asked.inv, cfg)
        interpreted = cfg.implementation in INTERPRETED and jax.default_backend() == "cpu" and "GPU" in str(verdict)
        # Beside a bias, JAX's kernel for attention is refused on every device.
        lacks = cfg.implementation == "pallas" and "dbias" in case.outputs
        found[way] = (
            "the Pallas kernel has no bias" if lacks else "" if verdict is True or interpreted else str(verdict)
        )
    return found


def exact(program: Callable[..., Any], arrays: tuple[Any, ...], dy: Any) -> list[np.ndarray]:
    """Result and gradients in float64, of the values that the dtype has."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a).astype(np.float64) if is_float(a) else np.asarray(a) for a in (*arrays, dy)]
        return [np.asarray(x) for x in flat(program(*wide))]


def flat(made: Any) -> list[Any]:
    """The result, and then its gradients."""
    return jax.tree_util.tree_leaves(made)


def errors(found: Any, wanted: np.ndarray) -> np.ndarray:
    """The root mean square of the errors over that of what is right, and the largest over the largest."""
    most = float(jnp.finfo(found.dtype).max)
    # What the dtype cannot hold is infinite in every way.
    fits = np.abs(wanted) <= most
    off, right = np.abs(np.asarray(found).astype(np.float64) - wanted)[fits], np.abs(wanted)[fits]
    if not off.any():
        return np.zeros(2)
    if not np.isfinite(off).all() or not right.any():
        return np.array([math.inf, math.inf])
    # Squares of the largest numbers are too large.
    size = float(np.max(right, initial=1e-300))
    mean = math.sqrt(float(np.mean((off / size) ** 2)) / float(np.mean((right / size) ** 2)))
    return np.array([mean, float(np.max(off)) / size])


def floor(wanted: np.ndarray, dtype: Any) -> np.ndarray:
    """The errors that rounding the exact result makes, and at least what it makes of many numbers."""
    half = float(jnp.finfo(dtype).eps) / 2
    if jax.default_backend() == "gpu" and dtype == jnp.float32:
        # Tensor cores add up with fewer bits than float32 has.
        half = 2.0**-19
    # One number may happen to be rounded by nothing; it is a sum in any order.
    least = np.array([0.4 * half, half]) if wanted.size > 1 else np.array([2 * half, 2 * half])
    return np.maximum(errors(narrowed(wanted, dtype), wanted), least)


def narrowed(values: Any, dtype: Any) -> np.ndarray:
    """Narrows on the host as JAX does, which compiles a program for each shape. Values too large become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(dtype)


def compiled(fn: Callable[..., Any], case: Case, arrays: tuple[Any, ...]) -> Callable[..., Any]:
    """Both passes as one program."""
    program = both_passes(fn, arrays)
    # JAX's attention in float16 asks for a product that no CPU's compiler has, and falls back where it is not jitted.
    halves = case.operation == "attention" and arrays[0].dtype == jnp.float16 and jax.default_backend() == "cpu"
    return program if halves and fn is case.plain else jax.jit(program)


def study(case: Case, dtype: str) -> Iterator[dict[str, Any]]:
    """A row for each way and kind of values, with its worst output; or one that says why there is none."""
    programs: dict[str, Callable[..., Any]] = {}
    executor: Executor[Any, Any] = Executor(Asked().selector)
    drawn = [case.values(np.random.default_rng(seed)) for seed in SEEDS]
    for kind in drawn[0]:
        calls = [_call(case, dtype, *values[kind]) for values in drawn]
        arrays = calls[0][0]
        if not programs:
            right = jax.jit(both_passes(case.exact, arrays))
            programs["plain"] = compiled(case.plain, case, arrays)
            for way, reason in refusals(case, arrays).items():
                if reason:
                    yield {"way": way, "dtype": dtype, "skipped": reason}
                    continue
                ours = functools.partial(case.call, cfg=case.ways[way], executor=executor)
                programs[way] = compiled(ours, case, arrays)
                if way in case.ready:
                    programs[f"JAX's {way}"] = compiled(case.ready[way], case, arrays)
        # Of each output, over the seeds.
        wanted = list(zip(*(exact(right, *call) for call in calls), strict=True))
        made = {
            name: list(zip(*(flat(program(*arrays, dy)) for arrays, dy in calls), strict=True))
            for name, program in programs.items()
        }
        for way in case.ways:
            if way in made:
                beside = made.get(f"JAX's {way}", made["plain"])
                parts = zip(case.outputs, made[way], beside, wanted, strict=True)
                rows = [compare(*part) | {"way": way, "dtype": dtype, "values": kind} for part in parts]
                yield max(rows, key=lambda row: max(r / limit for r, limit in zip(row["ratio"], LIMITS, strict=True)))


def _call(case: Case, dtype: str, given: Any, pulled: Any) -> tuple[tuple[Any, ...], Any]:
    arrays = tuple(jnp.asarray(narrowed(a, dtype) if a.dtype.kind == "f" else a) for a in given)
    return arrays, jnp.asarray(narrowed(pulled, jax.eval_shape(case.plain, *arrays).dtype))


def compare(output: str, found: Any, beside: Any, wanted: Any) -> dict[str, Any]:
    """One output's errors over the seeds, and how many times those of plain JAX they are."""
    mine, plain = (_over_seeds(map(errors, made, wanted)) for made in (found, beside))
    over = np.maximum(plain, _over_seeds(floor(right, found[0].dtype) for right in wanted))
    # Infinite beside infinite is as far off.
    ratio = [1.0 if m == o else float(m / o) for m, o in zip(mine, over, strict=True)]
    return {"output": output, "error": mine.tolist(), "plain": plain.tolist(), "ratio": ratio}


def _over_seeds(each: Iterable[np.ndarray]) -> np.ndarray:
    return np.sqrt(np.mean(np.square(list(each)), axis=0))


def is_over(row: dict[str, Any]) -> bool:
    """Is a way too far off?"""
    return any(ratio > limit for ratio, limit in zip(row.get("ratio", ()), LIMITS, strict=False))


def main() -> int:
    """Prints a line for each operation, way and dtype; 1 where one is too far off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted({case.operation for case in CASES}), help="operations")
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--json", help="where to write everything")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print(f"{'case':<36}{'way':<16}{'dtype':<10}{'error':>9}{'plain':>9}{'times':>7}{'most':>7}  worst", flush=True)
    every, over = [], 0
    for case in (case for case in CASES if not options.only or case.operation in options.only):
        title = f"{case.operation} {case.name}"
        for dtype in options.dtypes:
            rows = [{"operation": case.operation, "case": case.name} | row for row in study(case, dtype)]
            every += rows
            for way in case.ways:
                mine = [row for row in rows if row["way"] == way]
                if "skipped" in mine[0]:
                    print(f"{title:<36}{way:<16}{dtype:<10}skipped: {mine[0]['skipped']}")
                    continue
                worst = max(mine, key=lambda row: (is_over(row), row["ratio"][0]))
                over += is_over(worst)
                figures = f"{worst['error'][0]:>9.1e}{worst['plain'][0]:>9.1e}{worst['ratio'][0]:>7.2f}"
                most = max(row["ratio"][1] for row in mine)
                where = f"{worst['values']}: {worst['output']}{'  OVER' if is_over(worst) else ''}"
                print(f"{title:<36}{way:<16}{dtype:<10}{figures}{most:>7.2f}  {where}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(every, indent=1), encoding="utf-8")
    print(f"over the limit: {over}" if over else "no way is over the limit")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
