"""Attention: values and gradients of every implementation, what it hides, and what it refuses.

Covers `library/attention_arguments.py`, `library/attention_blocks.py` and `library/attention_sight.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import Attention, AttentionConfig, attention, attention_jax
from ejkernel.library.attention_jax import cudnn_refuses, pallas_refuses
from ejkernel.library.attention_sight import Sight
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    OpsError,
    calls_made,
    check,
)

# Blocks that divide none of the lengths below.
WAYS = {
    "xla": AttentionConfig("xla"),
    "sliced": AttentionConfig("sliced", block_q=8),
    "chunked": AttentionConfig("chunked", block_q=4, block_k=6),
}
LIMITS = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def arrays(*shapes, dtype=np.float32, seed=0):
    """Random arrays."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)


def inputs(batch=2, queries=13, keys=17, heads=4, key_heads=2, depth=8, dtype=np.float32):
    """Queries, keys, values and a gradient of the output."""
    shapes = (batch, queries, heads, depth), (batch, keys, key_heads, depth)
    return arrays(shapes[0], shapes[1], shapes[1], shapes[0], dtype=dtype)


def truth(q, k, v, dy, *, causal=False, scale=None, mask=None, bias=None, window=None, lengths=(None, None)):
    """Output and gradients of queries, keys, values and bias in float64."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    each = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, each, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("btnh,bsnh->bnts", q, wide_k) * scale
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    row, column = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None, :]
    seen = np.ones(scores.shape, bool)
    left, right = (window, window) if isinstance(window, int) else window or (None, None)
    seen &= (column <= row) | (not causal)
    seen &= True if left is None else (column >= row - left) & (column <= row + right)
    seen &= True if mask is None else np.asarray(mask)
    for places, length in zip((row, column), lengths, strict=True):
        seen &= True if length is None else places < np.asarray(length)[:, None, None, None]
    top = np.max(np.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = np.exp(np.where(seen, scores - top, -np.inf))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    d_weights = np.einsum("btnh,bsnh->bnts", dy, wide_v)
    d_scores = weights * (d_weights - np.sum(d_weights * weights, axis=-1, keepdims=True))
    grouped = (*k.shape[:3], each, k.shape[3])
    d_k = np.einsum("bnts,btnh->bsnh", d_scores, q).reshape(grouped).sum(axis=3) * scale
    d_v = np.einsum("bnts,btnh->bsnh", weights, dy).reshape(grouped).sum(axis=3)
    out = np.einsum("bnts,bsnh->btnh", weights, wide_v)
    return out, np.einsum("bnts,bsnh->btnh", d_scores, wide_k) * scale, d_k, d_v, d_scores


def close(got, want, dtype="float32"):
    """Is every element right, in units of the largest?"""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.all(np.isfinite(got))
    assert np.max(np.abs(got - want), initial=0) <= LIMITS[dtype] * max(1.0, np.max(np.abs(want), initial=0))


def compare(way, options, dtype=np.float32, **sizes):
    """Values and gradients of one call against float64."""
    q, k, v, dy = inputs(dtype=dtype, **sizes)
    known = dict(options)
    lengths = (known.pop("query_lengths", None), known.pop("key_value_lengths", None))
    bias = known.get("bias")
    out, d_q, d_k, d_v, d_scores = truth(q, k, v, dy, lengths=lengths, **known)

    @jax.jit
    def both(q, k, v, bias):
        def of_floats(q, k, v, bias):
            return attention(q, k, v, **{**options, "bias": bias}, cfg=way, executor=UNTUNED)

        made, pull = jax.vjp(of_floats, q, k, v, bias)
        return made, pull(dy)

    made, grads = both(q, k, v, bias)
    name = jnp.dtype(dtype).name
    assert made.dtype == q.dtype
    for got, want in zip((made, *grads[:3]), (out, d_q, d_k, d_v), strict=True):
        close(got, want, name)
    if bias is not None:
        summed = tuple(i for i, size in enumerate(bias.shape) if size == 1)
        close(grads[3], d_scores.sum(axis=summed, keepdims=True), name)


MASK = np.random.default_rng(1).integers(0, 2, (2, 1, 13, 17)).astype(bool)
# One query of every head sees nothing.
MASK[:, :, 6] = False
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 3},
    "window mask": {"window": (4, 2), "mask": jnp.asarray(MASK)},
    "bias lengths": {
        "causal": True,
        "scale": 0.5,
        "bias": arrays((1, 4, 13, 17), seed=3)[0],
        "query_lengths": jnp.array([13, 7]),
        "key_value_lengths": jnp.array([0, 9]),
    },
}
FEW = ["window mask", "bias lengths"]


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", WAYS)
def test_an_eager_gradient_makes_no_infinity(way):
    """A search for infinities and for what is no number finds none in what is hidden."""
    q, k, v, _ = inputs()

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, mask=jnp.asarray(MASK), window=2, cfg=WAYS[way], executor=UNTUNED) ** 2)

    with jax.debug_infs(True), jax.debug_nans(True):
        grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    for grad in grads:
        assert np.all(np.isfinite(grad))


@pytest.mark.parametrize("way", ["sliced", "chunked"])
def test_a_seen_key_of_the_lowest_score_is_seen(way):
    """A bias may be as low as float32 goes, which hides nothing by itself; minus infinity does."""
    q, k, v, _ = inputs()
    mask = np.zeros((1, 1, 13, 17), bool)
    mask[..., 3] = True
    lowest = jnp.full((1, 1, 13, 17), jnp.finfo(jnp.float32).min)
    only = attention(q, k, v, mask=jnp.asarray(mask), bias=lowest, cfg=WAYS[way], executor=UNTUNED)
    np.testing.assert_allclose(only, np.broadcast_to(np.repeat(v[:, 3:4], 2, axis=2), only.shape), rtol=1e-6)
    none = attention(q, k, v, mask=jnp.asarray(mask), bias=lowest - jnp.inf, cfg=WAYS[way], executor=UNTUNED)
    assert not np.any(none)


@pytest.mark.thinned
@pytest.mark.parametrize("option", FEW)
@pytest.mark.parametrize("way", WAYS)
def test_every_implementation_agrees_with_float64(way, option):
    """Values and gradients, for grouped heads and lengths that no block divides."""
    compare(WAYS[way], OPTIONS[option])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(13, 17, 4, 2), (17, 13, 4, 4), (13, 17, 4, 1), (64, 64, 2, 2), (1, 17, 4, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("option", ["plain", "causal", "causal window"])
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_grid_agrees_with_float64(way, option, dtype, sizes):
    """Shapes, dtypes and options, each with each."""
    queries, keys, heads, key_heads = sizes
    compare(WAYS[way], OPTIONS[option], dtype, queries=queries, keys=keys, heads=heads, key_heads=key_heads)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("way", "dtype"), [("sliced", jnp.bfloat16), ("chunked", jnp.float16), ("xla", jnp.bfloat16)])
def test_narrow_inputs_are_summed_in_float32(way, dtype):
    """The output has the inputs' dtype and is as right as that allows."""
    compare(WAYS[way], OPTIONS["causal window"], dtype)


