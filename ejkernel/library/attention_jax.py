"""The attention that JAX brings: XLA's, cuDNN's and the Pallas kernel for GPUs, and what each of them takes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .attention_sight import Sight, without_hidden
from .folding import folded
from .jax_pallas import gpu_kernels
from .triton.served import missing


def by_jax(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, *, sight: Sight, scale: float, implementation: Any
) -> jax.Array:
    """`jax.nn.dot_product_attention` with the rows that see nothing set to zero."""
    key_value_lengths = sight.key_value_lengths
    if implementation == "cudnn":
        # A mask becomes a bias there, which must be of the inputs' dtype and have all queries and keys.
        mask, bias = (
            x if x is None else jnp.broadcast_to(x, (*x.shape[:2], q.shape[1], k.shape[1])) for x in (mask, bias)
        )
        bias = bias if bias is None else bias.astype(q.dtype)
        # A row without keys may be no number there, and so its gradients; its output is set to zero below.
        key_value_lengths = key_value_lengths if key_value_lengths is None else jnp.maximum(key_value_lengths, 1)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=sight.causal,
        query_seq_lengths=sight.query_lengths,
        key_value_seq_lengths=key_value_lengths,
        local_window_size=sight.window,
        implementation=implementation,
    )
    sighted = sight.sighted(mask, q.shape[1], k.shape[1])
    return out if sighted is None else jnp.where(sighted, out, jnp.zeros_like(out))


def by_cudnn(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, *, sight: Sight, scale: float, capability: tuple[int, ...]
) -> jax.Array:
    """cuDNN's, with zeros for what is hidden and would be seen all the same."""

    def attend(*arrays: Any, **copied: bool) -> jax.Array:
        q, k, v, mask, bias, queries, keys = arrays
        place = replace(sight, query_lengths=queries, key_value_lengths=keys)
        q, k, v = without_hidden(q, k, v, mask, place, **copied)
        return by_jax(q, k, v, mask, bias, sight=place, scale=scale, implementation="cudnn")

    arrays = (q, k, v, mask, bias, sight.query_lengths, sight.key_value_lengths)
    by_lengths_alone = sight.key_value_lengths is not None and sight.window is None and mask is None and bias is None
    if not by_lengths_alone or not leaves_hidden_alone(capability):
        return attend(*arrays)
    # Keys beyond their length do no harm, and one query does not see values there either. The copies that are saved
    # were two thirds of a decoding step on an H200: 3.15 ms against 1.07. A gradient is hurt by both. Results of
    # sequences without keys become zeros, whatever their queries hold.
    copied = {"of_queries": sight.query_lengths is not None, "of_keys": False, "of_values": q.shape[1] > 1}
    lean = jax.custom_vjp(folded(functools.partial(attend, **copied)))
    lean.defvjp(lambda *given: jax.vjp(attend, *given), lambda pull, dy: pull(dy))
    return lean(*arrays)


def leaves_hidden_alone(capability: tuple[int, ...]) -> bool:
    """Was cuDNN seen to keep out of a result what is beyond the lengths of keys?

    On an H200, with 4000 and 4096 keys, causal or not, the result of one query was the same bit by bit with NaN and
    infinities in keys and values there; that of 4 to 1024 queries was hurt by values alone. Other generations have
    other kernels.
    """
    return capability[:1] == (9,)


def capability_of(device: Any) -> tuple[int, ...]:
    """The compute capability of an NVIDIA GPU as numbers; (0,) for other devices."""
    parts = str(getattr(device, "compute_capability", "0")).split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (0,)


def ready_made_refuses(q: Any, v: Any, sinks: Any, cap: float | None) -> str:
    """The reason why none of JAX's own takes this call; empty where one may."""
    if cap is not None or sinks is not None:
        return "JAX's own attention has no soft cap and no sinks"
    return "" if v.shape[-1] == q.shape[-1] else f"JAX's own has values as wide as keys, not {v.shape[-1]}"


