"""Checks every candidate of every operation on a GPU against float64, values and gradients.

The reference is the plain computation on the host in float64. Exit code 1 where a candidate that can run is wrong, or
where none but XLA's can.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from library_cases import Case, collected, make, operations
from library_programs import both_passes, compiled, cotangent, is_float

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.core.request import ask, candidates

# Largest error over the reference's largest value. Tensor cores round float32 to 10 bits.
LIMITS = {"float32": 5e-3, "bfloat16": 3e-2, "float16": 8e-3}


class Asked:
    """A chooser that remembers what it was asked for."""

    def __init__(self) -> None:
        self.inv: Any = None
        self.kernel: Any = None

    def choose(self, inv: Any, kernel: Any) -> Any:
        self.inv, self.kernel = inv, kernel
        selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False))
        return selector.choose(inv, kernel)


def exact(plain: Callable[..., Any], arrays: tuple[Any, ...], dy: Any) -> list[np.ndarray]:
    """Result and gradients in float64, on the host."""
    host = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(host):
        given = [np.asarray(a).astype(np.float64) if is_float(a) else np.asarray(a) for a in (*arrays, dy)]
        out = jax.jit(both_passes(plain, arrays))(*(jax.device_put(a, host) for a in given))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree_util.tree_leaves(out)]


def error_of(found: Any, wanted: list[np.ndarray]) -> float:
    """The largest error of result and gradients, each over its largest value."""
    worst = 0.0
    for got, want in zip(jax.tree_util.tree_leaves(found), wanted, strict=True):
        off = np.max(np.abs(np.asarray(got).astype(np.float64) - want), initial=0.0)
        worst = max(worst, float(off) / max(float(np.max(np.abs(want), initial=0.0)), 1e-30))
        if not np.isfinite(np.asarray(got).astype(np.float64)).all():
            return float("inf")
    return worst


def check(case: Case, number: int, workers: int) -> list[dict[str, Any]]:
    """Outcomes of all candidates."""
    arrays, static = make(case)
    plain, asked = functools.partial(case.plain, **static), Asked()
    dy = cotangent(plain, arrays)
    Executor(asked)(case.kernel(), *arrays, **static)
    cfgs = list(dict.fromkeys(candidates(ask(asked.inv, asked.kernel, "forward"))))
    wanted = exact(plain, arrays, dy)
    # By the narrowest that goes in: a loss in float32 of narrow values has their gradients.
    limit = max(LIMITS[str(a.dtype)] for a in arrays if is_float(a))
    executor = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))

    def build(at: int) -> Any:
        def run(*given: Any) -> Any:
            return executor(case.kernel(), *given, cfg=cfgs[at], **static)

        return compiled(f"check{number}_{at}", both_passes(run, arrays), (*arrays, dy))

    rows = []
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(build, at) for at in range(len(cfgs))]
        for cfg, future in zip(cfgs, futures, strict=True):
            row = {"operation": case.op, "case": case.name, "cfg": str(cfg), "error": None, "reason": ""}
            try:
                row["error"] = error_of(jax.block_until_ready(future.result()(*arrays, dy)), wanted)
                row["status"] = "ok" if row["error"] <= limit else "wrong"
            # A candidate that cannot run is told with its reason; tuning leaves it out as well.
            except Exception as error:
                row["status"], row["reason"] = "failed", f"{type(error).__name__}: {str(error)[:200]}"
            rows.append(row)
    return rows


def main() -> int:
    """Prints a line for each case; 1 where a candidate is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=operations("check"), help="operations")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--anywhere", action="store_true", help="also without a GPU, with that machine's candidates")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.anywhere:
        print("this check needs a GPU; nothing was run")
        return 0
    warnings.simplefilter("ignore")
    print(f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    every, bad = [], 0
    for number, case in enumerate(collected("check", options.only)):
        rows = check(case, number, workers=16 if jax.default_backend() == "gpu" else 2)
        every += rows
        wrong = [row for row in rows if row["status"] == "wrong"]
        failed = [row for row in rows if row["status"] == "failed"]
        ran = [row["error"] for row in rows if row["error"] is not None]
        nothing = len(ran) < min(len(rows), 2)
        bad += bool(wrong) or nothing
        worst = f"worst error {max(ran):.2g}" if ran else "nothing ran"
        print(f"{case.op} {case.name}: {len(rows)} candidates, {len(failed)} failed, {worst}")
        for row in (*wrong, *failed[:2]):
            print(f"   {row['status']}: {row['cfg']} {row['error'] or ''} {row['reason']}")
        print("   WRONG" if wrong else "   NOTHING BUT ONE RAN" if nothing else "   ok", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(every, indent=1), encoding="utf-8")
    print(f"cases with something wrong: {bad}" if bad else f"all {len(every)} candidates that run are right")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