def test_float16_needs_no_config_on_a_cpu():
    """JAX's own attention cannot be compiled for float16 there as it is, and yet serves short calls untuned."""
    compare(None, OPTIONS["bias lengths"], jnp.float16)


def test_jax_own_pallas_kernel_agrees_with_float64():
    """Interpreted on a CPU: values and gradients, causal and with grouped heads."""
    way = AttentionConfig("pallas", block_q=16, block_k=16, block_back=16)
    compare(way, {"causal": True}, queries=32, keys=32, depth=16)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_query_that_sees_nothing_gives_zeros(way):
    """No NaN, and no gradient: not of the query, and not through it."""
    q, k, v, _ = inputs(batch=1)
    mask = jnp.ones((1, 1, 13, 1), bool).at[0, 0, 6].set(False)

    def row(q, k, v):
        return attention(q, k, v, mask=mask, cfg=WAYS[way], executor=UNTUNED)[:, 6]

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(row, *args)
        return out, pull(jnp.ones_like(out))

    assert not any(np.any(x) for x in jax.tree.leaves(both(q, k, v)))


def test_a_query_that_sees_one_key_has_no_gradient():
    """Its weight is one whatever the score, however large the key: `sliced` has exact zeros there in float32."""
    q, k, v, dy = (
        jnp.asarray(np.random.default_rng(n).normal(size=(1, 8, 2, 4)).astype(jnp.float32)) for n in range(4)
    )
    cfg = AttentionConfig("sliced", block_q=4)

    def total(q):
        return (attention(q, k + 100, v, causal=True, cfg=cfg, executor=UNTUNED) * dy).sum()

    assert not jax.grad(total)(q)[:, 0].any()


