"""Arrays in few bits with scales: per channel, per group of rows, per tensor or per block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arguments import FLOATS, ArgumentError, ArgumentTypeError, as_array, float_dtype, integer
from .call import planned, program

INTEGERS = ("int8", "int4")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

# Blocks of float8 that may leave a rest.
_WIDTH = 128


@planned()
def quantize(
    x: jax.Array, dtype: Any = jnp.int8, *, group: int | None = None, block: tuple[int, int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """The array (rows, columns) in few bits, and float32 scales; `dequantize` gives it back, up to rounding.

    int8 and int4 have a scale for each column (columns,), or with `group` for so many rows of it, (rows / group,
    columns), as `quantized_matmul` takes them. float8_e4m3fn and float8_e5m2 have one scale, of shape (), or with
    `block=(r, c)` one for each such block, as `scaled_matmul` takes them.
    """
    x = as_array("x", x)
    if x.dtype.name not in FLOATS or x.ndim != 2:
        raise ArgumentTypeError(f"x is {x.dtype.name} {x.shape}; use an array (rows, columns) of {', '.join(FLOATS)}")
    served = ", ".join((*INTEGERS, *FLOAT8))
    try:
        kind = jnp.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype={dtype!r} is no dtype; use {served}") from error
    if kind.name not in (*INTEGERS, *FLOAT8):
        raise ArgumentTypeError(f"dtype={kind.name} has no scales here; use {served}")
    if (block if kind.name in INTEGERS else group) is not None:
        raise ArgumentError(f"{kind.name} takes {'group' if kind.name in INTEGERS else 'block'}=")
    size = _block_of(kind.name, x.shape, group, block)

    def made(executor: Any) -> tuple[jax.Array, jax.Array]:
        near, scales = _rounded(x, kind, size)
        # Nothing has the scale one, as zeros have.
        if kind.name in INTEGERS:
            return near, scales if group is not None else scales[0] if x.shape[0] else jnp.ones(x.shape[1], jnp.float32)
        return near, scales if block is not None else scales[0, 0] if x.size else jnp.ones((), jnp.float32)

    return program("library.quantize", made)  # type: ignore[no-any-return]


def _rounded(x: jax.Array, kind: Any, size: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    most = _of_blocks(jnp.abs(wide), size)
    largest = float(jnp.iinfo(kind).max) if kind.name in INTEGERS else float(jnp.finfo(kind).max)
    # An empty or zero block has the scale one. No scale is so small that a processor takes it for zero, which zeros
    # divided by it would show; what is no number has none either, and so no block that holds one.
    scales = jnp.where(most == 0, 1.0, jnp.maximum(most / largest, jnp.finfo(jnp.float32).tiny))
    near = wide / spread_scales(scales, x.shape, size)
    near = jnp.round(near) if kind.name in INTEGERS else near
    return jnp.clip(near, -largest, largest).astype(kind), scales


@planned()
def dequantize(q: jax.Array, scales: jax.Array, *, dtype: Any = jnp.float32, group: int | None = None) -> jax.Array:
    """The numbers that `quantize` stood for: each times its scale, computed in float32.

    Scales of shape (groups, columns) of integers are for equal groups of rows; with `group` these must have so many
    rows each. Where float8 has a scale for each 128 rows or columns, the last may be for fewer.
    """
    q, scales = as_array("q", q), as_array("scales", scales)
    if q.dtype.name not in (*INTEGERS, *FLOAT8) or q.ndim != 2:
        raise ArgumentTypeError(f"q is {q.dtype.name} {q.shape}; use an array (rows, columns) that quantize made")
    block, dtype = block_from(scales, q), float_dtype("dtype", dtype)
    if group is not None:
        _check_group(q, scales, group)

    def made(executor: Any) -> jax.Array:
        factor = spread_scales(scales.astype(jnp.float32), q.shape, block)
        return (q.astype(jnp.float32) * factor).astype(dtype)

    return program("library.dequantize", made)  # type: ignore[no-any-return]


def block_from(scales: jax.Array, q: jax.Array, name: str = "scales") -> tuple[int, int]:
    """Rows and columns that share a scale, by the shape of the scales: those that `quantize` makes of this dtype."""
    counts = {0: (1, 1), 1: (1, *scales.shape), 2: scales.shape}.get(scales.ndim)
    # Groups of integers are whole.
    shared = _equal if q.dtype.name in INTEGERS else _shared
    sizes = None if counts is None else [shared(s, c) for s, c in zip(q.shape, counts, strict=True)]
    if sizes is None or not all(sizes):
        raise ArgumentError(
            f"{name} of shape {scales.shape} do not fit an array of shape {q.shape}: use (), (columns,), or (rows / r, "
            f"columns / c) for blocks of r by c"
        )
    return sizes[0], sizes[1]


def refuse_doubtful(scales: jax.Array, q: jax.Array, name: str) -> None:
    """Raises an error where the shape of the scales is that of equal blocks, and of 128 with a smaller last one."""
    if scales.ndim != 2:
        return
    for axis, (size, count) in enumerate(zip(q.shape, scales.shape, strict=True)):
        equal = _equal(size, count)
        if equal and _shared(size, count) != equal:
            spread = f"jnp.repeat({name}, {{}}, axis={axis})"
            raise ArgumentError(
                f"{name} of shape {scales.shape} for an array of shape {q.shape} may be for blocks of {equal}, or of "
                f"{_WIDTH} and a smaller last one, along axis {axis}; give a scale for each number there: "
                f"{spread.format(equal)}, or {spread.format(_WIDTH)}{'[:, ' if axis else '['}:{size}]"
            )


def _shared(size: int, count: int) -> int:
    """Elements that share a scale where so many have `count` of them: 128 where these make so many, else equal parts.

    Blocks of 128 may leave a rest; others divide the array. 0 where there are no such blocks.
    """
    return _WIDTH if count > 1 and -(-size // _WIDTH) == count else _equal(size, count)


def _equal(size: int, count: int) -> int:
    # An axis of nothing has one scale or none.
    if not size:
        return int(count <= 1)
    return size // count if count and size % count == 0 else 0


def _check_group(q: jax.Array, scales: jax.Array, group: Any) -> None:
    if q.dtype.name not in INTEGERS:
        raise ArgumentError(f"group={group} is for integers; q is {q.dtype.name}")
    rows, _ = _block_of(q.dtype.name, q.shape, group, None, "q")
    wanted = (q.shape[0] // rows, q.shape[1])
    if scales.shape != wanted:
        raise ArgumentError(f"scales have the shape {scales.shape}; q {q.shape} with group={group} needs {wanted}")


def spread_scales(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """A scale for each element, or one for a whole axis where all of it has the same."""
    scales = scales.reshape((1,) * (2 - scales.ndim) + scales.shape)
    for axis in (0, 1):
        if scales.shape[axis] > 1 and block[axis] > 1:
            scales = jnp.repeat(scales, block[axis], axis=axis)
            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales


def _block_of(kind: str, shape: tuple[int, ...], group: Any, block: Any, name: str = "x") -> tuple[int, int]:
    if kind in INTEGERS:
        rows = max(shape[0], 1) if group is None else integer("group", group)
        if rows < 1 or shape[0] % rows:
            raise ArgumentError(f"group={group} does not divide the {shape[0]} rows of {name} {shape}")
        return rows, 1
    if block is None:
        return max(shape[0], 1), max(shape[1], 1)
    if not isinstance(block, tuple) or len(block) != 2 or any(integer("block", size) < 1 for size in block):
        raise ArgumentError(f"block={block!r} must be two sizes, rows and columns, such as (128, 128)")
    for size, part in zip(shape, block, strict=True):
        if part < size and _shared(size, -(-size // part)) != part:
            raise ArgumentError(
                f"block={block} does not fit x {shape}: use sizes that divide it into equal parts, or {_WIDTH}; of "
                f"two sizes that make as many blocks, {_WIDTH} alone is served"
            )
    return min(int(block[0]), max(shape[0], 1)), min(int(block[1]), max(shape[1], 1))


def _of_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """The largest of each block; the last ones may be smaller."""
    rows, columns = (-(-size // part) for size, part in zip(x.shape, block, strict=True))
    padded = jnp.pad(x, ((0, rows * block[0] - x.shape[0]), (0, columns * block[1] - x.shape[1])))
    return jnp.max(padded.reshape(rows, block[0], columns, block[1]), axis=(1, 3), initial=0.0)
