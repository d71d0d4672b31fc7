"""Products that gather their rows, interpreted, lowered for a Hopper GPU, and run where there is one.

Covers `library/mosaic/gathered.py`. The interpreter has no instructions of our own: it copies row after row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import assert_near, normal, wide
from fakes_mosaic import lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library.arguments import ArgumentError
from ejkernel.library.gate import joined
from ejkernel.library.mosaic.tiles import Tile
from ejkernel.library.permutation import by_counting, inverse
from ejkernel.library.ragged_dot_tiles import masked

__all__ = ["races"]
pytestmark = needs_mosaic
needs_instructions = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU of this JAX has no instructions of our own"
)


def sent(tokens, k, experts, seed=0, alike=None):
    """The token of each row in order of experts, and how many rows each has; `alike`: how even they are."""
    rng = np.random.default_rng(seed)
    share = None if alike is None else rng.dirichlet([alike] * experts)
    chosen = jnp.asarray(rng.choice(experts, size=tokens * k, p=share), jnp.int32)
    places, sizes = by_counting(chosen, experts)
    return inverse(places, tokens * k) // k, sizes


def arrays(tokens, width, inner, groups):
    """Tokens and both matrices of each group."""
    matrices = [normal(groups, width, inner, dtype="bfloat16", seed=seed) / width**0.5 for seed in (1, 2)]
    return normal(tokens, width, dtype="bfloat16"), *matrices


def plain(x, source, gate, up, sizes):
    """The same by plain JAX, in float32."""
    rows = jnp.take(x, source, axis=0, mode="clip")
    how = {"transposed": False, "dtype": jnp.float32}
    return joined(*(masked(rows, matrix, sizes, **how) for matrix in (gate, up)))


# Rows of none, an empty group, groups within a tile, a last tile that has rows of the one before, and a second step.
@needs_loops
@pytest.mark.parametrize(
    ("sizes", "width"),
    [
        ((70, 0, 100), 64),
        pytest.param((3, 2, 195), 128, marks=pytest.mark.slow),
        pytest.param((0, 200, 0), 64, marks=pytest.mark.slow),
        pytest.param((0, 0, 0), 64, marks=pytest.mark.slow),
    ],
)
def test_gathered_rows_give_what_rows_in_order_give(races, sizes, width):
    """To the last bit; rows without a token are those of the last one."""
    from ejkernel.library.mosaic import gathered, ragged_rolling

    x, gate, up = arrays(50, width, 128, 3)
    source = jnp.asarray(np.random.default_rng(3).integers(0, 51, 200), jnp.int32)
    how = {"tile": Tile(128, 128, 64, 2), "interpret": True, "blocks": 2}
    sizes = jnp.asarray(sizes, jnp.int32)
    found = jax.jit(functools.partial(gathered.gated, **how))(x, source, gate, up, sizes)
    rows = jnp.take(x, source, axis=0, mode="clip")
    wanted = jax.jit(functools.partial(ragged_rolling.gated, **how))(rows, gate, up, sizes)
    np.testing.assert_array_equal(found, wanted)
    assert_near(found, wide(plain(x, source, gate, up, sizes)), "bfloat16", slack=0.5)


def test_each_part_of_a_tile_is_copied_once_to_where_tensor_cores_read_it():
    """As the tensor memory accelerator swizzles lines of 128 bytes: chunks by the row's number among eight."""
    from ejkernel.library.mosaic import gathered

    threads, found = np.arange(128), {}
    for turn in range(8):
        rows = gathered.rows_of(threads, turn)
        there = gathered.shared_places(threads) + turn * 16 * 128
        for row, chunk, place in zip(rows, gathered.chunks_of(threads), there, strict=True):
            found[int(row), int(chunk)] = int(place)
    assert len(found) == 128 * 8
    straight = {(row, chunk): row * 128 + chunk * 16 for row, chunk in found}
    # Bits 4 to 6 of a place are changed by bits 7 to 9.
    assert found == {at: place ^ (place >> 7 & 7) << 4 for at, place in straight.items()}


@needs_instructions
@pytest.mark.parametrize("tile", [Tile(128, 256, 64, 4), Tile(128, 128, 64, 5, 1)])
def test_a_product_that_gathers_is_lowered_for_a_gpu(tile):
    """Eight copies of each thread, which arrive by themselves at barriers of 128 arrivals."""
    from ejkernel.library.mosaic.gathered import gated

    shapes = [((512, 256), "bfloat16"), ((1024,), "int32"), *[((8, 256, 384), "bfloat16")] * 2, ((8,), "int32")]
    text = lowered_by_mosaic(
        functools.partial(gated, tile=tile, interpret=False), *(jax.ShapeDtypeStruct(*one) for one in shapes)
    )
    assert "library_ragged_gathered" in text
    assert text.count("cp.async.cg.shared.global [t + ") == 8
    assert "cp.async.mbarrier.arrive.noinc.shared::cta.b64" in text
    assert text.count("], 128; @p mbarrier.init.shared::cta.b64 [") == tile.stages - 1
    assert "fence.proxy.async.shared::cta;" in text


@pytest.mark.parametrize(("rows", "width", "depth"), [(64, 64, 64), (128, 96, 64), (128, 128, 128)])
def test_what_is_no_whole_tile_of_lines_is_refused(rows, width, depth):
    """Too few rows, a row that ends within a line, and steps of two lines."""
    from ejkernel.library.mosaic.gathered import gated

    x, gate, up = arrays(50, width, 128, 3)
    given = x, jnp.zeros(rows, jnp.int32), gate, up, jnp.zeros(3, jnp.int32)
    with pytest.raises(ArgumentError, match="are not gathered"):
        gated(*given, tile=Tile(128, 128, depth, 2), interpret=True)


@needs_instructions
@pytest.mark.gpu
@pytest.mark.skipif(all(device.platform != "gpu" for device in jax.devices()), reason="there is no GPU here")
@pytest.mark.parametrize("tile", [Tile(128, 256, 64, 4), Tile(128, 256, 64, 4, 1), Tile(128, 128, 64, 5)])
@pytest.mark.parametrize("kind", ["even", "skewed", "one group", "rows of none"])
def test_rows_that_a_gpu_gathers_are_those_of_float32(kind, tile):
    """Groups of about one size and of very different ones, many of them empty, and rows that belong to none."""
    from ejkernel.library.mosaic import gathered, ragged_rolling

    tokens, k, experts, width = 2048, 4, 16, 1024
    x, gate, up = arrays(tokens, width, 512, experts)
    source, sizes = sent(tokens, k, experts, alike=0.1 if kind == "skewed" else None)
    if kind == "one group":
        sizes = jnp.zeros(experts, jnp.int32).at[5].set(tokens * k)
    if kind == "rows of none":
        sizes = sizes // 2
    how = {"tile": tile, "interpret": False}
    found = jax.jit(functools.partial(gathered.gated, **how))(x, source, gate, up, sizes)
    assert_near(found, wide(plain(x, source, gate, up, sizes)), "bfloat16", slack=0.5)
    ordered = jax.jit(functools.partial(ragged_rolling.gated, **how))(x[source], gate, up, sizes)
    np.testing.assert_array_equal(found, ordered)
