"""Attention to pages by cuDNN, without a GPU: the call that XLA gets, what goes into it, and what is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_text import call_of
from fakes_library import UNTUNED, assert_near, normal, pull, selects, wide
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import DecodeAttention, DecodeAttentionConfig, decode_attention, decode_attention_cudnn
from ejkernel.library.attention_jax import capability_of
from ejkernel.library.decode_attention_cudnn import of_pages
from ejkernel.library.decode_attention_ways import CacheSight, whole
from ejkernel.ops import Invocation

CUDNN, GATHER = DecodeAttentionConfig("cudnn"), DecodeAttentionConfig("gather")
BATCH, EACH, PAGE, HEADS, SHARED, SIZE = 3, 4, 16, 4, 2, 16
ROOM, PAGES = EACH * PAGE, 9
LENGTHS = np.array([50, 0, 17], np.int32)


def shapes(pages=PAGES, dtype=jnp.bfloat16, queries=1, page=PAGE, size=SIZE, paged=True):
    """Queries, pages, lengths and a table, as `DecodeAttention` has them."""
    k = jax.ShapeDtypeStruct((pages, page, SHARED, size) if paged else (BATCH, ROOM, SHARED, size), dtype)
    q, lengths = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((BATCH, queries, HEADS, size), dtype), ((BATCH,), jnp.int32))
    )
    return q, k, k, lengths, jax.ShapeDtypeStruct((BATCH, EACH), jnp.int32) if paged else None


def arrays(seed=0):
    """A call with a table that ends in nonsense, and a pool of fewer pages than the table has places."""
    k, v = (normal(PAGES, PAGE, SHARED, SIZE, dtype="bfloat16", seed=seed + at) for at in (1, 2))
    table = np.random.default_rng(seed).integers(0, PAGES, (BATCH, EACH)).astype(np.int32)
    table[1], table[2, 2:] = -7, 10**6
    return normal(BATCH, 1, HEADS, SIZE, dtype="bfloat16", seed=seed), k, v, jnp.asarray(LENGTHS), jnp.asarray(table)


@pytest.fixture
def handed(monkeypatch):
    """Tables and lengths that were handed to cuDNN, which is plain JAX here."""
    seen = []

    def plain(q, k, v, table, lengths, *, scale):
        jax.debug.callback(lambda *values: seen.append(values), table, lengths)
        return whole(q, k, v, table, lengths, None, CacheSight(None, None, scale), fused=False)

    monkeypatch.setattr(decode_attention_cudnn, "of_pages", plain)
    return seen


@pytest.fixture
def hopper(cudnn, monkeypatch):
    """A GPU of capability 9 with cuDNN, as far as the library asks."""
    monkeypatch.setattr(decode_attention_cudnn, "get_device_platform", lambda device: "gpu")
    monkeypatch.setattr(decode_attention_cudnn, "capability_of", lambda device: (9, 0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_xla_gets_the_call_that_jax_itself_makes(cudnn, dtype):
    """Operands, layouts and every field of the config, for as many pages as JAX's own function asks for."""
    q, k, v, lengths, table = shapes(pages=BATCH * EACH, dtype=dtype)

    def by_jax(q, k, v, lengths, table):
        pages = table[:, None, :, None]
        return cudnn.paged_attention(q, k, v, jnp.ones_like(lengths), lengths, pages, pages, scale=0.25)

    def ours(q, k, v, lengths, table):
        return of_pages(q, k, v, table, lengths, scale=0.25)

    given = q, k, v, lengths, table
    assert call_of(ours, *given) == call_of(by_jax, *given)


@pytest.mark.parametrize("pages", [1, PAGES, 1000])
def test_a_pool_has_any_number_of_pages(pages):
    """Fewer than the table has places, as where sequences share some, and more."""
    run = partial(DecodeAttention().run, scale=0.25, cfg=CUDNN)
    form, config = call_of(run, *shapes(pages=pages))
    assert f"tensor<{pages}x{PAGE}x{SHARED}x{SIZE}xbf16>" in form
    assert config["cudnn_fmha_backend_config"]["is_paged_attention"] is True


