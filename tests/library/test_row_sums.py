"""The kernel that reads logits once: its sums beside JAX's, what it makes of infinities, and its way to a GPU.

Covers `library/linear_cross_entropy_kernel.py`, `library/linear_cross_entropy_terms.py`,
`library/mosaic/cross_entropy.py` and `library/triton/cross_entropy.py`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, lowered_for_a_gpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import LinearCrossEntropy, LinearCrossEntropyConfig, linear_cross_entropy
from ejkernel.library.linear_cross_entropy_kernel import passes
from ejkernel.library.linear_cross_entropy_terms import Terms, summed
from ejkernel.library.triton.cross_entropy import refuses, row_sums
from ejkernel.ops import Invocation, PersistentCache

LOWEST = np.finfo(np.float32).min


# One function, so that cases of one shape share their program.
interpreted = jax.jit(partial(row_sums, num_warps=4, interpret=True), static_argnames=("total", "block"))


def sums(logits, labels, *, total=True, block=128):
    """The kernel's, interpreted: the normaliser, the label's logit and the sum."""
    top, norm, *others = interpreted(jnp.asarray(logits), jnp.asarray(labels), total=total, block=block)
    return top + jnp.log(norm), *others


@pytest.mark.parametrize(("words", "block"), [(1, 4096), (100, 4096), (512, 128), (513, 128), (5000, 1024)])
def test_sums_are_those_of_float64(words, block):
    """For rows of one block, of whole blocks, and of some more; logits of any size."""
    rng = np.random.default_rng(words)
    logits = (rng.standard_normal((5, words)) * np.array([[1e-3], [1], [30], [1e3], [1e30]])).astype(np.float32)
    labels = rng.integers(0, words, 5)
    normaliser, at_label, total = sums(logits, labels, block=block)
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    want = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    np.testing.assert_allclose(normaliser, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(at_label, logits[np.arange(5), labels])
    np.testing.assert_allclose(total, wide.sum(axis=1), atol=1e-5 * np.abs(wide).sum(axis=1).max(), rtol=1e-4)


@pytest.mark.parametrize("place", [0, 99], ids=["first block", "last block"])
@pytest.mark.parametrize("rest", [0.5, -np.inf, LOWEST], ids=["numbers", "nothing", "lowest"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LOWEST, -LOWEST])
def test_what_is_no_number_is_as_in_logsumexp(value, rest, place):
    """Not a number, infinities and the largest numbers of either sign, alone, twice and among others."""
    logits = np.full((2, 100), rest, np.float32)
    logits[:, place] = value
    # The same place of another block, since maxima are kept for each.
    logits[1, (place + 32) % 64] = value
    normaliser, _, _ = sums(logits, [0, 0], total=False, block=32)
    np.testing.assert_allclose(normaliser, jax.nn.logsumexp(jnp.asarray(logits), axis=1), rtol=1e-6)


def test_sums_of_what_is_no_number_are_as_in_sum():
    """The places beyond a row's end count for nothing."""
    logits = np.full((4, 100), 0.5, np.float32)
    logits[[1, 2, 3], [3, 40, 99]] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(sums(logits, [0] * 4, block=32)[2], [50.0, np.nan, np.inf, -np.inf])


