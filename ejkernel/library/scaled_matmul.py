"""Products of float8 with scales, and float8 training."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel, _jax
from ..ops.core.errors import GradientError
from .arguments import LARGEST, ArgumentError, ArgumentTypeError, as_array, float_array, float_dtype, same, same_dtype
from .call import plan, planned, program
from .mosaic import scaled_tiles, served
from .mosaic.measured_calls import is_measured
from .mosaic.tiles import PROCESSORS
from .quantize import FLOAT8, block_from, quantize, refuse_doubtful, spread_scales
from .reverse import recomputed
from .varying import varying_like

_BLOCK = 128


@dataclass(frozen=True)
class ScaledMatmulConfig:
    """An implementation, and its blocks where it has any."""

    implementation: str
    block_m: int | None = None
    block_n: int | None = None
    num_stages: int | None = None
    warpgroups: int | None = None
    block_k: int | None = None


class ScaledMatmul(Kernel[ScaledMatmulConfig, jax.Array]):
    """`(a * a_scales) @ (b * b_scales)` for float8 a (m, k) and b (k, n), with scales of two dimensions.

    Implementations: "float8" (the product itself, then the scales, where these do not change along k), "blocks" (the
    same for each block of k, added up), "bfloat16" (scaled and rounded before), "float32" (scaled before) and "mosaic"
    (one kernel for Hopper GPUs: scales that do not change along k, as "float8" has them, or of 1x128 for a and 128x128
    for b, as "blocks" has them).
    """

    op_id = "library.scaled_matmul"
    version = "2"  # blocks came: entries of version 1 lack them
    cfg_type = ScaledMatmulConfig

    def run(
        self,
        a: jax.Array,
        b: jax.Array,
        a_scales: jax.Array,
        b_scales: jax.Array,
        *,
        dtype: str = "bfloat16",
        cfg: ScaledMatmulConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        if cfg.implementation == "float8":
            return _direct(a, b, a_scales, b_scales).astype(dtype)
        if cfg.implementation == "blocks":
            return _by_blocks(a, b, a_scales, b_scales).astype(dtype)
        if cfg.implementation in ("bfloat16", "float32"):
            wide = [_times(x, s).astype(cfg.implementation) for x, s in ((a, a_scales), (b, b_scales))]
            return jnp.matmul(*wide, preferred_element_type=jnp.float32).astype(dtype)
        if cfg.implementation == "mosaic":
            refused = scaled_tiles.refuses(a, b, a_scales, b_scales, dtype=dtype, sizes=_patch(cfg))
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")

            def plain(*arrays: jax.Array) -> jax.Array:
                return _by_blocks(*arrays).astype(dtype)

            return recomputed(functools.partial(_by_mosaic, cfg, dtype, interpret), plain)(a, b, a_scales, b_scales)  # type: ignore[no-any-return]
        names = "float8, blocks, bfloat16, float32 or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of scaled_matmul; use {names}")

    def run_cpu(self, *args: Any, cfg: ScaledMatmulConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, *args: Any, dtype: str = "bfloat16") -> jax.Array:
        """Computes the product in float32."""
        with jax.default_matmul_precision("highest"):
            return self.run(*args, dtype=dtype, cfg=ScaledMatmulConfig("float32"))

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> ScaledMatmulConfig:
        """The product in float32, which hardware without float8 computes anyway."""
        return ScaledMatmulConfig("float32")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> ScaledMatmulConfig:
        """The kernel for Hopper where it fills the GPU; else float8 itself where the scales allow it, else bfloat16, or
        what is exact enough for a wider result.

        4096x7168x4096 took 188 us by it on an H200, and 251 with scales by block; by XLA 362 to 380. Scales by block
        need registers that blocks of 256 rows do not have.
        """
        constant = _is_constant(inv)
        kernels = [cfg for cfg in self._kernels(inv) if cfg.block_m == (256 if constant else 192)]
        for cfg in sorted(kernels, key=lambda cfg: -(cfg.block_k or 0)) if is_measured(inv, inv.args[0].size) else ():
            if self._fills(inv, cfg) and self.valid_cfg(inv, cfg) is True:
                return cfg
        narrow = inv.kwargs.get("dtype", "bfloat16") == "bfloat16"
        return ScaledMatmulConfig("float8" if constant else "bfloat16" if narrow else "float32")

    @staticmethod
    def _fills(inv: Invocation[Any, Any], cfg: ScaledMatmulConfig) -> bool:
        """Has every multiprocessor of a Hopper GPU a block?"""
        (m, _), n = inv.args[0].shape, inv.args[1].shape[1]
        return bool(-(-m // (cfg.block_m or 1)) * -(-n // (cfg.block_n or 1)) >= PROCESSORS)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[ScaledMatmulConfig]:
        """All ways in plain JAX."""
        return [ScaledMatmulConfig(way) for way in ("float32", "bfloat16", "float8", "blocks")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[ScaledMatmulConfig]:
        """The kernel as well, over its blocks."""
        return [*self.candidate_cfgs(inv), *self._kernels(inv)]

    @staticmethod
    def _kernels(inv: Invocation[Any, Any]) -> list[ScaledMatmulConfig]:
        a_scales, b_scales = inv.args[2:]
        blocks = scaled_tiles.patches(a_scales, b_scales, inv.kwargs.get("dtype", "bfloat16"))
        return [
            # Steps of 128 have no name of their own: so they are known since before there were others.
            ScaledMatmulConfig("mosaic", p.m, p.n, p.stages, p.workers, p.k if p.k != scaled_tiles.DEPTH else None)
            for p in blocks
        ]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: ScaledMatmulConfig) -> bool | str:
        """A product that is scaled afterwards needs scales that are the same along k; bfloat16 is for such results."""
        dtype = inv.kwargs.get("dtype", "bfloat16")
        if cfg.implementation == "mosaic":
            refused = scaled_tiles.refuses(*inv.args, dtype=dtype, sizes=_patch(cfg))
            a, b = inv.args[:2]
            return refused or served.refuses(inv, a.size, b.size, a.shape[0] * b.shape[1], hopper=True) or True
        if cfg.implementation == "bfloat16" and dtype != "bfloat16":
            return f"factors rounded to bfloat16 are too far off for a result in {dtype}"
        if cfg.implementation == "float8" and not _is_constant(inv):
            return "the scales change along k; float8 scales the product afterwards"
        if cfg.implementation == "blocks" and _is_constant(inv):
            return "the scales do not change along k; float8 does the same in one product"
        steps = _steps(*inv.args) if cfg.implementation == "blocks" else []
        if steps and math.gcd(*steps) < min(steps):
            return f"the scales change after {' and after '.join(map(str, steps))} of k, which makes many small blocks"
        return True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Random numbers of float8 and scales around one."""
        made = []
        for at, array in enumerate(inv.args):
            values = jax.random.normal(jax.random.key(int(rng.integers(1 << 31))), array.shape)
            made.append((values if at < 2 else jnp.exp(values / 4)).astype(array.dtype))
        return tuple(made), dict(inv.kwargs)