def test_what_is_handed_over_is_in_bounds(handed):
    """Pages that there are and lengths from one on; a sequence without tokens gives zeros all the same."""
    out, wanted = (jax.jit(partial(DecodeAttention().run, scale=0.25, cfg=cfg))(*arrays()) for cfg in (CUDNN, GATHER))
    assert_near(out, wide(wanted), "bfloat16")
    assert not np.any(np.asarray(out)[1])
    jax.effects_barrier()
    ((pages, sizes),) = handed
    assert np.min(pages) >= 0
    assert np.max(pages) < PAGES
    np.testing.assert_array_equal(sizes, [50, 1, 17])


def test_lengths_beyond_the_table_are_cut(handed):
    """Also where the kernel is run by hand, past the checks of the arguments."""
    q, k, v, lengths, table = arrays()
    jax.jit(lambda *given: DecodeAttention().run(*given, table, scale=0.25, cfg=CUDNN))(q, k, v, lengths + 1000)
    jax.effects_barrier()
    assert np.max(handed[0][1]) == ROOM


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0, 0), (0, None, None, 0, 0), (0, None, 0, None, None)], ids=str)
def test_under_vmap_examples_are_more_sequences(handed, mapped):
    """Each with its own pages, or with pages that all of them share: one call."""
    ones = [arrays(seed) for seed in (0, 10)]
    pairs = zip(zip(*ones, strict=True), mapped, strict=True)
    stacked = [jnp.asarray(np.stack(pair)) if axis == 0 else pair[0] for pair, axis in pairs]

    def attended(cfg):
        return jax.jit(jax.vmap(partial(DecodeAttention().run, scale=0.25, cfg=cfg), in_axes=mapped))(*stacked)

    assert_near(attended(CUDNN), wide(attended(GATHER)), "bfloat16")
    jax.effects_barrier()
    assert [pages.shape for pages, _ in handed] == [(2 * BATCH, EACH)]


def test_under_vmap_keys_side_by_side_are_a_larger_batch(cudnn):
    """Where the examples share their keys, and lie along another axis than the first."""
    q, k, v, lengths, _ = shapes(paged=False)
    several = jax.ShapeDtypeStruct((*q.shape[:2], 5, *q.shape[2:]), q.dtype)
    run = jax.vmap(partial(DecodeAttention().run, scale=0.25, cfg=CUDNN), in_axes=(2, None, None, None))
    found = jax.make_jaxpr(run)(several, k, v, lengths)
    assert found.out_avals[0].shape == (5, *q.shape)


