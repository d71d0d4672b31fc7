"""Labels of kernel calls: written into programs, found again in their text."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    device_fingerprint,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
    overlay_cache,
)
from ejkernel.ops.execution.labels import parse_label

pytestmark = pytest.mark.usefixtures("own_text")

KEY = "0123456789abcdef"


def labelled(*names):
    """A function with one operation under each of these names."""

    def fn(x):
        for number, name in enumerate(names):
            with jax.named_scope(name):
                x = jnp.sin(x) * (number + 2)
        return x

    return fn


def lower(fn, *args):
    """The lowered program."""
    return jax.jit(fn).lower(*(args or (jnp.ones(8),)))


@pytest.fixture(params=["lowered", "compiled"])
def program(request):
    """A way to a program's text: as lowered, or as compiled."""
    return lower if request.param == "lowered" else lambda fn, *args: lower(fn, *args).compile()


def test_a_label_is_prefix_operation_version_and_key():
    """A label is spelled `prefix#op:vN:call_key`."""
    assert label("matmul@v2", KEY) == f"ejkernel_ops#matmul:v2:{KEY}"


def test_a_label_may_have_another_prefix():
    """The prefix is the caller's choice."""
    assert label("matmul@v2", KEY, prefix="mine") == f"mine#matmul:v2:{KEY}"


def test_a_label_of_a_built_key_has_no_character_that_ends_a_name():
    """`@`, `/`, quotes and spaces of a built key do not stand in the label as they are."""
    assert re.fullmatch(r"[^@/\s\"'()\[\],;]+", label("matmul@v2", "a@b/c d\"e'f(g)h[i]j,k;l"))


def test_a_label_is_found_in_the_text(program):
    """The label of a call is found in the lowered and in the compiled text."""
    name = label("matmul@v2", KEY)
    assert find_labels_in_lowered(program(labelled(name))) == [name]


def test_labels_are_found_once_each(program):
    """Several calls give several labels, each once, however many operations it stands on."""
    names = [label("matmul@v2", KEY), label("softmax@v0", KEY), label("matmul@v2", "f" * 16)]
    assert sorted(find_labels_in_lowered(program(labelled(*names, names[0])))) == sorted(names)


def test_labels_are_found_in_the_order_of_the_program():
    """In the lowered text labels come in the order of the calls."""
    names = [label("b@v0", KEY), label("a@v0", KEY), label("c@v0", KEY)]
    assert find_labels_in_lowered(lower(labelled(*names))) == names


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jax.grad(lambda x: jnp.sum(f(x))),
        jax.vmap,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0],
        lambda f: jax.checkpoint(f),
        lambda f: jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(f(x))))),
    ],
    ids=["grad", "vmap", "scan", "checkpoint", "jit of vmap of grad"],
)
def test_a_label_survives_transformations(program, wrap):
    """What JAX writes around a name under a transformation is not taken for a part of it."""
    name = label("matmul@v2", KEY)
    assert find_labels_in_lowered(program(wrap(labelled(name)), jnp.ones((4, 4)))) == [name]


def test_a_program_without_labels_has_none(program):
    """Names that are no labels are not found."""
    assert find_labels_in_lowered(program(labelled("plain", "a#b"))) == []


def test_labels_can_be_found_by_prefix(program):
    """A prefix picks its own labels."""
    mine, other = label("a@v0", KEY, prefix="mine"), label("a@v0", KEY)
    found = program(labelled(mine, other))
    assert find_labels_in_lowered(found, prefix="mine") == [mine]
    assert sorted(find_labels_in_lowered(found)) == sorted([mine, other])


def test_a_prefix_is_not_found_inside_a_longer_one():
    """`ops` does not pick the labels of `my_ops`."""
    assert extract_labels_from_hlo_text(f'"{label("a@v0", KEY, prefix="my_ops")}"', prefix="ops") == []


@pytest.mark.parametrize("built", ["a b", "x~y", "m=4/n=8", "[1, 2]", "é", 'quoted "key"', "50%", "a:b#c@d"])
def test_a_built_key_is_found_in_the_text(program, built):
    """Whatever a key builder returned, its label is found whole and leads back to operation and key."""
    name = label("matmul@v2", built)
    found = find_labels_in_lowered(program(labelled(name)))
    assert found == [name]
    assert parse_label(found[0]) == ("matmul@v2", built)


@given(
    st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True),
    st.text(min_size=1, max_size=6),
    st.text(min_size=1, max_size=8),
    st.sampled_from(['loc("{}")', 'op_name="jit(f)/{}/mul"', "jvp({})", "transpose(jvp({}))/x", "{}"]),
)
@example("op", "~", "~", 'loc("{}")')
@settings(max_examples=100, deadline=None)
def test_every_label_is_found_again(op, version, call_key, around):
    """Any operation, version and key come back from the label's text, wherever it stands."""
    name = label(f"{op}@v{version}", call_key)
    found = extract_labels_from_hlo_text(around.format(name))
    assert found == [name]
    assert parse_label(found[0]) == (f"{op}@v{version}", call_key)


def test_what_is_no_label_is_refused():
    """Reading something else as a label is a ValueError that shows it."""
    with pytest.raises(ValueError, match="plain text"):
        parse_label("plain text")


class TestLabelsToConfigs:
    """The cfgs of a program's calls, as far as they are known."""

    known, unknown = label("matmul@v2", KEY), label("matmul@v2", "f" * 16)

    def lowered(self):
        """A program with a known and an unknown call."""
        return lower(labelled(self.known, self.unknown))

    def test_the_cache_answers(self):
        """A cfg in memory is found; an unknown call is left out."""
        cache = ConfigCache()
        cache.put(device_fingerprint(), "matmul@v2", KEY, "cfg")
        assert labels_to_configs(self.lowered(), ConfigSelectorChain(cache)) == {self.known: "cfg"}

    def test_the_store_answers_where_the_cache_does_not(self, tmp_path):
        """A cfg on disk is found."""
        store = PersistentCache("matmul", path=tmp_path / "store.json")
        store.put(device_fingerprint(), "matmul@v2", KEY, {"block": 64})
        selector = ConfigSelectorChain(ConfigCache(), persistent=store)
        assert labels_to_configs(self.lowered(), selector) == {self.known: {"block": 64}}

    def test_an_overlay_answers_first(self):
        """Inside an overlay its cfg is the one in force."""
        cache = ConfigCache()
        cache.put(device_fingerprint(), "matmul@v2", KEY, "cfg")
        with overlay_cache({(device_fingerprint(), "matmul@v2", KEY): "other"}):
            assert labels_to_configs(self.lowered(), ConfigSelectorChain(cache)) == {self.known: "other"}
