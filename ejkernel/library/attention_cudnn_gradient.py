"""cuDNN's gradient of attention from another forward pass: its result, and the logarithms of its sums.

JAX's own function takes them from cuDNN's forward pass alone. XLA, which gets the call, does not ask where they come
from: it is the same call here, by `jax.ffi`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .cudnn_calls import Axes, call, config
from .folding import merged, spread

# XLA's name for the gradient of attention by cuDNN without bias and dropout.
_TARGET = "__cudnn$fmhaSoftmaxBackward"
_PRODUCTS: dict[str, Axes] = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logs: jax.Array, dy: jax.Array, **how: Any
) -> tuple[jax.Array, ...]:
    """Gradients of queries, keys and values; `logs` (batch, heads, queries) are natural, of sums of scaled scores.

    `scale` and `causal` are the forward pass's own. Under a vmap its examples are a larger batch.
    """
    made: tuple[jax.Array, ...] = _mapped(lambda *arrays: of_batch(*arrays, **how))(q, k, v, out, logs, dy)
    return made


def _mapped(fn: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    computed = jax.custom_batching.custom_vmap(fn)

    @computed.def_vmap
    def rule(size: int, batched: Any, *arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        found = computed(*(merged(spread(x, has, size)) for x, has in zip(arrays, batched, strict=True)))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in found), (True,) * len(found)

    return computed


def of_batch(q: Any, k: Any, v: Any, out: Any, logs: Any, dy: Any, *, scale: float, causal: bool) -> Any:
    """cuDNN's call for one batch."""
    about = config(q, k.shape[1], scale, _PRODUCTS, mask_type="CAUSAL" if causal else "NO_MASK")
    # Results are written in the layout of the arrays, and named by heads before places.
    results = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v)]
    found = call(_TARGET, results, ((0, 2, 1, 3),) * 3, about)(q, k, v, logs, dy.astype(q.dtype), out)
    return tuple(jnp.swapaxes(x, 1, 2) for x in found)
