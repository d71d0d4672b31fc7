"""float64, as JAX makes it under x64: XLA's way computes, nothing is tuned, and other operations say what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import library
from ejkernel.library.rms_norm import RmsNormConfig
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, OpsError

RNG = np.random.default_rng(0)
A, B, V = RNG.normal(size=(8, 16)), RNG.normal(size=(16, 4)), RNG.normal(size=16)


@pytest.fixture(autouse=True)
def x64():
    """As `jax_enable_x64` has it, for the time of a test."""
    with jax.enable_x64(True):
        yield


def mean(x):
    return x.mean(-1, keepdims=True)


def exact_softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


CASES = {
    "matmul": ((A, B, B[0]), {"activation": "relu"}, np.maximum(A @ B + B[0], 0)),
    "rms_norm": ((A, V), {}, A / np.sqrt(mean(A * A) + 1e-6) * V),
    "layer_norm": ((A, V, V), {}, (A - mean(A)) / np.sqrt(mean((A - mean(A)) ** 2) + 1e-6) * V + V),
    "softmax": ((A,), {}, exact_softmax(A)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_computes_in_float64(name):
    """To its last digits, with gradients, under jit, and without a choice."""
    args, options, exact = CASES[name]
    told = []
    executor = Executor(ConfigSelectorChain(ConfigCache(), on_event=lambda event, **data: told.append(event)))
    function = getattr(library, name)
    found = jax.jit(lambda *args: function(*args, executor=executor, **options))(*map(jnp.asarray, args))
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12)
    total = lambda x: function(x, *map(jnp.asarray, args[1:]), executor=executor, **options).sum()  # noqa: E731
    slope = jax.jit(jax.grad(total))(args[0])
    assert slope.dtype == jnp.float64
    assert told == []


def test_a_way_that_is_named_is_refused():
    """None of them computes in float64."""
    with pytest.raises(OpsError, match="cannot compute in float64; leave cfg out"):
        library.rms_norm(jnp.asarray(A), cfg=RmsNormConfig("recompute"))


def test_factors_may_be_transposed():
    """As for every other dtype."""
    found = library.matmul(jnp.asarray(A.T), jnp.asarray(B.T), transpose_a=True, transpose_b=True)
    np.testing.assert_allclose(found, A @ B, rtol=1e-12, atol=1e-12)


def test_other_operations_say_what_to_do():
    """Attention in float64 has no way."""
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match=r"q is float64; use one of .*x\.astype\(jnp\.float32\).*jax_enable_x64"):
        library.attention(q, q, q)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_residual_norm_computes_in_float64(kind):
    """Both results, to their last digits."""
    summed = A + A[::-1]
    off = summed - mean(summed) if kind == "layer" else summed
    exact = off / np.sqrt(mean(off * off) + 1e-6) * V + V
    found = library.residual_norm(*map(jnp.asarray, (A, A[::-1], V, V)), kind=kind)
    for one, other in zip(found, (exact, summed), strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", ["sort", "bits", "recompute", "parts"])
def test_words_are_drawn_from_float64_as_from_float32(way):
    """By every way: the noise is of float32."""
    logits, key = jnp.asarray(A), jax.random.key(0)
    how = {"top_k": 3, "top_p": 0.8, "cfg": library.SampleConfig(way, None if way in ("sort", "parts") else 2)}
    found = [library.sample(key, x, **how) for x in (logits, logits.astype(jnp.float32))]
    np.testing.assert_array_equal(*found)


def test_weights_of_few_bits_are_not_for_float64():
    """A result of float64 would have the digits of float32."""
    q, scales = library.quantize(jnp.ones((16, 4), jnp.float32))
    with pytest.raises(TypeError, match="x is float64; use one of"):
        library.quantized_matmul(jnp.asarray(A), q, scales)


@pytest.mark.parametrize("way", ["count", "sort"])
def test_places_and_sizes_have_32_bits_by_every_way(way):
    """The dtype of a result must not depend on what was tuned."""
    x, logits = jnp.asarray(A, jnp.float32), jnp.asarray(A[:, :4], jnp.float32)
    sent = library.moe_dispatch(x, logits, k=2, cfg=library.MoeDispatchConfig(way))
    assert sent.places.dtype == sent.group_sizes.dtype == jnp.int32


def test_scales_of_nothing_are_float32():
    """As all others are."""
    assert library.quantize(jnp.ones((0, 3), jnp.float32))[1].dtype == jnp.float32
