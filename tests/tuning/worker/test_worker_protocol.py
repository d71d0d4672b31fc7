"""Messages between a tuning and its worker."""

from __future__ import annotations

import io

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.tuning.worker.protocol import Sender, pack, receive, unpack


def sent(*messages):
    """What the other side reads."""
    stream = io.BytesIO()
    sender = Sender(stream)
    for verb, parts, head in messages:
        sender.send(verb, parts, **head)
    return stream.getvalue()


@given(
    st.lists(
        st.tuples(
            st.text(max_size=5),
            st.lists(st.binary(max_size=40), max_size=3),
            st.dictionaries(st.sampled_from(["number", "message", "found"]), st.integers() | st.text() | st.none()),
        ),
        max_size=4,
    )
)
def test_what_is_sent_is_received(messages):
    """Any number of messages, each with any parts, in order."""
    stream = io.BytesIO(sent(*messages))
    for verb, parts, head in messages:
        found = receive(stream)
        assert (found.verb, found.parts) == (verb, parts)
        assert found.head == {**head, "verb": verb}
    assert receive(stream) is None


@pytest.mark.parametrize("cut", [1, 11, 13, 30, -1])
def test_a_message_that_was_cut_off_is_the_end(cut):
    """The other side died while it spoke."""
    whole = sent(("done", [b"x" * 20], {"number": 3}))

    assert receive(io.BytesIO(whole[:cut])) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_arrays_come_back_as_they_were(dtype):
    """Every type that JAX has, scalars and empty arrays too."""
    arrays = [jnp.arange(6).reshape(2, 3).astype(dtype), jnp.zeros((), dtype), jnp.zeros((0, 4), dtype)]
    for one, other in zip(unpack(*pack(arrays)), arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, np.asarray(other))
