"""What the library knows of its arguments: values where there are some, and its own integers where there are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Picking, executor_with
from fakes_programs import QUIET

from ejkernel.library import (
    attention,
    dequantize,
    float8_matmul,
    linear_attention,
    linear_cross_entropy,
    quantize,
    ragged_dot,
    softmax,
)
from ejkernel.library.arguments import known_values
from ejkernel.ops import autotune


def test_values_are_known_where_there_are_some():
    """Of arrays on a device and on the host."""
    assert known_values(jnp.arange(3)).tolist() == [0, 1, 2]
    assert known_values(np.arange(3)).tolist() == [0, 1, 2]


def test_a_shape_and_a_tracer_have_no_values():
    """They stand for an array that is elsewhere."""
    seen = []
    jax.eval_shape(lambda x: seen.append(known_values(x)) or x, jnp.arange(3))
    assert seen == [None]
    assert known_values(jax.ShapeDtypeStruct((3,), jnp.int32)) is None


def loss_with(z_loss):
    return linear_cross_entropy(jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.arange(4), z_loss=z_loss)


def product_as(dtype):
    rows, sizes = jnp.ones((4, 8)), jnp.array([4, 0], jnp.int32)
    return ragged_dot(rows, jnp.ones((2, 8, 4)), sizes, preferred_element_type=dtype)


def decayed(*decay):
    q = jnp.ones((1, 4, len(decay), 8))
    return linear_attention(q, q, q, decay=jnp.array(decay))


WRONG = {
    "z_loss": (lambda: loss_with(float("nan")), ValueError, "z_loss must be finite, got nan"),
    "integers": (lambda: product_as(jnp.int32), TypeError, "preferred_element_type is int32; use one of float32"),
    "no dtype": (lambda: product_as("foo"), TypeError, "preferred_element_type='foo' is no dtype; use one of float32"),
    "dequantize": (lambda: dequantize(*quantize(jnp.ones((4, 8))), dtype="foo"), TypeError, "dtype='foo' is no dtype"),
    "low decay": (lambda: decayed(-0.125, 0.5), ValueError, r"decay must be from 0 to 1, got \[-0.125, 0.5\]"),
    "high decay": (lambda: decayed(2.0), ValueError, "decay must be from 0 to 1"),
    "shape": (lambda: softmax(jax.ShapeDtypeStruct((4, 8), jnp.float32)), TypeError, "x is a shape without values"),
}


@pytest.mark.parametrize(("call", "kind", "words"), WRONG.values(), ids=WRONG)
def test_an_error_names_the_argument(call, kind, words):
    """Before anything is computed."""
    with pytest.raises(kind, match=words):
        call()


def test_forward_mode_of_a_float8_product_says_what_to_do():
    """The error names the function, not a rule inside of it."""
    a = jnp.ones((4, 8))
    with pytest.raises(TypeError, match=r"library.float8_matmul has its own gradient.*use jacrev"):
        jax.jvp(lambda a: float8_matmul(a, a.T), (a,), (a,))


def losses(executor, labels):
    return linear_cross_entropy(jnp.ones((256, 8)), jnp.ones((8, 16)), labels, executor=executor)


def products(executor, sizes):
    return ragged_dot(jnp.ones((64, 8)), jnp.ones((4, 8, 16)), sizes, executor=executor)


def heads(executor, lengths):
    q = jnp.ones((4, 32, 2, 8))
    return attention(q, q, q, key_value_lengths=lengths, executor=executor)


GIVEN = {
    "labels of any word": (losses, 256, lambda found: set(found) == set(range(16))),
    "groups that hold every row": (products, 4, lambda found: sum(found) == 64 and min(found) > 1),
    "lengths from half of the places on": (heads, 4, lambda found: min(found) >= 16 and max(found) <= 32),
}


@pytest.mark.thinned
@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("shapes", [False, True], ids=["arrays", "shapes"])
def test_a_call_that_autotune_finds_is_measured_on_the_library_s_own_integers(what, shapes):
    """Never on 0 and 1, whether the program is given arrays or shapes."""
    call, count, holds = GIVEN[what]
    tuner = Picking()
    executor = executor_with(tuner)
    integers = jax.ShapeDtypeStruct((count,), jnp.int32) if shapes else jnp.ones(count, jnp.int32)
    autotune(lambda i: call(executor, i), integers, tuning=QUIET)
    ((found,),) = tuner.integers
    assert len(found) == count
    assert holds(found)
