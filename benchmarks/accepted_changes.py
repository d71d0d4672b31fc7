"""Changes that a confirmed tuning keeps, measured once more: is any of them slower after all?

Programs of two to four of the library's operations are generated from a seed, with guesses drawn from the candidates,
so that there is something to change. Each is tuned with `confirm=True` in a process of its own; then every change that
was kept is compared alone, the program with it and without it, in 200 pairs in turns. At most five of a hundred
intervals may lie wholly above 1.005.

    python benchmarks/accepted_changes.py --changes 100
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from program_calls import candidates

from ejkernel import library
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Tuner, autotune
from ejkernel.ops.core.cfg import same
from ejkernel.ops.core.kernel import levels
from ejkernel.ops.programs.batch import BatchTuner
from ejkernel.ops.programs.confirm import NOT_SLOWER, Form, ProgramStep

KERNELS = ("Attention", "LayerNorm", "LinearCrossEntropy", "Matmul", "RaggedDot", "RmsNorm", "Softmax")
PAIRS = 200
# A pair is long beside the clock.
SAMPLE_SECONDS = 0.01


def guess_at_random(seed: int) -> None:
    """Has every kernel guess one of its candidates, the same one for the same call."""
    for name in KERNELS:
        cls = getattr(library, name)
        for suffix in levels(jax.default_backend(), None):
            if f"heuristic_cfg{suffix}" in vars(cls):
                _wrap(cls, f"heuristic_cfg{suffix}", seed)
                break


def _wrap(cls: type[Any], name: str, seed: int) -> None:
    original, chosen, inside = getattr(cls, name), dict[str, Any](), list[bool]()

    def guess(self: Any, inv: Any) -> Any:
        # A kernel's list may begin with its own guess.
        if inside:
            return original(self, inv)
        if inv.call_key not in chosen:
            inside.append(True)
            try:
                cfgs = candidates(self, inv)
            finally:
                inside.pop()
            chosen[inv.call_key] = random.Random(f"{seed} {cls.__name__} {inv.call_key}").choice(cfgs)
        return chosen[inv.call_key]

    setattr(cls, name, guess)


def program(seed: int, executor: Executor[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step with some operations on a matrix, and gradients half of the time; its arguments."""
    rng = random.Random(seed)
    rows, width = rng.choice([256, 512, 1024]), rng.choice([256, 512])
    key = jax.random.key(seed)
    x = jax.random.normal(key, (rows, width))
    steps: list[Callable[[Any], Any]] = []
    for number in range(rng.randint(2, 4)):
        steps.append(_operation(rng, jax.random.fold_in(key, number), rows, width, executor))

    def forward(x: Any) -> Any:
        for step in steps:
            x = x + step(x)
        return x

    if rng.random() < 0.5:
        return jax.jit(forward), (x,)
    return jax.jit(jax.grad(lambda x: jnp.sum(forward(x) ** 2))), (x,)


