"""The batch around a call: found where the call is made, and put around the function that is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .stable import is_array, jax_dtype

# (size, the axis of each array leaf or None), innermost vmap first; a third item is the name of a vmap that has one.
BatchAxes = tuple[tuple[Any, ...], ...]


def find_batch(leaves: Sequence[Any]) -> BatchAxes | None:
    """The vmaps around these arrays, as far as their tracers show them."""
    peeled = [_jax.peel(leaf).batches for leaf in leaves]
    if not any(peeled):
        return None
    order = _in_order([[batch[0] for batch in batches] for batches in peeled])
    levels: list[tuple[Any, ...]] = []
    for tag in order:
        found = [next((batch for batch in batches if batch[0] is tag), None) for batches in peeled]
        _, size, name, _ = next(hit for hit in found if hit)
        axes = tuple(hit[3] if hit else None for hit in found)
        levels.append((size, axes) if name is None else (size, axes, name))
    return tuple(levels) or None


def _in_order(chains: Sequence[list[Any]]) -> list[Any]:
    """Merges the orders of nesting that single arrays show into one."""
    order: list[Any] = []
    for chain in chains:
        place = 0
        for tag in chain:
            if any(tag is known for known in order):
                place = next(i for i, known in enumerate(order) if known is tag) + 1
            else:
                order.insert(place, tag)
                place += 1
    return order


def batched_shape(shape: Sequence[int], axes: Sequence[tuple[int, int | None]]) -> tuple[int, ...]:
    """Shape of the whole batch: one example's shape with each batch size at its axis."""
    whole = list(shape)
    for size, axis in axes:
        if axis is not None:
            whole.insert(axis, size)
    return tuple(whole)


def batched_leaves(leaves: Sequence[Any], batch: BatchAxes | None) -> list[Any]:
    """Shapes of the whole batch from the arrays of one example; without a batch the arrays themselves."""
    if not batch:
        return list(leaves)
    return [
        jax.ShapeDtypeStruct(
            batched_shape(leaf.shape, [(level[0], level[1][i]) for level in batch]), jax_dtype(leaf.dtype)
        )
        for i, leaf in enumerate(leaves)
    ]


def over_batch(fn: Callable[..., Any], batch: BatchAxes | None) -> Callable[..., Any]:
    """A function of array leaves, mapped over the batch."""
    for _, axes, *name in batch or ():
        fn = jax.vmap(fn, in_axes=axes, axis_name=name[0] if name else None)
    return fn


def array_leaves(args: Any, kwargs: Any) -> list[Any]:
    """The arrays of a call in order."""
    return [leaf for leaf in jax.tree_util.tree_leaves((tuple(args), dict(kwargs))) if is_array(leaf)]
