"""Attention on a Hopper GPU: the blocks of our kernel beside cuDNN and tokamax, forward and with gradients.

A process a case: all compile at once, and take turns on the device. A line a way: device time over interleaved rounds,
its ratio to the floor and to the best opponent, and how far it is off float32. Exit code 1 where a way fails.

    python benchmarks/attention_gpu.py --only 0 2
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import in_turns
from in_turns import turn
from library_programs import lowered
from opponents.clock import MixedClock
from opponents.opponent import Call
from ragged_gpu import distances
from tuning_gpu import raced

from ejkernel.library import Attention, AttentionConfig
from ejkernel.ops import Invocation

# Batch, length, heads, key heads, their width; causal? with gradients?
CASES = [
    (1, 4096, 32, 8, 128, True, False),
    (2, 4096, 16, 8, 256, True, False),
    (4, 2048, 16, 16, 64, True, False),
    (2, 16384, 8, 8, 128, True, False),
    (4, 2048, 16, 16, 128, False, False),
    (8, 1024, 12, 12, 64, True, False),
    (16, 512, 16, 16, 64, False, False),
    (1, 8192, 16, 2, 128, True, False),
    (1, 16384, 32, 4, 64, True, False),
    (2, 2048, 8, 4, 256, False, False),
    (1, 1024, 8, 8, 128, True, False),
    (1, 4096, 32, 8, 128, True, True),
    (4, 2048, 16, 16, 64, True, True),
    (2, 4096, 16, 8, 256, True, True),
]
# Blocks of queries and keys, stages, and whether a block of threads stays.
TILES = {
    64: [(128, 128, 2, False), (128, 128, 2, True), (192, 128, 2, False), (192, 128, 2, True)],
    128: [(128, 128, 2, False), (128, 128, 2, True), (128, 64, 3, False)],
    256: [(128, 64, 2, False)],
}
FLOPS, TRAFFIC = 790e12, 4.3e12
# Off by more than this share of the largest value is wrong.
LIMIT = 2e-2
ROUNDS = 8


def ways(number: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of queries, keys and values, and of the result's gradient where there is one."""
    *shape, causal, backward = CASES[number]
    static = {"scale": shape[-1] ** -0.5, "causal": causal}
    kernel = Attention()

    def both(cfg: AttentionConfig, q: Any, k: Any, v: Any, dy: Any) -> Any:
        out, kept = kernel.fwd_with_residuals_gpu(q, k, v, cfg=cfg, **static)
        return out, *kernel.vjp_gpu(kept, out, dy, q, k, v, cfg=cfg, **static)

    def pulled(fn: Callable[..., Any], *given: Any) -> Any:
        out, pull = jax.vjp(fn, *given[:3])
        return out, *pull(given[3])

    cfgs = {
        f"mosaic {q}x{k}, {stages}{', stays' if stays else ''}": AttentionConfig(
            "mosaic", q, k, num_stages=stages, backward="cudnn", persistent=stays
        )
        for q, k, stages, stays in TILES[shape[-1]]
    }
    shapes = [jax.ShapeDtypeStruct((shape[0], shape[1], n, shape[4]), "bfloat16") for n in (shape[2], *[shape[3]] * 2)]
    inv = Invocation(kernel.op_id, tuple(shapes), static)
    guess = kernel.heuristic_cfg_gpu(inv)
    for name, cfg in {**cfgs, "cudnn": AttentionConfig("cudnn")}.items():
        if kernel.valid_cfg(inv, cfg) is True:
            run = functools.partial(both, cfg) if backward else functools.partial(kernel.run, cfg=cfg, **static)
            yield name + ("*" if cfg == guess else ""), run
    if importlib.util.find_spec("tokamax") is not None:
        from opponents.by_tokamax import opponents

        wanted = ("tokamax mosaic", "tokamax mosaic(64, 128, 2, False)", "tokamax mosaic(64, 64, 2, False)")
        for opponent in opponents(Call("attention", (), static, backward)):
            if opponent.name in wanted:
                yield opponent.name, functools.partial(pulled, opponent.fn) if backward else opponent.fn


