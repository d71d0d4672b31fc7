"""A matrix product with an optional bias and activation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation
from . import double
from .arguments import DOUBLE, FLOATS, ArgumentError, ArgumentTypeError, as_array, same_dtype
from .call import plan, planned
from .double import is_double, refuse_cfg
from .extent import too_large
from .guessed_products import FEW_ROWS, tile_of_product
from .mosaic import served, tiles
from .reverse import ReverseOnGpu, recomputed
from .rows import across
from .triton.matmul import refuses, tiled

Activation = str | Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

# Tiles that won for some shape of a real model on an H200, or stand beside one that did: rows, columns, depth.
_LARGE = ((128, 128, 64), (128, 256, 64), (256, 128, 64), (64, 256, 64), (64, 128, 64), (128, 64, 64), (64, 64, 64))
_HOPPER = ((128, 256, 3), (128, 128, 4), (128, 128, 5), (256, 128, 3))
_SMALL = ((16, 64, 128), (16, 128, 64), (32, 64, 64), (32, 128, 64), (64, 64, 64), (16, 32, 256))


@dataclass(frozen=True)
class MatmulConfig:
    """An implementation, and its tiles where it has any."""

    implementation: str
    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


class Matmul(ReverseOnGpu[MatmulConfig, jax.Array]):
    """`activation(a @ b + bias)`, over leading axes as `jnp.matmul` has them.

    Implementations: "xla" (the product in the result's dtype), "narrow" (bias and activation in that dtype as well, as
    plain JAX has them), "wide" (the product in float32, rounded at the end),
    "upcast" (the factors in float32 as well), "triton" (tiles, with bias and activation before the result is written)
    and "mosaic" (the same for Hopper GPUs).
    """

    op_id = "library.matmul"
    version = "1"
    cfg_type = MatmulConfig

    def run(
        self,
        a: jax.Array,
        b: jax.Array,
        bias: jax.Array | None = None,
        *,
        activation: Activation | None = None,
        transpose_a: bool = False,
        transpose_b: bool = False,
        dtype: str | None = None,
        cfg: MatmulConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        out = jnp.dtype(dtype or a.dtype)
        finish = _activation(activation)

        def plain(
            a: jax.Array, b: jax.Array, *biases: jax.Array, product: Any = jnp.float32, between: Any = jnp.float32
        ) -> jax.Array:
            left, right = (jnp.swapaxes(x, -1, -2) if flip else x for x, flip in ((a, transpose_a), (b, transpose_b)))
            total = jnp.matmul(left, right, preferred_element_type=product)
            if not biases and activation is None:
                return total.astype(out)
            # Before the result is rounded, as every implementation but "narrow" does it.
            return finish(sum((across(bias, total).astype(between) for bias in biases), total.astype(between))).astype(
                out
            )

        def by_triton(a: jax.Array, b: jax.Array, *biases: jax.Array) -> jax.Array:
            tiles: dict[str, Any] = {"block_m": cfg.block_m, "block_n": cfg.block_n, "block_k": cfg.block_k}
            launch: dict[str, Any] = {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages, "interpret": interpret}
            matrix = a.reshape(-1, a.shape[-1])
            made = tiled(matrix, b, biases[0] if biases else None, finish=finish, dtype=out, **tiles, **launch)
            return made.reshape(*a.shape[:-1], b.shape[-1])

        def by_mosaic(a: jax.Array, b: jax.Array, *biases: jax.Array) -> jax.Array:
            from .mosaic.matmul import tiled as by_tiles

            # JAX's own has a rule for gradients, which Mosaic does not take.
            end = (lambda x: jnp.maximum(x, 0.0)) if activation == "relu" else finish
            sizes = (cfg.block_m or 128, cfg.block_n or 128, cfg.block_k or 64, cfg.num_stages or 4)
            matrix = a.reshape(-1, a.shape[-1])
            how: dict[str, Any] = {"dtype": out, "tile": tiles.Tile(*sizes), "interpret": interpret}
            made = by_tiles(matrix, b, biases[0] if biases else None, finish=end, **how)
            return made.reshape(*a.shape[:-1], b.shape[-1])

        given = (a, b) if bias is None else (a, b, bias)
        # The gradient of tiles: without an activation that of "xla", which keeps all factors narrow.
        again = functools.partial(plain, product=out) if activation is None else plain
        if cfg.implementation == "xla":
            return plain(*given, product=out)
        if cfg.implementation == "narrow":
            return plain(*given, product=out, between=out)
        if cfg.implementation == "wide":
            return plain(*given)
        if cfg.implementation == "upcast":
            return plain(*(x.astype(jnp.float32) for x in given))
        if cfg.implementation == "triton":
            refused = _tiles_refuse(a, b, cfg, transposed=transpose_a or transpose_b)
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")
            return recomputed(by_triton, again)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic":
            refused = _mosaic_refuses(a, b, cfg, transposed=transpose_a or transpose_b, out=out)
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")
            return recomputed(by_mosaic, again)(*given)  # type: ignore[no-any-return]
        names = "xla, narrow, wide, upcast, triton or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of matmul; use {names}")

    def run_cpu(self, *args: Any, cfg: MatmulConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def fwd_with_residuals_gpu(self, *args: Any, cfg: MatmulConfig, **kwargs: Any) -> tuple[Any, Any]:
        """Computes few rows with an activation as "narrow", which keeps the product that tiles would make twice."""
        if cfg.implementation == "triton" and kwargs.get("activation") is not None:
            few = args[0].size <= FEW_ROWS * args[0].shape[-1]
            cfg = MatmulConfig("narrow") if few else cfg
        return super().fwd_with_residuals_gpu(*args, cfg=cfg, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The right result, by which candidates are checked."""
        return self.run(*args, cfg=MatmulConfig("upcast"), **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> MatmulConfig:
        """XLA's own choice of library and tiles is the best there is for most products on an accelerator."""
        return MatmulConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> MatmulConfig:
        """XLA's product, and an activation in the result's dtype, as plain JAX computes it; tiles for few rows.

        In float32 the activation's own gradient moves twice the bytes: on an H200 a layer of a vision transformer took
        1.09 times as long, forward and backward.
        """
        has_activation = inv.kwargs.get("activation") is not None
        tile = tile_of_product(inv, _rows(inv), inv.args[0].shape[-1], inv.args[1].shape[-1])
        if tile and self.valid_cfg(inv, MatmulConfig(**tile)) is True:
            return MatmulConfig(**tile)
        return MatmulConfig("narrow" if has_activation and inv.args[0].dtype != jnp.float32 else "xla")

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> MatmulConfig:
        """A product of bfloat16 in float32: on an EPYC 1.4 to 3.6 times as fast under jax 0.10, as fast under 0.12."""
        return MatmulConfig("wide" if inv.args[0].dtype.name == "bfloat16" else "xla")

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[MatmulConfig]:
        """XLA's, in three precisions of what is between."""
        return [MatmulConfig("xla"), MatmulConfig("wide"), MatmulConfig("upcast")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[MatmulConfig]:
        """XLA's, and tiles that suit the number of rows."""
        few = _rows(inv) <= 64
        launches = ((2, 4), (4, 3), (4, 4)) if few else ((4, 3), (8, 3), (8, 4))
        blocks = itertools.product(_SMALL if few else _LARGE, launches)
        return [
            *(MatmulConfig("xla"), MatmulConfig("narrow"), MatmulConfig("wide")),
            *(MatmulConfig("triton", m, n, k, num_warps=w, num_stages=s) for (m, n, k), (w, s) in blocks),
            *(MatmulConfig("mosaic", m, n, 64, num_stages=s) for m, n, s in _HOPPER),
        ]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: MatmulConfig) -> bool | str:
        """Tiles are for matrices as they lie in memory, and must fit; float32 has nothing wider."""
        a, b = inv.args[:2]
        if cfg.implementation in ("wide", "upcast") and a.dtype == jnp.float32:
            return "the factors are float32 already"
        bare = inv.kwargs.get("activation") is None and (len(inv.args) < 3 or inv.args[2] is None)
        if cfg.implementation == "narrow" and (bare or a.dtype == jnp.float32):
            return "there is nothing between product and result that could be narrow"
        if cfg.implementation not in ("triton", "mosaic"):
            return True
        transposed = inv.kwargs.get("transpose_a") or inv.kwargs.get("transpose_b")
        if cfg.implementation == "mosaic":
            out = jnp.dtype(inv.kwargs.get("dtype") or a.dtype)
            refused = _mosaic_refuses(a, b, cfg, transposed=bool(transposed), out=out)
            return refused or served.refuses(inv, a.size, b.size, _rows(inv) * b.shape[-1], hopper=True) or True
        refused = _tiles_refuse(a, b, cfg, transposed=bool(transposed))
        return refused or too_large(inv, a.size, b.size, _rows(inv) * b.shape[-1]) or True


@planned()
def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: Activation | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    preferred_element_type: Any = None,
    cfg: MatmulConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`activation(a @ b + bias)` with sums in float32, over leading axes as `jnp.matmul` has them.

    `activation` is "relu", "gelu", "silu", "tanh" or an elementwise function. The result has the dtype of the factors,
    or `preferred_element_type`.
    """
    a, b = _factor("a", a), _factor("b", b)
    same_dtype("a", a, "b", b)
    inner = a.shape[-2 if transpose_a else -1], b.shape[-1 if transpose_b else -2]
    if inner[0] != inner[1]:
        raise ArgumentError(
            f"a and b differ in the axis that is summed over: {inner[0]} and {inner[1]}, "
            f"of shapes {a.shape}{' (transposed)' if transpose_a else ''} and "
            f"{b.shape}{' (transposed)' if transpose_b else ''}"
        )
    if not _broadcast(a.shape[:-2], b.shape[:-2]):
        raise ArgumentError(f"the leading axes of a and b do not broadcast: shapes {a.shape} and {b.shape}")
    given = (a, b) if bias is None else (a, b, _bias(bias, b, b.shape[-2 if transpose_b else -1]))
    _activation(activation)
    static: dict[str, Any] = {"activation": activation} if activation is not None else {}
    if transpose_a or transpose_b:
        static |= {"transpose_a": bool(transpose_a), "transpose_b": bool(transpose_b)}
    if preferred_element_type is not None:
        static["dtype"] = _dtype(preferred_element_type)
    out = static.get("dtype", a.dtype.name)
    if is_double(*given) or out == DOUBLE:
        refuse_cfg(cfg)
        left, right = (jnp.swapaxes(x, -1, -2) if flip else x for x, flip in ((a, transpose_a), (b, transpose_b)))
        return double.matmul(left, right, *given[2:], finish=_activation(activation), dtype=out)
    return plan(Matmul(), *given, cfg=cfg, executor=executor, **static)  # type: ignore[no-any-return]


def _tiles_refuse(a: Any, b: Any, cfg: MatmulConfig, *, transposed: bool) -> str:
    """The reason that tiles cannot compute this product; empty where they can."""
    if 0 in (*a.shape, *b.shape):
        return f"there is nothing to compute of shapes {a.shape} and {b.shape}"
    if b.ndim != 2 or transposed:
        return "tiles are read from a plain matrix b, nothing transposed"
    return refuses((cfg.block_m, cfg.block_n, cfg.block_k), cfg.num_stages, a.dtype.itemsize)


def _mosaic_refuses(a: Any, b: Any, cfg: MatmulConfig, *, transposed: bool, out: Any) -> str:
    """The reason that tiles of Mosaic cannot compute this product; empty where they can."""
    if 0 in (*a.shape, *b.shape) or b.ndim != 2 or transposed:
        return "tiles are read from plain matrices with something in them, nothing transposed"
    if out != a.dtype:
        return f"the result must be {a.dtype.name} as the factors are, not {out.name}"
    rows = a.size // a.shape[-1]
    refused = tiles.refuses((cfg.block_m, cfg.block_n, cfg.block_k), cfg.num_stages, a.dtype)
    return refused or tiles.shapes_refuse(rows, a.shape[-1], b.shape[-1], cfg.block_k, a.dtype)


def _factor(name: str, value: Any) -> jax.Array:
    array = value if isinstance(value, jax.Array) else as_array(name, value)
    if array.dtype.name not in (*FLOATS, DOUBLE):
        raise ArgumentTypeError(f"{name} is {array.dtype.name}; use one of {', '.join(FLOATS)}")
    if array.ndim < 2:
        raise ArgumentError(f"{name} must be a matrix, or have leading axes before one; got the shape {array.shape}")
    return array


def _bias(value: Any, b: jax.Array, columns: int) -> jax.Array:
    array = value if isinstance(value, jax.Array) else as_array("bias", value)
    if array.dtype.name not in (*FLOATS, DOUBLE):
        raise ArgumentTypeError(f"bias is {array.dtype.name}; use one of {', '.join(FLOATS)}")
    if array.shape != (columns,):
        raise ArgumentError(
            f"bias has the shape {array.shape} and b the shape {b.shape}; bias needs one value for each column of the "
            f"product, ({columns},)"
        )
    return array


def _dtype(value: Any) -> str:
    try:
        name = str(jnp.dtype(value))
    except TypeError as error:
        raise ArgumentTypeError(f"preferred_element_type={value!r} is no dtype") from error
    if name not in (*FLOATS, DOUBLE):
        raise ArgumentTypeError(f"preferred_element_type is {name}; use one of {', '.join(FLOATS)}")
    return name


def _activation(activation: Activation | None) -> Callable[[jax.Array], jax.Array]:
    if activation is None:
        return lambda x: x
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation]
    if callable(activation):
        return activation
    raise ArgumentError(f"activation={activation!r} is unknown; use {', '.join(ACTIVATIONS)}, or a function")


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _rows(inv: Invocation[Any, Any]) -> int:
    """The number of rows of a product with a matrix."""
    a = inv.args[0]
    return int(a.size // max(a.shape[-1], 1))
