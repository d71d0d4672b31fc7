"""Products by Mosaic GPU: interpreted with races looked for, beside float32, and lowered for a Hopper GPU.

Covers `library/mosaic/attention.py`, `library/mosaic/attention_order.py`, `library/mosaic/attention_tiles.py`,
`library/mosaic/matmul.py`, `library/mosaic/ragged_dot.py` and `library/mosaic/tiles.py`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal
from fakes_mosaic import hopper, lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library import Attention, AttentionConfig, Matmul, MatmulConfig, RaggedDot, RaggedDotConfig, matmul
from ejkernel.library.mosaic.tiles import CHUNK, LINE_ROWS, SHARED_BYTES, Tile, refuses, shapes_refuse
from ejkernel.library.ragged_dot_tiles import masked, masked_outer
from ejkernel.ops import Invocation

__all__ = ["races"]
pytestmark = needs_mosaic


@needs_loops
@pytest.mark.parametrize(
    ("shape", "activation"),
    [((128, 64, 64), None), pytest.param((136, 128, 192), "gelu", marks=pytest.mark.slow)],
    ids=["whole", "ragged"],
)
def test_a_product_with_bias_is_that_of_float64(races, shape, activation):
    """Whole tiles, and such as reach over the last row and column."""
    m, k, n = shape
    a, b, bias = normal(m, k, dtype="bfloat16"), normal(k, n, dtype="bfloat16", seed=1), normal(n, seed=2)
    cfg = MatmulConfig("mosaic", 128, 64, 64, num_stages=2)
    made = matmul(a, b, bias, activation=activation, cfg=cfg, executor=UNTUNED)
    wide = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + np.asarray(bias, np.float64)
    finish = (lambda x: x) if activation is None else getattr(jax.nn, activation)
    assert_near(made, finish(jnp.asarray(wide, jnp.float32)), "bfloat16")


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(100, 0, 120), (1, 255, 0), (256, 0, 0), (0, 0, 0)])
def test_rows_of_groups_are_multiplied_with_their_matrices(races, sizes, transposed):
    """Tiles that several groups share, empty groups, and rows of none."""
    from ejkernel.library.mosaic.ragged_dot import product

    lhs, sizes = normal(256, 64, dtype="bfloat16"), jnp.asarray(sizes, jnp.int32)
    rhs = normal(3, 64, 64, dtype="bfloat16", seed=1)
    how = {"transposed": transposed, "dtype": jnp.bfloat16}
    made = jax.jit(lambda *a: product(*a, tile=Tile(128, 64, 64, 2), interpret=True, **how))(lhs, rhs, sizes)
    wanted = masked(lhs, rhs, sizes, transposed=transposed, dtype=jnp.float32)
    assert_near(made, np.asarray(wanted, np.float64), "bfloat16")


@needs_loops
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [272, pytest.param(64, marks=pytest.mark.slow)])
def test_tiles_start_with_their_group_and_are_handed_over_by_chunks(races, rows, transposed):
    """Where groups start between lines of rows, columns end within a tile, and the last tile within the tile before."""
    from ejkernel.library.mosaic.ragged_dot import product

    shares = (3, 0, rows // 2 + 1, 1, rows // 3)
    lhs, sizes = normal(rows, 64, dtype="bfloat16"), jnp.asarray(shares, jnp.int32)
    rhs = normal(5, 320, 64, dtype="bfloat16", seed=1) if transposed else normal(5, 64, 320, dtype="bfloat16", seed=1)
    how = {"transposed": transposed, "dtype": jnp.bfloat16}
    made = jax.jit(lambda *a: product(*a, tile=Tile(128, 256, 64, 2), interpret=True, **how))(lhs, rhs, sizes)
    wanted = masked(lhs, rhs, sizes, transposed=transposed, dtype=jnp.float32)
    assert_near(made, np.asarray(wanted, np.float64), "bfloat16")


@needs_loops
def test_bands_of_columns_need_not_divide_them(races):
    """Nine blocks of columns are two bands of five, of which the last has one too many."""
    from ejkernel.library.mosaic.ragged_dot import product

    lhs, rhs, sizes = normal(64, 64, dtype="bfloat16"), normal(1, 64, 576, dtype="bfloat16", seed=1), jnp.array([60])
    how = {"transposed": False, "dtype": jnp.bfloat16}
    made = jax.jit(lambda *a: product(*a, tile=Tile(128, 64, 64, 2), interpret=True, **how))(lhs, rhs, sizes)
    assert_near(made, np.asarray(masked(lhs, rhs, sizes, **how | {"dtype": jnp.float32}), np.float64), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [(128, 256, 4), (256, 128, 3), (128, 64, 6)])
def test_results_of_any_dtype_leave_room_for_the_steps(block, dtype):
    """Wider results take the memory of stages, of which two are left at least."""
    from ejkernel.library.mosaic.ragged_dot import holding

    m, n, stages = block
    held = holding(Tile(m, n, 64, stages), "bfloat16", dtype)
    assert (held.stages == stages) or dtype == "float32"
    assert held.stages >= 2
    assert (m + n) * 64 * 2 * held.stages + 2 * m * CHUNK * jnp.dtype(dtype).itemsize <= SHARED_BYTES


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("tile", [8, 64, 128])
def test_every_row_is_in_one_visit_of_its_group(tile):
    """From the line of its group's first row on, and in no more visits than there are."""
    from ejkernel.library.mosaic.ragged_dot import visits_of

    rows, rng = 320, np.random.default_rng(0)
    visits = jax.jit(visits_of, static_argnums=(1, 2))
    for groups in (1, 3, 40):
        for _ in range(20):
            sizes = rng.multinomial(int(rng.integers(0, rows + 1)), rng.dirichlet([0.4] * groups))
            owners = np.repeat(np.arange(groups + 1), [*sizes, rows - sizes.sum()])
            found = np.full(rows, -1)
            for group, line, low, high in zip(*map(np.asarray, visits(jnp.asarray(sizes), rows, tile)), strict=True):
                if low < high:
                    assert line * LINE_ROWS <= low
                    assert high <= line * LINE_ROWS + tile <= max(rows, tile)
                    assert (found[low:high] == -1).all()
                    found[low:high] = group
            np.testing.assert_array_equal(found, owners)


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize("wide", [64, 256])
@pytest.mark.parametrize("sizes", [(70, 0, 110), (192, 0, 0), (1, 1, 1)])
def test_gradients_of_the_matrices_are_sums_over_their_rows(races, sizes, wide):
    """Rows of other groups in the same step count for nothing."""
    from ejkernel.library.mosaic.ragged_dot import outer

    lhs, out = normal(192, 128, dtype="bfloat16"), normal(192, 128, dtype="bfloat16", seed=1)
    sizes = jnp.asarray(sizes, jnp.int32)
    how = {"tile": Tile(128, wide, 64, 2), "dtype": jnp.bfloat16, "interpret": True}
    made = jax.jit(lambda *a: outer(*a, **how))(lhs, out, sizes)
    assert_near(made, np.asarray(masked_outer(lhs, out, sizes, dtype=jnp.float32), np.float64), "bfloat16")