def study(number: int, lock: str) -> bool:
    """Prints the lines of a case; False where one of our ways fails or any is wrong."""
    batch, length, heads, key_heads, depth, causal, backward = CASES[number]
    counts = (heads, key_heads, key_heads, *[heads] * backward)
    shapes = [(batch, length, count, depth) for count in counts]
    abstract = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    begun, good, said = time.perf_counter(), True, []
    built: dict[int, Any] = {}
    names: dict[int, str] = {}
    for at, (name, fn) in enumerate(ways(number)):
        start = time.perf_counter()
        try:
            built[at] = lowered(f"case{number}_{at}", fn, abstract).compile()
            names[at] = f"{name} [{time.perf_counter() - start:.1f} s]"
        # What one way says, the others do not hear.
        except Exception as error:
            good = good and not name.startswith("mosaic")
            said.append(f"   FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
    # Nothing is timed for it by the compiler: other cases may be on the device. A few heads are enough.
    each = heads // key_heads
    few = [(1, length, count // key_heads, depth) for count in counts]
    plain = functools.partial(Attention().reference, scale=depth**-0.5, causal=causal)

    def exact(q: Any, k: Any, v: Any, *dy: Any) -> Any:
        if not dy:
            return plain(q, k, v)
        out, pull = jax.vjp(plain, q, k, v)
        return out, *pull(*dy)

    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in few]
    reference = jax.jit(exact).lower(*wide).compile({"xla_gpu_autotune_level": 0})
    compiled_s = time.perf_counter() - begun
    with turn(lock):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = tuple(jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
        off = dict.fromkeys(built, 0.0)
        for head in (0, key_heads - 1):
            group, one = slice(head * each, (head + 1) * each), slice(head, head + 1)
            places = (group, one, one, *[group] * backward)
            part = [a[-1:, :, place].astype(jnp.float32) for a, place in zip(arrays, places, strict=True)]
            wanted = jax.tree.leaves(reference(*part))
            for at, program in built.items():
                found = jax.tree.leaves(program(*arrays))
                shown = [x[-1:, :, place] for x, place in zip(found, (group, *places[:3]), strict=False)]
                off[at] = max(off[at], *(float(x) for x in distances(shown, wanted)))
        for at in [at for at in built if not off[at] <= LIMIT]:
            good = False
            said.append(f"   WRONG {names[at]}: off by {off[at]:.3g} of the largest value")
            del built[at]
        times = raced(built, arrays, f"case{number}", rounds=ROUNDS, clock=MixedClock())
    # Two products forward, five backward.
    work = 4.0 * batch * heads * length * length * depth / (2 if causal else 1) * (3.5 if backward else 1)
    moved = 2.0 * batch * length * depth * (2 * heads + 2 * key_heads) * (3 if backward else 1)
    floor = max(work / FLOPS, moved / TRAFFIC)
    best = min((times[at] for at in times if not names[at].startswith("mosaic")), default=float("nan"))
    kind = ("causal" if causal else "whole") + (", with gradients" if backward else "")
    print(
        f"{batch}x{length}, {heads} on {key_heads} of {depth}, {kind}: floor {floor * 1e6:.0f} us, {compiled_s:.0f} s"
    )
    for at in sorted(times, key=times.__getitem__):
        ratio = f"{times[at] / floor:.2f} of the floor, {times[at] / best:.3f} of the best opponent"
        print(f"   {times[at] * 1e6:9.1f} us  {ratio}  {names[at]}  off {off[at]:.1e}")
    print("\n".join(said), flush=True)
    return good


def main() -> int:
    """All cases at once; their lines as they end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", type=int, default=range(len(CASES)), help="numbers of cases")
    options = in_turns.asked_for(parser, seconds=120.0)
    return in_turns.run(options, options.only, lambda case, lock: study(int(case), lock))


if __name__ == "__main__":
    sys.exit(main())
