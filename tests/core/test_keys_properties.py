"""Keys over random nested structures: equal calls have equal keys, any change that matters has another."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops import Invocation
from ejkernel.ops.core.key import differences

few = settings(max_examples=80, deadline=None)


class Mode(enum.Enum):
    """A static value that is no plain one."""

    A = 1
    B = 2


# A call is described by plain data, and built from it in more than one way: with other values, another kind of
# array, another order of dicts. A leaf is ("array", dtype, shape) or ("static", value).
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64"])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
arrays = st.tuples(st.just("array"), dtypes, shapes)
statics = st.tuples(
    st.just("static"),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-2, 2),
        st.floats(),
        st.sampled_from([0.0, -0.0, 1.0, float("nan")]),
        st.text(max_size=5),
        st.sampled_from(["1", "True", "None", "float32[2]", "list of 1"]),
        st.binary(max_size=3),
        st.sampled_from(list(Mode)),
        st.sampled_from([jnp.float32, jnp.bfloat16, np.dtype("int8")]),
    ),
)
leaves = arrays | statics
names = st.text("ab'[]\"", min_size=1, max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, max_size=3).map(tuple)),
        st.tuples(st.just("tuple"), st.lists(inner, max_size=3).map(tuple)),
        st.tuples(st.just("dict"), st.dictionaries(names, inner, max_size=3).map(lambda d: tuple(d.items()))),
    ),
    max_leaves=6,
)
calls = st.tuples(
    st.lists(trees, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from("pqr"), trees, max_size=2).map(lambda d: tuple(d.items())),
)


def build(tree, make_array, flip=False):
    """The value that a description stands for."""
    if tree[0] == "array":
        return make_array(tree[1], tree[2])
    if tree[0] == "static":
        return tree[1]
    if tree[0] == "dict":
        items = [(name, build(inner, make_array, flip)) for name, inner in tree[1]]
        return dict(reversed(items) if flip else items)
    return (list if tree[0] == "list" else tuple)(build(inner, make_array, flip) for inner in tree[1])


def invoke(call, make_array, flip=False, **fields):
    """The invocation that a described call stands for."""
    args = tuple(build(tree, make_array, flip) for tree in call[0])
    kwargs = {name: build(tree, make_array, flip) for name, tree in (reversed(call[1]) if flip else call[1])}
    return Invocation("op", args, kwargs, **fields)


def of_zeros(dtype, shape):
    """A numpy array of zeros."""
    return np.zeros(shape, jnp.dtype(dtype))


def of_ones(dtype, shape):
    """A jax array of ones."""
    return jnp.asarray(np.ones(shape, jnp.dtype(dtype)))


def of_shapes(dtype, shape):
    """A shape without an array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def exact(tree):
    """A text that tells two descriptions apart, types included; dict order aside."""
    if tree[0] in ("list", "tuple"):
        return f"{tree[0]}({','.join(map(exact, tree[1]))})"
    if tree[0] == "dict":
        return f"dict({sorted((name, exact(inner)) for name, inner in tree[1])})"
    # NaN is one value; a dtype's class and its instances are one dtype.
    return repr(("dtype", str(jnp.dtype(tree[1])))) if _is_dtype(tree[1]) else repr(tree)


def _is_dtype(value):
    return isinstance(value, np.dtype) or value in (jnp.float32, jnp.bfloat16)


def exact_call(call):
    """The same for a whole call."""
    return [exact(tree) for tree in call[0]], sorted((name, exact(tree)) for name, tree in call[1])


def places(tree, path=()):
    """Where the leaves of a description are."""
    if tree[0] in ("array", "static"):
        yield path
    else:
        for index, inner in enumerate(tree[1]):
            yield from places(inner[1] if tree[0] == "dict" else inner, (*path, index))


def replaced(tree, path, leaf):
    """The description with another leaf in one place."""
    if not path:
        return leaf
    index, rest = path[0], path[1:]
    inner = list(tree[1])
    if tree[0] == "dict":
        inner[index] = (inner[index][0], replaced(inner[index][1], rest, leaf))
    else:
        inner[index] = replaced(inner[index], rest, leaf)
    return tree[0], tuple(inner)


@given(calls)
@few
def test_equal_calls_have_equal_keys(call):
    """Other values, another kind of array and another order of dicts and keywords leave the key as it is."""
    expected = invoke(call, of_zeros).call_key
    assert invoke(call, of_ones).call_key == expected
    assert invoke(call, of_ones, flip=True).call_key == expected
    assert invoke(call, of_shapes).call_key == expected


@given(calls, calls)
@few
def test_two_calls_have_one_key_only_if_they_are_equal(one, other):
    """Keys are equal exactly where the calls are, and the named parts agree with the keys."""
    first, second = invoke(one, of_zeros), invoke(other, of_zeros)
    same = exact_call(one) == exact_call(other)
    assert (first.call_key == second.call_key) == same
    assert (differences(first.parts, second.parts) == {}) == same


@given(trees, leaves, st.data())
@few
def test_one_changed_leaf_changes_the_key_and_is_named(tree, leaf, data):
    """Another dtype, shape, static value or type in one place gives another key, and a part names the difference."""
    found = list(places(tree))
    if not found:
        return
    changed = replaced(tree, data.draw(st.sampled_from(found)), leaf)
    one, other = invoke(((tree,), ()), of_zeros), invoke(((changed,), ()), of_zeros)
    if exact(tree) == exact(changed):
        assert one.call_key == other.call_key
    else:
        assert one.call_key != other.call_key
        assert all(name.startswith("args[0]") for name in differences(one.parts, other.parts))
        assert differences(one.parts, other.parts)


@given(trees)
@few
def test_wrapping_changes_the_key(tree):
    """The same leaves inside one more list, tuple or dict are another structure."""
    wrapped = [tree, ("list", (tree,)), ("tuple", (tree,)), ("dict", (("a", tree),))]
    assert len({invoke(((t,), ()), of_zeros).call_key for t in wrapped}) == 4


@given(calls)
@settings(max_examples=50, deadline=None)
def test_a_traced_call_has_the_key_of_the_call(call):
    """Tracing a random call gives the key that the call has outside."""
    made = []

    def collect(dtype, shape):
        made.append(of_zeros(dtype, shape))
        return made[-1]

    expected = invoke(call, collect).call_key
    seen = []

    def body(*tracers):
        remaining = iter(tracers)
        seen.append(invoke(call, lambda dtype, shape: next(remaining)).call_key)
        return 0.0

    jax.eval_shape(body, *made)
    assert seen == [expected]


@given(calls, st.sampled_from(["batch_axes", "method", "in_specs", "out_specs"]), st.data())
@few
def test_another_field_is_another_key(call, field, data):
    """Batch, method and specs count for every call."""
    specs = st.sampled_from([None, jax.P("x"), jax.P("y"), jax.P(None, "x"), (jax.P("x"), jax.P())])
    values = {
        "batch_axes": st.none() | st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=2).map(tuple),
        "method": st.none() | st.just("shard_map"),
        "in_specs": specs,
        "out_specs": specs,
    }[field]
    one, other = data.draw(values), data.draw(values)
    first, second = (invoke(call, of_zeros, **{field: value}) for value in (one, other))
    assert (first.call_key == second.call_key) == (one == other)
    assert set(differences(first.parts, second.parts)) == (set() if one == other else {field})
