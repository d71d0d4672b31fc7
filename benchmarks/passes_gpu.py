"""Norms by rows that stream through blocks that stay, and cross entropy of kept exponentials, on a Hopper GPU.

A process a case, and they take turns on the device. Norms compile before their turn, all at once; cross entropy in it,
since XLA times its products. A line a way: device time over interleaved rounds, its ratio to the floor, and how far it
is off: norms beside plain JAX in float32, cross entropy beside its first way, of logits in halves. With `--kernels`
where the time of the two best ways goes. Exit code 1 where a way fails, is wrong, or a case does not end in time.

    python benchmarks/passes_gpu.py norms --seconds 60
    python benchmarks/passes_gpu.py cross_entropy --only 0 1 2 3 --seconds 90 --kernels 12
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import in_turns
from device_kernels import kernels_of
from in_turns import turn
from library_programs import both_passes, lowered
from mosaic_gpu import distances, short, told
from mosaic_gpu_cases import plain_layer
from mosaic_gpu_gradients import KEPT, LAUNCHES, STREAMS, GradientLaunch, NormGradient, launches
from tuning_gpu import raced

from ejkernel.library import LayerNorm, LayerNormConfig, LinearCrossEntropy, LinearCrossEntropyConfig
from ejkernel.library.linear_cross_entropy_ways import by_exponentials

FLOPS, TRAFFIC = 790e12, 4.3e12
# Largest error over the largest value that bfloat16 explains.
LIMIT = 3e-2
ROUNDS = {"norms": 12, "cross_entropy": 4}
# Compiling a product by Triton in each of its tilings takes longer than all else, and cuBLAS is what large ones get.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@dataclass(frozen=True)
class Study:
    """A call: its ways by name, the first one known to be right or a plain function besides, and its floor."""

    name: str
    ways: dict[str, Callable[..., Any]]
    make: Callable[[], tuple[Any, ...]]
    floor: float
    plain: Callable[..., Any] | None = None


def drawn(*shapes: tuple[tuple[int, ...], str]) -> tuple[Any, ...]:
    """Random arrays, made where they are used."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, *shape) for key, shape in zip(keys, shapes, strict=True))


def norm(rows: int, width: int, backward: bool) -> Study:
    """layer_norm by blocks for each row and by blocks that stay, forward or with its gradient."""
    shapes: list[Any] = [((rows, width), "bfloat16"), ((width,), "float32"), ((width,), "float32")]
    abstract = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    kernel = LayerNorm()
    more: list[dict[str, Any]] = [{"kept": kept, "streams": on} for on in (False, True) for kept in (False, True)]
    cfgs = [LayerNormConfig("mosaic", num_warps=4, **fields) for fields in (more if backward else more[::2])]

    def by(cfg: LayerNormConfig) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            return kernel.run(*arrays, cfg=cfg)

        return both_passes(run, abstract) if backward else run

    plain = both_passes(plain_layer, abstract) if backward else plain_layer
    shapes += [((rows, width), "bfloat16")] * backward
    moved = rows * width * 2.0 * (5 if backward else 2)
    name = f"layer_norm {rows}x{width}{', with gradient' if backward else ''}"
    ways = {short(cfg): by(cfg) for cfg in cfgs} | ({} if backward else streaming(rows, width))
    return Study(name, ways, lambda: drawn(*shapes), moved / TRAFFIC, plain)


def streaming(rows: int, width: int) -> dict[str, Callable[..., Any]]:
    """Forward passes by rows that stream through so many blocks of a multiprocessor, some elements for each thread."""
    from ejkernel.library.mosaic.norm_streams import layer_norm
    from ejkernel.library.mosaic.streams import stream_of

    def finished(normed: Any, vectors: Any) -> Any:
        weight, bias = vectors
        return normed * weight + bias

    def by(stream: Any) -> Callable[..., Any]:
        how: dict[str, Any] = {"numbers": 0, "eps": 1e-6, "stream": stream, "interpret": False, "name": "study"}
        return lambda x, weight, bias: layer_norm(x, (weight, bias), finished, **how)[0]

    tried = [(32, 2), (32, 3), (32, 4)] if width == 4096 else [(32, 3), (32, 4), (32, 5), (16, 6), (8, 8)]
    found = {(each, blocks): stream_of(rows, width, 2, arrays=1, blocks=blocks, each=each) for each, blocks in tried}
    return {f"streams {at}": by(stream) for at, stream in found.items() if stream is not None}


