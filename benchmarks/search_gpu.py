"""A matmul with thousands of configs on a GPU, searched with the `default` effort against measuring them all.

The search runs first, several times with other seeds; then every valid config is compiled in threads, with a deadline,
and profiled. The picks and the best of the exhaustive profile are raced again over fresh interleaved rounds. Exit code
1 where a pick is more than 3% off the best, or takes more than a tenth of the exhaustive time. `--dry` runs the whole
script on a CPU with a small made-up space, and judges nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import Subject, arrays, call

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Tuner
from ejkernel.ops.core.bind import bind
from ejkernel.ops.timing.clock import Run, WallClock, in_turns
from ejkernel.ops.timing.compile_pool import compile_all
from ejkernel.ops.timing.profiler import ProfilerClock, ProfilerUnavailable

# Limits: off the best, and of the exhaustive time.
OFF, SHARE = 0.03, 0.1
# What an H200 has: bytes of shared memory for a block, and accumulators that a thread can hold without spilling.
SHARED, ACCUMULATORS = 227 * 1024, 128
# Programs and rounds in one trace, rounds of the exhaustive profile, rounds of the last race and how many take part.
CHUNK, A_TRACE, ROUNDS, LAST_ROUNDS, LAST = 64, 4, 4, 40, 8


@dataclass(frozen=True)
class Tiling:
    """Blocks, launch parameters and the order of the blocks of a matmul."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int


