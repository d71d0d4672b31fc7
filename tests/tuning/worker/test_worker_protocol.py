"""Messages between a tuning and its worker."""

from __future__ import annotations

import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.timing.inputs import draw
from ejkernel.ops.tuning.check import drawn_inputs_of
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker.main import _placed
from ejkernel.ops.tuning.worker.protocol import Receiver, Sender, pack, unpack


def received(data, count):
    """So many messages of these bytes."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    receiver = Receiver(reading)
    found = [receiver.receive() for _ in range(count)]
    receiver.close()
    return found


def sent(*messages):
    """The bytes that the other side reads."""
    reading, writing = os.pipe()
    sender = Sender(writing)
    for verb, parts, head in messages:
        sender.send(verb, parts, **head)
    sender.close()
    with open(reading, "rb") as file:
        return file.read()


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
    *all_found, end = received(sent(*messages), len(messages) + 1)
    for found, (verb, parts, head) in zip(all_found, messages, strict=True):
        assert (found.verb, found.parts) == (verb, parts)
        assert found.head == {**head, "verb": verb}
    assert end is None


def test_parts_larger_than_a_pipe_are_received():
    """The other side reads while they are written."""
    reading, writing = os.pipe()
    part, sender, receiver = os.urandom(1 << 20), Sender(writing), Receiver(reading)
    thread = threading.Thread(target=sender.send, args=("program", [part, b""]))
    thread.start()
    found = receiver.receive()
    thread.join()
    sender.close()
    receiver.close()

    assert found.parts == [part, b""]


@pytest.mark.parametrize("cut", [1, 11, 13, 30, -1])
def test_a_message_that_was_cut_off_is_the_end(cut):
    """The other side died while it spoke."""
    whole = sent(("done", [b"x" * 20], {"number": 3}))

    assert received(whole[:cut], 1) == [None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_arrays_come_back_as_they_were(dtype):
    """Every type that JAX has, scalars and empty arrays too."""
    arrays = [jnp.arange(6).reshape(2, 3).astype(dtype), jnp.zeros((), dtype), jnp.zeros((0, 4), dtype)]
    for one, other in zip(unpack(*pack(arrays)), arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, np.asarray(other))


@pytest.mark.parametrize("fresh", [True, False], ids=["random floats", "all given"])
def test_a_worker_draws_what_its_parent_drew(fresh):
    """Bytes are sent for the caller's own integers alone; cotangents are drawn apart from the inputs."""
    floats = jax.ShapeDtypeStruct((3, 5), "bfloat16") if fresh else jnp.ones((3, 5), "bfloat16")
    job = TuningJob(None, (floats, jnp.arange(4)), {"scale": jnp.float32(2)}, (), fresh_floats=fresh)
    _, leaves, drawn = drawn_inputs_of(job, seed=7)
    extra = [*draw([jax.ShapeDtypeStruct((2, 2), "float32")], 7), 0]
    about, parts = pack(leaves, drawn=drawn.places, seed=drawn.seed)
    more, beside = pack(extra, drawn=[0], seed=7, group="cotangents")
    found = _placed(json.loads(json.dumps([*about, *more])), [*parts, *beside])

    assert len(parts) == (1 if fresh else 3)
    for one, other in zip(found, [*leaves, *extra], strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
