"""A tuning's work on each call of a program: the candidates, their outcomes, and how far off the pick is."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from statistics import median
from typing import Any

import jax
import numpy as np
from library_programs import both_passes, compiled, cotangent
from tuning_gpu import raced

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.core.kernel import variant
from ejkernel.ops.programs.find import find

# Shown in words below, or too long for a line.
_TOLD = {"key", "kernel", "environment", "trials", "winner", "heuristic", "runner_up", "gain", "tied", "seed"}
THREADS, TOP, ROUNDS = 16, 5, 30


def told(entry: Any) -> dict[str, Any]:
    """An entry's figures."""
    record = entry.record
    row: dict[str, Any] = {
        "operation": entry.op_id_v,
        "call": entry.call_key,
        "runs": entry.count,
        "cfg": repr(entry.cfg),
        "source": entry.source,
        "note": entry.note,
        "measured": record is not None and _measured(record),
    }
    if record is None:
        return row | {"offered": 1, "raced": 1}
    # What the kernel itself rules out is no candidate.
    trials = [t for t in record.trials if t.status != "invalid"]
    failed = Counter(t.status for t in trials if t.status != "ok")
    first = {status: next(t for t in trials if t.status == status) for status in failed}
    return row | {
        "offered": len(trials),
        "compiled": sum(t.compile_s is not None for t in trials),
        "checked": sum(t.error is not None or t.status == "wrong" for t in trials),
        "raced": sum(bool(t.samples_s) for t in trials),
        "failed": dict(failed),
        "first_failures": {status: f"{t.cfg}: {t.message}"[:300] for status, t in first.items()},
        "compile_s": sum(t.compile_s or 0.0 for t in trials),
        "seconds": None if record.winner is None else record.trials[record.winner].seconds,
        "gain": record.gain,
        # A record may learn to say where time went: whatever it holds besides is shown.
        "more": {f.name: getattr(record, f.name) for f in fields(record) if f.name not in _TOLD},
    }


def _measured(record: Any) -> bool:
    """Has the winner been timed, and the heuristic cfg too, unless it cannot be used?"""
    if record.winner is None or not record.trials[record.winner].samples_s:
        return False
    guess = None if record.heuristic is None else record.trials[record.heuristic]
    return guess is None or bool(guess.samples_s) or guess.status in ("compile", "memory", "runtime", "wrong", "crash")


def passed_over(call: Any) -> dict[str, Any]:
    """The figures of a call that had no turn."""
    offered = len(candidates(call.kernel, call.inv))
    row = {"operation": call.key.op_id, "call": call.key.call_key, "runs": call.count, "measured": False}
    return row | {"cfg": "", "source": "", "note": "it had no turn", "offered": offered, "raced": 0}


def show(row: dict[str, Any]) -> None:
    """The lines of a call."""
    print(f"{row['operation']} {row['call']}, {row['runs']} times a step: {row['cfg']} from {row['source'] or '-'}")
    if "compiled" not in row:
        print(f"   nothing was measured: {row['note']}", flush=True)
        return
    counts = ", ".join(f"{row[name]} {name}" for name in ("offered", "compiled", "checked", "raced"))
    lost = ", ".join(f"{count} {status}" for status, count in row["failed"].items())
    print(f"   {counts}{'; ' + lost if lost else ''}{'' if row['measured'] else '; NOT MEASURED ' + row['note']}")
    gain = "no gain known" if row["gain"] is None else "gain {:.3f} ({:.3f} to {:.3f})".format(*row["gain"])
    taken = "no time" if row["seconds"] is None else f"{1e6 * row['seconds']:.1f} us"
    print(f"   {taken}, {gain}; compilers took {row['compile_s']:.1f} s together")
    print("   " + ", ".join(f"{name} {_short(value)}" for name, value in row["more"].items() if value is not None))
    for status, why in row["first_failures"].items():
        print(f"   first {status}: {why}")
    print(end="", flush=True)


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def calls_of(step: Any, args: tuple[Any, ...]) -> dict[tuple[str, str], Any]:
    """The kernel calls of a step by operation and call key, with their kernels."""
    return {(call.key.op_id, call.key.call_key): call for call in find(step, args, {}).calls}


