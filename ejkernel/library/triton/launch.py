"""Hands a Pallas kernel to Triton, and holds what Triton asks of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from ..varying import all_alike
from .served import backend


def power_of_two(size: int) -> int:
    """The next power of two: the only sizes that Triton has blocks of."""
    return 1 << max(size - 1, 0).bit_length()


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    out: jax.ShapeDtypeStruct,
    out_specs: pl.BlockSpec,
    **how: Any,
) -> jax.Array:
    """Runs a kernel that makes one array, as `launch_all` does."""
    (made,) = launch_all(kernel, operands, out=[out], out_specs=[out_specs], **how)
    return made


def launch_all(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Runs the kernel over a grid; `interpret` is for tests, on machines without a GPU.

    `aliases`: operands that are written to, by their number, and the results that they become.
    """
    out, operands = all_alike(out, operands)
    made: Sequence[jax.Array] = pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        input_output_aliases=dict(aliases or {}),
        compiler_params=backend().CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
    return made


def load(ref: Any, mask: jax.Array | None, other: float = 0.0) -> jax.Array:
    """A block, with `other` where the mask leaves out what is beyond the array."""
    if mask is None:
        return ref[...]  # type: ignore[no-any-return]
    return backend().load(ref, mask=mask, other=other)  # type: ignore[no-any-return]


def store(ref: Any, value: jax.Array, mask: jax.Array | None) -> None:
    """Writes a block, except where the mask leaves out what is beyond the array."""
    if mask is None:
        ref[...] = value
    else:
        backend().store(ref, value, mask=mask)


def inside(start: Any, size: int, limit: int, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """A mask of the places of a block, along an axis, that lie before the array's end."""
    places: jax.Array = start * size + jax.lax.broadcasted_iota("int32", shape, axis)
    return places < limit