class LargeMatmul(Subject):
    """A matmul that visits blocks in groups of rows, so that neighbours share columns."""

    op_id = "bench.large_matmul"
    cfg_type = Tiling

    def run(self, a, b, *, cfg):
        m, k = a.shape
        n = b.shape[1]

        def kernel(a_ref, b_ref, o_ref):
            def step(i, total):
                part = pl.ds(i * cfg.k, cfg.k)
                return total + jnp.dot(a_ref[:, part], b_ref[part, :], preferred_element_type=jnp.float32)

            total = jax.lax.fori_loop(0, k // cfg.k, step, jnp.zeros((cfg.m, cfg.n), jnp.float32))
            o_ref[...] = total.astype(o_ref.dtype)

        return call(
            kernel,
            jax.ShapeDtypeStruct((m, n), a.dtype),
            (m // (cfg.m * cfg.group), n // cfg.n, cfg.group),
            [
                pl.BlockSpec((cfg.m, k), lambda g, j, r: (g * cfg.group + r, 0)),
                pl.BlockSpec((k, cfg.n), lambda g, j, r: (0, j)),
            ],
            pl.BlockSpec((cfg.m, cfg.n), lambda g, j, r: (g * cfg.group + r, j)),
            cfg.warps,
            cfg.stages,
            self.interpret,
        )(a, b)

    def heuristic_cfg(self, inv):
        return Tiling(64, 64, 32, 4, 2, 1)

    def candidate_cfgs(self, inv):
        blocks = (32, 64, 128, 256)
        every = itertools.product(blocks, blocks, (16, 32, 64, 128), (2, 4, 8, 16), (1, 2, 3, 4, 5, 6), (1, 2, 4, 8))
        return [Tiling(*values) for values in every]

    def valid_cfg(self, inv, cfg):
        (m, k), n = inv.args[0].shape, inv.args[1].shape[1]
        if m % (cfg.m * cfg.group) or n % cfg.n or k % cfg.k:
            return "the blocks do not divide the arrays"
        if cfg.stages > 1 and 2 * cfg.stages * cfg.k * (cfg.m + cfg.n) > SHARED:
            return "the stages do not fit into shared memory"
        held = cfg.m * cfg.n / (32 * cfg.warps)
        return (8 <= held <= ACCUMULATORS) or "too many or too few accumulators for a thread"


class Pretend(Subject):
    """A small space for `--dry`: sums, in more steps than needed."""

    op_id = "bench.pretend"

    def run(self, a, b, *, cfg):
        for _ in range(cfg["steps"]):
            a = jnp.tanh(a @ b) * 1e-3 + a
        # A trace of each config, so that no two programs are equal; too small to be seen by the check.
        return a * 0 + b + 1e-9 * (cfg["block"] * 7 + cfg["order"])

    def heuristic_cfg(self, inv):
        return {"steps": 3, "block": 1, "order": 0}

    def candidate_cfgs(self, inv):
        every = itertools.product((1, 2, 3, 4), (1, 2, 4, 8), (0, 1, 2))
        return [{"steps": s, "block": b, "order": o} for s, b, o in every]

    def valid_cfg(self, inv, cfg):
        return cfg["order"] < 2 or cfg["block"] > 1 or "an invalid one"


@dataclass
class Exhaustive:
    """Every valid config: seconds of those that ran, and what became of the others."""

    programs: dict[int, Any]
    seconds: dict[int, float]
    failures: Counter[str]
    compile_s: float
    profile_s: float


def space_of(kernel: Any, inv: Invocation) -> list[Any]:
    """The heuristic cfg and every valid candidate."""
    offered = [kernel.heuristic_cfg(inv), *kernel.candidate_cfgs(inv)]
    valid = [cfg for cfg in offered if kernel.valid_cfg(inv, cfg) is True]
    return [cfg for place, cfg in enumerate(valid) if cfg not in valid[:1] or place == 0]


def build(kernel: Any, inv: Invocation, cfg: Any, number: int) -> Any:
    """One candidate, compiled under a name that a trace tells it by."""
    fn = bind(kernel, cfg, inv, jax.default_backend())

    def named(*args: Any) -> Any:
        return fn(*args)

    named.__name__ = named.__qualname__ = f"all_{number}"
    return jax.jit(named).trace(*inv.args).lower().compile()


def compiled(kernel: Any, inv: Invocation, cfgs: Sequence[Any], seconds: float) -> tuple[dict[int, Any], Counter[str]]:
    """Every candidate that compiles in time, and why the others did not."""
    jobs = [(n, functools.partial(build, kernel, inv, cfg, n)) for n, cfg in enumerate(cfgs)]
    # Should the time be up before the end, what was compiled is a fair sample.
    random.Random(0).shuffle(jobs)
    programs, failures = {}, Counter[str]()
    for built in compile_all(jobs, workers=16, deadline=time.perf_counter() + seconds):
        if built.failed:
            failures[f"compile: {str(built.outcome).splitlines()[0][:100]}"] += 1
        else:
            programs[built.number] = built.outcome
    late = len(cfgs) - len(programs) - sum(failures.values())
    failures.update({"not compiled in time": late} if late else {})
    return programs, failures


def raced(programs: dict[int, Any], args: Any, rounds: int, failures: Counter[str]) -> dict[int, float]:
    """Median seconds of each over interleaved rounds in shuffled order; those that raise are left out."""
    gpu = jax.default_backend() == "gpu"
    profiler, shuffled = ProfilerClock(), random.Random(0)
    samples: dict[int, list[float]] = {}
    for number, program in programs.items():
        try:
            jax.block_until_ready(program(*args))
            samples[number] = []
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            failures[f"run: {str(error).splitlines()[0][:100]}"] += 1
    for first in range(0, rounds, A_TRACE):
        orders = [shuffled.sample(sorted(samples), len(samples)) for _ in range(min(A_TRACE, rounds - first))]
        schedule = [[Run(n, f"all_{n}", programs[n], args) for n in order] for order in orders]
        try:
            found = profiler.rounds(schedule) if gpu else [in_turns(WallClock(), runs) for runs in schedule]
        # A trace that lost events costs its rounds.
        except ProfilerUnavailable as error:
            failures[f"trace: {error}"] += 1
            continue
        for number, seconds in (pair for row in found for pair in row.items()):
            if not isinstance(seconds, Exception):
                samples[number].append(seconds)
    return {number: median(found) for number, found in samples.items() if found}


def exhaustive(kernel: Any, inv: Invocation, cfgs: Sequence[Any], seconds: float) -> Exhaustive:
    """Compiles and profiles everything."""
    start = time.perf_counter()
    programs, failures = compiled(kernel, inv, cfgs, seconds)
    compile_s = time.perf_counter() - start
    numbers, times = list(programs), {}
    for first in range(0, len(numbers), CHUNK):
        chunk = {n: programs[n] for n in numbers[first : first + CHUNK]}
        times.update(raced(chunk, inv.args, ROUNDS, failures))
    return Exhaustive(programs, times, failures, compile_s, time.perf_counter() - start - compile_s)


def searched(kernel: Any, inv: Invocation, seed: int, effort: str, worker: bool) -> dict[str, Any]:
    """One search from cold: its pick, what it took, and its record in a few figures."""
    jax.clear_caches()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(seed=seed, effort=effort, isolate=worker))
    start = time.perf_counter()
    decision = selector.decide(inv, kernel)
    seconds = time.perf_counter() - start
    record = decision.record
    return {
        "pick": decision.cfg,
        "seconds": seconds,
        "evaluations": sum(trial.status != "invalid" for trial in record.trials),
        "failed": Counter(t.status for t in record.failures),
        "clock": record.clock,
        "gain": record.gain,
        "stop": record.stop,
    }


def study(kernel: Any, args: Any, *, effort: str, repeats: int, compile_seconds: float, worker: bool) -> dict[str, Any]:
    """Searches, the exhaustive profile, and the last race between their best."""
    inv = Invocation(kernel.op_id, args, {})
    cfgs = space_of(kernel, inv)
    print(f"{kernel.op_id}: {len(cfgs):,} valid configs", flush=True)
    # The first compilation of a process pays for what all others find ready.
    jax.block_until_ready(jax.jit(bind(kernel, cfgs[0], inv, jax.default_backend()))(*args))
    searches = [searched(kernel, inv, seed, effort, worker) for seed in range(repeats)]
    for found in searches:
        print(
            f"  {effort}: {found['evaluations']} evaluations in {found['seconds']:.1f} s, {found['pick']}", flush=True
        )
    jax.clear_caches()
    every = exhaustive(kernel, inv, cfgs, compile_seconds)
    taken = every.compile_s + every.profile_s
    print(f"  exhaustive: {len(every.seconds):,} ran in {every.compile_s:.1f} + {every.profile_s:.1f} s", flush=True)
    best = sorted(every.seconds, key=every.seconds.__getitem__)
    last = {*best[:LAST], *(cfgs.index(found["pick"]) for found in searches)}
    for number in last - every.programs.keys():
        # A pick that the exhaustive pass had no time for.
        every.programs[number] = build(kernel, inv, cfgs[number], number)
    final = raced({n: every.programs[n] for n in sorted(last)}, args, LAST_ROUNDS, every.failures)
    fastest = min(final, key=final.__getitem__)
    for found in searches:
        place = cfgs.index(found["pick"])
        found["off"] = final[place] / final[fastest] - 1
        found["share"] = found["seconds"] / taken
        found["pick"] = _plain(found["pick"])
    times = sorted(every.seconds.values())
    return {
        "kernel": kernel.op_id,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "configs": len(cfgs),
        "ran": len(times),
        "failures": every.failures,
        "us": {"best": times[0] * 1e6, "median": median(times) * 1e6, "worst": times[-1] * 1e6},
        "exhaustive": {"compile_s": every.compile_s, "profile_s": every.profile_s, "best": _plain(cfgs[fastest])},
        "searches": searches,
    }


def _plain(cfg: Any) -> Any:
    return cfg if isinstance(cfg, dict) else asdict(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what came out; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrices")
    parser.add_argument("--repeats", type=int, default=3, help="searches, each with another seed")
    parser.add_argument("--compile-seconds", type=float, default=270.0, help="deadline of the exhaustive compilation")
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    parser.add_argument("--worker", action="store_true", help="candidates of the searches run in a worker process")
    parser.add_argument("--dry", action="store_true", help="a small made-up space on whatever device there is")
    options = parser.parse_args(argv)
    if not options.dry and jax.default_backend() != "gpu":
        print("this benchmark needs a GPU; nothing was measured (--dry tries the script)")
        return 0
    warnings.simplefilter("ignore")
    kernel, size = (Pretend(), 16) if options.dry else (LargeMatmul(), options.size)
    args = arrays((size, size), (size, size), dtype=jnp.float32 if options.dry else jnp.bfloat16)
    effort = "quick" if options.dry else "default"
    found = study(
        kernel,
        args,
        effort=effort,
        repeats=options.repeats,
        compile_seconds=options.compile_seconds,
        worker=options.worker,
    )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    us = found["us"]
    print(f"jax {found['jax']} on {found['device']}: {us['best']:.1f} / {us['median']:.1f} / {us['worst']:.0f} us")
    broken = 0
    for row in found["searches"]:
        bad = row["off"] > OFF or row["share"] > SHARE
        broken += bad
        print(f"  {row['off']:+.1%} off in {row['share']:.1%} of the exhaustive time{'  LIMIT BROKEN' if bad else ''}")
    for reason, count in found["failures"].most_common(5):
        print(f"  {count} x {reason}")
    if options.dry:
        print("dry run: nothing is judged")
        return 0
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
