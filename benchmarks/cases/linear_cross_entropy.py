"""The loss of language models: hidden states times the vocabulary, and its cross entropy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import LinearCrossEntropy

from .case import Case, normal


def plain(hidden: Any, weight: Any, labels: Any) -> jax.Array:
    """All logits at once, the obvious way."""
    logits = jnp.einsum("td,dv->tv", hidden, weight, preferred_element_type=jnp.float32)
    at_label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - at_label)


def case(
    name: str, platform: str, shape: tuple[int, int, int], *, dtype: Any = jnp.bfloat16, backward: bool = False
) -> Case:
    """A case from (tokens, width, words)."""
    tokens, depth, words = shape

    def make(rng: Any) -> Any:
        arrays = normal(rng, (tokens, depth), dtype), normal(rng, (depth, words), dtype, depth**-0.5)
        return (*arrays, jnp.asarray(rng.integers(0, words, tokens), jnp.int32)), {}

    times = 3 if backward else 1
    flops = 2 * tokens * depth * words * times
    traffic = jnp.dtype(dtype).itemsize * (tokens * depth + depth * words) * times
    # Nothing ready-made does it without all logits.
    return Case("linear_cross_entropy", name, platform, make, LinearCrossEntropy, plain, flops, traffic, backward)


CASES = [
    case("8192x4096, 131072 words", "gpu", (8192, 4096, 131072)),
    case("8192x4096, 131072 words, gradient", "gpu", (8192, 4096, 131072), backward=True),
    case("4096x4096, 32000 words, gradient", "gpu", (4096, 4096, 32000), backward=True),
    case("8192x768, 50257 words, gradient", "gpu", (8192, 768, 50257), backward=True),
    case("4096x2048, 151936 words", "gpu", (4096, 2048, 151936)),
    case("512x1024, 32000 words", "gpu", (512, 1024, 32000)),
    case("512x128, 8192 words", "cpu", (512, 128, 8192), dtype=jnp.float32),
    case("512x128, 8192 words, gradient", "cpu", (512, 128, 8192), dtype=jnp.float32, backward=True),
    case("256x256, 16384 words, bfloat16, gradient", "cpu", (256, 256, 16384), backward=True),
    case("1024x64, 4099 words", "cpu", (1024, 64, 4099), dtype=jnp.float32),
    case("1280x64, 16384 words, gradient", "cpu", (1280, 64, 16384), dtype=jnp.float32, backward=True),
]