def test_windows_that_hide_nothing_are_no_window():
    """Then the call has the key, and the implementations, of one without."""
    q, k, v, _ = inputs()
    seen = []
    selector = ConfigSelectorChain(ConfigCache(), policy=AutotunePolicy(allow_autotune=False))
    selector.on_event = lambda event, **data: seen.append(data["call_key"])
    for window in (None, 13, (20, 5)):
        attention(q, k, v, causal=True, window=window, executor=Executor(selector))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("way", ["xla", "chunked"])
def test_attention_is_mapped(way):
    """A vmap over batch and lengths gives each example's own."""
    q, k, v, _ = inputs()
    lengths = jnp.array([5, 17])

    def one(q, k, v, length):
        return attention(q[None], k[None], v[None], key_value_lengths=length[None], cfg=WAYS[way], executor=UNTUNED)[0]

    whole = attention(q, k, v, key_value_lengths=lengths, cfg=WAYS[way], executor=UNTUNED)
    close(jax.jit(jax.vmap(one))(q, k, v, lengths), whole)


@pytest.mark.parametrize("way", WAYS)
def test_attention_is_sharded_over_batch_and_heads(way):
    """Inside shard_map, with its checks on, values and gradients are those of the whole."""
    q, k, v, dy = inputs()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "heads"))
    spec = P("batch", None, "heads", None)

    def attend(q, k, v):
        return attention(q, k, v, causal=True, cfg=WAYS[way], executor=UNTUNED)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(sharded, *args)
        return out, *pull(dy)

    for got, want in zip(both(q, k, v), truth(q, k, v, dy, causal=True), strict=False):
        close(got, want)


def test_forward_mode_works_where_no_implementation_has_its_own_gradient():
    """On a CPU `jvp` agrees with the gradients."""
    q, k, v, dy = inputs()
    for way in WAYS.values():
        attend = lambda q, way=way: attention(q, k, v, cfg=way, executor=UNTUNED)  # noqa: E731  (used once)
        moved = jax.jit(lambda q, attend=attend: jax.jvp(attend, (q,), (q,))[1])(q)
        _, d_q, *_ = truth(q, k, v, dy)
        assert np.isclose(np.sum(moved * dy), np.sum(d_q * np.asarray(q)), rtol=1e-3)


def test_on_a_gpu_all_have_a_gradient_of_the_kernel_s_own():
    """There the implementation's own rules are pulled back through; here by the same code under the other name."""

    class Everywhere(Attention):
        fwd_with_residuals = Attention.fwd_with_residuals_gpu
        vjp = Attention.vjp_gpu

    q, k, v, dy = inputs()
    bias = OPTIONS["bias lengths"]["bias"]

    def attend(q, k, v, bias):
        return UNTUNED(Everywhere(), q, k, v, None, bias, scale=0.5, cfg=WAYS["sliced"])

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(attend, *args)
        return out, *pull(dy)

    want = truth(q, k, v, dy, bias=bias, scale=0.5)
    for got, right in zip(both(q, k, v, bias), (*want[:4], want[4].sum(axis=0, keepdims=True)), strict=True):
        close(got, right)
    with pytest.raises(TypeError, match="attention"):
        jax.jvp(lambda q: attend(q, k, v, bias), (q,), (q,))


def test_every_candidate_agrees_and_the_call_is_tuned():
    """Each one's values and gradients, as a tuning would compare them; then the winner is kept."""
    q, k, v, _ = inputs(queries=40, keys=40)
    trials = check(Attention(), q, k, v, scale=0.3, causal=True)
    assert {trial.status for trial in trials} == {"ok"}
    assert {trial.cfg.implementation for trial in trials} == {"xla", "sliced"}
    cache = ConfigCache()
    out = attention(q, k, v, causal=True, scale=0.3, executor=Executor(ConfigSelectorChain(cache)))
    close(out, truth(q, k, v, q, causal=True, scale=0.3)[0])
    assert cache.size() == 1


def test_lengths_are_drawn_for_a_traced_call():
    """A tuning under jit takes lengths from the kernel, which fit the call."""
    q, k, v, _ = inputs()
    seen = []

    def look(lengths):
        call = Invocation("x", (q, k, v, None, None, None, lengths), {"scale": 1.0, "causal": True})
        seen.append(Attention().example_inputs(call, np.random.default_rng(0))[0][6])
        return lengths

    jax.jit(look)(jnp.zeros(2, jnp.int32))
    assert all(8 <= length <= 17 for length in np.asarray(seen[0]))


