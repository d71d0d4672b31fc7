"""One call as a frozen value, and the key made of it."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest

from ejkernel.ops import Invocation
from ejkernel.ops.core.key import Key, differences


def test_the_documented_defaults():
    """Everything but operation, arguments and keywords has the documented default."""
    inv = Invocation("op", (1,), {"a": 2})
    named = {f.name: getattr(inv, f.name) for f in dataclasses.fields(inv)}
    assert named == {
        "op_id": "op",
        "args": (1,),
        "kwargs": {"a": 2},
        "batch_axes": None,
        "override_cfg": None,
        "stamp": True,
        "method": None,
        "mesh": None,
        "in_specs": None,
        "out_specs": None,
        "check_vma": False,
    }


@pytest.mark.parametrize("name", ["op_id", "args", "kwargs", "batch_axes", "override_cfg", "method", "mesh"])
def test_no_field_can_be_set(name):
    """An invocation is frozen."""
    inv = Invocation("op", (), {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(inv, name, "other")


def test_the_call_key_is_sixteen_hexadecimal_digits():
    """A call key is 16 hex digits, lower case."""
    assert re.fullmatch(r"[0-9a-f]{16}", Invocation("op", (jnp.ones(2), 3), {"mode": "a"}).call_key)


def test_make_key_is_the_call_key():
    """Without a builder the key is the call key."""
    inv = Invocation("op", (1,), {})
    assert inv.make_key() == inv.call_key


def test_make_key_asks_the_builder():
    """A builder gets the invocation, and its string is the key."""
    inv = Invocation("op", (1,), {})
    assert inv.make_key(lambda given: f"built {given is inv}") == "built True"


def test_make_key_with_a_builder_needs_no_stable_form():
    """A call that has no key of its own can still have a built one."""
    assert Invocation("op", (object(),), {}).make_key(lambda inv: "mine") == "mine"


def test_make_key_refuses_what_is_not_a_string():
    """A builder that returns something else is a TypeError that names the operation."""
    with pytest.raises(TypeError, match=r"matmul.*17.*string"):
        Invocation("matmul", (1,), {}).make_key(lambda inv: 17)


def test_the_parts_are_named_and_printable():
    """A key is made of named parts, each a printable string."""
    inv = Invocation("op", (jnp.ones((2, 3)), {"w": jnp.ones(4), "n": 5}), {"mode": "fast"}, batch_axes=(8, 0))
    assert {"args[0]", "args[1]['w']", "args[1]['n']", "kwargs['mode']", "batch_axes"} <= set(inv.parts)
    assert all(isinstance(text, str) and text.isprintable() for text in (*inv.parts, *inv.parts.values()))
    assert inv.parts["args[0]"] == "float32[2,3]"


def test_equal_calls_do_not_differ_in_any_part():
    """Two equal calls have no differences."""
    one, other = (Invocation("op", (jnp.ones(2), 3), {"mode": "a"}) for _ in range(2))
    assert differences(one.parts, other.parts) == {}


def test_a_difference_is_named_by_its_place():
    """Calls that differ in one nested value differ in that part alone, and both sides are shown."""
    one = Invocation("op", (jnp.ones(2), {"a": [1, 2]}), {})
    other = Invocation("op", (jnp.ones(2), {"a": [1, 3]}), {})
    found = differences(one.parts, other.parts)
    assert list(found) == ["args[1]['a'][1]"]
    assert found["args[1]['a'][1]"][0] != found["args[1]['a'][1]"][1]


def test_a_part_that_one_side_lacks_is_shown_as_none():
    """A keyword that only one call has differs from None."""
    one = Invocation("op", (1,), {})
    other = Invocation("op", (1,), {"mode": "a"})
    assert differences(one.parts, other.parts)["kwargs['mode']"][0] is None
    assert differences(other.parts, one.parts)["kwargs['mode']"][1] is None


def test_a_key_is_the_tuple_of_its_three_strings():
    """A key compares and hashes as `(device, op_id, call_key)`."""
    key = Key("cpu|x", "op@v0", "00")
    assert key == ("cpu|x", "op@v0", "00")
    assert {key: 1}["cpu|x", "op@v0", "00"] == 1


def test_a_key_prints_all_of_its_parts():
    """A message that holds a key names device, operation and call."""
    assert {"cpu|x", "op@v0", "00ff"} <= set(re.split(r"[ ()]+", str(Key("cpu|x", "op@v0", "00ff"))))
