"""Ragged products: values and gradients of every implementation for groups of every kind, and what is refused.

Covers `library/ragged_dot_tiles.py`, `library/ragged_dot_triton.py` and `library/ragged_dot_ways.py`.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, lowered_for_a_gpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import RaggedDot, RaggedDotConfig, ragged_dot, ragged_dot_ways
from ejkernel.library.ragged_dot_tiles import most_visits, starts_of, visits_of
from ejkernel.library.ragged_dot_ways import mosaic_refuses
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, OpsError, check
from ejkernel.ops.timing.program import has_kernel

# Blocks that divide none of the sizes below.
WAYS = {
    "xla": RaggedDotConfig("xla"),
    "masked": RaggedDotConfig("masked"),
    "tiled": RaggedDotConfig("tiled", block_m=8),
    "triton": RaggedDotConfig("triton", block_m=16, block_n=16, block_k=16),
}
# All rows, some groups empty; one group has all; rows beyond the last group; nothing at all.
GROUPS = {"even": [10, 9, 9, 9], "skewed": [0, 35, 0, 2], "one": [0, 0, 37, 0], "rest": [5, 6, 0, 7], "none": [0] * 4}
ROWS, DEPTH, WIDTH = 37, 21, 19
LIMITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def inputs(dtype=jnp.float32):
    """Rows, matrices and a gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = ((ROWS, DEPTH), (4, DEPTH, WIDTH), (ROWS, WIDTH))
    return tuple(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)


def truth(lhs, rhs, sizes, dy):
    """Output and gradients in float64."""
    lhs, rhs, dy = (np.asarray(x, np.float64) for x in (lhs, rhs, dy))
    out, d_lhs, d_rhs = np.zeros(dy.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows], d_lhs[rows] = lhs[rows] @ rhs[group], dy[rows] @ rhs[group].T
        d_rhs[group] = lhs[rows].T @ dy[rows]
        start += size
    return out, d_lhs, d_rhs


def close(got, want, dtype="float32"):
    """Is every element right, in units of the largest?"""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.max(np.abs(got - want), initial=0) <= LIMITS[dtype] * max(1.0, np.max(np.abs(want), initial=0))


def both(way, dy):
    """Output and gradients as one program of rows, matrices and sizes."""

    @jax.jit
    def run(lhs, rhs, sizes):
        product = lambda lhs, rhs: ragged_dot(lhs, rhs, sizes, cfg=way, executor=UNTUNED)  # noqa: E731  (used once)
        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(dy)

    return run


@pytest.mark.parametrize("way", WAYS)
def test_every_implementation_agrees_with_float64(way):
    """One program serves skewed, empty and newly drawn groups, and rows beyond the last one; values and gradients."""
    lhs, rhs, dy = inputs()
    run = both(WAYS[way], dy)
    drawn = np.random.default_rng(5).multinomial(ROWS, [0.1, 0.5, 0.1, 0.3])
    for sizes in (*GROUPS.values(), drawn):
        for got, want in zip(run(lhs, rhs, jnp.asarray(sizes)), truth(lhs, rhs, sizes, dy), strict=True):
            close(got, want)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("way", "dtype"), [("tiled", jnp.bfloat16), ("triton", jnp.float16), ("masked", jnp.float16)])