WHOLE = (128, 128, 4)


@pytest.mark.parametrize(
    ("tile", "activation"),
    [
        (WHOLE, "relu"),
        (WHOLE, "gelu"),
        ((128, 256, 3), "silu"),
        ((256, 128, 3), None),
        pytest.param((128, 256, 3), "tanh", marks=pytest.mark.slow),
    ],
)
def test_products_are_lowered_for_a_gpu(tile, activation):
    """With bias and every activation, where tiles do not divide the matrix."""
    m, n, stages = tile
    cfg = MatmulConfig("mosaic", m, n, 64, num_stages=stages)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1000, 2048), (2048, 4160), (4160,))]
    text = lowered_by_mosaic(lambda *a: Matmul().run(*a, activation=activation, cfg=cfg), *shapes)
    assert "library_matmul" in text


@pytest.mark.thinned
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("groups", "wide", "stages"), [(8, 256, 4), (8, 128, 5), pytest.param(1, 128, 4, marks=pytest.mark.slow)]
)
def test_ragged_products_and_their_gradients_are_lowered_for_a_gpu(groups, wide, stages, x64):
    """Three kernels: the product, the one with the matrices transposed, and that of rows with their gradients."""
    cfg, kernel = RaggedDotConfig("mosaic", 128, wide, 64, None, stages), RaggedDot()
    shapes = ((1000, 512), jnp.bfloat16), ((groups, 512, 320), jnp.bfloat16), ((groups,), jnp.int32)

    def both(lhs, rhs, sizes):
        out = kernel.run(lhs, rhs, sizes, cfg=cfg)
        return out, kernel.vjp((), out, out, lhs, rhs, sizes, cfg=cfg)[:2]

    with jax.enable_x64(x64):
        text = lowered_by_mosaic(both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count("library_ragged_dot") >= 2
    assert "library_ragged_dot_outer" in text or jax.__version_info__ < (0, 10, 2)


def test_what_cannot_run_says_why(monkeypatch):
    """By tile, dtype, shape and GPU."""
    narrow, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert refuses((128, 256, 64), 3, narrow) == ""
    assert "must be given" in refuses((128, None, 64), 3, narrow)
    assert "not float32" in refuses((128, 256, 64), 3, wide)
    assert "are not served" in refuses((96, 256, 64), 3, narrow)
    assert "registers" in refuses((256, 256, 64), 2, narrow)
    assert "shared memory" in refuses((128, 256, 64), 4, narrow)
    assert "multiples of 8" in shapes_refuse(7, 64, 64, 64, narrow)
    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (4096, 4096)))
    inv, cfg = Invocation("x", shapes, {}), MatmulConfig("mosaic", 128, 128, 64, num_stages=4)
    hopper(monkeypatch)
    assert Matmul().valid_cfg(inv, cfg) is True
    assert "nothing transposed" in Matmul().valid_cfg(Invocation("x", shapes, {"transpose_b": True}), cfg)
    assert "not float32" in Matmul().valid_cfg(Invocation("x", shapes, {"dtype": "float32"}), cfg)
    hopper(monkeypatch, "10.0")
    assert "capability 9, not 10.0" in Matmul().valid_cfg(inv, cfg)


