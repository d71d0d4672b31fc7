"""Operations that JAX has no fast way for: device time of every way beside plain JAX and the floor, and errors.

Each operation runs in a process of its own, so that a crash or a hang costs that operation alone; a line is printed for
each case as it is done. `--small` runs small cases by the host's clock, for machines without a GPU; `--ways mosaic`
runs plain JAX, the heuristic choice and the ways that start so; `--cases 2` the first two calls of an operation.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# Seconds of all operations together, and the most that one of them may take.
ALL, EACH = 245.0, 55.0
NAMES = (
    *("top_k", "residual_norm", "decode_attention", "quantized_matmul", "scaled_matmul", "gated_delta_rule", "moe"),
    "sample",
)


def compiled(name: str, fn: Any, arrays: Any) -> Any:
    """The way as a program with a name of its own, by which a profile knows it; or why it cannot run."""
    import jax

    def named(*given: Any) -> Any:
        return fn(*given)

    named.__name__ = named.__qualname__ = name
    try:
        return jax.jit(named).lower(*arrays)
    # Whatever a way raises is its result here.
    except Exception as error:
        return error


def finished(lowered: Any) -> Any:
    """The compiled program, or why there is none."""
    if isinstance(lowered, Exception):
        return lowered
    try:
        return lowered.compile()
    except Exception as error:
        return error


def off(found: Any, right: Any) -> float:
    """The largest root mean square of a result's errors over its own; for integers the share that differs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def squares(one: Any, other: Any) -> Any:
        near, far = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.sqrt(jnp.mean((near - far) ** 2) / jnp.maximum(jnp.mean(far**2), 1e-30))

    worst = 0.0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        if one.dtype == jax.dtypes.float0:
            continue
        compare = squares if jnp.issubdtype(one.dtype, jnp.floating) else lambda a, b: jnp.mean(a != b)
        # Of numpy's, since it keeps NaN.
        worst = float(np.maximum(worst, jax.jit(compare)(one, other)))
    return worst


def timed(programs: dict[int, Any], arrays: Any, tag: str, seconds: float) -> dict[int, float]:
    """Median seconds of each over interleaved rounds: by the device's clock, else by the host's."""
    import jax

    from ejkernel.ops.timing.clock import Run
    from ejkernel.ops.timing.profiler import ProfilerClock

    samples: dict[int, list[float]] = {number: [] for number in programs}
    end, rounds, shuffled = time.perf_counter() + seconds, 0, random.Random(0)
    while rounds < 2 or (time.perf_counter() < end and rounds < 12):
        rounds += 1
        order = list(programs)
        shuffled.shuffle(order)
        if jax.default_backend() == "gpu":
            runs = [Run(n, f"{tag}_{n}", programs[n], arrays, 3) for n in order]
            for number, found in ProfilerClock().round(runs).items():
                if not isinstance(found, Exception):
                    samples[number].append(found)
            continue
        for number in order:
            start = time.perf_counter()
            jax.block_until_ready(programs[number](*arrays))
            samples[number].append(time.perf_counter() - start)
    return {number: median(found) for number, found in samples.items() if found}


def study(case: Any, number: int, ways: list[str]) -> str:
    """The line of a case; of the ways only those that start with one of these words, where there are any."""
    import jax

    tag = f"case{number}"
    kept = ("plain", *ways)
    names = [name for name in case.ways if not ways or name.startswith(kept) or name.endswith("*")]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        waiting = [
            pool.submit(finished, compiled(f"{tag}_{at}", case.ways[name], case.arrays))
            for at, name in enumerate(names)
        ]
        wanted = finished(compiled(f"{tag}_exact", case.exact, case.arrays))
        made = [one.result() for one in waiting]
    right = None if isinstance(wanted, Exception) else wanted(*case.arrays)
    programs, errors, words = {}, {}, {}
    for at, program in enumerate(made):
        try:
            if isinstance(program, Exception):
                raise program
            out = jax.block_until_ready(program(*case.arrays))
            errors[at] = float("nan") if right is None else off(out, right)
            programs[at] = program
        except Exception as error:
            words[at] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90] if str(error) else ''}"
    seconds = timed(programs, case.arrays, tag, 1.5)
    parts = [f"floor {case.floor * 1e6:.1f}"]
    parts += [f"{names[at]} {seconds[at] * 1e6:.1f} (off {errors[at]:.1e})" for at in programs if at in seconds]
    parts += [f"{names[at]} FAILED {word}" for at, word in words.items()]
    if right is None:
        parts.append(f"no exact result: {wanted}"[:120])
    return f"{case.name}: " + "; ".join(parts)


def one_operation(name: str, small: bool, ways: list[str], most: int) -> int:
    """Waits for its turn, and prints a line for each case."""
    import jax

    import ejkernel.library  # noqa: F401
    from ejkernel.ops import default_executor  # noqa: F401

    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdin.readline()
    from new_ops_cases import OPERATIONS

    start = time.perf_counter()
    cases = OPERATIONS[name](small)
    number = 0
    while number < most:
        try:
            case = next(cases)
            print(study(case, number, ways), flush=True)
        except StopIteration:
            break
        except Exception as error:
            print(f"{name}, case {number}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        number += 1
        jax.clear_caches()
    print(f"   {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def main() -> int:
    """Runs the operations one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="operations")
    parser.add_argument("--small", action="store_true", help="small cases, by the host's clock")
    parser.add_argument(
        "--ways", nargs="*", default=[], help="first words of ways, beside plain JAX and the heuristic's"
    )
    parser.add_argument("--cases", type=int, default=99, help="so many calls of each operation, the first ones")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=ALL, help="of all operations together")
    options = parser.parse_args()
    if options.one:
        return one_operation(options.one, options.small, options.ways, options.cases)
    # Names alone: this process must not hold the device.
    names = options.only or list(NAMES)
    start = time.perf_counter()
    command = [sys.executable, __file__, *(["--small"] if options.small else []), "--cases", str(options.cases)]
    command += ["--ways", *options.ways, "--one"]
    # All of them start at once, so that imports take no time of those that come later; each waits for its turn.
    children = {name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, text=True) for name in names}
    print("us of device time; * is the heuristic choice; off is the error's RMS over the result's", flush=True)
    for at, (name, child) in enumerate(children.items()):
        left = options.seconds - (time.perf_counter() - start)
        try:
            share = max(min(EACH, left - 5 * (len(children) - at - 1)), 1.0)
            child.communicate("go\n", timeout=share)
            if child.returncode:
                print(f"   {name}: the process ended with status {child.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"   {name}: stopped after {share:.0f} s", flush=True)
    print(f"all in {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