def cudnn_refuses(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, *, sight: Sight, scale: float, capability: tuple[int, ...]
) -> str:
    """The reason why cuDNN cannot compute this call on a GPU of this capability; empty where it can."""
    depth, widest = q.shape[-1], 256 if capability >= (9, 0) else 128
    if q.dtype.name not in ("bfloat16", "float16"):
        return f"cuDNN takes bfloat16 and float16, not {q.dtype.name}"
    if depth % 8 or depth > widest:
        return f"cuDNN takes head sizes that are multiples of 8 up to {widest}, not {depth}"
    if (mask is not None or bias is not None) and (q.shape[1] % 2 or k.shape[1] % 2):
        return f"cuDNN has no gradient with a mask or bias for odd lengths, here {q.shape[1]} and {k.shape[1]}"
    if sight.window is not None and not sight.causal:
        return "cuDNN takes a window to the left alone"
    if sight.window is not None and q.shape[1] > k.shape[1]:
        return f"with a window cuDNN is given no more queries than keys, here {q.shape[1]} and {k.shape[1]}"
    return ""


def jax_refuses_cudnn(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, *, sight: Sight, scale: float, gradient: bool
) -> str:
    """JAX's own reason against cuDNN, from shapes: no cuDNN, too old a one, or a call that it does not take.

    cuDNN takes some calls, such as those of odd lengths, without their gradient.
    """
    leaves, tree = jax.tree_util.tree_flatten((q, k, v, mask, bias, sight.query_lengths, sight.key_value_lengths))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def attend(*given: Any) -> Any:
        q, k, v, mask, bias, queries, keys = jax.tree_util.tree_unflatten(tree, given)
        place = Sight(sight.causal, sight.window, queries, keys)

        def of_floats(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return by_jax(q, k, v, mask, bias, sight=place, scale=scale, implementation="cudnn")

        if not gradient:
            return of_floats(q, k, v, bias)
        out, pull = jax.vjp(of_floats, q, k, v, bias)
        return pull(out)

    try:
        jax.eval_shape(attend, *shapes)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        return f"JAX refuses cuDNN: {error}"
    return ""


def by_pallas(
    q: Any,
    k: Any,
    v: Any,
    *,
    sight: Sight,
    scale: float,
    blocks: tuple[int, int, int],
    warps: int,
    stages: int,
    interpret: bool,
) -> jax.Array:
    """JAX's Pallas kernel for GPUs, with its gradient."""
    ready = gpu_kernels("attention")
    block_q, block_k, block_back = blocks
    sizes = ready.BlockSizes(block_q, block_k, block_back, block_back, block_back, block_back)
    each = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, each, axis=2) if each > 1 else x for x in (k, v))
    out: jax.Array = ready.mha(
        q, k, v, None, scale, sight.causal, sizes, num_warps=warps, num_stages=stages, interpret=interpret
    )
    return out


def pallas_refuses(q: Any, k: Any, mask: Any, bias: Any, *, sight: Sight, blocks: tuple[int, int, int]) -> str:
    """The reason why JAX's Pallas kernel, which Triton compiles, cannot compute this call; empty where it can."""
    if missing():
        return missing()
    if mask is not None or bias is not None or sight.window is not None:
        return "the Pallas kernel has no mask, bias or window"
    if sight.query_lengths is not None or sight.key_value_lengths is not None:
        return "the Pallas kernel has no lengths"
    if q.shape[1] != k.shape[1]:
        return f"the Pallas kernel takes as many keys as queries, not {k.shape[1]} and {q.shape[1]}"
    if q.shape[-1] < 16:
        return f"the Pallas kernel takes head sizes from 16 on, not {q.shape[-1]}"
    uneven = [block for block in blocks if q.shape[1] % block]
    return f"blocks of {uneven[0]} do not divide the length {q.shape[1]}" if uneven else ""