def norm_gradient(rows: int, width: int) -> Study:
    """The gradient alone, with and without what the forward pass kept."""
    kernel = NormGradient()
    cfgs = [*launches(width, 1, LAUNCHES[:1]), *launches(width, 1, KEPT)]
    cfgs += [cfg for cfg in STREAMS if cfg.each == 32 or width < 4096]

    def by(cfg: GradientLaunch) -> Callable[..., Any]:
        return lambda x, dy, weight, bias, kept: kernel.run(x, dy, weight, bias, *([kept] * cfg.kept), cfg=cfg)

    def plain(x: Any, dy: Any, weight: Any, bias: Any, _: Any) -> Any:
        return jax.vjp(plain_layer, x, weight, bias)[1](dy)

    def make() -> tuple[Any, ...]:
        x, dy, weight, bias = drawn(*[((rows, width), "bfloat16")] * 2, *[((width,), "float32")] * 2)
        wide = x.astype(jnp.float32)
        return x, dy, weight, bias, jnp.stack([jnp.mean(wide, 1), jax.lax.rsqrt(jnp.var(wide, 1) + 1e-6)])

    floor = rows * width * 6.0 / TRAFFIC
    return Study(f"gradient of layer_norm {rows}x{width}", {short(cfg): by(cfg) for cfg in cfgs}, make, floor, plain)


