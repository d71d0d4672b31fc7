"""The key under which a cfg is kept, and the parts in which two calls differ."""

from __future__ import annotations

from ejkernel.ops.core.key import Key, differences

PARTS = ("NVIDIA H200", "matmul@v2", "9f3c52e01b7ad844")


def test_a_key_is_the_tuple_of_its_strings():
    """Equal and of one hash, so that stores may keep and be asked for either."""
    assert Key(*PARTS) == PARTS
    assert {Key(*PARTS): 1}[PARTS] == 1


def test_a_key_is_spelled_for_messages():
    """The operation first, then the call and the device."""
    assert str(Key(*PARTS)) == "matmul@v2 (call 9f3c52e01b7ad844) on NVIDIA H200"


def test_calls_differ_in_the_parts_whose_text_is_another():
    """Equal parts are left out; a part that one call has not is None there."""
    one, other = {"args[0]": "f32[2]", "axis": "0", "mesh": "i"}, {"args[0]": "f32[3]", "axis": "0", "batch": "5"}
    assert differences(one, other) == {"args[0]": ("f32[2]", "f32[3]"), "mesh": ("i", None), "batch": (None, "5")}
    assert differences(one, one) == {}
