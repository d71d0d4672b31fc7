"""cuDNN's attention without a GPU: which copies of keys and values its programs make, and what gradients see.

Covers `library/folding.py` and `library/jax_pallas.py`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal, pull, selects
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import Attention, AttentionConfig, attention, attention_jax
from ejkernel.library.attention_jax import by_cudnn, by_jax, capability_of
from ejkernel.library.attention_sight import Sight

BATCH, KEYS, HEADS, DEPTH = 2, 32, 2, 16
HOPPER, AMPERE = (9, 0), (8, 0)


def program(queries, capability=HOPPER, **options):
    """The forward program of a call with lengths of keys."""
    shapes = [jax.ShapeDtypeStruct((BATCH, n, HEADS, DEPTH), jnp.bfloat16) for n in (queries, KEYS, KEYS)]
    mask = options.pop("mask", None)

    def attend(q, k, v, lengths):
        sight = Sight(key_value_lengths=lengths, **options)
        return by_cudnn(q, k, v, mask, None, sight=sight, scale=0.5, capability=capability)

    return jax.make_jaxpr(attend)(*shapes, jax.ShapeDtypeStruct((BATCH,), jnp.int32)).jaxpr


@pytest.mark.parametrize("causal", [False, True])
def test_one_query_with_lengths_copies_no_keys_and_no_values(cudnn, causal):
    """cuDNN does not see what is beyond the lengths, so that no select has the size of the keys."""
    found = program(1, causal=causal)
    assert "dot_product_attention" in str(found)
    assert selects(found, BATCH * KEYS * HEADS * DEPTH) == 0
    # Of the results, for sequences without keys; none of the queries.
    assert selects(found, BATCH * HEADS * DEPTH) == 1


def test_several_queries_with_lengths_copy_values_alone(cudnn):
    """Keys beyond the lengths do no harm to the result; values do."""
    assert selects(program(4), BATCH * KEYS * HEADS * DEPTH) == 1


@pytest.mark.parametrize(
    ("capability", "options"),
    [
        (AMPERE, {}),
        ((0,), {}),
        (HOPPER, {"mask": jnp.ones((1, 1, 1, KEYS), bool)}),
        (HOPPER, {"causal": True, "window": (3, 0)}),
    ],
    ids=["older GPU", "unknown GPU", "mask", "window"],
)
def test_where_nothing_was_seen_keys_and_values_are_copied(cudnn, capability, options):
    """Other generations, masks and windows: hidden values are zeros before cuDNN sees them."""
    assert selects(program(1, capability, **options), BATCH * KEYS * HEADS * DEPTH) == 2


def test_the_kernel_asks_which_gpu_it_runs_on(cudnn, monkeypatch):
    """One query by the kernel's own `run`, for a device of capability 9 and for this one."""
    shapes = [jax.ShapeDtypeStruct((BATCH, n, HEADS, DEPTH), jnp.bfloat16) for n in (1, KEYS, KEYS)]
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32)

    def found():
        def attend(q, k, v, lengths):
            cfg = AttentionConfig("cudnn")
            return Attention().run(q, k, v, key_value_lengths=lengths, scale=0.5, cfg=cfg)

        return selects(jax.make_jaxpr(attend)(*shapes, lengths).jaxpr, BATCH * KEYS * HEADS * DEPTH)

    assert found() == 2
    monkeypatch.setattr(sys.modules[Attention.__module__], "capability_of", lambda device: HOPPER)
    assert found() == 0