def test_what_holds_all_scores_is_no_heuristic_for_long_sequences():
    """Then blocks: of queries, and of keys too where even one block of queries has many scores."""

    def chosen(length, heads):
        q = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
        inv = Invocation("x", (q, q, q), {"scale": 1.0})
        return Attention().heuristic_cfg(inv).implementation

    assert [chosen(512, 8), chosen(8192, 8), chosen(65536, 16)] == ["xla", "sliced", "chunked"]


def test_chunks_hold_far_less_than_all_scores():
    """Forward and backward of 2048 places in blocks need a fraction of what XLA's own needs."""
    q = jax.ShapeDtypeStruct((1, 2048, 4, 16), jnp.float32)
    scores = 4 * 2048 * 2048 * 4

    def needed(way):
        def loss(q, k, v):
            return jnp.sum(attention(q, k, v, causal=True, cfg=way, executor=UNTUNED))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(AttentionConfig("xla")) > scores
    assert needed(AttentionConfig("chunked", block_q=128, block_k=128)) < scores / 8


def test_nothing_to_see_is_zeros_without_tuning():
    """Empty queries, keys and batches."""
    for batch, queries, keys in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q, k, v, _ = inputs(batch=batch, queries=queries, keys=keys)
        assert attention(q, k, v).shape == q.shape
        assert not np.any(attention(q, k, v))


Q, K, V, _ = map(np.asarray, inputs())
BAD = [
    ((Q[0], K, V), {}, ValueError, r"q must have the shape \(batch, length, heads, head_dim\), got \(13, 4, 8\)"),
    ((Q, K, V[:, :5]), {}, ValueError, r"k and v .*\(2, 17, 2, 8\) and \(2, 5, 2, 8\)"),
    ((Q[:1], K, V), {}, ValueError, "q and k differ in batch: 1 and 2"),
    ((Q[..., :4], K, V), {}, ValueError, "head_dim: 4 and 8"),
    ((Q[:, :, :3], K, V), {}, ValueError, "multiple of those of k: 3 and 2"),
    ((jax.random.key(0), K, V), {}, TypeError, "q is key<fry>"),
    ((Q.astype(jnp.int32), K, V), {}, TypeError, "q is int32"),
    ((Q.astype(jnp.bfloat16), K, V), {}, TypeError, "q is bfloat16 and k is float32"),
    ((Q, K, V), {"mask": jnp.ones((3, 17), bool)}, ValueError, r"mask of shape \(3, 17\).*\(2, 4, 13, 17\)"),
    ((Q, K, V), {"mask": jnp.ones((13, 17))}, TypeError, "mask is float32"),
    ((Q, K, V), {"bias": jnp.ones((13, 17), int)}, TypeError, "bias is int"),
    ((Q, K, V), {"window": -1}, ValueError, "window"),
    ((Q, K, V), {"query_lengths": jnp.array([1, 14])}, ValueError, "query_lengths must be from 0 to 13, got 1 to 14"),
    ((Q, K, V), {"key_value_lengths": jnp.array([1])}, ValueError, r"\(2,\), got \(1,\)"),
    ((Q, K, V), {"scale": jnp.ones(())}, TypeError, "scale must be a number"),
    ((Q, K, V), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ((Q, K, V), {"cfg": AttentionConfig("sliced", block_q=-4)}, ValueError, "give a size from 1 on"),
    ((Q, K, V), {"cfg": AttentionConfig("nothing")}, ValueError, "names no implementation"),
]


def test_numbers_of_numpy_are_numbers():
    """Models read their options from arrays and files: the call, and its key, are the same."""
    given = {"window": np.int64(3), "scale": np.float32(0.5)}
    with calls_made() as calls:
        for options in (given, {"window": 3, "scale": 0.5}):
            attention(Q, K, V, **options, executor=UNTUNED)
    assert len(calls.entries) == 1


@pytest.mark.parametrize(("args", "options", "kind", "message"), BAD)
def test_bad_input_is_a_clear_error(args, options, kind, message):
    """It names the argument and both shapes, before anything is tuned."""
    with pytest.raises(kind, match=message) as caught:
        attention(*args, **options)
    assert isinstance(caught.value, OpsError)


def test_lengths_are_read_before_they_are_narrowed():
    """One that 32 bits would turn into a length is out of range; under a trace it counts as all places."""
    for wrong in (1 << 32 | 3, -(1 << 32) + 3):
        lengths = np.array([13, wrong])
        with pytest.raises(ValueError, match=f"query_lengths must be from 0 to 13, got .*{wrong}"):
            attention(Q, K, V, query_lengths=lengths, executor=UNTUNED)
    with jax.enable_x64(True):
        wide = jax.jit(
            lambda lengths: attention(Q, K, V, key_value_lengths=lengths, cfg=WAYS["chunked"], executor=UNTUNED)
        )(jnp.array([17, 1 << 32 | 3], jnp.int64))
    close(wide, attention(Q, K, V, cfg=WAYS["chunked"], executor=UNTUNED))


def test_gpu_implementations_are_refused_on_a_cpu():
    """With the reason, so that a candidate list of another machine does no harm."""
    inv = Invocation("x", (Q, K, V), {"scale": 1.0})
    for name in ("cudnn", "pallas"):
        assert "GPUs alone" in Attention().valid_cfg(inv, AttentionConfig(name))


def test_cudnn_is_refused_what_it_does_not_take():
    """Each with its reason; what it takes is not refused."""

    def refused(dtype=jnp.bfloat16, depth=64, length=128, capability=(9, 0), mask=None, **sight):
        q = jax.ShapeDtypeStruct((1, length, 4, depth), dtype)
        return cudnn_refuses(q, q, q, mask, None, sight=Sight(**sight), scale=1.0, capability=capability)

    assert refused() == ""
    assert refused(causal=True, window=(8, 0)) == ""
    assert refused(depth=256) == ""
    assert "float32" in refused(dtype=jnp.float32)
    assert "not 36" in refused(depth=36)
    assert "up to 128, not 256" in refused(depth=256, capability=(8, 0))
    assert "odd lengths" in refused(length=127, mask=jnp.ones((1, 1, 1, 1), bool))
    assert "window" in refused(window=(3, 3))


def test_cudnn_is_asked_for_the_gradient_of_a_bias_too(monkeypatch):
    """Where it has that of queries, keys and values alone, another's gradient serves."""

    @jax.custom_vjp
    def added(q, bias):
        return q + jnp.sum(bias).astype(q.dtype)

    def back(shape, dy):
        raise NotImplementedError("no gradient of this bias")

    added.defvjp(lambda q, bias: (added(q, bias), None), back)

    def by_jax(q, k, v, mask, bias, **kwargs):
        return q if bias is None else added(q, bias)

    monkeypatch.setattr(attention_jax, "by_jax", by_jax)
    q, bias = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 8, 8), jnp.bfloat16)

    def refused(bias, gradient):
        given = {"sight": Sight(), "scale": 1.0, "gradient": gradient}
        return attention_jax.jax_refuses_cudnn(q, q, q, None, bias, **given)

    assert refused(bias, gradient=False) == ""
    assert "no gradient of this bias" in refused(bias, gradient=True)
    assert refused(None, gradient=True) == ""


