"""Products by blocks that stay on their multiprocessors, interpreted and lowered for a Hopper GPU.

Covers `library/gate.py`, `library/mosaic/gated_back.py`, `library/mosaic/handover.py`,
`library/mosaic/outer_rolling.py`, `library/mosaic/ragged_rolling.py` and `library/mosaic/rolling.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import assert_near, normal, wide
from fakes_mosaic import lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library.gate import joined
from ejkernel.library.mosaic.tiles import Tile
from ejkernel.library.ragged_dot_tiles import masked, masked_outer

__all__ = ["races"]
pytestmark = [needs_mosaic, needs_loops]
NARROW = jnp.dtype("bfloat16")


@pytest.mark.parametrize("sizes", [(70, 0, 100), pytest.param((0, 1, 191), marks=pytest.mark.slow)])
def test_blocks_go_from_tile_to_tile(races, sizes):
    """Rows of several groups in a tile, an empty group and rows of none, for the sum of two products."""
    from ejkernel.library.mosaic.ragged_rolling import product

    one, other = (normal(192, 64, dtype="bfloat16", seed=seed) for seed in (0, 1))
    near, far = (normal(3, 128, 64, dtype="bfloat16", seed=seed) for seed in (2, 3))
    sizes, tile = jnp.asarray(sizes, jnp.int32), Tile(128, 64, 64, 2)
    how = {"transposed": True, "dtype": NARROW}

    def rolled(one, other, near, far, sizes):
        return product([one, other], [near, far], sizes, tile=tile, interpret=True, blocks=2, **how)

    made = jax.jit(rolled)(one, other, near, far, sizes)
    how["dtype"] = jnp.dtype("float32")
    wanted = masked(one, near, sizes, **how) + masked(other, far, sizes, **how)
    assert_near(made, wide(wanted), "bfloat16")


def led(way, tile):
    """The kernel's results from warpgroups that begin together, and from one that begins some steps later."""
    return (jax.jit(functools.partial(way, tile=one))() for one in (replace(tile, lead=0), tile))


# Shares without a row of the group, a block's first tile among them; tiles shorter than the lead; a block without any.
@pytest.mark.parametrize(
    ("sizes", "depth", "lead", "blocks"),
    [
        ((100, 0, 280, 5), 256, 2, 2),
        ((3, 2, 390, 0), 64, 2, 2),
        pytest.param((70, 0, 1, 300), 128, 1, 1, marks=pytest.mark.slow),
        pytest.param((0, 0, 0, 384), 192, 2, 9, marks=pytest.mark.slow),
    ],
)
def test_a_warpgroup_that_begins_later_ends_with_the_same(races, sizes, depth, lead, blocks):
    """Several tiles of a block, in which the two overtake each other; nothing waits for ever."""
    from ejkernel.library.mosaic.ragged_rolling import product

    lhs, rhs = normal(400, depth, dtype="bfloat16"), normal(4, depth, 64, dtype="bfloat16", seed=1)
    how = {"transposed": False, "dtype": NARROW, "interpret": True, "blocks": blocks}
    way = functools.partial(product, [lhs], [rhs], jnp.asarray(sizes, jnp.int32), **how)
    one, other = led(way, Tile(128, 64, 64, 3, lead))
    np.testing.assert_array_equal(one, other)


def test_gradients_of_matrices_have_a_lead_too(races):
    """Groups without rows have tiles without steps, a block's first ones among them."""
    from ejkernel.library.mosaic.outer_rolling import outer

    lhs, out = normal(256, 128, dtype="bfloat16"), normal(256, 128, dtype="bfloat16", seed=1)
    sizes = jnp.asarray((0, 30, 0, 220), jnp.int32)
    way = functools.partial(outer, lhs, out, sizes, dtype=NARROW, interpret=True, blocks=2)
    one, other = led(way, Tile(128, 64, 64, 3, 2))
    np.testing.assert_array_equal(one, other)


def test_a_gate_is_joined_with_what_it_opens(races):
    """In float32, before anything is rounded."""
    from ejkernel.library.mosaic.ragged_rolling import gated

    lhs, sizes = normal(192, 64, dtype="bfloat16"), jnp.asarray((70, 0, 100), jnp.int32)
    matrices = [normal(3, 64, 128, dtype="bfloat16", seed=seed) for seed in (1, 2)]
    how = {"tile": Tile(128, 128, 64, 2), "interpret": True, "blocks": 2}
    made = jax.jit(lambda *a: gated(*a, **how))(lhs, *matrices, sizes)
    one, other = (masked(lhs, matrix, sizes, transposed=False, dtype=jnp.float32) for matrix in matrices)
    assert_near(made, wide(jax.nn.silu(one) * other), "bfloat16", slack=0.5)


@pytest.mark.parametrize("sizes", [(70, 0, 100), pytest.param((0, 1, 191), marks=pytest.mark.slow)])
def test_both_products_of_a_pair_are_one_launch(races, sizes):
    """Each is what it is by itself, in whole tiles and in parts of them."""
    from ejkernel.library.mosaic.ragged_rolling import pair, product

    lhs, sizes = normal(192, 64, dtype="bfloat16"), jnp.asarray(sizes, jnp.int32)
    matrices = [normal(3, 64, 128, dtype="bfloat16", seed=seed) for seed in (1, 2)]
    how = {"tile": Tile(128, 64, 64, 2), "interpret": True, "blocks": 3}
    found = jax.jit(lambda *a: pair(*a, **how))(lhs, *matrices, sizes)
    one = functools.partial(product, transposed=False, dtype=NARROW, **how)
    for matrix, made in zip(matrices, found, strict=True):
        np.testing.assert_array_equal(made, jax.jit(lambda *a: one([a[0]], [a[1]], a[2]))(lhs, matrix, sizes))


