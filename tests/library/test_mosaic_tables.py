"""Tables of grouped products' tiles in one launch, interpreted and lowered for a Hopper GPU.

Covers `library/mosaic/ragged_tables.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import normal
from fakes_mosaic import lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library.mosaic.tiles import Tile, visits
from ejkernel.library.ragged_dot_tiles import starts_of, stops_of

__all__ = ["races"]
pytestmark = needs_mosaic


def drawn(rng, groups, rows):
    """Sizes of all kinds: some of none, some below zero, and sums below and above all rows."""
    most = rng.choice([2, 2 * rows // groups, 4 * rows])
    sizes = rng.integers(-most // 8, most + 1, groups) * (rng.random(groups) < rng.choice([0.3, 0.7, 1.0]))
    return jnp.asarray(sizes, jnp.int32)


# Several steps and blocks, one step, one group, fewer rows than a tile has, and lines that are cut at the last row.
@pytest.mark.parametrize(
    ("groups", "rows", "tile"),
    [
        (33, 14400, 128),
        (8, 1000, 128),
        pytest.param(1, 256, 128, marks=pytest.mark.slow),
        pytest.param(15, 40, 128, marks=pytest.mark.slow),
        pytest.param(16, 5000, 256, marks=pytest.mark.slow),
        pytest.param(3, 200, 24, marks=pytest.mark.slow),
    ],
)
@needs_loops
def test_tables_of_one_launch_are_those_of_several(races, groups, rows, tile):
    """Every number of them, for visits that are not needed as well."""
    from ejkernel.library.mosaic.ragged_tables import visits_at_once, visits_of

    once = jax.jit(functools.partial(visits_at_once, rows=rows, tile=tile, interpret=True))
    several = jax.jit(functools.partial(visits_of, rows=rows, tile=tile))
    rng, count = np.random.default_rng(groups), visits(rows, groups, tile)
    edges = [jnp.zeros(groups, jnp.int32), jnp.full(groups, np.iinfo("int32").max), jnp.zeros(groups, jnp.int32) - 1]
    for sizes in [*edges, *(drawn(rng, groups, rows) for _ in range(20))]:
        for found, wanted in zip(once(sizes), several(sizes), strict=True):
            np.testing.assert_array_equal(found[:count], wanted, err_msg=str(sizes))


@pytest.mark.parametrize("blocks", [2, pytest.param(None, marks=pytest.mark.slow)])
@needs_loops
def test_products_take_tables_of_one_launch(races, blocks):
    """Longer ones than are counted change nothing, for blocks that stay and for a block a tile."""
    from ejkernel.library.mosaic import ragged_dot, ragged_rolling
    from ejkernel.library.mosaic.ragged_tables import visits_at_once

    lhs, rhs = normal(192, 64, dtype="bfloat16"), normal(3, 64, 64, dtype="bfloat16", seed=1)
    how = {"tile": Tile(128, 64, 64, 2), "transposed": False, "dtype": jnp.dtype("bfloat16"), "interpret": True}

    def made(sizes, **more):
        if blocks:
            return ragged_rolling.product([lhs], [rhs], sizes, **how, blocks=blocks, **more)
        return ragged_dot.product(lhs, rhs, sizes, **how, **more)

    sizes, tables = jnp.asarray([70, 0, 100], jnp.int32), functools.partial(visits_at_once, interpret=True)
    np.testing.assert_array_equal(jax.jit(functools.partial(made, tables=tables))(sizes), jax.jit(made)(sizes))


@pytest.mark.parametrize(("groups", "dtype"), [(1, "int32"), (8, "int32"), (129, "int32"), (600, "int16")])
def test_tables_are_lowered_for_a_gpu(groups, dtype):
    """Of few groups and of many, whatever integers their sizes are."""
    from ejkernel.library.mosaic.ragged_tables import visits_at_once

    fn = functools.partial(visits_at_once, rows=32000, tile=128, interpret=False)
    assert "library_ragged_tables" in lowered_by_mosaic(fn, jax.ShapeDtypeStruct((groups,), dtype))


@pytest.mark.parametrize(("groups", "rows"), [(9, 100), (1, 8), (128, 1 << 25)])
def test_a_block_finds_the_rows_of_its_group(groups, rows):
    """From stops that are not cut, also where their sum is too large for 32 bits."""
    from ejkernel.library.mosaic.ragged_dot import rows_of, stops_at

    rng = np.random.default_rng(0)
    for sizes in [jnp.full(groups, rows, jnp.int32), *(drawn(rng, groups, rows) for _ in range(10))]:
        owner = jnp.arange(groups)
        found = rows_of(owner, *stops_at(owner, stops_of(sizes, rows)), rows=rows)
        np.testing.assert_array_equal(found, starts_of(sizes, rows))
