"""The implementations of ragged products by their names: the product, and each group's outer product for gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .arguments import ArgumentError
from .jax_pallas import gpu_kernels
from .mosaic import tiles
from .ragged_dot_tiles import in_parts, masked, masked_outer, starts_of, tiled, tiled_outer
from .reverse import recomputed
from .triton.served import missing as triton_missing

if TYPE_CHECKING:
    from .ragged_dot import RaggedDotConfig


def mosaic_refuses(lhs: Any, rhs: Any, wanted: str | None, cfg: RaggedDotConfig, capability: str) -> str:
    """The reason why JAX's kernel for Hopper GPUs cannot compute this call; empty where it can."""
    if not capability.startswith("9."):
        return f"the Mosaic kernel is for GPUs of capability 9, not {capability}"
    if lhs.dtype.name not in ("bfloat16", "float16") or wanted not in (None, lhs.dtype.name):
        return f"the Mosaic kernel takes and gives bfloat16 or float16, not {lhs.dtype.name} and {wanted}"
    (rows, depth), width = lhs.shape, rhs.shape[2]
    block_m, block_n, block_k = cfg.block_m or 128, cfg.block_n or 128, cfg.block_k or 64
    # The gradient swaps the two.
    if any(size % block for size in (depth, width) for block in (block_n, block_k)):
        return f"blocks of {block_n} and {block_k} do not divide both {depth} and {width}"
    return f"a block of {block_m} is more than the {rows} rows" if rows < block_m else ""


def product(cfg: RaggedDotConfig, interpret: bool) -> Callable[..., jax.Array]:
    """`f(lhs, rhs, sizes, transposed=..., dtype=...)` of this implementation; a fourth array is added to `lhs`."""
    way = _once(_way, cfg, ("transposed", "dtype")) if _is_ours(cfg, interpret) else _way(cfg, interpret)
    return _differentiable(way if cfg.implementation == "triton" else in_parts(way, 0), in_parts(masked, 0))


def outer(cfg: RaggedDotConfig, interpret: bool) -> Callable[..., jax.Array]:
    """`f(lhs, out, sizes, dtype=...)` of this implementation; a fourth array is added to `out`."""
    way = _once(_outer_way, cfg, ("dtype",)) if _is_ours(cfg, interpret) else _outer_way(cfg, interpret)
    has_parts = cfg.implementation in ("triton", "mosaic_jax")
    return _differentiable(way if has_parts else in_parts(way, 1), in_parts(masked_outer, 1))


def _is_ours(cfg: RaggedDotConfig, interpret: bool) -> bool:
    """Is it one of the library's own kernels for Hopper GPUs, which take a tenth of a second to trace and lower?"""
    return not interpret and cfg.implementation in ("mosaic", "mosaic_rolling")


@functools.lru_cache(maxsize=64)
def _once(
    make: Callable[[RaggedDotConfig, bool], Callable[..., jax.Array]], cfg: RaggedDotConfig, static: tuple[str, ...]
) -> Callable[..., jax.Array]:
    """Jits a way, so that its calls with equal shapes, such as those of a gated pair, are traced and lowered once."""
    return jax.jit(make(cfg, False), static_argnames=static)