def test_the_last_tiles_of_a_gradient_may_be_parts(races):
    """Matrices that are no whole number of tiles: what is left at their ends is written too, and nothing beyond."""
    from ejkernel.library.mosaic.outer_rolling import outer

    lhs, out = normal(128, 192, dtype="bfloat16"), normal(128, 192, dtype="bfloat16", seed=1)
    sizes = jnp.asarray((70, 58), jnp.int32)
    how = {"tile": Tile(128, 128, 64, 2), "dtype": NARROW, "interpret": True, "blocks": 2}
    made = jax.jit(lambda *a: outer(*a, **how))(lhs, out, sizes)
    assert_near(made, wide(masked_outer(lhs, out, sizes, dtype=jnp.float32)), "bfloat16")


@pytest.mark.parametrize("sizes", [(70, 0, 110), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_gradients_of_matrices_are_added_up_tile_after_tile(races, sizes):
    """Rows of other groups in the same step count for nothing, and an empty group has zeros."""
    from ejkernel.library.mosaic.outer_rolling import outer

    lhs, out = normal(192, 128, dtype="bfloat16"), normal(192, 128, dtype="bfloat16", seed=1)
    sizes = jnp.asarray(sizes, jnp.int32)
    how = {"tile": Tile(128, 64, 64, 2), "dtype": NARROW, "interpret": True, "blocks": 2}
    made = jax.jit(lambda *a: outer(*a, **how))(lhs, out, sizes)
    assert_near(made, wide(masked_outer(lhs, out, sizes, dtype=jnp.float32)), "bfloat16")


def pulled_apart(dy, down, opened, raised, sizes):
    """The gradients of a gated pair's products as plain JAX derives them, in float32."""
    towards = masked(dy, down, sizes, transposed=True, dtype=jnp.float32)
    return jax.vjp(joined, opened.astype(jnp.float32), raised.astype(jnp.float32))[1](towards)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((100, 0, 150, 5), Tile(128, 128, 64, 6, 2)),
        pytest.param((100, 0, 150, 5), Tile(128, 256, 64, 4, 2), marks=pytest.mark.slow),
        pytest.param((3, 2, 270, 0), Tile(128, 256, 64, 3), marks=pytest.mark.slow),
        pytest.param((128, 136, 0, 1), Tile(128, 128, 64, 4, 2), marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), Tile(128, 128, 64, 2), marks=pytest.mark.slow),
    ],
)
def test_a_product_makes_the_gradients_of_a_gated_pair(races, sizes, tile):
    """Whole shares and parts of them, a block's several tiles, and zeros for rows of no group, whatever they hold."""
    from ejkernel.library.mosaic.gated_back import gated_back

    dy, down = normal(280, 128, dtype="bfloat16"), normal(4, 256, 128, dtype="bfloat16", seed=1)
    opened, raised = (normal(280, 256, dtype="bfloat16", seed=seed) for seed in (2, 3))
    sizes = jnp.asarray(sizes, jnp.int32)
    wanted = pulled_apart(dy, down, opened, raised, sizes)
    opened = opened.at[sum(sizes) :].set(jnp.nan)
    how = {"tile": tile, "interpret": True, "blocks": 2}
    found = jax.jit(lambda *a: gated_back(*a, **how))(dy, down, opened, raised, sizes)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, wide(other), "bfloat16", slack=0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile", [None, Tile(128, 256, 64, 4, 2)])
def test_gradients_of_a_gated_pair_are_lowered_for_a_gpu(tile, dtype):
    """By the tile that is used, and with four stages of the widest ones."""
    from ejkernel.library.mosaic.gated_back import TILE, gated_back

    shapes = [(1024, 512), (8, 768, 512), (1024, 768), (1024, 768)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    fn = functools.partial(gated_back, tile=tile or TILE, interpret=False)
    assert "library_ragged_gated_back" in lowered_by_mosaic(fn, *arrays, jax.ShapeDtypeStruct((8,), "int32"))


@pytest.mark.parametrize("sizes", [(70, 0, 110), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_gradients_of_several_matrices_are_one_launch(races, sizes):
    """Each is what it is by itself, whatever the shape of the others."""
    from ejkernel.library.mosaic.outer_rolling import outer, outers

    one, other, narrow = (normal(192, width, dtype="bfloat16", seed=seed) for seed, width in enumerate((128, 128, 64)))
    how = {"tile": Tile(128, 64, 64, 2), "dtype": NARROW, "interpret": True, "blocks": 2}
    pairs, sizes = [(one, narrow), (one, other)], jnp.asarray(sizes, jnp.int32)
    found = jax.jit(lambda *a: outers(pairs, *a, **how))(sizes)
    for pair, made in zip(pairs, found, strict=True):
        np.testing.assert_array_equal(made, jax.jit(lambda *a: outer(*a, **how))(*pair, sizes))
