"""cuDNN's attention of one query to pages of keys, or to keys side by side: its call, and where it cannot run.

JAX's own function over pages is private, asks for exactly as many pages as the table has places, and has no rule for a
vmap or for shards of a table. XLA, which gets the call, needs none of that: it is the same call here, by `jax.ffi`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Invocation
from ..ops.core.device import device_of, get_device_platform
from .arguments import ArgumentError
from .attention_jax import by_jax, capability_of, jax_refuses_cudnn, leaves_hidden_alone
from .attention_sight import Sight
from .cudnn_calls import ELEMENTS, Axes, call, config
from .decode_attention_ways import CacheSight
from .folding import folded, merged, spread

# XLA's name for attention by cuDNN without bias and dropout.
_TARGET = "__cudnn$fmhaSoftmax"
_PRODUCTS: dict[str, Axes] = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
# Wider heads over pages need a cuDNN of 9.10, and JAX runs with older ones.
_WIDEST_IN_PAGES, _WIDEST = 128, 256
_SMALLEST_PAGE = 16


def by_cudnn(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any, sight: CacheSight) -> jax.Array:
    """All keys of a sequence, each read once where it lies; those beyond a length are not seen."""
    refused = call_refused(q, k, table, sinks, window=sight.window, soft_cap=sight.soft_cap)
    if refused:
        raise ArgumentError(f"cudnn cannot compute this call: {refused}")
    if table is None:

        def side_by_side(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
            place = Sight(key_value_lengths=lengths)
            return by_jax(q, k, v, None, None, sight=place, scale=sight.scale, implementation="cudnn")

        return folded(side_by_side)(q, k, v, lengths)
    # A sequence without keys may be no number there.
    real = jnp.clip(lengths, 1, table.shape[1] * k.shape[1])
    out = _mapped(q, k, v, jnp.clip(table, 0, k.shape[0] - 1), real, sight.scale)
    return jnp.where((lengths > 0)[:, None, None, None], out, jnp.zeros_like(out))


def call_refused(q: Any, k: Any, table: Any, sinks: Any, *, window: int | None, soft_cap: float | None) -> str:
    """The reason that cuDNN computes no call of this form; empty where it does."""
    size, page, widest = q.shape[3], k.shape[1], _WIDEST if table is None else _WIDEST_IN_PAGES
    if q.shape[1] != 1:
        return f"cuDNN is given one query of each sequence, not {q.shape[1]}"
    if window is not None or soft_cap is not None or sinks is not None:
        return "cuDNN is given no window, soft cap or sinks here"
    if q.dtype.name not in ELEMENTS:
        return f"cuDNN takes bfloat16 and float16, not {q.dtype.name}"
    if size % 8 or size > widest:
        return f"cuDNN is given head sizes that are multiples of 8 up to {widest}, not {size}"
    if table is not None and (page & (page - 1) or page < _SMALLEST_PAGE):
        return f"cuDNN is given pages of {_SMALLEST_PAGE} keys and more that are powers of two, not {page}"
    return ""


def cudnn_refuses(inv: Invocation[Any, Any], given: dict[str, Any], keys: int) -> str:
    """The reason that cuDNN cannot compute a call on its device; empty where it can."""
    q, k = given["q"], given["k_pages"]
    options = {name: given.get(name) for name in ("window", "soft_cap")}
    refused = call_refused(q, k, given.get("page_table"), given.get("sinks"), **options)
    if refused:
        return refused
    device = device_of(inv)
    if get_device_platform(device) != "gpu":
        return "cudnn runs on GPUs alone"
    if not leaves_hidden_alone(capability_of(device)):
        return "what lies beyond a length was seen to stay out of cuDNN's results on GPUs of capability 9 alone"
    side_by_side = jax.ShapeDtypeStruct((q.shape[0], keys, *k.shape[2:]), k.dtype)
    sight = Sight(key_value_lengths=given["lengths"])
    arrays = (q, side_by_side, side_by_side, None, None)
    return jax_refuses_cudnn(*arrays, sight=sight, scale=given["scale"], gradient=False)


def _mapped(q: Any, k: Any, v: Any, table: Any, lengths: Any, scale: float) -> jax.Array:
    """The call; under a vmap its examples are more sequences, and their pages are more pages."""

    @jax.custom_batching.custom_vmap
    def computed(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> jax.Array:
        return of_pages(q, k, v, table, lengths, scale=scale)

    @computed.def_vmap
    def rule(size: int, batched: Any, *arrays: Any) -> tuple[jax.Array, bool]:
        paged = batched[1] or batched[2]
        # Pages that all examples share stay as they are.
        q, k, v, table, lengths = (
            one if at in (1, 2) and not paged else spread(one, has, size)
            for at, (one, has) in enumerate(zip(arrays, batched, strict=True))
        )
        if paged:
            table = table + jnp.arange(size, dtype=table.dtype)[:, None, None] * k.shape[1]
            k, v = merged(k), merged(v)
        out = computed(merged(q), k, v, merged(table), merged(lengths))
        return out.reshape(size, -1, *out.shape[1:]), True

    made: jax.Array = computed(q, k, v, table, lengths)
    return made


def of_pages(q: Any, k: Any, v: Any, table: Any, lengths: Any, *, scale: float) -> jax.Array:
    """cuDNN's attention over pages; lengths from 1 on, and a table of pages that there are."""
    batch, queries, heads, size = q.shape
    # Written in the queries' layout. Scores are of one page: XLA takes the number of pages from the table.
    result = jax.ShapeDtypeStruct((batch, heads, queries, size), q.dtype)
    about = config(q, k.shape[1], scale, _PRODUCTS, is_paged_attention=True)
    pages = table[:, None, :, None]
    (out,) = call(_TARGET, [result], ((0, 2, 1, 3),), about)(
        q, k, v, jnp.full_like(lengths, queries), lengths, pages, pages
    )
    return jnp.swapaxes(out, 1, 2)