def test_narrow_inputs_are_summed_in_float32(way, dtype):
    """Output and gradients have the inputs' dtypes and are as right as those allow."""
    lhs, rhs, dy = inputs(dtype)
    made = both(WAYS[way], dy)(lhs, rhs, jnp.array(GROUPS["skewed"]))
    for got, want in zip(made, truth(lhs, rhs, GROUPS["skewed"], dy), strict=True):
        assert got.dtype == dtype
        close(got, want, jnp.dtype(dtype).name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("way", [*WAYS.values(), *(RaggedDotConfig("tiled", block_m=m) for m in (1, 3, 64))], ids=str)
def test_the_whole_grid_agrees_with_float64(way, dtype):
    """Dtypes, tiles and groups, each with each."""
    lhs, rhs, dy = inputs(dtype)
    run = both(way, dy)
    for sizes in GROUPS.values():
        for got, want in zip(run(lhs, rhs, jnp.asarray(sizes)), truth(lhs, rhs, sizes, dy), strict=True):
            close(got, want, jnp.dtype(dtype).name)


def test_the_output_can_be_wider_than_the_inputs():
    """`preferred_element_type` as of `lax.ragged_dot`; the gradients are still the inputs'."""
    lhs, rhs, _ = inputs(jnp.bfloat16)
    sizes = jnp.array(GROUPS["rest"])

    def run(lhs):
        return ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32, cfg=WAYS["tiled"], executor=UNTUNED)

    @jax.jit
    def both(lhs):
        out, pull = jax.vjp(run, lhs)
        return out, pull(out)[0]

    out, d_lhs = both(lhs)
    close(out, truth(lhs, rhs, sizes, out)[0])
    assert (out.dtype, d_lhs.dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", WAYS)
def test_ragged_products_are_mapped(way):
    """A vmap over rows and sizes, with matrices that all share, gives each example's own."""
    lhs, rhs, dy = inputs()
    sizes = np.array([GROUPS["even"], GROUPS["rest"]])
    rows = jnp.stack([lhs, lhs[::-1]])

    def loss(lhs, sizes):
        return jnp.sum(ragged_dot(lhs, rhs, sizes, cfg=WAYS[way], executor=UNTUNED) * dy)

    grads = jax.jit(jax.vmap(jax.grad(loss)))(rows, jnp.asarray(sizes))
    for row, size, got in zip(rows, sizes, grads, strict=True):
        close(got, truth(row, rhs, size, dy)[1])


@pytest.mark.parametrize("way", WAYS)
def test_ragged_products_are_sharded(way):
    """Each shard with rows and sizes of its own, matrices that all share; gradients of those are summed."""
    lhs, rhs, dy = inputs()
    sizes = jnp.array([*GROUPS["even"], *GROUPS["skewed"]])
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    specs = (P("rows"), P(), P("rows"))

    def product(lhs, rhs, sizes):
        return ragged_dot(lhs, rhs, sizes, cfg=WAYS[way], executor=UNTUNED)

    # JAX interprets Pallas kernels without that check alone.
    sharded = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=way != "triton")
    two = jnp.concatenate([lhs, lhs])

    @jax.jit
    def both(lhs, rhs):
        out, pull = jax.vjp(lambda lhs, rhs: sharded(lhs, rhs, sizes), lhs, rhs)
        return out, *pull(jnp.concatenate([dy, dy]))

    out, d_lhs, d_rhs = both(two, rhs)
    parts = [truth(lhs, rhs, GROUPS[name], dy) for name in ("even", "skewed")]
    close(out, np.concatenate([part[0] for part in parts]))
    close(d_lhs, np.concatenate([part[1] for part in parts]))
    close(d_rhs, parts[0][2] + parts[1][2])


def test_the_triton_kernels_say_over_which_axes_they_vary():
    """As a GPU would trace them inside shard_map with its checks on: on shapes, since a CPU cannot run them."""
    lhs, rhs, dy = inputs()
    sizes = jnp.array([*GROUPS["even"], *GROUPS["skewed"]])
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))

    def both(lhs, rhs, sizes, dy):
        kernel, cfg = RaggedDot(), WAYS["triton"]
        return kernel.run(lhs, rhs, sizes, cfg=cfg), kernel.vjp((), None, dy, lhs, rhs, sizes, cfg=cfg)[1][None]

    specs = (P("rows"), P(), P("rows"), P("rows"))
    sharded = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=P("rows"))
    made = jax.eval_shape(sharded, *(jnp.concatenate([lhs] * 2), rhs, sizes, jnp.concatenate([dy] * 2)))
    assert [out.shape for out in made] == [(2 * ROWS, WIDTH), (2, 4, DEPTH, WIDTH)]


def test_every_candidate_agrees_and_the_call_is_tuned():
    """Each one's values and gradients; then, under jit, with sizes that the kernel draws, the winner is kept."""
    lhs, rhs, dy = inputs()
    sizes = jnp.array(GROUPS["skewed"])
    trials = check(RaggedDot(), lhs, rhs, sizes)
    assert {trial.status for trial in trials} == {"ok"}
    assert {trial.cfg.implementation for trial in trials} == {"xla", "masked", "tiled"}
    cache = ConfigCache()
    run = Executor(ConfigSelectorChain(cache))
    out = jax.jit(lambda *args: ragged_dot(*args, executor=run))(lhs, rhs, sizes)
    close(out, truth(lhs, rhs, GROUPS["skewed"], dy)[0])
    assert cache.size() == 1


