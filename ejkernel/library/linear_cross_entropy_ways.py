"""The ways to compute cross entropy of a linear layer: which there are for a call, and with which chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .extent import are_known
from .mosaic.tiles import CHUNK, EXPONENTIALS, shapes_refuse

# All logits at once only where they are as small as a chunk would be: in float32, this many bytes.
WHOLE_BYTES = 64 << 20
# A chunk's logits in float32: on a GPU enough rows for its matrix units, on a CPU within reach of its caches.
GPU_BYTES = (256 << 20, 512 << 20, 1 << 30)
CPU_BYTES = (1 << 20, 4 << 20, 16 << 20)
# Half of the tokens may be a larger chunk than those: two chunks cost less than four.
_HALF_BYTES = 2 << 30
# Derivatives of all tokens' logits may take as much as those of half of them with their logits do.
STACK_BYTES = 3 << 30
# Without tuning those of all tokens are kept while they take no more.
_KEPT_BYTES = 1 << 30
# Exponentials are kept without tuning from so many bytes on, a little less than the smallest of four calls that were
# timed (4096 tokens by 32000 words), and not of shallower products than this: those of 768 to 4096 were timed, and of
# shorter ones exponentials are what takes the time.
_KEPT_FROM, _LEAST_DEPTH = 250_000_000, 512
# Chunks of tokens are at most so many, since each adds up the gradient of the weight: chosen, and not timed. They serve
# 196,608 tokens by 131072 words.
_MOST_CHUNKS = 16
# Tokens that a chunk of words is chosen for where their number is a symbol.
_UNKNOWN_TOKENS = 4096
# Words of a product's tile, and of half of one.
PADDED = 128
# The kernel's block of words and its warps, the first where none are given: the fastest of nine for four sizes of
# logits on an H200, where it took 0.53 to 0.71 of XLA's time.
_LAUNCHES = ((2048, 8), (4096, 8), (1024, 4))


@dataclass(frozen=True)
class LinearCrossEntropyConfig:
    """An implementation, a chunk's tokens or words, whether narrow inputs become float32, and how a kernel runs."""

    implementation: str
    chunk: int | None = None
    wide: bool = False
    block: int | None = None
    num_warps: int | None = None
    # Words are padded with zeros to a multiple of this many; and all tokens' derivatives kept for one product.
    padded: int | None = None
    stacked: bool = False


def by_chunks(tokens: int, words: int, sizes: Sequence[int] = GPU_BYTES) -> LinearCrossEntropyConfig:
    """Chunks of tokens, of the largest of these sizes; of words where the number of tokens is a symbol.

    A chunk of tokens must not be larger than all of them.
    """
    if not are_known(tokens):
        return LinearCrossEntropyConfig("chunked_vocab", _fitting(words, _UNKNOWN_TOKENS, sizes[-1]))
    return LinearCrossEntropyConfig("chunked_tokens", _fitting(tokens, words, sizes[-1]))


def by_xla(tokens: int, words: int, sizes: Sequence[int] = GPU_BYTES) -> list[LinearCrossEntropyConfig]:
    """The cfgs of plain JAX: all logits at once, and chunks of tokens and of words of these sizes.

    Where the number of tokens is a symbol, chunks of words alone.
    """
    if not are_known(tokens):
        return [by_chunks(tokens, words, [size]) for size in sizes]
    found = [LinearCrossEntropyConfig("xla")]
    found += [LinearCrossEntropyConfig("chunked_tokens", _fitting(tokens, words, size)) for size in sizes]
    found += [LinearCrossEntropyConfig("chunked_vocab", _fitting(words, tokens, size)) for size in sizes]
    return list(dict.fromkeys(found))


