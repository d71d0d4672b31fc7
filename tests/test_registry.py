"""The calls seen so far: kept as they were given, copied in and out, from any thread."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from ejkernel.ops import get_invocations, record_invocation

DEVICE = "gpu|NVIDIA H200"


def recorded(call_key="00"):
    """The one call that a test recorded."""
    return get_invocations(DEVICE)["matmul@v1"][call_key]


def record(*args, call_key="00", kernel="kernel", **kwargs):
    """Records one call."""
    record_invocation(DEVICE, "matmul@v1", call_key, kernel, args, kwargs)


def test_nothing_is_recorded_for_an_unknown_device():
    """A device without calls has an empty answer."""
    assert get_invocations("tpu|TPU v5") == {}


def test_a_call_is_found_by_device_operation_and_key():
    """The answer is `{op: {call_key: (kernel, args, kwargs)}}` of one device."""
    record(1, 2, mode="a")
    record(3, call_key="01")
    record_invocation(DEVICE, "softmax@v0", "02", "other", (4,), {})
    record_invocation("cpu|x", "matmul@v1", "03", "elsewhere", (5,), {})
    assert get_invocations(DEVICE) == {
        "matmul@v1": {"00": ("kernel", (1, 2), {"mode": "a"}), "01": ("kernel", (3,), {})},
        "softmax@v0": {"02": ("other", (4,), {})},
    }


def test_the_newest_of_equal_keys_stays():
    """Recording a key again replaces the call."""
    record(1)
    record(2)
    assert recorded()[1] == (2,)


def test_what_is_given_is_stored_as_it_is():
    """Kernel and arrays are the very objects that were given."""
    kernel, array = object(), jnp.ones(3)
    record(array, {"x": array}, kernel=kernel, bias=array)
    found, args, kwargs = recorded()
    assert found is kernel
    assert args[0] is array
    assert args[1]["x"] is array
    assert kwargs["bias"] is array


def test_positional_arguments_are_a_tuple_and_keywords_a_dict():
    """Whatever sequence and mapping came in, a tuple and a dict come out."""
    record_invocation(DEVICE, "matmul@v1", "00", "kernel", [1, 2], collections.OrderedDict(a=1))
    _, args, kwargs = recorded()
    assert (args, type(kwargs)) == ((1, 2), dict)


class Pair(NamedTuple):
    """A tuple with names that holds something that can change."""

    inner: list


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1], lambda v: v.append(2)),
        (lambda: {"a": 1}, lambda v: v.update(a=2)),
        (lambda: {1}, lambda v: v.add(2)),
        (lambda: {"a": [1]}, lambda v: v["a"].append(2)),
        (lambda: ([1],), lambda v: v[0].append(2)),
        (lambda: collections.OrderedDict(a=1), lambda v: v.update(a=2)),
        (lambda: collections.defaultdict(int, a=1), lambda v: v.update(a=2)),
        (lambda: Pair([1]), lambda v: v.inner.append(2)),
    ],
    ids=["list", "dict", "set", "nested", "in a tuple", "ordered dict", "default dict", "named tuple"],
)
class TestContainers:
    """Containers are copied on the way in and on the way out."""

    def test_a_change_of_the_argument_does_not_reach_the_registry(self, make, change):
        """What the caller changes afterwards was not recorded."""
        value = make()
        record(value, key=value)
        change(value)
        assert recorded()[1:] == ((make(),), {"key": make()})

    def test_a_change_of_the_answer_does_not_reach_the_registry(self, make, change):
        """What a reader changes is the reader's own."""
        record(make())
        change(recorded()[1][0])
        assert recorded()[1] == (make(),)

    def test_the_kind_of_container_stays(self, make, change):
        """A copy is of the same type as the original."""
        record(make())
        assert type(recorded()[1][0]) is type(make())


def test_a_change_of_the_whole_answer_does_not_reach_the_registry():
    """The outer dicts are copies too."""
    record(1)
    answer = get_invocations(DEVICE)
    answer["matmul@v1"].clear()
    answer.clear()
    assert recorded()[1] == (1,)


def test_many_threads_record_and_read_at_once():
    """Nothing is lost and nothing breaks when threads record and read at the same time."""
    threads, calls = 8, 40
    start = threading.Barrier(threads)
    failures = []

    def work(number):
        try:
            start.wait()
            for i in range(calls):
                record_invocation(DEVICE, f"op{i % 5}@v0", f"{number}-{i}", "kernel", ([i],), {})
                get_invocations(DEVICE)
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert sum(map(len, get_invocations(DEVICE).values())) == threads * calls