@pytest.mark.parametrize("tile", [1, 6])
def test_tiles_hold_every_row_of_every_group_once(tile):
    """Whatever the sizes: rows in order, each tile of one group, none longer than a tile, and no more than planned."""
    rng, groups, rows = np.random.default_rng(tile), 5, 40
    listed = jax.jit(lambda sizes: dataclasses.astuple(visits_of(sizes, rows, tile)))
    for _ in range(50):
        sizes = rng.integers(0, 2, groups) * rng.integers(0, 9, groups)
        group, start, stop, count = map(np.asarray, listed(jnp.asarray(sizes, jnp.int32)))
        found = [(g, row) for g, a, b in zip(group, start, stop, strict=True) for row in range(a, b)]
        assert found == [(g, row) for row, g in enumerate(np.repeat(np.arange(groups), sizes))]
        assert count <= len(group) == most_visits(rows, groups, tile)
        assert np.all(stop - start <= tile)
        assert np.array_equal(start[count:], stop[count:])


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_do_not_fit_are_cut_under_a_trace(way):
    """Where values cannot be read, groups end at the last row."""
    lhs, rhs, dy = inputs()
    run = jax.jit(lambda sizes: ragged_dot(lhs, rhs, sizes, cfg=WAYS[way], executor=UNTUNED))
    close(run(jnp.array([30, 30, 30, 30])), truth(lhs, rhs, [30, 7, 0, 0], dy)[0])


@pytest.mark.parametrize("sizes", [[1 << 32, 5, 0, 0], [1 << 62] * 4, [5, 0, 0, -(1 << 32)]])
def test_sizes_are_read_before_they_are_narrowed(sizes):
    """In 32 bits, these would fit, or add up to nothing."""
    lhs, rhs, _ = inputs()
    with pytest.raises(ValueError, match=f"the least is {min(sizes)} and they add up to {sum(sizes)}"):
        ragged_dot(lhs, rhs, np.array(sizes), executor=UNTUNED)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_32_bits_cannot_add_up_are_cut_under_a_trace(way):
    """Groups end at the last row, however large the sizes are, in 32 bits and in 64."""
    lhs, rhs, dy = inputs()
    run = jax.jit(lambda sizes: ragged_dot(lhs, rhs, sizes, cfg=WAYS[way], executor=UNTUNED))
    most = (1 << 31) - 1
    close(run(jnp.array([30, most, most, most])), truth(lhs, rhs, [30, 7, 0, 0], dy)[0])
    with jax.enable_x64(True):
        wide = run(jnp.array([30, 1 << 32, 0, 0], jnp.int64))
    close(wide, truth(lhs, rhs, [30, 7, 0, 0], dy)[0])


def test_many_groups_of_all_rows_are_cut():
    """Their sum is too large for 32 bits although each size fits."""
    rows, groups = 1 << 25, 1 << 7
    starts, stops = jax.jit(starts_of, static_argnums=1)(jnp.full(groups, rows), rows)
    np.testing.assert_array_equal(starts, [0, *[rows] * (groups - 1)])
    np.testing.assert_array_equal(stops, [rows] * groups)


def test_the_kernel_takes_its_arguments_by_name():
    """And their gradients are there as well."""
    lhs, rhs, dy = inputs()
    sizes = jnp.array(GROUPS["rest"])

    def loss(lhs):
        return jnp.sum(UNTUNED(RaggedDot(), lhs=lhs, rhs=rhs, group_sizes=sizes, cfg=WAYS["tiled"]) * dy)

    close(jax.jit(jax.grad(loss))(lhs), truth(lhs, rhs, sizes, dy)[1])


def test_nothing_to_compute_is_zeros_without_tuning():
    """No rows, no groups, or an empty inner dimension."""
    for rows, groups, depth in ((0, 2, 3), (4, 0, 3), (4, 2, 0)):
        out = ragged_dot(jnp.ones((rows, depth)), jnp.ones((groups, depth, 5)), jnp.zeros(groups, jnp.int32))
        assert out.shape == (rows, 5)
        assert not np.any(out)


LHS, RHS, _ = map(np.asarray, inputs())
SIZES = np.array(GROUPS["even"], np.int32)
BAD = [
    ((LHS[0], RHS, SIZES), {}, ValueError, r"lhs must have the shape \(m, k\), got \(21,\)"),
    ((LHS, RHS[:, :5], SIZES), {}, ValueError, r"k: 21 and 5, of shapes \(37, 21\) and \(4, 5, 19\)"),
    ((LHS, RHS, SIZES[:3]), {}, ValueError, r"groups: 4 and 3, of shapes \(4, 21, 19\) and \(3,\)"),
    ((LHS, RHS, SIZES + 1), {}, ValueError, r"at most the 37 rows of lhs \(37, 21\).*add up to 41"),
    ((LHS, RHS, SIZES - 10), {}, ValueError, "the least is -1"),
    ((LHS, RHS, SIZES.astype(float)), {}, TypeError, "group_sizes is float"),
    ((LHS, RHS.astype(jnp.bfloat16), SIZES), {}, TypeError, "lhs is float32 and rhs is bfloat16"),
    ((LHS, RHS, SIZES), {"cfg": RaggedDotConfig("nothing")}, ValueError, "names no implementation"),
]