def test_the_gradient_is_that_of_all_keys_at_once(handed):
    """cuDNN has none over pages."""
    q, k, v, lengths, table = arrays()

    def grads(cfg):
        fn = lambda q, v: DecodeAttention().run(q, k, v, lengths, table, scale=0.25, cfg=cfg)  # noqa: E731  (used once)
        return pull(fn, (q, v), q)

    for found, wanted in zip(grads(CUDNN), grads(GATHER), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_shards_of_sequences_are_calls_of_their_own():
    """Inside shard_map, with its checks on, over pages that all shards have."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("batch",))
    specs = P("batch"), P(), P(), P("batch"), P("batch")
    attend = jax.shard_map(
        partial(DecodeAttention().run, scale=0.25, cfg=CUDNN), mesh=mesh, in_specs=specs, out_specs=P("batch")
    )
    assert f"bf16[1,1,{HEADS},{SIZE}]" in str(jax.make_jaxpr(attend)(*shapes()))


def test_keys_side_by_side_are_not_copied(cudnn):
    """Nothing of their size is written: cuDNN does not see what is beyond the lengths."""
    q, k, v, lengths, _ = shapes(paged=False)
    program = jax.make_jaxpr(partial(DecodeAttention().run, scale=0.25, cfg=CUDNN))(q, k, v, lengths).jaxpr
    assert "dot_product_attention" in str(program)
    assert selects(program, k.size) == 0


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({"queries": 2}, {}, "one query of each sequence, not 2"),
        ({"dtype": jnp.float32}, {}, "bfloat16 and float16, not float32"),
        ({"size": 20}, {}, "multiples of 8 up to 128, not 20"),
        ({"size": 256}, {}, "multiples of 8 up to 128, not 256"),
        ({"page": 24}, {}, "powers of two, not 24"),
        ({"page": 8}, {}, "16 keys and more that are powers of two, not 8"),
        ({}, {"window": 8}, "no window, soft cap or sinks"),
        ({}, {"soft_cap": 2.0}, "no window, soft cap or sinks"),
    ],
)
def test_what_cudnn_is_not_given_is_refused(hopper, given, options, reason):
    """By `valid_cfg`, with the reason, and by a run with the cfg."""
    inv = Invocation("x", shapes(**given), {"scale": 0.25, **options})
    assert reason in DecodeAttention().valid_cfg(inv, CUDNN)
    with pytest.raises(ValueError, match="cudnn cannot compute this call"):
        jax.eval_shape(partial(DecodeAttention().run, cfg=CUDNN, **inv.kwargs), *inv.args)
    assert DecodeAttention().heuristic_cfg_gpu(inv).implementation != "cudnn"


def test_the_heuristic_of_a_gpu_is_cudnn_where_it_takes_the_call(hopper):
    """Over pages and without, and it is among the candidates."""
    kernel = DecodeAttention()
    for paged in (True, False):
        inv = Invocation("x", shapes(paged=paged), {"scale": 0.25})
        assert kernel.valid_cfg(inv, CUDNN) is True
        assert kernel.heuristic_cfg_gpu(inv) == CUDNN
        assert CUDNN in kernel.candidate_cfgs_gpu(inv)


def test_other_devices_have_no_cudnn(hopper, monkeypatch):
    """GPUs on which what lies beyond the lengths was not watched, and CPUs."""
    inv = Invocation("x", shapes(), {"scale": 0.25})
    monkeypatch.setattr(decode_attention_cudnn, "capability_of", lambda device: (8, 0))
    assert "GPUs of capability 9 alone" in DecodeAttention().valid_cfg(inv, CUDNN)
    monkeypatch.setattr(decode_attention_cudnn, "get_device_platform", lambda device: "cpu")
    assert "GPUs alone" in DecodeAttention().valid_cfg(inv, CUDNN)


def test_a_gpu_without_cudnn_has_another_heuristic(hopper, cudnn, monkeypatch):
    """JAX says so, and no import fails."""

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(cudnn, "check_cudnn_version", missing)
    inv = Invocation("x", shapes(), {"scale": 0.25})
    assert "JAX refuses cuDNN: cuDNN is not detected" in DecodeAttention().valid_cfg(inv, CUDNN)
    assert DecodeAttention().heuristic_cfg_gpu(inv).implementation in ("triton", "gather")


NO_HOPPER = all(capability_of(device)[0] != 9 for device in jax.devices())


@pytest.mark.gpu
@pytest.mark.skipif(NO_HOPPER, reason="there is no GPU of capability 9 here")
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
def test_on_a_gpu_pages_may_hold_anything_beyond_the_lengths(hidden, page):
    """NaN and infinities in the rest of a last page and in pages that no sequence uses; also side by side."""
    batch, each = 5, 1024 // page
    lengths = jnp.array([1000, 1, 0, page + 1, 1024], jnp.int32)
    table = np.random.default_rng(0).permutation(batch * each + 3)[: batch * each].reshape(batch, each)
    place = jnp.arange(1024).reshape(1, each, page)
    used = jnp.zeros((batch * each + 3, page), bool).at[table].set(place < lengths[:, None, None])
    q = normal(batch, 1, 8, 128, dtype="bfloat16")
    pools = [normal(*used.shape, 2, 128, dtype="bfloat16", seed=seed) for seed in (1, 2)]
    pools = [jnp.where(used[..., None, None], x, hidden).astype(x.dtype) for x in pools]
    side_by_side = [x[table].reshape(batch, 1024, 2, 128) for x in pools]
    for given in ((*pools, table), (*side_by_side, None)):
        found, wanted = (decode_attention(q, *given, lengths, cfg=cfg, executor=UNTUNED) for cfg in (CUDNN, GATHER))
        assert_near(found, wide(wanted), "bfloat16")