def _operation(rng: random.Random, key: Any, rows: int, width: int, executor: Any) -> Callable[[Any], Any]:
    weight = jax.random.normal(key, (width, width)) / math.sqrt(width)
    match rng.choice(["matmul", "rms_norm", "layer_norm", "softmax", "attention", "ragged_dot", "cross_entropy"]):
        case "matmul":
            return lambda x: library.matmul(x, weight, activation="silu", executor=executor)
        case "rms_norm":
            return lambda x: library.rms_norm(x, weight[0], executor=executor)
        case "layer_norm":
            return lambda x: library.layer_norm(x, weight[0], weight[1], executor=executor)
        case "softmax":
            return lambda x: library.softmax(x, executor=executor)
        case "attention":
            heads = width // 64
            shape = (1, rows, heads, 64)
            return lambda x: library.attention(*(x.reshape(shape),) * 3, causal=True, executor=executor).reshape(
                rows, width
            )
        case "ragged_dot":
            sizes = jnp.array([rows // 2, rows // 4, 0, rows // 4], jnp.int32)
            stacked = jnp.stack([weight] * 4)
            return lambda x: library.ragged_dot(x, stacked, sizes, executor=executor)
        case _:
            words = jax.random.normal(key, (width, 2048)) / math.sqrt(width)
            labels = jax.random.randint(key, (rows,), 0, 2048)
            return lambda x: library.linear_cross_entropy(x, words, labels, executor=executor)


def study(seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One program: what was changed and kept, and how each change compares."""
    guess_at_random(seed)
    executor: Executor[Any, Any] = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner()))
    fn, args = program(seed, executor)
    before: dict[Any, Any] = {}
    confirm = BatchTuner.confirm

    def noting(self: BatchTuner, *given: Any) -> None:
        before.update({key: cfg for key, (_, cfg) in self.changed.items()})
        confirm(self, *given)

    BatchTuner.confirm = noting  # type: ignore[method-assign]
    options = AutotuneOptions(seconds=seconds, confirm=True, progress=False)
    result = autotune(fn, *args, tuning=options)
    after = {key: entry.cfg for key, entry in result.by_key().items()}
    kept = [key for key, cfg in before.items() if not same(after[key], cfg)]
    yield {"seed": seed, "changed": len(before), "kept": len(kept), "step": str(result.confirmation)}
    step = ProgramStep(fn, args, {}, math.inf)
    for key in kept:
        tuned, without = step.compiled([after, {**after, key: before[key]}])
        yield {"seed": seed, "change": f"{key.op_id} {before[key]} -> {after[key]}", **compared(tuned, without)}


def compared(one: Form, other: Form) -> dict[str, float]:
    """Time of the first over that of the second in pairs in turns: middle and 95% interval."""
    calls = max(1, math.ceil(SAMPLE_SECONDS / max(_seconds(one, 3), _seconds(other, 3))))
    ratios = []
    for turn in range(PAIRS):
        first, second = (one, other) if turn % 2 else (other, one)
        times = _seconds(first, calls), _seconds(second, calls)
        ratios.append(times[0] / times[1] if turn % 2 else times[1] / times[0])
    ratios.sort()
    half = math.ceil(0.98 * math.sqrt(PAIRS))
    return {"middle": ratios[PAIRS // 2], "low": ratios[PAIRS // 2 - half], "high": ratios[PAIRS // 2 + half]}


def _seconds(form: Form, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = form()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def main() -> int:
    """Studies programs until there are enough changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="the budget of each tuning")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="one program, in this process")
    options = parser.parse_args()
    if options.only is not None:
        for line in study(options.only, options.seconds):
            print(json.dumps(line), flush=True)
        return 0
    found: list[dict[str, Any]] = []
    changed = kept = programs = 0
    seed = options.first
    while len(found) < options.changes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--only", str(seed), "--seconds", str(options.seconds)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode:
            print(f"seed {seed} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        programs += 1
        changed += sum(line.get("changed", 0) for line in lines)
        kept += sum(line.get("kept", 0) for line in lines)
        for line in (line for line in lines if "middle" in line):
            found.append(line)
            print(
                f"{len(found):4} {line['middle']:.3f} ({line['low']:.3f} to {line['high']:.3f}) {line['change']}",
                flush=True,
            )
        seed += 1
    slower = [line for line in found if line["low"] > NOT_SLOWER]
    middle = sorted(line["middle"] for line in found)[len(found) // 2]
    print(f"{programs} programs, {changed} calls changed, {kept} kept after confirming")
    print(f"{len(found)} kept changes, {PAIRS} pairs each: in the middle {middle:.3f} of the time before")
    print(f"{len(slower)} intervals lie wholly above {NOT_SLOWER}")
    for line in slower:
        print(f"  seed {line['seed']}: {line['low']:.3f} to {line['high']:.3f} {line['change']}")
    return int(len(slower) > 0.05 * len(found))


if __name__ == "__main__":
    sys.exit(main())