@planned(numbers=("a_scales", "b_scales"))
def scaled_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scales: jax.Array,
    b_scales: jax.Array,
    *,
    preferred_element_type: Any = jnp.bfloat16,
    cfg: ScaledMatmulConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`(a * a_scales) @ (b * b_scales)` for float8 `a` (m, k) and `b` (k, n), added up in float32.

    Scales are of shape (), or (rows / r, columns / c) for blocks of r by c, as `quantize` makes them: (m, k / 128) for
    a and (k / 128, n / 128) for b, say. The last block of 128 may be smaller, unless equal blocks would have as many
    scales, such as two of 96 for k = 192: that is an error, which says how to give one for each number. `float8_matmul`
    is the product for training, with gradients.
    """
    arrays = []
    for name, value in (("a", a), ("b", b)):
        array = as_array(name, value)
        if array.dtype.name not in FLOAT8 or array.ndim != 2:
            raise ArgumentTypeError(
                f"{name} is {array.dtype.name} {array.shape}; use two dimensions of {', '.join(FLOAT8)}"
            )
        arrays.append(array)
    same("k", "a", arrays[0], arrays[0].shape[1], "b", arrays[1], arrays[1].shape[0])
    factors = []
    for name, value, array in (("a_scales", a_scales, arrays[0]), ("b_scales", b_scales, arrays[1])):
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
            raise ArgumentError(f"{name}={value!r} is no finite float32")
        scale = jnp.asarray(value, jnp.float32) if isinstance(value, (int, float)) else as_array(name, value)
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ArgumentTypeError(f"{name} is {scale.dtype.name}; use float32")
        if scale.ndim == 1:
            raise ArgumentError(f"{name} has the shape {scale.shape}; give it two dimensions, such as [:, None]")
        if array.size:
            block_from(scale, array, name)
            refuse_doubtful(scale, array, name)
        factors.append(scale.astype(jnp.float32).reshape((1,) * (2 - scale.ndim) + scale.shape))
    dtype = float_dtype("preferred_element_type", preferred_element_type)
    if not arrays[0].size or not arrays[1].size:
        return jnp.zeros((arrays[0].shape[0], arrays[1].shape[1]), dtype)
    return plan(ScaledMatmul(), *arrays, *factors, dtype=dtype, cfg=cfg, executor=executor)  # type: ignore[no-any-return]


@planned()
def float8_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    blocks: bool = False,
    cfg: ScaledMatmulConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`a @ b` for a (..., k) and b (k, n) of one floating-point dtype, computed in float8, and so are its gradients.

    Both are rounded to float8_e4m3fn and the gradient that comes back to float8_e5m2, each with one scale; or with
    `blocks` in blocks of 1 by 128 along what is added up, and of 128 by 128.
    """
    first = as_array("a", a)
    if first.ndim < 1:
        raise ArgumentError("a has the shape (); give it at least one dimension")
    flat = float_array("a", first.reshape(math.prod(first.shape[:-1]), first.shape[-1]), ("m", "k"))
    second = float_array("b", b, ("k", "n"))
    same_dtype("a", flat, "b", second)
    same("k", "a", flat, flat.shape[1], "b", second, second.shape[0])

    def product(executor: Executor[Any, Any] | None) -> jax.Array:
        # Inside shard_map, what all shards share is spread before, so that JAX itself adds up its gradients.
        sides = (_jax.reverse_only(varying_like(side, flat, second), _forward_mode_error) for side in (flat, second))
        made: jax.Array = _training(bool(blocks), cfg, executor, *sides)
        return made.reshape(*first.shape[:-1], second.shape[1])

    return program("library.float8_matmul", product, executor)  # type: ignore[no-any-return]