def triton_and_kept(tokens: int, words: int) -> tuple[list[Any], Any]:
    """Triton's passes over half of the logits, as the guess was before and as it is where odd words are not padded."""
    half, padded = -(-tokens // 256) * 128, {"padded": 128} if words % 8 else {}
    return [LinearCrossEntropyConfig("triton", half, block=2048, num_warps=8, **padded)], by_exponentials(tokens, words)


def cross_entropy(tokens: int, width: int, words: int) -> Study:
    """A study with gradients: logits as they were, derivatives kept where these are small, and exponentials kept."""
    kernel, (cfgs, kept) = LinearCrossEntropy(), triton_and_kept(tokens, words)
    if 2 * tokens * words < 1 << 30:
        cfgs += [replace(cfgs[0], stacked=True)]

    def by(cfg: LinearCrossEntropyConfig) -> Callable[..., Any]:
        def run(hidden: Any, weight: Any, labels: Any) -> Any:
            loss, kept = kernel.fwd_with_residuals(hidden, weight, labels, cfg=cfg)
            return loss, kernel.vjp(kept, loss, jnp.float32(1), hidden, weight, labels, cfg=cfg)[:2]

        return run

    ways = {short(cfg): by(cfg) for cfg in [*cfgs, kept]}
    make, floor = tokens_and_words(tokens, width, words), 6.0 * tokens * width * words / FLOPS
    return Study(f"cross entropy {tokens}x{width} by {words} words, with gradients", ways, make, floor)


def forward_cross_entropy(tokens: int, width: int, words: int) -> Study:
    """A study without gradients: logits as they are without tuning, and no logits."""
    kernel, (cfgs, kept) = LinearCrossEntropy(), triton_and_kept(tokens, words)
    cfgs += [replace(cfgs[0], implementation="mosaic"), kept]
    ways: dict[str, Callable[..., Any]] = {short(cfg): functools.partial(kernel.run, cfg=cfg) for cfg in cfgs}
    make, floor = tokens_and_words(tokens, width, words), 2.0 * tokens * width * words / FLOPS
    return Study(f"cross entropy {tokens}x{width} by {words} words, forward", ways, make, floor)


def tokens_and_words(tokens: int, width: int, words: int) -> Callable[[], tuple[Any, ...]]:
    """A function that makes hidden states, a weight and labels."""

    def make() -> tuple[Any, ...]:
        hidden, weight = drawn(((tokens, width), "bfloat16"), ((width, words), "bfloat16"))
        labels = jax.random.randint(jax.random.key(1), (tokens,), 0, words)
        return hidden, weight * jnp.bfloat16(0.02), labels

    return make


STUDIES: dict[str, Sequence[Callable[[], Study]]] = {
    "norms": (
        lambda: norm(8192, 4096, True),
        lambda: norm(32768, 1024, True),
        lambda: norm(8192, 4096, False),
        lambda: norm(32768, 1024, False),
        lambda: norm_gradient(8192, 4096),
        lambda: norm_gradient(32768, 1024),
        lambda: norm(16384, 2048, True),
        lambda: norm(8192, 3072, True),
    ),
    "cross_entropy": (
        lambda: cross_entropy(8192, 4096, 131072),
        lambda: cross_entropy(4096, 4096, 32000),
        lambda: cross_entropy(4096, 3584, 152064),
        lambda: cross_entropy(8192, 768, 50257),
        lambda: forward_cross_entropy(8192, 4096, 131072),
        lambda: forward_cross_entropy(8192, 768, 50257),
        # More exponentials than are kept at once: some tokens at a time.
        lambda: cross_entropy(16384, 4096, 131072),
    ),
}


def here(kind: str, number: int, lock: str, as_is: bool, most: int) -> bool:
    """Prints the lines of a case; False where a way fails or is wrong."""
    study = STUDIES[kind][number]()
    abstract = jax.eval_shape(study.make)
    has_products = kind == "cross_entropy"
    options: Any = CUBLAS if has_products and not as_is else None
    built: dict[int, Any] = {}
    names, off = dict(enumerate(study.ways)), {}
    said: list[str] = []

    def build(at: int, way: Callable[..., Any]) -> None:
        start = time.perf_counter()
        try:
            built[at] = way()
            names[at] += f" [{time.perf_counter() - start:.1f} s]"
        # What one way says, the others do not hear.
        except Exception as error:
            built.pop(at, None)
            said.append(f"   FAILED {names[at]}: {told(error)}")

    for at, fn in enumerate(study.ways.values()):
        build(at, functools.partial(lowered, f"case{number}_{at}", fn, abstract))
        if at in built and not has_products:
            build(at, built[at].compile)
    with turn(lock):
        for at in list(built) if has_products else ():
            build(at, functools.partial(built[at].compile, options))
        arrays = jax.block_until_ready(study.make())
        if study.plain is not None:
            wide = [a.astype(jnp.float32) for a in arrays]
            wanted = jax.tree.leaves(jax.jit(study.plain)(*wide))
            del wide
        else:
            wanted = [a.astype(jnp.float32) for a in jax.tree.leaves(built[min(built)](*arrays))]
        for at in list(built):
            try:
                off[at] = max(float(x) for x in distances(jax.tree.leaves(built[at](*arrays)), wanted))
                trouble = "" if off[at] <= LIMIT else f"WRONG {names[at]}: off by {off[at]:.3g} of the largest value"
            # A kernel that fails on the device may leave it lost for the ways after it, which then say so.
            except Exception as error:
                trouble = f"FAILED {names[at]}: {told(error)}"
            if trouble:
                said.append(f"   {trouble}")
                del built[at]
        del wanted
        times = raced(built, arrays, f"case{number}", rounds=ROUNDS[kind])
        best = sorted(times, key=times.__getitem__)[:2]
        parts = kernels_of({at: built[at] for at in best}, arrays, f"case{number}", most)
    print(f"{study.name}: floor {study.floor * 1e6:.1f} us")
    for at in sorted(times, key=times.__getitem__):
        ratio = f"{times[at] / study.floor:.3f} of the floor"
        print(f"   {times[at] * 1e6:9.1f} us  {ratio}  {names[at]}  off {off[at]:.1e}")
        print("".join(f"   {line}\n" for line in parts.get(at, [])), end="")
    print("\n".join(said), flush=True)
    return not said


def main() -> int:
    """All cases at once; their lines as they end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(STUDIES))
    parser.add_argument("--only", nargs="*", type=int, help="numbers of cases")
    parser.add_argument("--as-is", action="store_true", help="products by any of XLA's compilers, not by cuBLAS alone")
    parser.add_argument("--kernels", type=int, default=0, help="so many device kernels of the two best ways")
    options = in_turns.asked_for(parser, seconds=90.0)
    numbers = range(len(STUDIES[options.kind])) if options.only is None else options.only

    def study(case: str, lock: str) -> bool:
        return here(options.kind, int(case), lock, options.as_is, options.kernels)

    words = [options.kind, *["--as-is"] * options.as_is, "--kernels", str(options.kernels)]
    return in_turns.run(options, numbers, study, words)


if __name__ == "__main__":
    sys.exit(main())