def by_kernel(tokens: int, words: int, backend: str = "triton") -> list[LinearCrossEntropyConfig]:
    """The kernel's candidates, the largest chunk first: all tokens where that is small, else about half of them."""
    sizes = {_fitting(tokens, words, size) for size in GPU_BYTES}
    half = -(-tokens // 256) * 128
    if half < tokens and half * words * 4 <= _HALF_BYTES:
        sizes.add(half)
    chunks: list[int | None] = [*sorted(sizes, reverse=True)]
    if tokens * words * 4 <= WHOLE_BYTES:
        chunks.insert(0, None)
    tried = [(chunks[0], *launch) for launch in _LAUNCHES] + [(chunk, *_LAUNCHES[0]) for chunk in chunks[1:]]
    return [LinearCrossEntropyConfig(backend, chunk, block=b, num_warps=w) for chunk, b, w in tried]


def by_exponentials(tokens: int, words: int) -> LinearCrossEntropyConfig | None:
    """The cfg that keeps exponentials of all logits, with words padded where copies of tiles need it.

    In equal chunks of tokens where those of all are too large, or none where tokens have no such parts. What is kept
    takes no more than the logits and derivatives of half of the tokens do.
    """
    padded = PADDED if words % CHUNK else None
    most = STACK_BYTES // (2 * (words + -words % (padded or 1)))
    for count in range(1, _MOST_CHUNKS + 1):
        if tokens % (8 * count) == 0 and tokens // count <= most:
            return LinearCrossEntropyConfig("mosaic_kept", None if count == 1 else tokens // count, padded=padded)
    return None


def are_kept_untuned(tokens: int, depth: int, words: int) -> bool:
    """Are exponentials kept without tuning, of a product of these sizes?

    Of fewer tokens than a tile has rows most of a tile would be computed for nothing.
    """
    return 2 * tokens * words >= _KEPT_FROM and tokens >= EXPONENTIALS.m and depth >= _LEAST_DEPTH


def with_whole_products(cfgs: Sequence[LinearCrossEntropyConfig], words: int) -> list[LinearCrossEntropyConfig]:
    """Cfgs with padding where rows of 16 bits are not aligned, and those of several chunks with derivatives kept."""
    odd = words % 8 != 0 and words >= 8 * PADDED
    padded = [replace(cfg, padded=PADDED) for cfg in cfgs] if odd else []
    return [*padded, *(replace(cfg, stacked=True) for cfg in padded or cfgs if cfg.chunk is not None)]


def whole_products_first(
    cfgs: Sequence[LinearCrossEntropyConfig], tokens: int, words: int
) -> list[LinearCrossEntropyConfig]:
    """Guesses among those: on an H200 odd words took 0.62 of the time when they were padded.

    Derivatives that are kept took 0.94 and 0.97 of it up to `_KEPT_BYTES`, and 1.01 and 1.03 of it beyond.
    """
    found = with_whole_products(cfgs, words)
    kept = [cfg for cfg in found if cfg.stacked and 2 * tokens * words <= _KEPT_BYTES]
    return [*kept, *(cfg for cfg in found if not cfg.stacked)]


def refuses_products(cfg: LinearCrossEntropyConfig, tokens: int, words: int, dtype: str) -> str:
    """The reason that words cannot be padded so, or derivatives kept; empty where they can."""
    if not cfg.padded and not cfg.stacked:
        return ""
    if cfg.implementation not in ("chunked_tokens", "triton", "mosaic", "mosaic_kept"):
        return f"{cfg.implementation} neither pads words nor keeps derivatives"
    if cfg.padded is not None and (cfg.padded < 1 or words % cfg.padded == 0):
        return f"padded={cfg.padded}: {words} words are such a multiple" if cfg.padded > 0 else f"padded={cfg.padded}"
    if not cfg.stacked:
        return ""
    if cfg.implementation in ("mosaic", "mosaic_kept"):
        return f"{cfg.implementation} writes whole arrays alone, not one part of all tokens' derivatives"
    if dtype != "bfloat16" or cfg.wide:
        return f"derivatives are kept in bfloat16 alone, not for {'float32' if cfg.wide else dtype}"
    size = 2 * tokens * words
    return f"all derivatives take {size >> 20} MiB, over {STACK_BYTES >> 20}" if size > STACK_BYTES else ""


def refuses_exponentials(
    cfg: LinearCrossEntropyConfig, shape: tuple[int, ...], words: int, dtype: Any, examples: int = 1
) -> str:
    """The reason that exponentials cannot be kept, of hidden states of this shape by so many words; else empty."""
    columns, chunk = words + -words % (cfg.padded or 1), cfg.chunk or shape[0]
    if jax.__version_info__ < (0, 10, 2):
        return "JAX 0.10.0 cannot take a part of what tensor cores read"
    if dtype.name != "bfloat16":
        return f"exponentials are kept in bfloat16 alone, not for {dtype.name}"
    if chunk < 1 or shape[0] % chunk:
        return f"chunk={chunk}: {shape[0]} tokens are no such chunks, all equal"
    size = 2 * chunk * columns * examples
    if size > STACK_BYTES:
        return f"exponentials of {chunk} tokens take {size >> 20} MiB, over {STACK_BYTES >> 20}"
    return shapes_refuse(chunk, shape[1], columns, CHUNK, dtype)


def launch_of(cfg: LinearCrossEntropyConfig) -> tuple[int, int]:
    """The kernel's block of words and its warps."""
    block, num_warps = _LAUNCHES[0]
    return cfg.block or block, cfg.num_warps or num_warps


def _fitting(many: int, each: int, size: int) -> int:
    """A chunk of the first, a power of two: its logits with all of the second take about this many bytes."""
    chunk = max(16, size // (4 * each))
    # At most half of them: a chunk of everything would be all logits at once.
    return int(min(1 << (chunk.bit_length() - 1), max(1, -(-many // 2))))
