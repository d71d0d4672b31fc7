"""Attention of new tokens to pages of keys: every way against float64, and pages that hold anything else.

Covers `library/decode_attention_pages.py`, `library/decode_attention_ways.py` and `library/triton/decode.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, lowered_for_a_gpu, normal, wide

from ejkernel.library import DecodeAttention, DecodeAttentionConfig, append_to_pages, decode_attention
from ejkernel.ops import Invocation, check

WAYS = [
    DecodeAttentionConfig("gather"),
    DecodeAttentionConfig("fused"),
    DecodeAttentionConfig("split", parts=4),
    DecodeAttentionConfig("loop", block=16),
]
PAGES, PAGE, SHARED, SIZE, HEADS, QUERIES = 24, 8, 2, 16, 4, 2
LENGTHS = np.array([45, 3, 20], np.int32)
SINKS = normal(HEADS, seed=4)
OPTIONS = [{}, {"window": 5, "soft_cap": 3.0, "sinks": SINKS}]


@pytest.fixture
def pages():
    """Queries, pages of keys and values with NaN where no sequence is, and a table that ends in nonsense."""
    table = np.random.default_rng(0).permutation(PAGES)[:18].reshape(3, 6).astype(np.int32)
    unused = [page for page in range(PAGES) if page not in (*table[0], table[1, 0], *table[2, :3])]
    k, v = (normal(PAGES, PAGE, SHARED, SIZE, seed=seed).at[jnp.array(unused)].set(jnp.nan) for seed in (1, 2))
    table[1, 1:] = -1
    return normal(3, QUERIES, HEADS, SIZE, seed=3), k, v, table


def exact(q, k, v, table, *, window=None, soft_cap=None, sinks=None):
    """One query after the other, in float64."""
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        own = LENGTHS[b] - QUERIES + t
        first = 0 if window is None else max(0, own - window)
        keys, values = (np.concatenate([wide(x[page]) for page in table[b]])[first : own + 1, h // 2] for x in (k, v))
        scores = keys @ wide(q[b, t, h]) * SIZE**-0.5
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        sink = 0 if sinks is None else np.exp(float(sinks[h]))
        out[b, t, h] = np.exp(scores) @ values / (np.exp(scores).sum() + sink)
    return out


@pytest.mark.thinned
@pytest.mark.parametrize("cfg", WAYS, ids=lambda cfg: cfg.implementation)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
def test_every_way_is_right_over_pages_and_without(pages, cfg, options):
    """Several queries, grouped heads, pages that hold NaN beyond the lengths."""
    q, k, v, table = pages
    right = exact(q, k, v, table, **options)
    assert_near(decode_attention(q, k, v, table, LENGTHS, cfg=cfg, executor=UNTUNED, **options), right, "float32")
    flat = [
        np.concatenate([np.asarray(x)[np.maximum(row, 0)].reshape(1, 48, SHARED, SIZE) for row in table])
        for x in (k, v)
    ]
    side_by_side = [jnp.asarray(x[:, :45]) for x in flat]
    found = jax.jit(lambda q, k, v, n: decode_attention(q, k, v, None, n, cfg=cfg, executor=UNTUNED, **options))(
        q, *side_by_side, LENGTHS
    )
    assert_near(found, right, "float32")


@pytest.mark.thinned
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
def test_the_kernel_is_right(pages, parts, options):
    """Blocks of two pages, parts that the pages do not divide, and NaN beyond the lengths."""
    q, k, v, table = pages
    cfg = DecodeAttentionConfig("triton", parts, 16, 1, 1)
    found = decode_attention(q, k, v, table, LENGTHS, cfg=cfg, executor=UNTUNED, **options)
    assert_near(found, exact(q, k, v, table, **options), "float32")


def test_the_kernel_is_lowered_for_a_gpu():
    """Over pages and without."""
    kinds = [
        ((2, 1, 8, 64), jnp.bfloat16),
        *[((32, 64, 2, 64), jnp.bfloat16)] * 2,
        ((2,), jnp.int32),
        ((2, 16), jnp.int32),
    ]
    q, k, v, lengths, table = (jax.ShapeDtypeStruct(*kind) for kind in kinds)
    cfg = DecodeAttentionConfig("triton", 2, 128, 4, 3)

    def computed(*arrays):
        return DecodeAttention().run(*arrays, scale=0.1, window=100, cfg=cfg)

    assert "library_decode_attention" in lowered_for_a_gpu(computed, q, k, v, lengths, table)
    flat = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)
    assert "library_decode_attention" in lowered_for_a_gpu(computed, q, flat, flat, lengths)


def test_one_query_needs_no_axis_for_it(pages):
    """The last token of each sequence."""
    q, k, v, table = pages
    right = exact(q, k, v, table)[:, -1]
    assert_near(decode_attention(q[:, -1], k, v, table, LENGTHS, executor=UNTUNED), right, "float32")


def test_a_sequence_without_tokens_gives_zeros(pages):
    """With and without sinks."""
    q, k, v, table = pages
    for cfg in WAYS:
        for sinks in (None, SINKS):
            out = decode_attention(q, k, v, table, np.zeros(3, np.int32), sinks=sinks, cfg=cfg, executor=UNTUNED)
            assert not np.any(out)


def test_gradients_are_those_of_all_keys_at_once(pages):
    """Also where a loop has none of its own, and for pages that hold NaN elsewhere."""
    q, k, v, table = pages

    def grads(cfg):
        def total(q, v):
            return jnp.sum(jnp.sin(decode_attention(q, k, v, table, LENGTHS, cfg=cfg, executor=UNTUNED)))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(q, v)

    right = grads(WAYS[0])
    assert all(np.all(np.isfinite(x)) for x in right)
    for found, wanted in zip(grads(WAYS[3]), right, strict=True):
        assert_near(found, wide(wanted), "float32")


def test_appended_tokens_are_the_last_ones(pages):
    """Two at a time over the end of a page, in place where the pages are donated."""
    _, k, v, table = pages
    new = [normal(3, 2, SHARED, SIZE, seed=seed) for seed in (7, 8)]
    table = np.maximum(table, 0)
    lengths = np.array([39, 3, 15], np.int32)
    k_pages, v_pages = jax.jit(append_to_pages, donate_argnums=(0, 1))(k.copy(), v.copy(), *new, table, lengths)
    for b in range(3):
        for t in range(2):
            page, place = divmod(int(lengths[b]) + t, PAGE)
            np.testing.assert_array_equal(k_pages[table[b, page], place], new[0][b, t])
            np.testing.assert_array_equal(v_pages[table[b, page], place], new[1][b, t])
    kept = np.asarray(k_pages == k).all(axis=(2, 3))
    assert (~kept & ~np.isnan(np.asarray(k)).any(axis=(2, 3))).sum() <= 6


def test_under_a_trace_nothing_is_read_or_written_out_of_bounds(pages):
    """A page out of range is cut when it is read, and left out when it is written."""
    q, k, v, _ = pages
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    wild = jnp.full((3, 6), 10**6, jnp.int32).at[0].set(-5)
    out = jax.jit(lambda table: decode_attention(q, k, v, table, LENGTHS, executor=UNTUNED))(wild)
    assert np.all(np.isfinite(out))
    new = normal(3, SHARED, SIZE)
    k_pages, _ = jax.jit(lambda table: append_to_pages(k, v, new, new, table, jnp.zeros(3, jnp.int32)))(wild)
    np.testing.assert_array_equal(k_pages, k)


@pytest.mark.slow
def test_every_candidate_passes_the_check_of_a_tuning():
    """With a table and lengths of its own."""
    table = jnp.arange(16, dtype=jnp.int32).reshape(1, 16)
    pages = [normal(16, 16, 2, 8, seed=seed) for seed in (1, 2)]
    pages = [page.astype(jnp.bfloat16) for page in pages]
    trials = check(DecodeAttention(), normal(1, 1, 4, 8, dtype="bfloat16"), *pages, jnp.array([200]), table, scale=0.3)
    assert {trial.cfg.implementation for trial in trials} == {"gather", "fused", "split", "loop"}
    assert all(trial.status == "ok" for trial in trials)


def test_tables_to_measure_with_name_pages():
    """Where a trace hides the real one."""
    pages = jax.ShapeDtypeStruct((10, 4, 2, 8), jnp.float32)
    shapes = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 6), jnp.int32)
    q = jax.ShapeDtypeStruct((3, 1, 2, 8), jnp.float32)
    args, _ = DecodeAttention().example_inputs(
        Invocation("x", (q, pages, pages, *shapes), {}), np.random.default_rng(0)
    )
    assert np.all((args[3] >= 12) & (args[3] <= 24))
    assert np.all((args[4] >= 0) & (args[4] < 10))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"page_table": np.array([[0, 9]])}, ValueError, r"page_table\[0, 1\] is 9, and k_pages .* have pages 0 to 3"),
        ({"lengths": np.array([9])}, ValueError, "lengths must be from 0 to 8, got 9"),
        ({"lengths": np.array([1, 2])}, ValueError, "lengths must have the shape"),
        ({"q": jnp.ones((1, 3, 8))}, ValueError, "the heads of q must be a multiple of those of k_pages: 3 and 2"),
        ({"v_pages": jnp.ones((4, 4, 2, 7))}, ValueError, "k_pages and v_pages must have the same shape"),
        ({"page_table": np.array([[0.0, 1.0]])}, TypeError, "page_table is float64"),
        ({"sinks": jnp.ones(3)}, ValueError, "q and sinks differ in heads: 4 and 3"),
        ({"window": -1}, ValueError, "window must be a number of keys"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0 must be a finite number above 0"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    """Before anything is measured."""
    pages = {"k_pages": jnp.ones((4, 4, 2, 8)), "v_pages": jnp.ones((4, 4, 2, 8))}
    given = {"q": jnp.ones((1, 4, 8)), **pages, "page_table": np.array([[0, 1]]), "lengths": np.array([7])}
    with pytest.raises(error, match=words):
        decode_attention(**(given | change))


def test_a_token_that_does_not_fit_is_an_error():
    """Where that can be read."""
    pages, new = jnp.ones((4, 4, 2, 8)), jnp.ones((1, 2, 8))
    with pytest.raises(ValueError, match="lengths and 1 new tokens must fit the 8 places"):
        append_to_pages(pages, pages, new, new, np.array([[0, 1]]), np.array([8]))
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] is -1"):
        append_to_pages(pages, pages, new, new, np.array([[0, -1]]), np.array([4]))


def test_tokens_are_appended_to_pages_alone():
    """Without a table there are none, and the error names that and not the pages."""
    pages, new = jnp.ones((4, 4, 2, 8)), jnp.ones((1, 2, 8))
    with pytest.raises(ValueError, match="page_table must be given"):
        append_to_pages(pages, pages, new, new, None, np.array([4]))
    with pytest.raises(ValueError, match="k and page_table differ in batch"):
        append_to_pages(pages, pages, new, new, np.array([[0, 1], [2, 3]]), np.array([4]))
