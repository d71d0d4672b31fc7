"""Records, results and stores to make pages of."""

from __future__ import annotations

import random

from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.programs.results import AutotuningResult, Entry

H200 = "gpu|NVIDIA H200"


def record(seed=0, candidates=12, **fields):
    """A tuning of so many candidates; each fifth of them failed."""
    rng = random.Random(seed)
    trials = []
    for i in range(candidates):
        cfg = {
            "implementation": "triton",
            "block_m": 16 * 2 ** (i % 4),
            "block_n": 32 * 2 ** (i // 4 % 4),
            "stages": None,
        }
        if i % 5 == 4:
            trials.append(Trial(cfg, ("wrong", "compile", "memory", "invalid")[i % 4], f"reason {i}: it went wrong"))
            continue
        level = 1e-4 * (1 + i % 4 + 0.3 * (i // 4 % 4))
        rounds = 6 if i < 3 else 2
        samples = tuple(level * rng.uniform(0.99, 1.01) for _ in range(rounds))
        trials.append(Trial(cfg, samples_s=samples, dropped_round=None if i < 3 else 2, compile_s=0.5, error=1e-7))
    given = {
        "key": {
            "device": H200,
            "op_id": "library.matmul@v4",
            "call_key": f"{seed:016x}",
            "call.args[0]": f"bfloat16[{128 * (seed + 1)},2048]",
        },
        "environment": {"jax": "0.11.2"},
        "clock": "profiler",
        "winner": 0,
        "heuristic": 1,
        "runner_up": 2,
        "gain": (2.0, 1.9, 2.1),
        "cost": {"bytes": 2e8, "operations": 4e9},
        "phases": {"compiling": 2.0, "checking": 0.2, "racing": 0.6},
    }
    return Record(trials=tuple(trials), **{**given, **fields})


def result(calls=3, candidates=12, **fields):
    """A tuned program with so many calls."""
    entries = []
    for seed in range(calls):
        made = record(seed, candidates)
        entries.append(Entry("library.matmul@v4", f"{seed:016x}", made.cfg, made, "autotune", count=seed + 1))
    return AutotuningResult(H200, tuple(entries), **fields)
