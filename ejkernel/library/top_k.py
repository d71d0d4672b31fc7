"""The largest of each row, with their indices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import FLOATS, ArgumentError, ArgumentTypeError, as_array, integer
from .call import plan, planned
from .extent import too_large
from .order import bits_refused
from .top_k_ways import by_bits, by_parts, spread
from .triton import lists, select

ValuesAndIndices = tuple[jax.Array, jax.Array]

# Rows of a router, which one warp holds.
_SHORT = 512
# Of a pass, where a cfg has none.
_BITS = 4


@dataclass(frozen=True)
class TopKConfig:
    """An implementation, and its parameters: elements of a block and how it ends, bits of a pass, rows of a program."""

    implementation: str
    block: int | None = None
    finish: str | None = None
    bits: int | None = None
    rows: int | None = None
    num_warps: int | None = None


class TopK(Kernel[TopKConfig, ValuesAndIndices]):
    """The k largest over the last axis, in order, and their indices; equal ones in the order of their indices.

    Implementations: "xla" (`lax.top_k`), "parts" (maxima of blocks, then the blocks that matter; it ends by counting or
    by sorting what is left), "bits" (the k-th largest found digit by digit), "triton" (short rows in registers, the
    largest taken one after the other) and "triton_lists" (the same, out of lists that each lane has sorted).
    """

    op_id = "library.top_k"
    version = "1"
    cfg_type = TopKConfig

    def run(self, x: jax.Array, *, k: int, cfg: TopKConfig, interpret: bool = False) -> ValuesAndIndices:
        """The computation by the cfg's implementation."""
        return _selected(_selection(cfg, k, interpret), x)

    def run_cpu(self, x: jax.Array, *, k: int, cfg: TopKConfig) -> ValuesAndIndices:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(x, k=k, cfg=cfg, interpret=True)

    def reference(self, x: jax.Array, *, k: int) -> ValuesAndIndices:
        """Selects as JAX does."""
        return _selected(_selection(TopKConfig("xla"), k), x)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> TopKConfig:
        """Parts where they leave less than half of a row to sort, else JAX's own."""
        _, width, k = _sizes(inv)
        return TopKConfig("parts", finish="sort") if width >= 64 * k and width >= 1024 else TopKConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> TopKConfig:
        """The kernel for a router's short rows, else parts and counting: XLA sorts whole rows there.

        On an H200: 6.2 us by lists, 10.6 one after the other, 51 by parts and 72 by XLA for 8 of 8192x256; 40 by parts
        against 935 for 50 of 32x131072.
        """
        _, width, k = _sizes(inv)
        for kernel in (TopKConfig("triton_lists", rows=4, num_warps=4), TopKConfig("triton", rows=1, num_warps=1)):
            if width <= _SHORT and self.valid_cfg(inv, kernel) is True:
                return kernel
        return TopKConfig("parts", finish="count") if width >= 4 * k and k <= 128 else TopKConfig("xla")

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[TopKConfig]:
        """JAX's own, and parts of several sizes."""
        blocks = [TopKConfig("parts", block, "sort") for block in (None, 16, 64, 256)]
        return [TopKConfig("xla"), *blocks, TopKConfig("parts", finish="count"), TopKConfig("bits", bits=4)]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[TopKConfig]:
        """JAX's own, parts that count and parts that sort, and bits."""
        counted = [TopKConfig("parts", block, "count") for block in (None, 8, 32, 128)]
        sorted_ = [TopKConfig("parts", block, "sort") for block in (None, 64)]
        found = [TopKConfig("xla"), *counted, *sorted_, TopKConfig("bits", bits=2), TopKConfig("bits", bits=4)]
        found += [TopKConfig("triton", rows=r, num_warps=w) for r in (1, 4, 8, 16) for w in (1, 4)]
        lists = ((1, 1), (2, 1), (4, 1), (4, 4), (8, 4), (16, 4))
        return [*found, *(TopKConfig("triton_lists", rows=r, num_warps=w) for r, w in lists)]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: TopKConfig) -> bool | str:
        """Blocks must leave something out, counting is for few, and passes of bits end with the last one."""
        _, width, k = _sizes(inv)
        if cfg.implementation == "parts" and cfg.block and cfg.block * k * 2 > width:
            return f"{k} blocks of {cfg.block} are over half of a row of {width}"
        if cfg.implementation == "parts" and cfg.finish == "count" and k > 256:
            return f"ranks of {k} blocks are too many to count"
        if cfg.implementation == "bits":
            return bits_refused(_array(inv).dtype, cfg.bits or _BITS) or True
        if cfg.implementation in ("triton", "triton_lists"):
            refuses = select.refuses if cfg.implementation == "triton" else lists.refuses
            return too_large(inv, _sizes(inv)[0] * width) or refuses(width, k, cfg.rows, cfg.num_warps) or True
        return True