def _forward_mode_error() -> GradientError:
    return GradientError(
        "library.float8_matmul has its own gradient, which is reverse mode only (grad, vjp); forward mode (jvp, "
        "jacfwd, linearize) of it cannot be had: use jacrev, or matmul"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _training(blocks: bool, cfg: Any, executor: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    return _narrow_product(blocks, cfg, executor, a, b, jnp.float8_e4m3fn, jnp.float8_e4m3fn)


def _training_forward(blocks: bool, cfg: Any, executor: Any, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    return _training(blocks, cfg, executor, a, b), (a, b)


def _training_backward(blocks: bool, cfg: Any, executor: Any, residuals: Any, dy: jax.Array) -> tuple[Any, Any]:
    a, b = residuals
    # Each is rounded again along what is added up now.
    kinds = (jnp.float8_e5m2, jnp.float8_e4m3fn)
    d_a = _narrow_product(blocks, cfg, executor, dy, b.T, *kinds)
    d_b = _narrow_product(blocks, cfg, executor, a.T, dy, *kinds[::-1])
    return d_a, d_b


_training.defvjp(_training_forward, _training_backward)


def _narrow_product(blocks: bool, cfg: Any, executor: Any, a: Any, b: Any, kind_a: Any, kind_b: Any) -> jax.Array:
    if not a.size or not b.size:
        return jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
    near, a_scales = quantize(a, kind_a, block=(1, _BLOCK) if blocks else None)
    other, b_scales = quantize(b, kind_b, block=(_BLOCK, _BLOCK) if blocks else None)
    # The size of the blocks is known here, which `scaled_matmul` would take from shapes.
    scales = [s.reshape((1,) * (2 - s.ndim) + s.shape) for s in (a_scales, b_scales)]
    return _of_float8(near, other, *scales, dtype=a.dtype.name, cfg=cfg, executor=executor)  # type: ignore[no-any-return]


@planned()
def _of_float8(*arrays: jax.Array, dtype: str, cfg: Any, executor: Any) -> Any:
    return plan(ScaledMatmul(), *arrays, dtype=dtype, cfg=cfg, executor=executor)


def _times(x: jax.Array, scales: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) * spread_scales(scales, x.shape, block_from(scales, x))


def _direct(a: Any, b: Any, a_scales: Any, b_scales: Any) -> jax.Array:
    made = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    rows = spread_scales(a_scales, a.shape, block_from(a_scales, a))
    return made * rows * spread_scales(b_scales, b.shape, block_from(b_scales, b))


def _by_blocks(a: Any, b: Any, a_scales: Any, b_scales: Any) -> jax.Array:
    """Block by block of k, as wide as neither of both scales changes within."""
    depth = a.shape[1]
    size = math.gcd(*_steps(a, b, a_scales, b_scales)) or depth
    total = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    for low in range(0, depth, size):
        high = min(low + size, depth)
        sides = []
        for scales, x, axis in ((a_scales, a, 1), (b_scales, b, 0)):
            block = block_from(scales, x)
            at = low // block[axis] if scales.shape[axis] > 1 else 0
            mine = jax.lax.slice_in_dim(scales, at, at + 1, axis=axis)
            sides.append(spread_scales(mine, x.shape, block))
        part = jax.lax.dot_general(
            a[:, low:high], b[low:high], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = total + part * sides[0] * sides[1]
    return total


def _steps(a: Any, b: Any, a_scales: Any, b_scales: Any) -> list[int]:
    """The number of k after which the scales change, for each side where they do."""
    sides = ((a, a_scales, 1), (b, b_scales, 0))
    return [block_from(scales, x)[axis] for x, scales, axis in sides if scales.shape[axis] > 1]


def _by_mosaic(cfg: ScaledMatmulConfig, dtype: str, interpret: bool, *arrays: jax.Array) -> jax.Array:
    from .mosaic.scaled import product

    a, b, a_scales, b_scales = arrays
    patch = scaled_tiles.Patch(*(size or 1 for size in _patch(cfg)))
    return product(a, b, a_scales, b_scales, patch=patch, dtype=jnp.dtype(dtype), interpret=interpret)


def _patch(cfg: ScaledMatmulConfig) -> tuple[int | None, ...]:
    depth = scaled_tiles.DEPTH if cfg.block_k is None else cfg.block_k
    return cfg.block_m, cfg.block_n, cfg.num_stages, cfg.warpgroups, depth


def _is_constant(inv: Invocation[Any, Any]) -> bool:
    return bool(inv.args[2].shape[1] == 1 and inv.args[3].shape[0] == 1)
