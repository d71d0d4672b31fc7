"""Mosaic ways on a Hopper GPU: each against plain JAX in float32, and its device time beside the others.

One process an operation. A line a case: the error of the worst launch, the device time of every way over interleaved
rounds, the floor. A way that fails prints the first lines of its error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from library_programs import both_passes, cotangent, lowered
from mosaic_gpu_cases import CASES, MosaicCase
from tuning_gpu import raced

# Largest error over the largest value, for values of bfloat16 and products of them.
LIMIT = 3e-2
FLOPS, TRAFFIC = 790e12, 4.3e12
ROUNDS = 12


def programs_of(case: MosaicCase) -> dict[str, Callable[..., Any]]:
    """Every way by its name: plain JAX, the Triton way of the heuristic, and the Mosaic launches."""
    kernel = case.kernel()

    def by(cfg: Any) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            if case.backward and hasattr(kernel, "fwd_with_residuals") and case.own_gradient:
                *given, dy = arrays
                out, kept = kernel.fwd_with_residuals(*given, cfg=cfg, **case.static)
                return out, [g for g in kernel.vjp(kept, out, dy, *given, cfg=cfg, **case.static) if g is not None]
            return kernel.run(*arrays, cfg=cfg, **case.static)

        return run

    return {short(cfg): by(cfg) for cfg in case.cfgs}


def short(cfg: Any) -> str:
    """The cfg's name and numbers."""
    given = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    numbers = [f"{name}={value}" for name, value in given.items() if value is not None and name != "implementation"]
    return f"{cfg.implementation}({','.join(numbers)})" if numbers else str(cfg.implementation)


@jax.jit
def distances(found: list[Any], wanted: list[Any]) -> list[Any]:
    """The largest error of each array over its largest value, computed where the arrays are."""
    pairs = zip(found, wanted, strict=True)
    return [jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30) for a, b in pairs]


def told(error: Exception) -> str:
    """The first lines of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:4])[:400]}"


def study(case: MosaicCase, number: int) -> bool:
    """Prints the lines of a case; False where a Mosaic way fails or is wrong."""
    arrays = tuple(jnp.asarray(a) for a in case.make(np.random.default_rng(0)))
    plain: Callable[..., Any] = case.plain
    ways = programs_of(case)
    if case.backward:
        dy = cotangent(plain, arrays)
        if not case.own_gradient:
            ways = {name: both_passes(fn, arrays) for name, fn in ways.items()}
        plain = both_passes(plain, arrays)
        arrays = (*arrays, dy)
    wide = [a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arrays]
    with jax.default_matmul_precision("highest"):
        wanted = jax.tree.leaves(jax.jit(plain)(*wide))
    del wide
    built, names, good = {}, {}, True
    print(f"{case.name}: floor {max(case.flops / FLOPS, case.bytes / TRAFFIC) * 1e6:.1f} us", flush=True)
    for at, (name, fn) in enumerate({"plain": plain, **ways}.items()):
        start = time.perf_counter()
        try:
            made = lowered(f"case{number}_{at}", fn, arrays).compile()
            off = max(float(one) for one in distances(jax.tree.leaves(made(*arrays)), wanted))
        except Exception as error:
            good = False
            print(f"   FAILED {name}: {told(error)}", flush=True)
            continue
        if not off <= LIMIT:
            good = False
            print(f"   WRONG {name}: off by {off:.3g} of the largest value", flush=True)
            continue
        built[at], names[at] = made, f"{name} [{off:.1e}, {time.perf_counter() - start:.1f} s]"
    try:
        times = raced(built, arrays, f"case{number}", rounds=ROUNDS)
    except Exception as error:
        print(f"   not timed: {told(error)}", flush=True)
        return False
    for at in sorted(times, key=times.__getitem__):
        print(f"   {times[at] * 1e6:9.1f} us  {names[at]}", flush=True)
    return good


def main() -> int:
    """Runs each operation in a process of its own; 1 where a Mosaic way failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="operations")
    parser.add_argument("--here", help="one operation, in this process")
    parser.add_argument("--seconds", type=float, default=195.0, help="most that all operations may take together")
    options = parser.parse_args()
    if options.here is None:
        status, end = 0, time.monotonic() + options.seconds
        for name in options.only or CASES:
            command = [sys.executable, __file__, "--here", name]
            try:
                left = max(end - time.monotonic(), 1.0)
                status |= subprocess.run(command, timeout=left, check=False).returncode
            except subprocess.TimeoutExpired:
                print(f"{name}: cut off after {options.seconds:.0f} s in all; run it with --only", flush=True)
                status = 1
        return int(status != 0)
    warnings.simplefilter("ignore")
    if jax.default_backend() != "gpu":
        print("this benchmark needs a GPU; nothing was measured")
        return 0
    print(f"== {options.here}, jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    good = True
    for number, case in enumerate(CASES[options.here]()):
        good = study(case, number) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
