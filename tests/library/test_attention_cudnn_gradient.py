"""cuDNN's gradient of Mosaic's forward pass, without a GPU: the call that XLA gets, and what goes into it.

Covers `library/cudnn_calls.py`.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_text import call_of
from fakes_library import assert_near, normal, pull, wide
from fakes_mosaic import needs_loops
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.library import Attention, AttentionConfig, attention_cudnn_gradient
from ejkernel.library.attention_cudnn_gradient import gradients
from ejkernel.library.attention_jax import capability_of
from ejkernel.ops import Invocation

BATCH, LENGTH, HEADS, SHARED, SIZE = 2, 128, 4, 2, 64
CFG = AttentionConfig("mosaic", 128, 64, num_stages=2, backward="cudnn")
ROOM = sys.modules[Attention.__module__]


def shapes(dtype=jnp.bfloat16, batch=BATCH):
    """Queries, keys, values, result, logarithms and cotangents."""
    q = jax.ShapeDtypeStruct((batch, LENGTH, HEADS, SIZE), dtype)
    k = jax.ShapeDtypeStruct((batch, LENGTH, SHARED, SIZE), dtype)
    return q, k, k, q, jax.ShapeDtypeStruct((batch, HEADS, LENGTH), jnp.float32), q


def arrays(dtype="bfloat16"):
    """Queries, keys, values and cotangents."""
    q, dy = (normal(BATCH, LENGTH, HEADS, SIZE, dtype=dtype, seed=seed) for seed in (0, 3))
    k, v = (normal(BATCH, LENGTH, SHARED, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    return q, k, v, dy


def plain(q, k, v, *, scale, causal):
    """Plain JAX."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal)


def from_logs(q, k, v, out, logs, dy, *, scale, causal):
    """The gradient as cuDNN computes it: weights from scores and logarithms, nothing of the forward pass again."""
    q, k, v, out, dy = (x.astype(jnp.float32) for x in (q, k, v, out, dy))
    each = q.shape[2] // k.shape[2]
    many_k, many_v = (jnp.repeat(x, each, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, many_k) * scale
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else True
    weights = jnp.where(seen, jnp.exp(scores - logs[..., None]), 0.0)
    inner = jnp.einsum("bqhd,bkhd->bhqk", dy, many_v) - jnp.einsum("bqhd,bqhd->bhq", dy, out)[..., None]
    through = weights * inner * scale
    grads = (
        jnp.einsum("bhqk,bkhd->bqhd", through, many_k),
        jnp.einsum("bhqk,bqhd->bkhd", through, q),
        jnp.einsum("bhqk,bqhd->bkhd", weights, dy),
    )
    back = [x.reshape(*x.shape[:2], -1, each, x.shape[-1]).sum(3) if at else x for at, x in enumerate(grads)]
    return tuple(x.astype(jnp.bfloat16) for x in back)


@pytest.fixture
def computed(monkeypatch):
    """cuDNN's call is plain JAX here, and Mosaic's kernel is interpreted."""
    monkeypatch.setattr(attention_cudnn_gradient, "of_batch", from_logs)
    monkeypatch.setattr(ROOM, "_with_logs", functools.partial(ROOM._with_logs, interpret=True))
    monkeypatch.setattr(ROOM, "jax_refuses_cudnn", lambda *args, **kwargs: "")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_xla_gets_the_call_that_jax_itself_makes(cudnn, monkeypatch, dtype, causal):
    """Operands, layouts and every field of the config."""
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *args: True)

    def by_jax(q, k, v, out, logs, dy):
        attend = functools.partial(jax.nn.dot_product_attention, scale=0.25, is_causal=causal, implementation="cudnn")
        return jax.vjp(attend, q, k, v)[1](dy)

    ours = functools.partial(gradients, scale=0.25, causal=causal)
    target = "fmhaSoftmaxBackward"
    assert call_of(ours, *shapes(dtype), target=target) == call_of(by_jax, *shapes(dtype), target=target)


