"""Ragged products: rows in groups, each group times a matrix of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel, _jax
from ..ops.core.device import device_of, get_device_platform
from .arguments import ArgumentError, as_int32, float_array, float_dtype, integers, known_values, same, same_dtype
from .call import plan, planned
from .extent import are_known, too_large
from .mosaic import served, tiles
from .mosaic.measured_calls import is_measured, runs_at_once
from .narrow import split
from .ragged_dot_tiles import masked
from .ragged_dot_ways import mosaic_refuses, outer, product
from .triton.served import missing as triton_missing
from .values import were_checked

_ARRAYS = ("lhs", "rhs", "group_sizes")
# An H200 does some 180 operations while it reads a byte: up to so many rows of a group it waits for matrices.
_READ = 64
# Rows that XLA's own serves, which reads each matrix whole, and so many groups that their last tiles count.
_FEW_ROWS, _FEW = 128, 16
# Rows of a tile where the number of rows is a symbol: chosen, and not timed.
_UNKNOWN_SHARE = 64
# Columns from which three stages are better than four: they leave room to hand over a tile's columns at once.
_MANY_COLUMNS = 8192


@dataclass(frozen=True)
class RaggedDotConfig:
    """An implementation of the product, and its blocks where it has any: rows, columns, inner dimension."""

    implementation: str
    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


class RaggedDot(Kernel[RaggedDotConfig, jax.Array]):
    """`lax.ragged_dot` of `lhs` (m, k), `rhs` (groups, k, n) and `group_sizes`; arguments as `ragged_dot` makes them.

    Implementations: "xla" (`lax.ragged_dot`), "masked" (group by group over all rows), "tiled" (a loop over tiles of
    rows of one group), "triton" (the same as a Pallas kernel), "mosaic" (the same for Hopper GPUs, with gradients),
    "mosaic_rolling" (the same by blocks that stay on their multiprocessors) and "mosaic_jax" (JAX's Pallas kernel for
    Hopper GPUs).
    """

    op_id = "library.ragged_dot"
    version = "4"  # no cfg has a lead
    cfg_type = RaggedDotConfig

    def run(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        preferred_element_type: str | None = None,
        cfg: RaggedDotConfig,
    ) -> jax.Array:
        """The product by the cfg's implementation."""
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        return product(cfg, interpret=False)(lhs, rhs, group_sizes, transposed=False, dtype=dtype)

    # Its arguments are named once more: the executor turns those given by name into positions, by this signature.
    def run_cpu(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        preferred_element_type: str | None = None,
        cfg: RaggedDotConfig,
    ) -> jax.Array:
        """The product on a CPU, where a Pallas kernel is interpreted, for tests alone."""
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        return product(cfg, interpret=True)(lhs, rhs, group_sizes, transposed=False, dtype=dtype)

    def fwd_with_residuals(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, tuple[()]]:
        """The product; its gradient needs the arguments alone."""
        return self.run(*args, cfg=cfg, **kwargs), ()

    def fwd_with_residuals_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, tuple[()]]:
        """The product on a CPU; its gradient needs the arguments alone."""
        return self.run_cpu(*args, cfg=cfg, **kwargs), ()

    def vjp(
        self,
        residuals: Any,
        y: jax.Array,
        dy: jax.Array,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        preferred_element_type: str | None = None,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array, None]:
        """Two products of the same kind: with the matrices transposed, and of each group's rows with its gradients."""
        back, across = product(cfg, interpret), outer(cfg, interpret)
        if jnp.promote_types(dy.dtype, lhs.dtype) == lhs.dtype:
            dy = dy.astype(lhs.dtype)
            d_lhs = back(dy, rhs, group_sizes, transposed=True, dtype=lhs.dtype)
            return d_lhs, across(lhs, dy, group_sizes, dtype=rhs.dtype), None
        # A gradient wider than the factors would be rounded, and be infinite where it is too large for them.
        near, rest, lift = split(dy, lhs.dtype)
        dtypes = (lhs.dtype, rhs.dtype) if isinstance(lift, float) else (jnp.float32, jnp.float32)
        d_lhs = back(near, rhs, group_sizes, rest, transposed=True, dtype=dtypes[0]) / lift
        d_rhs = across(lhs, near, group_sizes, rest, dtype=dtypes[1]) / lift
        return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype), None

    def vjp_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, jax.Array, None]:
        """The gradients on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """Tiles as high as a group on average: XLA's own computes every row for every group."""
        return RaggedDotConfig("tiled", block_m=_average(inv, least=16, most=512))

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """Chooses by the average rows of a group, since each row is one operation a byte of the matrices.

        Up to `_READ` of them in few groups, reading the matrices is what takes the time, and Triton's low tiles leave
        room for several blocks on a multiprocessor: 0.81 to 0.93 of the time of any other in two calls. Else the
        library's own for Hopper GPUs, which took 0.66 to 1.08 of Triton's time and 0.46 to 0.92 of JAX's in fourteen
        calls of 8 to 128 groups with 16 to 1,024 rows each; blocks that stay took 0.86 to 1.0 of that in seven, where
        all run at once. On other GPUs Triton's, with tiles no higher than a group.
        """
        given = _named(inv)
        lhs, rhs = given["lhs"], given["rhs"]
        if not are_known(lhs.shape[0]):
            return self.heuristic_cfg(inv)
        share = lhs.shape[0] / rhs.shape[0]
        inner = 64 if _narrow(inv) else 32
        ways = [RaggedDotConfig("xla")] if lhs.shape[0] <= _FEW_ROWS else []
        ways.append(RaggedDotConfig("triton", _average(inv, least=16, most=128), 128, inner, 4, 3))
        if is_measured(inv, lhs.size, rhs.size, lhs.shape[0] * rhs.shape[2]):
            own = RaggedDotConfig("mosaic", 128, *_columns(*rhs.shape[1:]))
            low = RaggedDotConfig("triton", 64, 128, inner, 4, 3)
            rolling = RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 3 if rhs.shape[2] >= _MANY_COLUMNS else 4)
            reads = share <= _READ and rhs.shape[0] <= _FEW
            stays = share > _READ and runs_at_once(inv)
            ways = [*ways[:-1], low, own, ways[-1]] if reads else [*[rolling] * stays, own, *ways]
        return next((cfg for cfg in ways if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """Smaller tiles than elsewhere: on a CPU a tile need not be larger than the cache."""
        return RaggedDotConfig("tiled", block_m=_average(inv, least=16, most=256))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """XLA's, group by group, and tiles around the average group."""
        average = _average(inv, least=16, most=512)
        sizes = dict.fromkeys(min(max(size, 8), 1024) for size in (average // 4, average // 2, average, 2 * average))
        tiles = [RaggedDotConfig("tiled", block_m=size) for size in sizes]
        return [RaggedDotConfig("xla"), RaggedDotConfig("masked"), *tiles]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """The Pallas kernels as well, over their blocks and launch parameters."""
        high = _average(inv, least=16, most=128)
        rows = dict.fromkeys((high, max(16, high // 2)))
        inner = (64, 32) if _narrow(inv) else (32,)
        blocks = dict.fromkeys([*itertools.product(rows, (128, 256), inner, (4, 8), (3, 4)), (64, 128, inner[0], 4, 3)])
        # Those first that were the fastest: a tuning that runs out of time must not miss them.
        found = [RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, s) for s in (4, 3)]
        found += [RaggedDotConfig("mosaic", 128, 256, 64, None, s) for s in (4, 3)]
        found += [RaggedDotConfig("triton", *block) for block in blocks]
        found += [RaggedDotConfig("mosaic", 128, n, 64, None, s) for n, s in ((128, 5), (128, 4), (64, 6))]
        # Without Triton the guess may be among these.
        sizes = {256, 512} | ({_average(inv, least=16, most=512)} if triton_missing() else set())
        found += [RaggedDotConfig("tiled", block_m=size) for size in sorted(sizes)]
        found += [RaggedDotConfig("mosaic_jax", m, n, 64, None, s) for m, n in ((64, 128), (128, 128)) for s in (4, 6)]
        return [*found, RaggedDotConfig("xla")]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: RaggedDotConfig) -> bool | str:
        """Refuses Pallas kernels where they cannot run, with the reason."""
        if cfg.implementation not in ("triton", "mosaic", "mosaic_rolling", "mosaic_jax"):
            return True
        device, given = device_of(inv), _named(inv)
        if get_device_platform(device) != "gpu":
            return f"{cfg.implementation} runs on GPUs alone"
        if cfg.implementation in ("mosaic", "mosaic_rolling"):
            lhs, rhs, block = given["lhs"], given["rhs"], (cfg.block_m, cfg.block_n, cfg.block_k)
            wanted = given.get("preferred_element_type") or lhs.dtype.name
            if wanted not in ("float32", "bfloat16", "float16"):
                return f"Mosaic's products give float32, bfloat16 and float16, not {wanted}"
            # Whole tiles and parts of tiles are handed over from places of their own.
            refused = tiles.refuses(block, cfg.num_stages, lhs.dtype, held=2 * tiles.CHUNK)
            if wanted != lhs.dtype.name:
                # Wider results, and gradients to them, leave two stages at least.
                refused = refused or tiles.refuses(block, 2, lhs.dtype, held=4 * tiles.CHUNK)
            refused = refused or tiles.grid_refuses(lhs.shape[0], rhs.shape[0], cfg.block_m)
            # The gradient swaps depth and columns.
            for depth, width in (rhs.shape[1:], rhs.shape[:0:-1]):
                refused = refused or tiles.shapes_refuse(lhs.shape[0], depth, width, cfg.block_k, lhs.dtype)
            if cfg.implementation == "mosaic_rolling":
                refused = refused or tiles.rolling_refuses(lhs.shape[0], rhs.shape[1:], block)
            sizes = (lhs.size, rhs.size, lhs.shape[0] * rhs.shape[2])
            return refused or served.refuses(inv, *sizes, hopper=True) or True
        if cfg.implementation == "mosaic_jax":
            capability = str(getattr(device, "compute_capability", "0"))
            if any(_jax.varying_axes(given[name]) for name in _ARRAYS):
                return "JAX's Mosaic kernel does not say over which mesh axes it varies; use check_vma=False"
            wanted = given.get("preferred_element_type")
            return mosaic_refuses(given["lhs"], given["rhs"], wanted, cfg, capability) or True
        if triton_missing():
            return triton_missing()
        # Both operands of each stage are in shared memory at once; a Hopper GPU has 227 KiB of it for a program.
        size = (cfg.block_m or 0) + (cfg.block_n or 0)
        held = size * (cfg.block_k or 0) * given["lhs"].dtype.itemsize * (cfg.num_stages or 1)
        if held > 227 * 1024:
            return f"its stages need {held // 1024} KiB of shared memory, over 227"
        lhs, rhs = given["lhs"], given["rhs"]
        return too_large(inv, lhs.size, rhs.size, lhs.shape[0] * rhs.shape[2]) or True

    def operations(self, inv: Invocation[Any, Any]) -> float:
        """Each row times one matrix: the reference multiplies each with all."""
        given = _named(inv)
        return float(2 * given["lhs"].size * given["rhs"].shape[2])

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Groups as a router makes them, some larger than others, where a trace hides the real sizes."""
        given = _named(inv)
        sizes = given["group_sizes"]
        if known_values(sizes) is None and sizes.shape[0]:
            # No more rows than one group may have by its dtype.
            rows = min(given["lhs"].shape[0], int(np.iinfo(sizes.dtype).max))
            shares = rng.dirichlet(np.full(sizes.shape[0], 4.0))
            given["group_sizes"] = rng.multinomial(rows, shares).astype(sizes.dtype)
        rest = {name: value for name, value in inv.kwargs.items() if name not in _ARRAYS}
        return tuple(given[name] for name in _ARRAYS), rest

    def reference(self, lhs: Any, rhs: Any, group_sizes: Any, *, preferred_element_type: str | None = None) -> Any:
        """Group by group in float32."""
        dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        with jax.default_matmul_precision("highest"):
            one, other = (x.astype(jnp.float32) for x in (lhs, rhs))
            return masked(one, other, group_sizes, transposed=False, dtype=dtype)


def _fits(sizes: np.ndarray[Any, Any], rows: int) -> bool:
    # By Python's numbers, which have no end.
    known = sizes.tolist()
    return not known or (min(known) >= 0 and sum(known) <= rows)


def _sizes_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # All three arrays by position, as nearly every call has them: a call of another form is checked in full.
    shape: tuple[int, ...] = args[0].shape if len(args) == 3 else ()
    return len(shape) == 2 and were_checked(args[2], shape[0], _fits)


@planned(known_good=_sizes_are_known)
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = None,
    cfg: RaggedDotConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """Rows of `lhs` (m, k) in groups of these sizes, each group times its matrix of `rhs` (groups, k, n).

    Rows beyond the last group give zeros. Sizes that are negative or add up to more than m are an error where they can
    be read; under a trace they are cut at the last row.
    """
    lhs = float_array("lhs", lhs, ("m", "k"))
    rhs = float_array("rhs", rhs, ("groups", "k", "n"))
    given = integers("group_sizes", group_sizes, ("groups",))
    same_dtype("lhs", lhs, "rhs", rhs)
    same("k", "lhs", lhs, lhs.shape[1], "rhs", rhs, rhs.shape[1])
    same("groups", "rhs", rhs, rhs.shape[0], "group_sizes", given, given.shape[0])
    known = known_values(given)
    if known is not None and not _fits(known, lhs.shape[0]):
        raise ArgumentError(
            f"group_sizes must be 0 or more and add up to at most the {lhs.shape[0]} rows of lhs {lhs.shape}; "
            f"the least is {int(known.min())} and they add up to {sum(known.tolist())}"
        )
    wanted = None if preferred_element_type is None else float_dtype("preferred_element_type", preferred_element_type)
    if not lhs.size or not rhs.size:
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), wanted or lhs.dtype)
    static: dict[str, Any] = {"preferred_element_type": wanted}
    return plan(RaggedDot(), lhs, rhs, as_int32(given), cfg=cfg, executor=executor, **static)  # type: ignore[no-any-return]


def _named(inv: Invocation[Any, Any]) -> dict[str, Any]:
    return dict(zip(_ARRAYS, inv.args, strict=False)) | dict(inv.kwargs)


def _narrow(inv: Invocation[Any, Any]) -> bool:
    return bool(_named(inv)["lhs"].dtype.itemsize == 2)


def _columns(depth: int, width: int) -> tuple[int, int, None, int]:
    """Columns of a tile with the rest of its launch: wide ones, unless they reach far over the end of a matrix."""
    # The gradient swaps depth and columns.
    is_wide = all(-(-size // 256) * 256 <= 1.15 * (-(-size // 128) * 128) for size in (depth, width))
    return (256, 64, None, 4) if is_wide else (128, 64, None, 5)


def _average(inv: Invocation[Any, Any], *, least: int, most: int) -> int:
    """The rows of a group on average, as the power of two above."""
    given = _named(inv)
    if not are_known(given["lhs"].shape[0]):
        return min(max(_UNKNOWN_SHARE, least), most)
    share = max(1, given["lhs"].shape[0] // given["rhs"].shape[0])
    return int(min(max(1 << (share - 1).bit_length(), least), most))