def test_without_cudnn_a_gpu_has_another_heuristic(monkeypatch):
    """What JAX itself says against cuDNN is the reason, and the other candidates stay."""
    monkeypatch.setattr(sys.modules[Attention.__module__], "get_device_platform", lambda device: "gpu")
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    inv = Invocation("x", (q, q, q), {"scale": 1.0, "causal": True})
    kernel = Attention()
    assert "JAX refuses cuDNN" in kernel.valid_cfg(inv, AttentionConfig("cudnn"))
    assert kernel.heuristic_cfg_gpu(inv) == AttentionConfig("pallas", 128, 128, 32, 4, 2)
    odd = jax.ShapeDtypeStruct((1, 100, 4, 64), jnp.bfloat16)
    assert kernel.heuristic_cfg_gpu(replace(inv, args=(odd, odd, odd))) == AttentionConfig("xla")
    valid = {cfg.implementation for cfg in kernel.candidate_cfgs_gpu(inv) if kernel.valid_cfg(inv, cfg) is True}
    assert valid == {"pallas", "xla", "sliced", "chunked"}


def test_jax_s_pallas_kernel_is_refused_what_it_does_not_take():
    """Masks, windows, lengths, other numbers of keys, and blocks that do not divide."""
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
    blocks = (64, 64, 32)
    assert pallas_refuses(q, q, None, None, sight=Sight(causal=True), blocks=blocks) == ""
    assert "window" in pallas_refuses(q, q, None, None, sight=Sight(window=(1, 1)), blocks=blocks)
    assert "64 and 128" in pallas_refuses(q, few, None, None, sight=Sight(), blocks=blocks)
    assert "do not divide" in pallas_refuses(q, q, None, None, sight=Sight(), blocks=(48, 64, 32))
