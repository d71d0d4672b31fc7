"""Products with weights of 8 or 4 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation, Kernel
from .arguments import ArgumentError, ArgumentTypeError, as_array, float_array, integer, same
from .call import plan, planned
from .extent import too_large
from .mosaic import quantized_tiles, served
from .quantize import INTEGERS, spread_scales
from .reverse import recomputed
from .rows import narrow_rows
from .triton.quantized import refuses, widened

_MOSAIC = ("mosaic", "mosaic_ahead")


@dataclass(frozen=True)
class QuantizedMatmulConfig:
    """An implementation, and its blocks where it has any."""

    implementation: str
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    split_k: int | None = None
    warpgroups: int | None = None


class QuantizedMatmul(Kernel[QuantizedMatmulConfig, jax.Array]):
    """`x @ (q_weight * scales)` for x (rows, k), integers (k, n) and scales (n,) or, by groups of k, (groups, n).

    Implementations: "dequantize" (weights in the dtype of x, then a product), "scaled" (a product of the integers and
    then the scales, group by group) "summed" (multiplied and added up, for a few rows), "triton" (integers
    made wide in registers, for up to 128 rows), "mosaic" (the same for Hopper GPUs and up to 256 rows, with the
    depth in `split_k` parts that are added up, and `warpgroups` that multiply while another copies) and "mosaic_ahead"
    (the same, with the next weights made wide while the tensor cores multiply, for scales (n,)).
    """

    op_id = "library.quantized_matmul"
    version = "2"  # split_k and warpgroups came: entries of version 1 lack them
    cfg_type = QuantizedMatmulConfig

    def run(
        self,
        x: jax.Array,
        q_weight: jax.Array,
        scales: jax.Array,
        *,
        cfg: QuantizedMatmulConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        if cfg.implementation == "dequantize":
            return _dequantized(x, q_weight, scales)
        if cfg.implementation == "scaled":
            return _scaled(x, q_weight, scales)
        if cfg.implementation == "summed":
            return recomputed(_summed, _scaled)(x, q_weight, scales)  # type: ignore[no-any-return]
        if cfg.implementation == "triton":
            how: dict[str, Any] = {"block_n": cfg.block_n or 64, "block_k": cfg.block_k or 64}
            how |= {"num_warps": cfg.num_warps or 4, "num_stages": cfg.num_stages or 3}
            return recomputed(functools.partial(widened, interpret=interpret, **how), _scaled)(x, q_weight, scales)  # type: ignore[no-any-return]
        if cfg.implementation in _MOSAIC:
            refused = _refused(cfg, x, q_weight, scales)
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")
            return recomputed(functools.partial(_by_mosaic, cfg, interpret), _scaled)(x, q_weight, scales)  # type: ignore[no-any-return]
        names = "dequantize, scaled, summed, triton, mosaic or mosaic_ahead"
        raise ArgumentError(f"{cfg} names no implementation of quantized_matmul; use {names}")

    def run_cpu(self, *args: Any, cfg: QuantizedMatmulConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, x: jax.Array, q_weight: jax.Array, scales: jax.Array) -> jax.Array:
        """Computes the product in float32."""
        with jax.default_matmul_precision("highest"):
            return _dequantized(x.astype(jnp.float32), q_weight, scales).astype(x.dtype)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> QuantizedMatmulConfig:
        """A product of the integers, which rounds nothing before it is scaled; many groups are scaled before."""
        x, _, scales = inv.args
        return QuantizedMatmulConfig("scaled" if scales.ndim == 1 or x.shape[0] <= 16 else "dequantize")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> QuantizedMatmulConfig:
        """The kernel for Hopper for a batch of decoding; one row, many, and scales of groups were not measured.

        64 rows by 8192x8192 took 25 us on an H200 with 8 bits, 33 with weights made wide and multiplied in turns; by
        XLA 38. With 4 bits the latter took 24, by XLA 40; the former was not measured.
        """
        x, _, scales = inv.args
        if scales.ndim == 1 and 32 <= x.shape[0] <= 128:
            for cfg in self._strips(inv)[:1]:
                if self.valid_cfg(inv, cfg) is True:
                    return cfg
        return self.heuristic_cfg(inv)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[QuantizedMatmulConfig]:
        """All ways in plain JAX."""
        return [QuantizedMatmulConfig(way) for way in ("scaled", "dequantize", "summed")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[QuantizedMatmulConfig]:
        """The kernels as well, over their blocks."""
        blocks = [(n, k, w, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 4)) for w in (4, 8)]
        return [
            *self.candidate_cfgs(inv),
            *(QuantizedMatmulConfig("triton", *block) for block in blocks),
            *self._strips(inv),
        ]

    @staticmethod
    def _strips(inv: Invocation[Any, Any]) -> list[QuantizedMatmulConfig]:
        return [
            QuantizedMatmulConfig(way, s.n, s.k, None, s.stages, s.parts, s.workers)
            for way in (("mosaic_ahead", "mosaic") if inv.args[2].ndim == 1 else ("mosaic",))
            for s in quantized_tiles.strips(*inv.args, ahead=way == "mosaic_ahead")
        ]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: QuantizedMatmulConfig) -> bool | str:
        """Sums without a product are for a few rows, and so are the kernels."""
        if cfg.implementation in _MOSAIC:
            refused = _refused(cfg, *inv.args)
            return refused or served.refuses(inv, inv.args[1].size, hopper=True) or True
        if cfg.implementation == "triton":
            x, weight, scales = inv.args
            found = refuses(x, weight, scales, cfg.block_n, cfg.block_k, cfg.num_stages)
            return found or too_large(inv, inv.args[1].size) or True
        rows = inv.args[0].shape[0]
        return (
            f"{rows} rows are too many to add up without a product"
            if cfg.implementation == "summed" and rows > 16
            else True
        )

    def example_inputs(self, inv: Invocation[Any, Any], rng: Any) -> tuple[tuple[Any, ...], Any]:
        """All integers that the dtype has, where a trace hides the real ones, and scales as small as they make them."""
        x, weight, scales = inv.args
        info = jnp.iinfo(weight.dtype)
        if not isinstance(weight, jax.Array) or isinstance(weight, jax.core.Tracer):
            key = jax.random.key(int(rng.integers(1 << 31)))
            made = jax.random.randint(key, weight.shape, int(info.min), int(info.max) + 1, jnp.int32)
            weight = made.astype(weight.dtype)
            scales = jnp.asarray(rng.uniform(0.5, 1.5, scales.shape) / float(info.max), scales.dtype)
        return (x, weight, scales), dict(inv.kwargs)


@planned()
def quantized_matmul(
    x: jax.Array,
    q_weight: jax.Array,
    scales: jax.Array,
    *,
    group: int | None = None,
    cfg: QuantizedMatmulConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`x @ (q_weight * scales)` in the dtype of x, for x (..., k) and weights of int8 or int4 (k, n).

    Scales are (n,), or with `group` (k / group, n): one for so many of k. `x` and scales have gradients.
    """
    x = narrow_rows("x", x)
    weight = as_array("q_weight", q_weight)
    if weight.dtype.name not in INTEGERS or weight.ndim != 2:
        raise ArgumentTypeError(f"q_weight is {weight.dtype.name} {weight.shape}; use int8 or int4 of the shape (k, n)")
    same("k", "x", x, x.shape[-1], "q_weight", weight, weight.shape[0])
    depth, width = weight.shape
    if group is not None:
        group = integer("group", group)
        if group < 1 or depth % group:
            raise ArgumentError(f"group={group} does not divide the {depth} rows of q_weight {weight.shape}")
    form = ("n",) if group is None else ("k / group", "n")
    factors = float_array("scales", scales, form)
    wanted = (width,) if group is None else (depth // group, width)
    if factors.shape != wanted:
        raise ArgumentError(
            f"scales have the shape {factors.shape}; q_weight {weight.shape} with group={group} needs {wanted}"
        )
    shape = (*x.shape[:-1], width)
    if not x.size or not weight.size:
        return jnp.zeros(shape, x.dtype)
    flat = x.reshape(math.prod(x.shape[:-1]), depth)

    def whole(out: jax.Array) -> jax.Array:
        return out.reshape(shape)

    return plan(QuantizedMatmul(), flat, weight, factors, cfg=cfg, executor=executor, then=whole)  # type: ignore[no-any-return]


def _dequantized(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    block = (weight.shape[0] // scales.shape[0], 1) if scales.ndim == 2 else (weight.shape[0], 1)
    factor = spread_scales(scales.astype(jnp.float32), weight.shape, block)
    made = (weight.astype(jnp.float32) * factor).astype(x.dtype)
    return jnp.matmul(x, made, preferred_element_type=jnp.float32).astype(x.dtype)


def _scaled(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    # Integers of 8 bits are exact in bfloat16, which has 8, and in float16.
    if scales.ndim == 1:
        made = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return (made * scales.astype(jnp.float32)[None]).astype(x.dtype)
    groups, width = scales.shape
    parts = x.reshape(x.shape[0], groups, -1)
    blocks = weight.reshape(groups, -1, width).astype(x.dtype)
    made = jnp.einsum("mgk,gkn->gmn", parts, blocks, preferred_element_type=jnp.float32)
    return jnp.sum(made * scales.astype(jnp.float32)[:, None], axis=0).astype(x.dtype)


def _by_mosaic(
    cfg: QuantizedMatmulConfig, interpret: bool, x: jax.Array, weight: jax.Array, scales: jax.Array
) -> jax.Array:
    from .mosaic import quantized, quantized_ahead

    strip = quantized_tiles.Strip(*(size or 1 for size in _strip(cfg)))
    product = quantized.product if cfg.implementation == "mosaic" else quantized_ahead.product
    return product(x, weight, scales, strip=strip, interpret=interpret)


def _refused(cfg: QuantizedMatmulConfig, x: Any, weight: Any, scales: Any) -> str:
    if cfg.implementation == "mosaic_ahead" and scales.ndim == 2:
        return "scales of groups are not served"
    return quantized_tiles.refuses(x, weight, scales, sizes=_strip(cfg))


def _strip(cfg: QuantizedMatmulConfig) -> tuple[int | None, ...]:
    return cfg.block_n, cfg.block_k, cfg.num_stages, cfg.split_k, cfg.warpgroups


def _summed(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    block = (weight.shape[0] // scales.shape[0], 1) if scales.ndim == 2 else (weight.shape[0], 1)
    wide = weight.astype(jnp.float32)
    if scales.ndim == 2:
        wide = wide * spread_scales(scales.astype(jnp.float32), weight.shape, block)
    made: jax.Array = jnp.sum(x.astype(jnp.float32)[:, :, None] * wide[None], axis=1)
    return (made if scales.ndim == 2 else made * scales.astype(jnp.float32)[None]).astype(x.dtype)