def test_ragged_products_that_cannot_run_say_why(monkeypatch):
    """By the dtype of the result, what it leaves of shared memory, and the number of tiles."""
    found = hopper(monkeypatch)
    monkeypatch.setattr(sys.modules["ejkernel.library.ragged_dot"], "device_of", lambda inv: found)

    def judged(rows, block_k=64, stages=4, **static):
        shapes = ((rows, 512), jnp.bfloat16), ((8, 512, 256), jnp.bfloat16), ((8,), jnp.int32)
        inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), static)
        return RaggedDot().valid_cfg(inv, RaggedDotConfig("mosaic", 128, 256, block_k, None, stages))

    assert judged(8192) is True
    assert judged(8192, preferred_element_type="float32") is True
    assert "not float64" in judged(8192, preferred_element_type="float64")
    assert "shared memory" in judged(8192, 128, 2, preferred_element_type="float32")
    assert "tiles of rows are over the 65535" in judged(128 * 66_000)


def test_a_cfg_by_hand_that_cannot_run_is_refused_with_a_sentence():
    """And not by what the compiler says."""
    with pytest.raises(ValueError, match="cannot compute this call: Mosaic's products take bfloat16"):
        matmul(jnp.ones((8, 64)), jnp.ones((64, 64)), cfg=MatmulConfig("mosaic", 128, 64, 64, num_stages=2))


def attended(batch, length, heads, key_heads, depth, width=None):
    """Shapes of attention."""
    return [
        jax.ShapeDtypeStruct((batch, length, count, wide), jnp.bfloat16)
        for count, wide in ((heads, depth), (key_heads, depth), (key_heads, width or depth))
    ]