def test_labels_out_of_range_read_the_nearest():
    """Nothing is read outside of a row, whatever the label's dtype."""
    logits = np.arange(300, dtype=np.float32).reshape(3, 100)
    for dtype in (np.int8, np.int16, np.int32):
        _, at_label, total = sums(logits, np.array([-100, 120, 7], dtype), total=False, block=64)
        assert at_label.tolist() == [0.0, 199.0, 207.0]
        assert total == 0.0
    # An interpreted kernel never reads outside of an array; a GPU would, so the program itself must see to it.
    shapes = jax.ShapeDtypeStruct((3, 100), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    program = jax.make_jaxpr(lambda *a: row_sums(*a, total=False, block=64, num_warps=4, interpret=False))(*shapes)
    assert "clip" in str(program)


def test_blocks_that_no_program_could_hold_are_refused():
    """And such as Triton has none of."""
    assert refuses(4096, 8) == ""
    assert "powers of two" in refuses(3000, 8)
    assert "powers of two" in refuses(4096, 0)
    assert "registers of 1 warps" in refuses(4096, 1)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("words", [1, 100, 1024, 2500])
def test_derivatives_are_rounded_and_what_that_takes_is_known(words, dtype):
    """For rows of one block and of several: each narrow number is the nearest, and the sums of the rest are right."""
    rng = np.random.default_rng(words)
    logits = jnp.asarray(rng.standard_normal((5, words)).astype(jnp.float32))
    labels = jnp.asarray(rng.integers(0, words, 5))
    terms = Terms(z_loss=0.1, smoothing=0.2, vocab_first=False)
    dtype = jnp.dtype(dtype)
    sums, scales = summed(logits, labels, terms), jnp.linspace(0.0, 2.0, 5)
    scales = scales * terms.lift(scales, dtype)
    made = jax.jit(lambda *a: passes(1024, 4, True).slope(*a, dtype, terms))(logits, labels, sums, scales)
    share = np.exp(np.asarray(logits, np.float64) - np.asarray(sums.normaliser)[:, None])
    target = 0.8 * np.eye(words)[np.asarray(labels)] + 0.2 / words
    steepness = 1 + 0.2 * np.asarray(sums.normaliser)[:, None]
    wide = (share * steepness - target) * np.asarray(scales)[:, None] * float(made.lift)
    near = np.asarray(made.values, np.float64)
    assert made.values.dtype == dtype
    largest = np.max(np.abs(wide))
    np.testing.assert_allclose(near, wide, rtol=float(jnp.finfo(dtype).eps), atol=1e-6 * largest)
    np.testing.assert_allclose(made.lost, (wide - near).sum(axis=1), atol=1e-5 * largest)


@pytest.mark.parametrize("words", [100, 151936])
@pytest.mark.parametrize("total", [False, True])
def test_the_kernel_is_lowered_for_a_gpu(words, total):
    """Triton's program is made of it, with and without a last block that is not whole."""
    shapes = jax.ShapeDtypeStruct((16, words), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)

    def run(*args):
        return row_sums(*args, total=total, block=4096, num_warps=8, interpret=False)

    assert "triton" in lowered_for_a_gpu(run, *shapes)
    several = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes]
    assert "triton" in lowered_for_a_gpu(jax.vmap(run), *several)


