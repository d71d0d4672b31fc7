"""What the library knows of its arguments: values where there are some, and its own integers where there are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Picking, executor_with
from fakes_programs import QUIET

from ejkernel.library import attention, linear_cross_entropy, ragged_dot
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