@pytest.mark.parametrize(("args", "options", "kind", "message"), BAD)
def test_bad_input_is_a_clear_error(args, options, kind, message):
    """It names the argument and both shapes, before anything is tuned."""
    with pytest.raises(kind, match=message) as caught:
        ragged_dot(*args, **options)
    assert isinstance(caught.value, OpsError)


@pytest.mark.thinned
@pytest.mark.parametrize("wanted", [None, "float32"])
@pytest.mark.parametrize("wide", [False, True])
def test_products_and_gradients_are_lowered_for_a_gpu(wide, wanted):
    """As Triton's programs, one for each, also with a gradient in two parts and where Python's numbers have 64 bits."""
    kernel, cfg = RaggedDot(), RaggedDotConfig("triton", 128, 256, 64, 8, 4)
    shapes = (
        ((512, 256), jnp.bfloat16),
        ((4, 256, 512), jnp.bfloat16),
        ((4,), jnp.int32),
        ((512, 512), wanted or "bfloat16"),
    )

    def both(lhs, rhs, sizes, dy):
        given = (lhs, rhs, sizes)
        how = {"preferred_element_type": wanted, "cfg": cfg}
        return kernel.run(*given, **how), kernel.vjp((), None, dy, *given, **how)[:2]

    with jax.enable_x64(wide):
        text = lowered_for_a_gpu(both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3
    assert has_kernel(text)


def test_a_kernel_for_hopper_gpus_is_traced_once_for_equal_shapes(monkeypatch):
    """Whichever call asks for it: tracing its body takes a tenth of a second."""
    traced = []
    kernels = pytest.importorskip("ejkernel.library.mosaic.ragged_dot")

    def body(lhs, rhs, sizes, *, tile, interpret, transposed, dtype):
        traced.append((lhs.shape, transposed))
        return jnp.zeros((lhs.shape[0], rhs.shape[1 if transposed else 2]), dtype)

    monkeypatch.setattr(kernels, "product", body)
    # Ways of other tests may have this cfg, and later ones must not have this body.
    ragged_dot_ways._once.cache_clear()
    cfg = RaggedDotConfig("mosaic", 128, 256, 64, None, 4)
    matrices, sizes = (jax.ShapeDtypeStruct(*one) for one in (((4, 256, 512), jnp.bfloat16), ((4,), jnp.int32)))
    for rows in (512, 512, 640):
        lhs = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
        jax.eval_shape(lambda *a: RaggedDot().run(*a, cfg=cfg), lhs, matrices, sizes)
    ragged_dot_ways._once.cache_clear()

    assert traced == [((512, 256), False), ((640, 256), False)]


def test_candidates_of_a_gpu_fit_its_shared_memory(monkeypatch):
    """For narrow and wide inputs, few rows and many: the heuristic and most candidates are valid, and the rest told."""
    monkeypatch.setattr(sys.modules[RaggedDot.__module__], "get_device_platform", lambda device: "gpu")
    kernel = RaggedDot()
    for rows, dtype in ((64, jnp.bfloat16), (8192, jnp.bfloat16), (8192, jnp.float32)):
        lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 4096), (8, 4096, 4096)))
        inv = Invocation("x", (lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32)), {})
        assert kernel.valid_cfg(inv, kernel.heuristic_cfg_gpu(inv)) is True
        verdicts = {cfg: kernel.valid_cfg(inv, cfg) for cfg in kernel.candidate_cfgs_gpu(inv)}
        assert 10 <= sum(verdict is True for verdict in verdicts.values()) <= 40
        assert all(verdict is True or verdict for verdict in verdicts.values())


def test_pallas_kernels_are_refused_where_they_cannot_run():
    """On a CPU, on another GPU, for other dtypes and for blocks that do not divide."""
    inv = Invocation("x", (LHS, RHS, SIZES), {})
    for name in ("triton", "mosaic_jax"):
        assert "GPUs alone" in RaggedDot().valid_cfg(inv, RaggedDotConfig(name))
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (4, 256, 512)))
    wide = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    cfg = RaggedDotConfig("mosaic_jax", 128, 128, 64)
    assert mosaic_refuses(lhs, rhs, None, cfg, "9.0") == ""
    assert "capability" in mosaic_refuses(lhs, rhs, None, cfg, "8.0")
    assert "float32" in mosaic_refuses(wide, rhs, None, cfg, "9.0")
    assert "float32" in mosaic_refuses(lhs, rhs, "float32", cfg, "9.0")
    assert "divide" in mosaic_refuses(lhs, rhs, None, RaggedDotConfig("mosaic_jax", 128, 192, 64), "9.0")