def candidates(kernel: Any, inv: Any, platform: str | None = None) -> list[Any]:
    """All that the kernel offers for the call, on this process's platform unless another one is named."""
    platform = platform or jax.default_backend()
    offered = variant(kernel, "candidate_cfgs", platform=platform, method=inv.method)(inv)
    first = variant(kernel, "heuristic_cfg", platform=platform, method=inv.method)(inv)
    return [cfg for cfg in dict.fromkeys([first, *offered]) if kernel.valid_cfg(inv, cfg) is True]


def inputs(kernel: Any, inv: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays for a call, by the kernel's own example where it has one."""
    rng = np.random.default_rng(0)
    args, kwargs = inv.args, dict(inv.kwargs)
    if not getattr(type(kernel).example_inputs, "_is_absent", False):
        args, kwargs = kernel.example_inputs(inv, rng)

    def drawn(leaf: Any) -> Any:
        if isinstance(leaf, (jax.Array, np.ndarray)) or not hasattr(leaf, "shape"):
            return leaf
        key = jax.random.key(int(rng.integers(1 << 31)))
        return jax.random.normal(key, leaf.shape, np.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map(drawn, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]


def exhaustive(call: Any, entry: Any, number: int) -> dict[str, Any]:
    """Every candidate of a call measured, and how far the pick is off the best of them."""
    pick, objective = entry.cfg, entry.record.objective if entry.record else "forward"
    became = {repr(t.cfg): f"{t.status} {t.message}".strip() for t in (entry.record.trials if entry.record else ())}
    start, tag = time.perf_counter(), f"every{number}"
    kernel, cfgs = call.kernel, candidates(call.kernel, call.inv)
    args, kwargs = inputs(kernel, call.inv)
    run = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))

    def way(cfg: Any) -> Any:
        return lambda *given: run(kernel, *given, cfg=cfg, **kwargs)

    arrays = args
    if objective != "forward":
        arrays = (*args, cotangent(way(cfgs[0]), args))

    def build(at: int) -> Any:
        try:
            return compiled(
                f"{tag}_{at}", both_passes(way(cfgs[at]), args) if arrays is not args else way(cfgs[at]), arrays
            )
        # A candidate that cannot be compiled is no opponent.
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(THREADS) as pool:
        built = dict(enumerate(pool.map(build, range(len(cfgs)))))
    programs = {at: made for at, made in built.items() if not isinstance(made, str)}
    first = timed(programs, arrays, tag, 4)
    finalists = sorted(first, key=first.__getitem__)[:TOP]
    finalists += [at for at, cfg in enumerate(cfgs) if cfg == pick and at in first and at not in finalists]
    times = timed({at: programs[at] for at in finalists}, arrays, tag, ROUNDS)
    best = min(times, key=times.__getitem__)
    mine = next((at for at in times if cfgs[at] == pick), None)
    return {
        "candidates": len(cfgs),
        "compiled": len(programs),
        "best": repr(cfgs[best]),
        # Nothing is checked here: a wrong candidate may be the fastest.
        "best_became": became.get(repr(cfgs[best]), "not tried"),
        "best_us": 1e6 * times[best],
        "median_us": 1e6 * median(first.values()),
        "pick_off": None if mine is None else times[mine] / times[best] - 1,
        "seconds": time.perf_counter() - start,
    }


def timed(programs: dict[int, Any], arrays: Any, tag: str, rounds: int) -> dict[int, float]:
    """Seconds of each, of device time where there is a clock for it."""
    if jax.default_backend() != "cpu":
        return raced(programs, arrays, tag, rounds)
    samples: dict[int, list[float]] = {at: [] for at in programs}
    for _ in range(rounds + 1):
        for at, program in programs.items():
            begun = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            samples[at].append(time.perf_counter() - begun)
    return {at: median(taken[1:]) for at, taken in samples.items()}
