"""Inputs to measure with: valid for every shape and dtype, whatever a call was found by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.library import Attention, LinearCrossEntropy, RaggedDot
from ejkernel.library.examples import drawn
from ejkernel.ops import Invocation


def shape(*sizes, dtype=jnp.float32):
    """An array of which nothing but its shape is known."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def example(kernel, *args, **kwargs):
    """The arguments that the kernel would be measured with."""
    return kernel.example_inputs(Invocation("x", args, kwargs), np.random.default_rng(0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint16])
@pytest.mark.parametrize(("tokens", "words"), [(7, 1), (1, 1000), (33, 50257)])
def test_labels_are_words(tokens, words, dtype):
    """As far as their dtype goes, and of that dtype."""
    args, _ = example(LinearCrossEntropy(), shape(tokens, 3), shape(3, words), shape(tokens, dtype=dtype))
    assert args[2].dtype == dtype
    assert args[2].shape == (tokens,)
    assert np.all((args[2] >= 0) & (args[2] < words))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (7, 16), (1000, 3), (0, 2), (5, 0)])
def test_group_sizes_fit_the_rows(rows, groups, dtype):
    """Also where there are fewer rows than groups, no rows or no groups."""
    args, _ = example(RaggedDot(), shape(rows, 4), shape(groups, 4, 5), shape(groups, dtype=dtype))
    if groups:
        assert args[2].dtype == dtype
        assert np.all(args[2] >= 0)
        assert int(np.sum(args[2], dtype=np.int64)) == min(rows, np.iinfo(dtype).max)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (13, 17), (1, 64)])
def test_lengths_are_within_the_places(queries, keys):
    """By position and by name."""
    arrays = shape(2, queries, 4, 8), shape(2, keys, 2, 8), shape(2, keys, 2, 8)
    lengths = shape(2, dtype=jnp.int32)
    args, kwargs = example(Attention(), *arrays, None, None, lengths, key_value_lengths=lengths, scale=1.0)
    for found, most in ((args[5], queries), (kwargs["key_value_lengths"], keys)):
        assert found.dtype == jnp.int32
        assert np.all((found >= most // 2) & (found <= most))


def test_what_can_be_read_is_taken_as_it_is():
    """The call's own integers are the best there are."""
    labels, sizes = jnp.array([4, 2]), jnp.array([1, 1])
    args, kwargs = example(LinearCrossEntropy(), shape(2, 3), weight=shape(3, 9), labels=labels, reduction="sum")
    assert args[2] is labels
    assert kwargs == {"reduction": "sum"}
    assert example(RaggedDot(), shape(2, 3), shape(2, 3, 4), sizes)[0][2] is sizes


def test_a_large_array_is_drawn_on_the_device():
    """A host would take longer to send it."""
    found = drawn(np.random.default_rng(0), shape((1 << 22) + 1, dtype=jnp.int32), 3, 9)
    assert isinstance(found, jax.Array)
    assert found.dtype == jnp.int32
    assert (int(jnp.min(found)), int(jnp.max(found))) == (3, 8)