@needs_loops
@pytest.mark.parametrize("causal", [True, False])
def test_the_gradient_of_mosaics_forward_pass_is_that_of_plain_jax(computed, causal):
    """From the result and the logarithms that it keeps; the forward pass is Mosaic's own."""
    q, k, v, dy = arrays()
    how = {"scale": 0.2, "causal": causal}
    out, logs = jax.jit(lambda *a: Attention().fwd_with_residuals_gpu(*a, **how, cfg=CFG))(q, k, v)
    assert logs.shape == (BATCH, HEADS, LENGTH)
    grads = jax.jit(lambda *a: Attention().vjp_gpu(*a, **how, cfg=CFG))(logs, out, dy, q, k, v)

    @jax.jit
    def right(dy, *given):
        made, back = jax.vjp(functools.partial(plain, **how), *given)
        return made, *back(dy)

    wanted = right(*(np.asarray(x, np.float32) for x in (dy, q, k, v)))
    for one, other in zip((out, *grads), wanted, strict=True):
        assert_near(one, wide(other), "bfloat16")


@needs_loops
def test_arguments_without_a_gradient_have_none(computed):
    """A mask that was not given, and lengths."""
    q, k, v, dy = arrays()
    given = (q, k, v, None, None, None, None, None)
    out, logs = Attention().fwd_with_residuals_gpu(*given, scale=0.2, causal=True, cfg=CFG)
    grads = Attention().vjp_gpu(logs, out, dy, *given, scale=0.2, causal=True, cfg=CFG)
    assert grads[3:] == (None,) * 5


def test_where_cudnn_has_no_gradient_both_passes_are_others(computed, monkeypatch):
    """JAX says so; keys by blocks have one."""
    monkeypatch.setattr(ROOM, "jax_refuses_cudnn", lambda *args, gradient, **kwargs: "odd" if gradient else "")
    monkeypatch.setattr(ROOM, "by_cudnn", lambda q, k, v, *args, scale, **how: plain(q, k, v, scale=scale, causal=True))
    q, k, v, dy = arrays()
    how = {"scale": 0.2, "causal": True}
    out, kept = jax.jit(lambda *a: Attention().fwd_with_residuals_gpu(*a, **how, cfg=CFG))(q, k, v)
    assert not isinstance(kept, jax.Array)
    grads = jax.jit(lambda *a: Attention().vjp_gpu(*a, **how, cfg=CFG))(kept, out, dy, q, k, v)
    for one, other in zip(grads, pull(functools.partial(plain, **how), (q, k, v), dy), strict=True):
        assert_near(one, wide(other), "bfloat16", slack=2.0)


def test_under_vmap_examples_are_a_larger_batch():
    """One call of cuDNN; an array that all examples share is given to each."""
    q, k, v, _, logs, _ = shapes()
    several = jax.ShapeDtypeStruct((3, *q.shape), q.dtype)
    fn = jax.vmap(functools.partial(gradients, scale=0.2, causal=True), in_axes=(0, None, None, 0, None, 0))
    form, config = call_of(fn, several, k, v, several, logs, several, target="fmhaSoftmaxBackward")
    assert f"tensor<{3 * BATCH}x{LENGTH}x{HEADS}x{SIZE}xbf16>" in form
    extents = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
    assert extents == [str(n) for n in (3 * BATCH, HEADS, LENGTH, LENGTH)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_a_batch_are_served(check_vma):
    """Each has its own call."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    fn = functools.partial(gradients, scale=0.2, causal=True)
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    assert [x.shape for x in jax.eval_shape(sharded, *shapes())] == [x.shape for x in shapes()[:3]]


NO_HOPPER = all(capability_of(device)[0] != 9 for device in jax.devices())


@pytest.mark.gpu
@pytest.mark.skipif(NO_HOPPER, reason="there is no GPU of capability 9 here")
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_the_gradient_is_cudnns_own(causal):
    """Within rounding of both passes by cuDNN."""
    q, k, v, dy = arrays()
    how = {"scale": 0.125, "causal": causal}
    assert Attention().valid_cfg(Invocation("library.attention", (q, k, v), how), CFG) is True
    found = []
    for cfg in (CFG, AttentionConfig("cudnn")):
        out, kept = Attention().fwd_with_residuals_gpu(q, k, v, **how, cfg=cfg)
        found.append((out, *Attention().vjp_gpu(kept, out, dy, q, k, v, **how, cfg=cfg)))
    for one, other in zip(*found, strict=True):
        assert_near(one, wide(other), "bfloat16")