def _differentiable(way: Callable[..., jax.Array], plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A way with gradients of gradients, which are those of the plain one: no other has derivatives."""

    def made(*arrays: Any, **how: Any) -> Any:
        return recomputed(functools.partial(way, **how), functools.partial(plain, **how))(*arrays)

    return made


def _way(cfg: RaggedDotConfig, interpret: bool) -> Callable[..., jax.Array]:
    if cfg.implementation == "xla":
        return _xla
    if cfg.implementation == "masked":
        return masked
    if cfg.implementation == "tiled":
        return lambda *args, **kwargs: tiled(*args, tile=cfg.block_m or 128, **kwargs)
    if cfg.implementation == "triton":
        from .ragged_dot_triton import triton

        return lambda *args, **kwargs: triton(*args, tile=_tile(cfg), interpret=interpret, **kwargs)
    if cfg.implementation == "mosaic":
        from .mosaic import ragged_dot as kernels

        return functools.partial(kernels.product, tile=mosaic_tile(cfg), interpret=interpret)
    if cfg.implementation == "mosaic_rolling":
        from .mosaic import ragged_rolling

        how: dict[str, Any] = {"tile": mosaic_tile(cfg), "interpret": interpret}
        return lambda lhs, rhs, sizes, **kwargs: ragged_rolling.product([lhs], [rhs], sizes, **how, **kwargs)
    if cfg.implementation == "mosaic_jax":
        return lambda *args, **kwargs: _mosaic(*args, cfg=cfg, **kwargs)
    names = "xla, masked, tiled, triton, mosaic, mosaic_rolling or mosaic_jax"
    raise ArgumentError(f"{cfg} names no implementation of ragged_dot; use {names}")


def _outer_way(cfg: RaggedDotConfig, interpret: bool) -> Callable[..., jax.Array]:
    if cfg.implementation == "xla":
        return _xla_outer
    if cfg.implementation == "masked":
        return masked_outer
    if cfg.implementation == "tiled":
        return lambda *args, **kwargs: tiled_outer(*args, tile=cfg.block_m or 128, **kwargs)
    if cfg.implementation == "mosaic_rolling":
        from .mosaic import outer_rolling

        return functools.partial(outer_rolling.outer, tile=mosaic_tile(cfg), interpret=interpret)
    # JAX 0.10.0 cannot take a part of what tensor cores read.
    if cfg.implementation == "mosaic" and jax.__version_info__ >= (0, 10, 2):
        from .mosaic import ragged_dot as kernels

        return functools.partial(kernels.outer, tile=mosaic_tile(cfg), interpret=interpret)
    if cfg.implementation == "mosaic" or triton_missing():
        # Whole tiles of rows: their matrices are added up in memory, so few are better.
        way = functools.partial(tiled_outer, tile=512)
        return way if cfg.implementation == "mosaic" else in_parts(way, 1)
    from .ragged_dot_triton import TritonTile, triton_outer

    # Its blocks are of the matrix, so the rows of a group, however few, do not bound them.
    tile = TritonTile(128, 128, 64 if cfg.block_k == 64 else 32, 8, 3)
    return lambda *args, **kwargs: triton_outer(*args, tile=tile, interpret=interpret, **kwargs)


# JAX maps its ragged products over some arguments alone, so a vmap of them is a loop. They are never differentiated.
def _xla(lhs: Any, rhs: Any, sizes: Any, *, transposed: bool, dtype: Any) -> jax.Array:
    matrices = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
    dot = jax.custom_batching.sequential_vmap(functools.partial(jax.lax.ragged_dot, preferred_element_type=dtype))
    made: jax.Array = dot(lhs, matrices, _cut(sizes, lhs.shape[0]))
    return made


def _xla_outer(lhs: Any, out: Any, sizes: Any, *, dtype: Any) -> jax.Array:
    # The rows are what is summed over, and what is in groups.
    contracted = (((0,), (0,)), ((), ()))
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )

    def general(lhs: Any, out: Any, sizes: Any) -> jax.Array:
        return jax.lax.ragged_dot_general(lhs, out, sizes, numbers, preferred_element_type=dtype)

    made: jax.Array = jax.custom_batching.sequential_vmap(general)(lhs, out, _cut(sizes, lhs.shape[0]))
    return made


def _mosaic(lhs: Any, rhs: Any, sizes: Any, *, transposed: bool, dtype: Any, cfg: RaggedDotConfig) -> jax.Array:
    def dot(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return gpu_kernels("ragged_dot_mgpu").ragged_dot(
            lhs,
            rhs,
            group_sizes=sizes,
            block_m=cfg.block_m or 128,
            block_n=cfg.block_n or 128,
            block_k=cfg.block_k or 64,
            max_concurrent_steps=cfg.num_stages or 4,
            grid_block_n=1,
            transpose_rhs=transposed,
        )

    # A vmap of it fails, and one that is outside of a jit is not known when it is guessed: a loop.
    made: jax.Array = jax.custom_batching.sequential_vmap(dot)(lhs, rhs, _cut(sizes, lhs.shape[0]))
    # It leaves rows of no group as they are.
    written = jnp.arange(lhs.shape[0]) < starts_of(sizes, lhs.shape[0])[1][-1]
    return jnp.where(written[:, None], made, 0).astype(dtype)


def _cut(sizes: Any, rows: int) -> jax.Array:
    starts, stops = starts_of(sizes, rows)
    return (stops - starts).astype(jnp.int32)


def mosaic_tile(cfg: RaggedDotConfig) -> tiles.Tile:
    """The tile of a cfg for the library's own kernels for Hopper GPUs."""
    blocks = (cfg.block_m or 128, cfg.block_n or 128, cfg.block_k or 64)
    return tiles.Tile(*blocks, cfg.num_stages or 4)


def _tile(cfg: RaggedDotConfig) -> Any:
    from .ragged_dot_triton import TritonTile

    blocks = (cfg.block_m or 64, cfg.block_n or 128, cfg.block_k or 32)
    return TritonTile(*blocks, cfg.num_warps or 4, cfg.num_stages or 3)
