"""The ways to compute cross entropy of a linear layer: which there are for a call, and with which chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# All logits at once only where they are as small as a chunk would be: in float32, this many bytes.
WHOLE_BYTES = 64 << 20
# A chunk's logits in float32: on a GPU enough rows for its matrix units, on a CPU within reach of its caches.
GPU_BYTES = (256 << 20, 512 << 20, 1 << 30)
CPU_BYTES = (1 << 20, 4 << 20, 16 << 20)
# Half of the tokens may be a larger chunk than those: two chunks cost less than four.
_HALF_BYTES = 2 << 30
# The kernel's block of words and its warps, the first where none are given: the fastest of nine for four sizes of
# logits on an H200, where it took 0.53 to 0.71 of XLA's time.
_LAUNCHES = ((2048, 8), (4096, 8), (1024, 4))


@dataclass(frozen=True)
class LinearCrossEntropyConfig:
    """Which way, a chunk's tokens or words, whether narrow inputs are widened to float32, and how a kernel runs."""

    implementation: str
    chunk: int | None = None
    wide: bool = False
    block: int | None = None
    num_warps: int | None = None


def by_chunks(tokens: int, words: int, sizes: Sequence[int] = GPU_BYTES) -> LinearCrossEntropyConfig:
    """Chunks of tokens, of the largest of these sizes."""
    return LinearCrossEntropyConfig("chunked_tokens", _fitting(tokens, words, sizes[-1]))


def by_xla(tokens: int, words: int, sizes: Sequence[int] = GPU_BYTES) -> list[LinearCrossEntropyConfig]:
    """All at once, and chunks of tokens and of words of these sizes."""
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


def launch_of(cfg: LinearCrossEntropyConfig) -> tuple[int, int]:
    """The kernel's block of words and its warps."""
    block, num_warps = _LAUNCHES[0]
    return cfg.block or block, cfg.num_warps or num_warps


def _fitting(many: int, each: int, size: int) -> int:
    """A chunk of the first, a power of two: its logits with all of the second take about this many bytes."""
    chunk = max(16, size // (4 * each))
    # At most half of them: a chunk of everything would be all logits at once.
    return int(min(1 << (chunk.bit_length() - 1), max(1, -(-many // 2))))