@pytest.mark.thinned
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients_are_lowered_for_a_gpu(chunk, reduction):
    """The kernels are in the program, for all tokens at once and in chunks."""
    cfg = LinearCrossEntropyConfig("triton", chunk)
    shapes = ((20, 16), jnp.bfloat16), ((16, 5000), jnp.bfloat16), ((20,), jnp.int32)
    kernel = LinearCrossEntropy()

    def both(hidden, weight, labels):
        given = {"reduction": reduction, "label_smoothing": 0.1, "cfg": cfg}
        loss, kept = kernel.fwd_with_residuals(hidden, weight, labels, **given)
        return loss, kernel.vjp(kept, loss, jnp.ones_like(loss), hidden, weight, labels, **given)[:2]

    text = lowered_for_a_gpu(both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    # Sums and derivatives. Losses for each token keep nothing for their gradients, so their sums are computed again.
    assert text.count("custom_call @__gpu$xla.gpu.triton") == (3 if reduction == "none" else 2)


@pytest.mark.parametrize("words", [5000, 5003])
def test_derivatives_are_kept_in_place_on_a_gpu(words):
    """The kernel writes its part of an array that is never copied, nor filled before; under vmap as well."""
    cfg = LinearCrossEntropyConfig("triton", 8, padded=128 if words % 8 else None, stacked=True)
    shapes = ((20, 16), jnp.bfloat16), ((16, words), jnp.bfloat16), ((20,), jnp.int32)
    kernel = LinearCrossEntropy()

    def both(hidden, weight, labels):
        loss, kept = kernel.fwd_with_residuals(hidden, weight, labels, cfg=cfg)
        return loss, kernel.vjp(kept, loss, jnp.ones_like(loss), hidden, weight, labels, cfg=cfg)[:2]

    text = lowered_for_a_gpu(both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert "output_operand_alias" in text
    assert "AllocateBuffer" in text
    several = jax.vmap(both, in_axes=(0, None, 0))
    batched = (jax.ShapeDtypeStruct((2, *shape) if at != 1 else shape, kind) for at, (shape, kind) in enumerate(shapes))
    assert "triton" in lowered_for_a_gpu(several, *batched)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("padded", [None, 128])
def test_derivatives_that_are_kept_are_mapped(padded):
    """A batch of calls, interpreted, beside all logits at once."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 6, 4)).astype(jnp.bfloat16))
    weight = jnp.asarray(rng.standard_normal((4, 300)).astype(jnp.bfloat16))
    labels = jnp.asarray(rng.integers(0, 300, (2, 6)))

    def both(cfg):
        def loss(hidden, weight, labels):
            return linear_cross_entropy(hidden, weight, labels, cfg=cfg, executor=UNTUNED)

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0)))(hidden, weight, labels)

    found = both(LinearCrossEntropyConfig("triton", 4, block=128, padded=padded, stacked=True))
    for got, want in zip(found, both(LinearCrossEntropyConfig("xla")), strict=True):
        assert_near(got, np.asarray(want, np.float64), "bfloat16")


@pytest.mark.parametrize(("chunk", "stacked"), [(None, False), (4, False), (4, True)])
def test_the_kernel_says_over_which_axes_it_varies(chunk, stacked):
    """As a GPU would trace it inside shard_map with its checks on: on shapes, since a CPU cannot run it."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tokens",))
    kernel, cfg = LinearCrossEntropy(), LinearCrossEntropyConfig("triton", chunk, stacked=stacked)

    def both(*args):
        options = {"label_smoothing": 0.1, "reduction": "none", "cfg": cfg}
        losses, kept = kernel.fwd_with_residuals(*args, **options)
        return losses, kernel.vjp(kept, losses, losses, *args, **options)[1][None]

    sharded = jax.shard_map(both, mesh=mesh, in_specs=(P("tokens"), P(), P("tokens")), out_specs=P("tokens"))
    dtype = jnp.bfloat16 if stacked else jnp.float32
    shapes = ((12, 8), dtype), ((8, 50), dtype), ((12,), jnp.int32)
    made = jax.eval_shape(sharded, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert [out.shape for out in made] == [(12,), (2, 8, 50)]


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("words", [100, 513, 5000])
def test_losses_of_odd_vocabularies_agree(words):
    """Values and gradients beside those of all logits at once."""
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for shape in ((6, 4), (4, words)))
    labels = jnp.asarray(rng.integers(0, words, 6))

    def both(cfg):
        def loss(hidden, weight):
            options = {"z_loss": 0.1, "label_smoothing": 0.2, "cfg": cfg, "executor": UNTUNED}
            return linear_cross_entropy(hidden, weight, labels, **options)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)

    found = jax.tree.leaves(both(LinearCrossEntropyConfig("triton", 4, block=1024)))
    wanted = jax.tree.leaves(both(LinearCrossEntropyConfig("xla")))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_the_kernel_is_refused_without_a_gpu():
    """With the reason; and all at once beyond what may be held is refused on every device."""

    def refused(tokens, chunk):
        shapes = ((tokens, 8), jnp.float32), ((8, 1 << 15), jnp.float32), ((tokens,), jnp.int32)
        inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
        return LinearCrossEntropy().valid_cfg(inv, LinearCrossEntropyConfig("triton", chunk))

    assert refused(512, None) == "triton runs on GPUs alone"
    assert "128 MiB, over the 64 MiB" in refused(1024, None)
    assert "128 MiB, over the 64 MiB" in refused(1024, 1024)


def test_cfgs_that_were_stored_before_the_kernel_are_read(tmp_path):
    """They say nothing of blocks and warps."""
    path, key = tmp_path / "old.json", ("gpu|NVIDIA H200", "library.linear_cross_entropy@v1", "0" * 16)
    old = PersistentCache("x", path)
    old.put(*key, {"implementation": "chunked_tokens", "chunk": 1024, "wide": False})
    new = PersistentCache("x", path, cfg_type=LinearCrossEntropyConfig)
    assert new.get(*key) == LinearCrossEntropyConfig("chunked_tokens", 1024)