def test_a_gradient_sees_neither_keys_nor_values_beyond_the_lengths(monkeypatch):
    """Though the forward program alone leaves keys as they are: here with XLA's attention in the place of cuDNN's."""

    def by_xla(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return by_jax(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(attention_jax, "by_jax", by_xla)
    q, k, v = (normal(BATCH, n, HEADS, DEPTH, seed=n) for n in (4, KEYS, KEYS + 1))
    v, lengths = v[:, :KEYS], jnp.array([20, 0], jnp.int32)
    beyond = (jnp.arange(KEYS)[None] >= lengths[:, None])[..., None, None]

    def attend(q, k, v):
        sight = Sight(key_value_lengths=lengths)
        return by_cudnn(q, k, v, None, None, sight=sight, scale=0.5, capability=HOPPER)

    dirty, clean = ([q, *(jnp.where(beyond, other, x) for x in (k, v))] for other in (jnp.nan, 0.0))
    np.testing.assert_array_equal(jax.jit(attend)(*dirty), jax.jit(attend)(*clean))
    for found, wanted in zip(pull(attend, dirty, q), pull(attend, clean, q), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.all(np.isfinite(found))


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, None, None, None), (1, 2, 0, None)], ids=str)
def test_under_vmap_examples_are_a_larger_batch(cudnn, axes):
    """Whatever axis they lie along, and also where they share keys or lengths: JAX's own rule takes some of these."""
    shapes = [(BATCH, n, HEADS, DEPTH) for n in (1, KEYS, KEYS)] + [(BATCH,)]
    given = [
        jax.ShapeDtypeStruct(shape if axis is None else (*shape[:axis], 5, *shape[axis:]), kind)
        for shape, axis, kind in zip(shapes, axes, (*[jnp.bfloat16] * 3, jnp.int32), strict=True)
    ]

    def attend(q, k, v, lengths):
        sight = Sight(key_value_lengths=lengths)
        return by_cudnn(q, k, v, None, None, sight=sight, scale=0.5, capability=HOPPER)

    found = jax.make_jaxpr(jax.vmap(attend, in_axes=axes))(*given)
    assert found.out_avals[0].shape == (5, *shapes[0])
    assert f"bf16[{5 * BATCH},1,{HEADS},{DEPTH}]" in str(found)


def test_shards_of_sequences_are_calls_of_their_own(cudnn):
    """Inside shard_map, with its checks on, where all shards have the same keys."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    q, k = (jax.ShapeDtypeStruct((b, n, HEADS, DEPTH), jnp.bfloat16) for b, n in ((2, 1), (1, KEYS)))

    def attend(q, k, v, lengths):
        sight = Sight(key_value_lengths=lengths)
        return by_cudnn(q, k, v, None, None, sight=sight, scale=0.5, capability=HOPPER)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(P("batch"), P(), P(), P("batch")), out_specs=P("batch"))
    assert jax.eval_shape(sharded, q, k, k, jax.ShapeDtypeStruct((2,), jnp.int32)).shape == q.shape


@pytest.mark.parametrize(("said", "numbers"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", (0,)), (None, (0,))])
def test_a_capability_is_read_as_numbers(said, numbers):
    """What is not NVIDIA's has none."""
    device = type("Device", (), {} if said is None else {"compute_capability": said})()
    assert capability_of(device) == numbers


NO_GPU = all(device.platform != "gpu" for device in jax.devices())


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 64])
@pytest.mark.parametrize("hidden", [float("nan"), float("inf")])
def test_on_a_gpu_results_do_not_depend_on_what_is_beyond_the_lengths(hidden, queries, causal):
    """Bit by bit, with NaN and infinities in keys and values."""
    q, k, v = (normal(3, n, 8, 64, dtype="bfloat16", seed=n) for n in (queries, 4000, 4000))
    lengths = jnp.array([3000, 1, 4000], jnp.int32)
    beyond = (jnp.arange(4000)[None] >= lengths[:, None])[..., None, None]

    def attend(other):
        keys, values = (jnp.where(beyond, other, x).astype(x.dtype) for x in (k, v))
        how = {"key_value_lengths": lengths, "causal": causal, "cfg": AttentionConfig("cudnn"), "executor": UNTUNED}
        return attention(q, keys, values, **how)

    np.testing.assert_array_equal(attend(hidden), attend(0.0))
