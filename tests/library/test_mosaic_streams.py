"""Norms of rows that stream through blocks that stay: interpreted beside float64, and lowered for a GPU.

Covers `library/mosaic/bulk.py`, `library/mosaic/norm_streams.py` and `library/mosaic/streams.py`. The interpreter has
none of our copies and sums: what these are made of is held against numpy, and what they are lowered to is looked at.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull, value_and_pull
from fakes_mosaic import hopper, lowered_by_mosaic, needs_mosaic, races

from ejkernel.library import LayerNorm, LayerNormConfig, layer_norm
from ejkernel.library.arguments import ArgumentError
from ejkernel.library.mosaic import streams
from ejkernel.ops import Invocation

__all__ = ["races"]
needs_streams = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU of this JAX has no instructions of our own"
)
pytestmark = needs_mosaic
VECTORS = {"neither": 0, "weight": 1, "both": 2}


def streaming(**more):
    """A cfg of blocks that stay."""
    return LayerNormConfig("mosaic", num_warps=4, streams=True, **more)


@pytest.fixture
def two_blocks(monkeypatch):
    """Each kernel has two blocks or a few more, which go through several steps."""
    monkeypatch.setattr(streams, "PROCESSORS", 1)


def exact(x, *vectors):
    """In float64."""
    x, *vectors = (np.asarray(one, np.float64) for one in (x, *vectors))
    off = x - x.mean(-1, keepdims=True)
    normed = off / np.sqrt((off * off).mean(-1, keepdims=True) + 1e-6)
    return normed * (vectors[0] if vectors else 1) + (vectors[1] if vectors[1:] else 0)


@needs_streams
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((20, 1024), 2),
        ((2, 5, 2048), 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (((5, 4096), 2), ((3, 3072), 1))),
    ],
)
def test_rows_that_stream_are_those_of_float64(races, two_blocks, shape, count):
    """Several narrow rows and one wide row a step, far from zero, with and without vectors."""
    x = (normal(*shape, dtype="float32") + 3.0).astype("bfloat16")
    vectors = [normal(shape[-1], seed=seed) for seed in range(1, 1 + count)]
    made = layer_norm(x, *vectors, cfg=streaming(), executor=UNTUNED)
    assert_near(made, exact(x, *vectors), "bfloat16")


@needs_streams
@pytest.mark.parametrize(
    ("shape", "count", "kept"),
    [
        ((20, 1024), 2, False),
        ((7, 4096), 2, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (((20, 1024), 1, True), ((7, 4096), 0, False))),
    ],
)
def test_gradients_of_rows_that_stream_are_those_of_the_plain_way(races, two_blocks, shape, count, kept):
    """With a mean and a factor from the forward pass or without, for blocks of which the last has fewer steps."""
    x, dy = (normal(*shape) + 3.0).astype("bfloat16"), normal(*shape, seed=9).astype("bfloat16")
    vectors = [normal(shape[-1], seed=seed) for seed in range(1, 1 + count)]

    def by(cfg, x):
        return pull(lambda *a: layer_norm(*a, cfg=cfg, executor=UNTUNED), (x, *vectors), dy.astype(x.dtype))

    found, wanted = by(streaming(kept=kept), x), by(LayerNormConfig("xla"), x.astype("float32"))
    for one, other, kind in zip(found, wanted, ("bfloat16", "float32", "float32"), strict=False):
        assert_near(one, np.asarray(other, np.float64), kind, slack=100 if kind == "float32" else 5)


@pytest.mark.parametrize("rows", [4, 8, 1000, 4096, 8192, 10_000, 65_536])
@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_of_a_stream_have_as_many_steps_as_each_other(rows, blocks):
    """But for the last ones, no block has a step more, and none is without; few less run than there is room for."""
    stream = streams.Stream(4, 1, 1024, 4, blocks)
    programs, steps = stream.programs(rows), rows // 4
    assert 0 < programs <= min(blocks * 132, steps)
    assert -(-steps // programs) == -(-steps // (blocks * 132))
    assert (programs - 1) * -(-steps // programs) < steps


class InNumpy:
    """The steps of `bulk.folded` on arrays of one number a lane."""

    lanes = np.arange(32)

    def zero(self):
        """No more vectors."""
        return np.zeros(32)

    def add(self, a, b):
        """In each lane."""
        return a + b

    def swap(self, value, distance):
        """The value of the lane with a number that differs in this bit."""
        return value[self.lanes ^ distance]

    def pick(self, distance, low, high):
        """The second value in lanes with this bit in their number, else the first."""
        return np.where(self.lanes & distance, high, low)


@pytest.mark.parametrize("count", range(1, 17))
def test_lanes_share_the_sums_of_several_vectors(count):
    """Neighbouring lanes have the sum of the vector of their number, as many of them as are told."""
    from ejkernel.library.mosaic import bulk

    values = np.random.default_rng(count).normal(size=(count, 32))
    found, alike = bulk.folded(list(values), InNumpy())
    assert 32 // alike >= count
    np.testing.assert_allclose(found[: count * alike], np.repeat(values.sum(1), alike))


@needs_streams
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("shape", [(8192, 4096), (32768, 1024)])
def test_streams_are_lowered_for_a_gpu(monkeypatch, shape, kept):
    """With bulk copies that one thread expects, and as many blocks as there is shared memory for."""
    hopper(monkeypatch)
    kernel, cfg = LayerNorm(), streaming(kept=kept)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] + [jax.ShapeDtypeStruct(shape[-1:], jnp.float32)] * 2
    assert kernel.valid_cfg(Invocation(kernel.op_id, tuple(shapes), {}), cfg) is True

    def both(*args):
        made, back = jax.vjp(lambda *given: kernel.run(*given, cfg=cfg), *args)
        return made, back(made)

    text = lowered_by_mosaic(both, *shapes)
    assert "library_layer_norm_gradient" in text
    assert "cp.async.bulk.shared::cluster.global" in text
    narrow = shape[1] == 1024
    found = (streams.forward(*shape, 2), 1, 2 if narrow else 1), (streams.backward(*shape, 2), 2, 4 if narrow else 1)
    for stream, arrays, tall in found:
        assert stream.blocks * (stream.stages * arrays * tall * shape[1] * 2 + 4096) <= 227 * 1024
        assert stream.tall == tall


@needs_streams
@pytest.mark.gpu
@pytest.mark.skipif(all(device.platform != "gpu" for device in jax.devices()), reason="there is no GPU here")
@pytest.mark.parametrize("kept", [False, True], ids=["means again", "means kept"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width"), [(11_140, 1024), (7420, 2048), (2790, 3072), (2790, 4096)])
def test_rows_that_stream_through_a_gpu_are_those_of_float64(rows, width, dtype, kept):
    """With gradients, more steps of each block than it holds, and a last block with fewer than the others."""
    for stream in (streams.forward(rows, width, 2), streams.backward(rows, width, 2)):
        steps, programs = rows // stream.tall, stream.programs(rows)
        assert steps // programs > stream.stages
        assert steps % programs
    x, dy = (normal(rows, width) + 3.0).astype(dtype), normal(rows, width, dtype=dtype, seed=9)
    vectors = [normal(width, seed=seed) for seed in (1, 2)]
    cfg = streaming(kept=kept)
    found = value_and_pull(lambda *a: layer_norm(*a, cfg=cfg, executor=UNTUNED), (x, *vectors), dy)
    for one, other in zip(found, pulled_exactly(x, dy, *vectors), strict=True):
        assert_near(one, other, dtype)


def pulled_exactly(x, dy, weight, bias):
    """The rows in float64, and the gradients of `x`, weight and bias."""
    x, dy, weight, bias = (np.asarray(one, np.float64) for one in (x, dy, weight, bias))
    off = x - x.mean(-1, keepdims=True)
    over = 1 / np.sqrt((off * off).mean(-1, keepdims=True) + 1e-6)
    normed, towards = off * over, dy * weight
    along = (towards * normed).mean(-1, keepdims=True)
    d_x = over * (towards - towards.mean(-1, keepdims=True) - normed * along)
    return normed * weight + bias, d_x, (dy * normed).sum(0), dy.sum(0)


@needs_streams
def test_streams_are_mapped_and_sharded():
    """Gradients under vmap are lowered for a GPU, and traced inside shard_map with its checks on."""
    cfg, kernel = streaming(kept=True), LayerNorm()
    x, vector = jax.ShapeDtypeStruct((4, 8, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.float32)

    def both(x, weight, bias):
        made, back = jax.vjp(lambda *a: kernel.run(*a, cfg=cfg), x, weight, bias)
        return made, *(grad[None] if grad.ndim == 1 else grad for grad in back(made))

    assert "cp.async.bulk" in lowered_by_mosaic(jax.vmap(both, in_axes=(0, None, None)), x, vector, vector)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": (spec("batch"), spec(), spec()), "out_specs": (spec("batch"), spec("batch"), spec(), spec())}
    assert jax.eval_shape(jax.shard_map(both, mesh=mesh, **specs), x, vector, vector)[0].shape == x.shape


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 1024), "float32"), ((7, 1024), "bfloat16"), ((8, 1280), "bfloat16"), ((8, 8192), "float16")],
    ids=["wide numbers", "odd rows", "a width between", "too wide"],
)
def test_a_cfg_by_hand_that_cannot_stream_is_an_error(shape, dtype):
    """With the reason for which it is no candidate: else it would be timed as what it is not."""
    with pytest.raises(ArgumentError, match=r"cannot compute this call: .*(no whole steps|no instructions)"):
        layer_norm(normal(*shape, dtype=dtype), cfg=streaming(kept=shape[1] < 8192), executor=UNTUNED)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="this JAX has such instructions")
def test_an_older_jax_cannot_stream():
    """Whatever the rows are."""
    with pytest.raises(ArgumentError, match="has no instructions of our own"):
        layer_norm(normal(8, 1024, dtype="bfloat16"), cfg=streaming(), executor=UNTUNED)


@needs_streams
@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_stream_forward_alone_have_a_gradient(races, kept):
    """Six rows of 1024 are whole steps of two, and not of four; nothing that is chosen has such a cfg."""
    x, dy, vectors = (
        normal(6, 1024, dtype="bfloat16"),
        normal(6, 1024, dtype="bfloat16", seed=9),
        [normal(1024, seed=1)],
    )

    def by(cfg, x):
        return value_and_pull(lambda *a: layer_norm(*a, cfg=cfg, executor=UNTUNED), (x, *vectors), dy.astype(x.dtype))

    found, wanted = by(streaming(kept=kept), x), by(LayerNormConfig("xla"), x.astype("float32"))
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, np.asarray(other, np.float64), "bfloat16")


@needs_streams
def test_what_cannot_stream_says_why(monkeypatch):
    """By implementation, warps, rows, dtype and GPU; a tuning has both where they can, and neither else."""
    hopper(monkeypatch)
    kernel = LayerNorm()

    def judged(cfg, *shape, dtype="bfloat16"):
        return kernel.valid_cfg(Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),), {}), cfg)

    assert judged(streaming(), 8, 1024) is True
    assert "for mosaic alone" in judged(LayerNormConfig("xla", streams=True), 8, 1024)
    assert "blocks of 4 warps, not 8" in judged(LayerNormConfig("mosaic", num_warps=8, streams=True), 8, 4096)
    assert "no whole steps" in judged(streaming(), 6, 1024)
    assert "no whole steps" in judged(streaming(), 8, 1536)
    assert "no whole steps" in judged(streaming(), 8, 8192)
    assert "no whole steps" in judged(streaming(), 8, 1024, dtype="float32")
    both = {streaming(), streaming(kept=True)}
    for shape, found in (((8192, 4096), both), ((8190, 1024), set()), ((6, 1024), set()), ((8, 0), set())):
        inv = Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), {})
        assert {cfg for cfg in kernel.candidate_cfgs_gpu(inv) if cfg.streams} == found
    hopper(monkeypatch, "10.0")
    assert "capability 9, not 10.0" in judged(streaming(), 8, 1024)
