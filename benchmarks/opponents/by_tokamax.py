"""tokamax's ways, where it can be imported: it may lie in a folder of PYTHONPATH."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from .opponent import Call, Opponent

# Of those that its own tuner tries for attention on Hopper: blocks of queries and keys, stages, and whether a block
# of threads stays for several tiles. Without any it has a guess for this device.
TILES = (
    *((64, 128, 2, True), (64, 128, 2, False), (128, 128, 2, True)),
    *((64, 256, 2, True), (64, 64, 2, True), (64, 64, 2, False)),
)


def opponents(call: Call) -> Iterator[Opponent]:
    """Every implementation of tokamax that runs on a GPU and is not plain XLA."""
    import tokamax

    if call.op == "attention":
        names = ("mosaic", "cudnn", "triton")
        fns: Any = functools.partial(_attention, tokamax, call.static)
    elif call.op == "ragged_dot":
        names, fns = ("mosaic", "triton"), functools.partial(_ragged_dot, tokamax)
    elif call.op == "rms_norm":
        names, fns = ("triton",), functools.partial(_norm, tokamax, subtract_mean=False)
    elif call.op == "layer_norm":
        names, fns = ("triton",), functools.partial(_norm, tokamax)
    elif call.op == "linear_cross_entropy":
        names, fns = ("chunked_xla",), functools.partial(_loss, tokamax)
    else:
        return
    for name in names:
        yield Opponent(f"tokamax {name}", functools.partial(fns, implementation=name))
    if call.op == "attention":
        for tiles in TILES:
            yield Opponent(f"tokamax mosaic{tiles}", functools.partial(fns, implementation=tiles))


def _attention(tokamax: Any, static: dict[str, Any], q: Any, k: Any, v: Any, *, implementation: Any) -> Any:
    if not isinstance(implementation, str):
        implementation = [_mosaic(*implementation)]
    return tokamax.dot_product_attention(
        q,
        k,
        v,
        scale=static["scale"],
        is_causal=static["causal"],
        local_window_size=static.get("window"),
        implementation=implementation,
    )


def _mosaic(block_q: int, block_kv: int, stages: int, persistent: bool) -> Any:
    # Its public functions take no config.
    from tokamax._src.ops.attention import pallas_mosaic_gpu, pallas_mosaic_gpu_kernel_sm90

    kind = pallas_mosaic_gpu_kernel_sm90.Config
    config = kind(block_q=block_q, block_kv=block_kv, num_stages=stages, persistent=persistent)
    return pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(config=config)


def _ragged_dot(tokamax: Any, lhs: Any, rhs: Any, sizes: Any, *, implementation: str) -> Any:
    return tokamax.ragged_dot(lhs, rhs, sizes, preferred_element_type=lhs.dtype, implementation=implementation)


def _norm(
    tokamax: Any, x: Any, weight: Any, bias: Any = None, *, implementation: str, subtract_mean: bool = True
) -> Any:
    # Its epsilon is the library's, 1e-6.
    return tokamax.layer_norm(x, weight, bias, subtract_mean=subtract_mean, implementation=implementation)


def _loss(tokamax: Any, hidden: Any, weight: Any, labels: Any, *, implementation: str) -> Any:
    return tokamax.linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )
