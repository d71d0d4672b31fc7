"""Calls as people read them, and the nearest of those that are known."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation
from ejkernel.ops.core.description import KnownCall, calls_apart, described, nearest, one_line
from ejkernel.ops.core.key import Key


class Mode(enum.Enum):
    """A static value with a name."""

    FAST = 1


@dataclass(frozen=True)
class Sizes:
    """A static value with fields."""

    rows: int = 8
    scale: float = 0.5


def call(*args, **kwargs):
    """The readable parts of a call."""
    return described(Invocation("op", args, kwargs))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3.0"),
        (True, "True"),
        (None, "None"),
        ("relu", "'relu'"),
        (float("nan"), "nan"),
        (0.1, "0.1"),
        (Mode.FAST, "Mode.FAST"),
        (Sizes(), "Sizes(rows=8, scale=0.5)"),
        (jnp.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (jax.sharding.PartitionSpec("x", None), "P(x, None)"),
        (np.zeros((2, 3), np.float32), "float32[2,3]"),
    ],
)
def test_a_value_reads_as_python_writes_it(value, text):
    """Numbers, strings, enums, dataclasses, dtypes, specs and arrays are shown as their author knows them."""
    assert call(value) == {"args[0]": text}


def test_a_value_without_a_short_form_is_shown_whole():
    """What has no better form keeps the one of its key."""
    text = call(partial(jnp.sum, axis=0))["args[0]"]
    assert "partial" in text
    assert "axis" in text


def test_the_parts_of_containers_are_named_by_their_place():
    """A difference deep inside an argument can be told."""
    assert call([jnp.ones(2), {"a": 1}]) == {
        "args[0]": "list of 2",
        "args[0][0]": "float32[2]",
        "args[0][1]": "dict of 1",
        "args[0][1]['a']": "1",
    }


def test_a_call_that_no_key_can_be_made_of_has_no_description():
    """A kernel with its own key builder may take such arguments."""
    assert call(iter([])) == {}


def test_a_call_of_very_many_parts_is_not_described():
    """Every stored entry carries its description, so it is small or absent."""
    assert call(*[jnp.ones(4)] * 20) != {}
    assert call(*[jnp.ones(4)] * 2000) == {}


def test_a_call_is_one_line():
    """Positional values by themselves, keywords with their names."""
    assert one_line("op@v2", call(jnp.ones((2, 3)), scale=2.0)) == "op@v2(float32[2,3], scale=2.0)"
    assert one_line("op@v2", {}) == "op@v2(not described)"


DEVICE = "gpu|NVIDIA H200"


def known(call_key, parts, op="op@v2", device=DEVICE, where="memory"):
    """A call that has a cfg."""
    return KnownCall(Key(device, op, call_key), parts, where)


def near(parts, *others, most=3, op="op@v2"):
    """The call keys of the nearest of these, and their differing fields."""
    found = nearest(Key(DEVICE, op, "asked"), parts, others, most)
    return [(n.key.call_key, dict(n.fields)) for n in found]


def test_the_call_that_differs_in_the_fewest_fields_is_the_nearest():
    """One differing field is nearer than two, and each is told with both sides."""
    asked = {"args[0]": "float32[8]", "kwargs['scale']": "2.0"}
    two = known("two", {"args[0]": "float32[4]", "kwargs['scale']": "1.0"})
    one = known("one", {"args[0]": "float32[4]", "kwargs['scale']": "2.0"})
    assert near(asked, two, one, most=1) == [("one", {"args[0]": ("float32[4]", "float32[8]")})]


def test_of_equally_many_fields_the_nearer_numbers_win():
    """A shape of twice the size is nearer than one of a hundred times."""
    far, close = known("a", {"args[0]": "float32[800]"}), known("b", {"args[0]": "float32[16]"})
    assert [key for key, _ in near({"args[0]": "float32[8]"}, far, close)] == ["b", "a"]


def test_another_dtype_is_further_than_a_few_doublings():
    """The numbers of what is of another kind say nothing."""
    other, larger = known("a", {"args[0]": "int8[8]"}), known("b", {"args[0]": "float32[64]"})
    assert [key for key, _ in near({"args[0]": "float32[8]"}, other, larger)] == ["b", "a"]


def test_numbers_of_any_length_have_a_distance():
    """A file of entries may hold anything."""
    assert 0 < calls_apart({"n": "1"}, {"n": "9" * 400}) < math.inf
    assert 0 < calls_apart({"n": "1"}, {"n": "9" * 5000}) < math.inf


def test_calls_are_compared_part_by_part():
    """Doublings of sizes add up; what has another form counts as far away."""
    one = {"call.args[0]": "float32[8,8]", "call.args[1]": "2"}

    assert calls_apart(one, one) == 0
    assert 0 < calls_apart(one, {**one, "call.args[0]": "float32[8,16]"}) < 1.1
    assert calls_apart(one, {**one, "call.args[0]": "int8[8,8]"}) > calls_apart(
        one, {**one, "call.args[0]": "float32[64,64]"}
    )


def test_another_version_or_device_is_a_field_of_its_own():
    """The same call tuned elsewhere, or for an older version of the kernel, is near."""
    same = {"args[0]": "float32[8]"}
    older = known("asked", same, op="op@v1")
    elsewhere = known("asked", same, device="cpu|any")
    assert near(same, older) == [("asked", {"version": ("1", "2")})]
    assert near(same, elsewhere) == [("asked", {"device": ("cpu|any", DEVICE)})]


def test_other_operations_and_the_call_itself_are_no_misses():
    """Only other calls of the same operation can be near."""
    same = {"args[0]": "float32[8]"}
    assert near(same, known("a", same, op="other@v2"), known("asked", same)) == []


def test_a_call_without_a_description_differs_in_its_key():
    """There is always something that differs."""
    assert near({"args[0]": "float32[8]"}, known("a", {})) == [("a", {"call_key": ("a", "asked")})]


def test_a_near_call_reads_as_a_sentence():
    """Both sides of each difference, and what only one side has; the rest is counted."""
    there = {f"args[{i}]": "1" for i in range(9)}
    (found,) = nearest(Key(DEVICE, "op@v2", "asked"), {"args[0]": "2", "method": "'shard_map'"}, [known("a", there)])
    text = str(found)
    assert "op@v2 (call a) in memory: args[0] is 1 there, 2 here" in text
    assert "args[1] is 1 there and not given here" in text
    assert re.search(r"and 4 more$", text)