@pytest.mark.parametrize(
    ("depth", "block_k", "width", "causal"),
    [
        (128, 128, None, True),
        pytest.param(64, 128, None, True, marks=pytest.mark.slow),
        pytest.param(256, 64, None, True, marks=pytest.mark.slow),
        pytest.param(128, 64, 64, False, marks=pytest.mark.slow),
    ],
)
def test_attention_is_lowered_for_a_gpu(depth, block_k, width, causal):
    """For grouped heads of every width, and values of another one; gradients are those of another way."""
    cfg = AttentionConfig("mosaic", 128, block_k, num_stages=2)
    shapes = attended(1, 512, 4, 2, depth, width)
    text = lowered_by_mosaic(lambda *a: Attention().run(*a, causal=causal, scale=0.1, cfg=cfg), *shapes)
    assert "library_attention" in text


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_float32(races, causal):
    """With its log-sum-exp, for grouped heads."""
    from ejkernel.library.mosaic.attention import forward

    q = normal(1, 256, 2, 64, dtype="bfloat16")
    k, v = (normal(1, 256, 1, 64, dtype="bfloat16", seed=seed) for seed in (1, 2))
    how = {"scale": 0.125, "causal": causal, "block_q": 128, "block_k": 64, "stages": 2, "interpret": True}
    made, logs = jax.jit(lambda *a: forward(*a, **how))(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    wanted = jax.nn.dot_product_attention(*wide, scale=0.125, is_causal=causal)
    assert_near(made, np.asarray(wanted, np.float64), "bfloat16")
    scores = jnp.einsum("bthd,bsd->bhts", wide[0], wide[1][:, :, 0]) * 0.125
    scores = jnp.where(jnp.tril(jnp.ones((256, 256), bool)) | (not causal), scores, -jnp.inf)
    np.testing.assert_allclose(logs, jax.nn.logsumexp(scores, axis=-1), rtol=1e-3, atol=1e-3)


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stays", "lengths", "causal", "scale"),
    [
        (True, (320, 320), True, 0.125),
        (False, (256, 192), True, 1e-30),
        (False, (256, 320), False, -0.2),
        (True, (512, 512), True, 0.0),
    ],
)
def test_attention_of_odd_lengths_is_that_of_float32(monkeypatch, races, stays, lengths, causal, scale):
    """For lengths that blocks do not divide, fewer keys than queries, and scales of either sign and of no size."""
    from ejkernel.library.mosaic import attention, attention_order

    # So that a block of threads has several blocks of queries.
    monkeypatch.setattr(attention_order, "PROCESSORS", 3)
    queries, keys = lengths
    q = normal(2, queries, 2, 64, dtype="bfloat16")
    k, v = (normal(2, keys, 1, 64, dtype="bfloat16", seed=seed) for seed in (1, 2))
    how = {"scale": scale, "causal": causal, "block_q": 128, "block_k": 128, "stages": 2, "interpret": True}
    made, logs = jax.jit(lambda *a: attention.forward(*a, **how, persistent=stays))(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    scores = jnp.einsum("bthd,bsd->bhts", wide[0], wide[1][:, :, 0]) * scale
    scores = jnp.where(jnp.tril(jnp.ones((queries, keys), bool)) | (not causal), scores, -jnp.inf)
    wanted = jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(scores, axis=-1), wide[2][:, :, 0])
    assert_near(made, np.asarray(wanted, np.float64), "bfloat16")
    np.testing.assert_allclose(logs, jax.nn.logsumexp(scores, axis=-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("blocks", "causal"), [(3, True), (3, False), (64, True)])
def test_attention_computes_every_block_once(monkeypatch, blocks, causal):
    """In any order, by blocks of threads that have several or one."""
    from ejkernel.library.mosaic import attention_order

    monkeypatch.setattr(attention_order, "PROCESSORS", blocks)
    shapes = attended(2, 320, 4, 2, 64)
    order = attention_order.order_of(*shapes, block_q=128, persistent=True, causal=causal)
    found = []
    for block in range(order.blocks):
        monkeypatch.setattr(jax.lax, "axis_index", lambda _, block=block: block)
        number = 0
        while order.blocks * number < order.tiles and int(order._tile(number)) < order.tiles:
            found.append(tuple(int(x) for x in order.place(number)))
            number += 1
    assert sorted(found) == [(b, h, i) for b in range(2) for h in range(4) for i in range(3)]


def test_attention_that_cannot_run_says_why(monkeypatch):
    """By what the call has, its sizes and blocks."""
    hopper(monkeypatch)
    kernel, cfg = Attention(), AttentionConfig("mosaic", 128, 128, num_stages=2)

    def judged(shapes, cfg=cfg, **static):
        return kernel.valid_cfg(Invocation("x", tuple(shapes), {"scale": 0.1, **static}), cfg)

    assert judged(attended(1, 512, 4, 2, 128)) is True
    assert "no mask, bias, window" in judged(attended(1, 512, 4, 2, 128), window=(4, 0))
    assert "no mask, bias, window" in judged(attended(1, 512, 4, 2, 128), logits_soft_cap=30.0)
    assert "heads of 64, 128" in judged(attended(1, 512, 4, 2, 80))
    assert "no multiples" in judged(attended(1, 500, 4, 2, 128))
    longer = [shape.update(shape=(1, 640, *shape.shape[2:])) for shape in attended(1, 512, 4, 2, 128)[1:]]
    assert "hidden from all queries" in judged([attended(1, 512, 4, 2, 128)[0], *longer], causal=True)
    assert "shared memory" in judged(attended(1, 512, 4, 2, 256))
    assert "not served" in judged(attended(1, 512, 4, 2, 128), AttentionConfig("mosaic", 64, 128, num_stages=2))
    stays = AttentionConfig("mosaic", 128, 128, num_stages=2, persistent=True)
    assert judged(attended(1, 4096, 32, 8, 128), stays, causal=True) is True
    assert "would wait" in judged(attended(2, 16384, 8, 8, 128), stays, causal=True)
    assert judged(attended(2, 16384, 8, 8, 128), stays) is True