@planned()
def top_k(
    x: jax.Array, k: int, *, cfg: TopKConfig | None = None, executor: Executor[Any, Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, over the last axis, in order, and their indices as int32.

    Equal elements come in the order of their indices, as `lax.top_k` has them. Values have a gradient.
    """
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        # JAX itself would cut them to 32 bits.
        if x.size and not np.iinfo(np.int32).min <= int(x.min()) <= int(x.max()) <= np.iinfo(np.int32).max:
            raise ArgumentError(f"x is {x.dtype.name} from {x.min()} to {x.max()}; integers must fit in 32 bits")
        x = x.astype(np.int32)
    x = as_array("x", x)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits in (8, 16, 32)
    if x.dtype.name not in FLOATS and not is_integer:
        raise ArgumentTypeError(f"x is {x.dtype.name}; use {', '.join(FLOATS)} or integers of at most 32 bits")
    if x.ndim == 0:
        raise ArgumentError("x has the shape (); give it at least one dimension")
    k = integer("k", k)
    if not 0 <= k <= x.shape[-1]:
        raise ArgumentError(f"k={k} is not from 0 to the {x.shape[-1]} elements of the last axis of x {x.shape}")
    if k == 0 or not x.size:
        shape = (*x.shape[:-1], k)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int32)
    return plan(TopK(), x, k=k, cfg=cfg, executor=executor, then=tuple)  # type: ignore[no-any-return]


def _selection(cfg: TopKConfig, k: int, interpret: bool = False) -> Callable[[jax.Array], ValuesAndIndices]:
    if cfg.implementation == "xla":
        return lambda x: (*jax.lax.top_k(x, k),)
    if cfg.implementation == "parts":
        return _with_values(functools.partial(by_parts, k=k, block=cfg.block, sorts=cfg.finish != "count"))
    if cfg.implementation == "bits":
        return _with_values(functools.partial(by_bits, k=k, bits=cfg.bits or _BITS))
    if cfg.implementation in ("triton", "triton_lists"):
        kernel = select.largest_of_rows if cfg.implementation == "triton" else lists.largest_by_lists
        launch: dict[str, Any] = {"rows": cfg.rows or 1, "num_warps": cfg.num_warps or 1}
        return functools.partial(kernel, k=k, interpret=interpret, **launch)
    raise ArgumentError(f"{cfg} names no implementation of top_k; use xla, parts, bits, triton or triton_lists")


def _with_values(selection: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], ValuesAndIndices]:
    def found(x: jax.Array) -> ValuesAndIndices:
        indices = selection(x)
        return jnp.take_along_axis(x, indices, axis=-1), indices

    return found


def _selected(selection: Callable[[jax.Array], ValuesAndIndices], x: jax.Array) -> ValuesAndIndices:
    """Values and indices; the values' tangents are those at the indices, however these were found."""
    # Indices have no tangent: inside shard_map JAX takes none that a rule makes for them.
    still = jax.lax.stop_gradient(x)
    values, indices = selection(still.reshape(-1, x.shape[-1]))
    values, indices = (made.reshape(*x.shape[:-1], -1) for made in (values, indices))
    return (_moved(values, indices, x) if jnp.issubdtype(x.dtype, jnp.floating) else values), indices


@jax.custom_jvp
def _moved(values: jax.Array, indices: jax.Array, x: jax.Array) -> jax.Array:
    """The values, which move with the elements of `x` at the indices."""
    return values


@_moved.defjvp
def _moved_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _moved(*primals), spread(tangents[2], primals[1])


def _array(inv: Invocation[Any, Any]) -> Any:
    return inv.args[0] if inv.args else inv.kwargs["x"]


def _sizes(inv: Invocation[Any, Any]) -> tuple[int, int, int]:
    x = _array(inv)
    return math.prod(x.shape[:-1]), x.shape[-1], inv.kwargs["k"]
