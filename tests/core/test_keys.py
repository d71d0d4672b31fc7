"""What the key of a call depends on, and what not."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Invocation, OpsError


def key(*args, **kwargs):
    """The call key of a call with these arguments."""
    return Invocation("op", args, kwargs).call_key


def mesh_of(shape=(2, 2), names=("x", "y"), kind=AxisType.Explicit, devices=None):
    """A mesh of the test's CPU devices."""
    devices = jax.devices() if devices is None else devices
    count = int(np.prod(shape))
    return jax.sharding.Mesh(np.array(devices[:count]).reshape(shape), names, axis_types=(kind,) * len(shape))


def traced_key(transform, *args):
    """The key that a call of the same arguments has inside a transformation."""
    seen = []

    def body(*inner):
        seen.append(key(*inner))
        return jnp.zeros(())

    transform(body)(*args)
    return seen[-1]


# What counts.


def test_another_shape_is_another_key():
    """The key depends on shapes."""
    assert key(jnp.ones((2, 3))) != key(jnp.ones((3, 2)))


def test_another_rank_is_another_key():
    """A scalar, a vector of one and a matrix of one are three shapes."""
    assert len({key(jnp.ones(())), key(jnp.ones((1,))), key(jnp.ones((1, 1)))}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64", "float8_e5m2"])
def test_another_dtype_is_another_key(dtype):
    """The key depends on dtypes."""
    assert key(jnp.ones(2, dtype)) != key(jnp.ones(2, "float32"))


def test_swapped_arguments_are_another_key():
    """The key depends on which argument has which shape."""
    a, b = jnp.ones(2), jnp.ones(3)
    assert key(a, b) != key(b, a)


def test_a_numpy_array_is_an_array():
    """A numpy array counts by shape and dtype, as the jax array of the same does."""
    assert key(np.zeros((2, 3), np.float32)) == key(jnp.ones((2, 3)))


def test_a_numpy_scalar_is_an_array():
    """A numpy scalar is an array without axes, not a static value."""
    assert key(np.float32(1)) == key(np.float32(2)) == key(jnp.zeros(()))


def test_a_numpy_scalar_is_not_a_python_number():
    """A numpy scalar and the Python number that it equals are two kinds of argument."""
    assert key(np.int32(1)) != key(1)


@pytest.mark.parametrize("bits", ["float64", "int64", "uint64", "complex128"])
def test_sixty_four_bits_are_cut_as_jax_cuts_them(bits):
    """With x64 off a numpy array of 64 bits has the key of the 32-bit array that JAX makes of it."""
    value = np.zeros((2,), bits)
    assert key(value) == key(jnp.asarray(value.astype(value.dtype.str[1] + str(value.dtype.itemsize // 2))))


def test_sixty_four_bits_count_where_jax_keeps_them():
    """With x64 on float64 is a dtype of its own."""
    with jax.enable_x64(True):
        assert key(np.zeros(2, np.float64)) != key(np.zeros(2, np.float32))


def test_one_one_point_zero_true_the_string_and_none_are_five_values():
    """1, 1.0, True, "1" and None are five static values, and so are 0 and False."""
    assert len({key(v) for v in (1, 1.0, True, "1", None)}) == 5
    assert len({key(v) for v in (0, 0.0, False, "", None)}) == 5


def test_the_two_zeros_are_two_static_values():
    """0.0 and -0.0 may compute different things."""
    assert key(0.0) != key(-0.0)


def test_nan_is_a_stable_static_value():
    """NaN equals itself as a static value."""
    assert key(float("nan")) == key(float("nan")) != key(0.0)


def test_infinities_are_static_values():
    """The two infinities are two values."""
    assert key(float("inf")) != key(float("-inf"))


def test_large_integers_are_exact():
    """Integers beyond 53 bits do not collapse."""
    assert key(2**60) != key(2**60 + 1)


def test_a_list_is_not_a_tuple():
    """The key depends on the structure's types."""
    assert key([1, 2]) != key((1, 2))


def test_empty_containers_are_four_values():
    """Nothing in a list, a tuple, a dict, and nothing at all are different structures."""
    assert len({key([]), key(()), key({}), key(None), key()}) == 5


def test_nesting_is_structure():
    """The same leaves in another nesting are another call."""
    a = jnp.ones(2)
    assert len({key([a, [a]]), key([[a], a]), key([a, a]), key([[a, a]])}) == 4


def test_a_named_tuple_is_not_a_tuple():
    """A named tuple is a structure of its own, and its class counts."""
    one = collections.namedtuple("one", "a b")
    other = collections.namedtuple("other", "a b")
    assert len({key(one(1, 2)), key(other(1, 2)), key((1, 2))}) == 3


def test_dict_order_does_not_count():
    """Two dicts with the same items are the same argument."""
    a, b = jnp.ones(2), jnp.ones(3)
    assert key({"a": a, "b": b}) == key({"b": b, "a": a})


def test_dict_order_does_not_count_for_keys_of_other_types():
    """The same holds for dicts whose keys are no strings."""
    assert key({1: "a", "x": "b", None: 3}) == key({None: 3, "x": "b", 1: "a"})


def test_dict_keys_count_with_their_type():
    """1, "1" and True are three keys of a dict."""
    assert len({key({1: 0}), key({"1": 0}), key({True: 0}), key({1.0: 0})}) == 4


def test_keyword_order_does_not_count():
    """f(a=1, b=2) and f(b=2, a=1) are one call."""
    one = Invocation("op", (), {"a": 1, "b": 2})
    other = Invocation("op", (), {"b": 2, "a": 1})
    assert one.call_key == other.call_key


def test_keyword_names_count():
    """The same value under another name is another call."""
    assert key(a=1) != key(b=1)


def test_strings_that_look_like_parts_do_not_collide():
    """A static string that spells how an array or a container is written is still a string."""
    assert key("float32[2]") != key(jnp.ones(2))
    assert key("list of 2", 1, 2) != key([1, 2])
    assert key('["int","1"]') != key(1)


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("batch_axes", ((8, 0),), ((16, 0),)),
        ("batch_axes", ((8, 0),), ((8, 1),)),
        ("batch_axes", ((8, 0),), None),
        ("method", "shard_map", None),
        ("in_specs", (P("x"), P(None)), (P("y"), P(None))),
        ("in_specs", P(("x", "y")), P("x", "y")),
        ("out_specs", P("x"), P("y")),
        ("out_specs", P("x"), None),
    ],
)
def test_how_the_call_runs_counts(field, one, other):
    """Another batch, method or spec is another key, and the difference is named by the field."""
    first = Invocation("op", (1,), {}, **{field: one})
    second = Invocation("op", (1,), {}, **{field: other})
    assert first.call_key != second.call_key
    assert {n for n in (*first.parts, *second.parts) if first.parts.get(n) != second.parts.get(n)} == {field}


def test_mesh_axis_sizes_count():
    """A mesh of other axis sizes is another key."""
    keys = {
        Invocation("op", (1,), {}, mesh=mesh_of(shape)).call_key for shape in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
    }
    assert len(keys) == 5


def test_mesh_axis_names_count():
    """Specs name axes, so the names of a mesh's axes count."""
    one = Invocation("op", (1,), {}, mesh=mesh_of(names=("x", "y")))
    other = Invocation("op", (1,), {}, mesh=mesh_of(names=("a", "b")))
    assert one.call_key != other.call_key


def test_the_devices_of_a_mesh_do_not_count():
    """Two meshes of the same axes over other devices are one key."""
    devices = jax.devices()
    one = Invocation("op", (1,), {}, mesh=mesh_of((2,), ("x",), devices=devices[:2]))
    other = Invocation("op", (1,), {}, mesh=mesh_of((2,), ("x",), devices=devices[2:]))
    assert one.call_key == other.call_key


def test_a_matmul_precision_that_is_set_counts():
    """A matmul precision in force changes the key, another one changes it again, and it shows as a part."""
    plain = key(jnp.ones(2))
    keys = set()
    for precision in ("float32", "bfloat16", "tensorfloat32"):
        with jax.default_matmul_precision(precision):
            inv = Invocation("op", (jnp.ones(2),), {})
            assert any("precision" in name for name in inv.parts)
            keys.add(inv.call_key)
    assert len(keys | {plain}) == 4
    assert key(jnp.ones(2)) == plain


@pytest.mark.parametrize(
    ("field", "value"), [("override_cfg", 3), ("stamp", False), ("check_vma", True)], ids=lambda v: str(v)
)
def test_what_is_not_of_the_call_does_not_count(field, value):
    """A cfg given, a label and a check of JAX's do not change which cfg is best."""
    assert Invocation("op", (1,), {}, **{field: value}).call_key == key(1)


# What does not count.


def test_values_of_arrays_do_not_count():
    """Arrays of one shape and dtype are one key, whatever they hold."""
    assert key(jnp.zeros(3)) == key(jnp.arange(3.0)) == key(jnp.full(3, jnp.nan))


def test_weak_types_do_not_count():
    """An array made of a Python number has the key of one with a plain dtype."""
    weak = jnp.asarray(1.0) * 1
    assert jax.typeof(weak).weak_type
    assert key(weak) == key(jnp.float32(1))


def test_where_an_uncommitted_or_committed_array_lies_does_not_count():
    """The call key names no device: that is another part of the whole key."""
    x = jnp.ones(3)
    assert key(x) == key(jax.device_put(x, jax.devices()[2]))


def test_a_deleted_array_has_its_key():
    """An array that was donated or deleted still has shape and dtype."""
    x, y = jnp.ones(3), jnp.ones(3)
    expected = key(x)
    y.delete()
    assert key(y) == expected


def test_two_objects_with_one_name_are_one_key():
    """Functions count by qualified name, not by address."""

    def make():
        def inner(x):
            return x

        return inner

    assert make() is not make()
    assert key(make()) == key(make())


def test_functions_of_other_names_are_other_keys():
    """Two functions are two static values."""
    assert len({key(jnp.sin), key(jnp.cos), key(np.sin), key(len), key(test_weak_types_do_not_count)}) == 5


def test_functions_of_one_short_name_in_two_modules_are_two_keys():
    """The qualified name holds the module: the densities of two distributions are two functions."""
    import jax.scipy.stats as stats

    assert key(stats.norm.logpdf) != key(stats.cauchy.logpdf)


def test_a_jitted_function_counts_by_its_name():
    """jit gives a new object each time; the name stays."""

    def inner(x):
        return x

    assert key(jax.jit(inner)) == key(jax.jit(inner))


def test_partials_count_by_function_and_arguments():
    """A partial is its function, its arguments and its keywords."""
    base = key(functools.partial(jnp.sum, 1, axis=0))
    assert base == key(functools.partial(jnp.sum, 1, axis=0))
    others = [
        functools.partial(jnp.max, 1, axis=0),
        functools.partial(jnp.sum, 2, axis=0),
        functools.partial(jnp.sum, 1, axis=1),
        functools.partial(jnp.sum, 1, where=0),
        functools.partial(jnp.sum, 1),
        jnp.sum,
    ]
    assert len({base, *map(key, others)}) == len(others) + 1


def test_arrays_in_a_partial_count_by_shape():
    """An array that a partial holds counts as an array."""
    assert key(functools.partial(jnp.add, jnp.zeros(2))) == key(functools.partial(jnp.add, jnp.ones(2)))
    assert key(functools.partial(jnp.add, jnp.zeros(2))) != key(functools.partial(jnp.add, jnp.ones(3)))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_dtype_has_one_key_in_every_spelling(name):
    """np.dtype, the numpy scalar class and the jax.numpy name of one dtype are one static value."""
    spellings = [np.dtype(jnp.dtype(name)), jnp.dtype(name).type, getattr(jnp, name)]
    assert len({key(dtype) for dtype in spellings}) == 1


def test_dtypes_are_distinct_static_values():
    """Another dtype is another value, and none of them is its name as a string."""
    keys = {key(v) for v in (jnp.float32, jnp.bfloat16, jnp.int8, "float32", float)}
    assert len(keys) == 5


class Color(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    """An enum whose members are numbers as well."""

    LOW = 1
    HIGH = 2


class Shade(enum.Enum):
    """Another enum with the same members."""

    RED = 1


def test_enums_count_by_class_and_member():
    """Two members, and two enums with equal members, are different values."""
    assert key(Color.RED) == key(Color(1))
    assert len({key(v) for v in (Color.RED, Color.BLUE, Shade.RED)}) == 3


def test_an_int_enum_is_not_its_number():
    """An IntEnum's member equals a number, and is another static value all the same."""
    assert len({key(Level.LOW), key(Level.HIGH), key(1), key(Color.RED)}) == 4


def test_jax_enums_count():
    """jax.lax.Precision is a static value like any other."""
    assert key(jax.lax.Precision.HIGH) != key(jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Mask:
    """A nested static value."""

    window: int = 4
    causal: bool = True


@dataclasses.dataclass(frozen=True)
class Options:
    """A static value with fields."""

    scale: float = 1.0
    mask: Mask = Mask()
    table: object = None


def test_dataclasses_count_by_field():
    """Equal dataclasses are one key; any field, nested ones included, makes another."""
    assert key(Options()) == key(Options(1.0, Mask(4, True)))
    values = [Options(), Options(2.0), Options(1), Options(mask=Mask(5)), Options(mask=Mask(causal=False)), Mask()]
    assert len({key(v) for v in values}) == len(values)


def test_arrays_in_a_dataclass_count_by_shape():
    """An array that a dataclass holds counts as an array."""
    assert key(Options(table=jnp.zeros(2))) == key(Options(table=jnp.ones(2)))
    assert key(Options(table=jnp.zeros(2))) != key(Options(table=jnp.ones(3)))


class Inner(pydantic.BaseModel):
    """A nested model."""

    depth: int = 2


class Model(pydantic.BaseModel):
    """A pydantic model."""

    width: int = 1
    inner: Inner = Inner()


def test_pydantic_models_count_by_field():
    """Equal models are one key; any field, nested ones included, makes another."""
    assert key(Model()) == key(Model(width=1, inner=Inner(depth=2)))
    assert len({key(Model()), key(Model(width=2)), key(Model(inner=Inner(depth=3))), key(Inner())}) == 4


def test_sets_have_no_order():
    """A set's iteration order does not count; its members do."""
    # 0 and 8 share a place in a small set, so that the two are iterated in the order of their insertion.
    assert key({0, 8}) == key({8, 0})
    assert len({key({1, 2}), key({1, 3}), key({1}), key({"1"}), key(frozenset({1, 2}))}) == 5


def test_slices_and_ranges_are_static_values():
    """Slices and ranges count by their bounds."""
    values = [slice(1), slice(1, 2), slice(None, None, 2), range(1), range(1, 2), range(0, 4, 2), ...]
    assert len({key(v) for v in values}) == len(values)
    assert key(slice(1, 2)) == key(slice(1, 2))


class Scale:
    """A callable object with state."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def test_callable_objects_count_by_class_and_state():
    """A callable object is its class and what it holds, never its address."""
    assert key(Scale(2)) == key(Scale(2))
    assert key(Scale(2)) != key(Scale(3))


def test_specs_and_shardings_are_static_values():
    """PartitionSpec, meshes and NamedSharding count by axes and spec."""
    mesh = mesh_of()
    values = [P("x"), P("y"), P(("x", "y")), mesh, mesh_of((4, 1)), NamedSharding(mesh, P("x"))]
    assert len({key(v) for v in [*values, NamedSharding(mesh, P("y"))]}) == len(values) + 1
    assert key(mesh) == key(mesh_of())
    assert key(NamedSharding(mesh, P("x"))) == key(NamedSharding(mesh_of(), P("x")))


def test_registered_nodes_count_by_children_and_constants():
    """A class that its author registered with JAX is its children and its constant data."""

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, child, constant):
            self.child, self.constant = child, constant

        def tree_flatten(self):
            return (self.child,), self.constant

        @classmethod
        def tree_unflatten(cls, constant, children):
            return cls(*children, constant)

    x = jnp.ones(2)
    assert key(Pair(x, "a")) == key(Pair(x + 1, "a")) == traced_key(jax.jit, Pair(x, "a"))
    assert len({key(Pair(x, "a")), key(Pair(x, "b")), key(Pair(jnp.ones(3), "a"))}) == 3


# Typed PRNG keys.


def test_random_keys_count_by_implementation_and_shape():
    """A typed PRNG key is an array: its implementation and shape count, its value does not."""
    assert key(jax.random.key(0)) == key(jax.random.key(1))
    assert len({key(jax.random.key(0)), key(jax.random.split(jax.random.key(0), 2))}) == 2
    assert key(jax.random.key(0)) != key(jax.random.key(0, impl="rbg"))


def test_a_traced_random_key_has_its_key():
    """A tracer of a typed PRNG key gives the key of the key."""
    random = jax.random.key(0)
    assert traced_key(jax.jit, random) == key(random)


# Tracers and shapes.


def test_a_tracer_under_jit_is_the_array_it_stands_for():
    """jit: arrays, numpy arrays and structures of them have the same key inside and outside."""
    args = (jnp.ones((2, 3)), {"b": np.zeros(4, np.int8), "a": [jnp.ones((), jnp.bfloat16)]})
    assert traced_key(jax.jit, *args) == key(*args)


def test_a_weak_tracer_is_the_array_it_stands_for():
    """jit: a weakly typed array has the same key inside and outside."""
    weak = jnp.asarray(1.0) * 1
    assert traced_key(jax.jit, weak) == key(weak)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_a_tracer_of_sixty_four_bits_is_the_array_it_stands_for(dtype):
    """jit: a numpy array of 64 bits has the same key inside and outside with x64 off."""
    value = np.ones((2, 3), dtype)
    assert traced_key(jax.jit, value) == key(value)


def test_a_tracer_under_vmap_is_one_example():
    """vmap: the key inside is that of one example."""
    assert traced_key(jax.vmap, jnp.ones((5, 2, 3))) == key(jnp.ones((2, 3)))
    assert traced_key(lambda f: jax.vmap(f, in_axes=1), jnp.ones((5, 2, 3))) == key(jnp.ones((5, 3)))


def test_a_tracer_under_grad_is_the_array_it_stands_for():
    """grad, eager and jitted: the key inside is that of the array."""
    x = jnp.ones((2, 3))
    assert traced_key(jax.grad, x) == key(x)
    assert traced_key(lambda f: jax.jit(jax.grad(f)), x) == key(x)


def test_a_tracer_under_stacked_transformations_is_one_example():
    """jit of vmap of grad: the key inside is that of one example."""
    assert traced_key(lambda f: jax.jit(jax.vmap(jax.grad(f))), jnp.ones((5, 2))) == key(jnp.ones(2))


def test_a_tracer_under_jvp_scan_and_checkpoint_is_the_array_it_stands_for():
    """linearize, checkpoint and scan: the key inside is that of what the body sees."""
    x = jnp.ones((4, 3))
    assert traced_key(lambda f: lambda v: jax.jvp(f, (v,), (v,)), x) == key(x)
    assert traced_key(lambda f: jax.grad(jax.checkpoint(f)), x) == key(x)
    assert traced_key(lambda f: lambda v: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, v), x) == key(x[0])


@pytest.mark.parametrize(
    "kind",
    [dict, collections.OrderedDict, functools.partial(collections.defaultdict, int)],
    ids=["dict", "ordered dict", "default dict"],
)
def test_a_traced_mapping_is_the_mapping_it_stands_for(kind):
    """jit: a mapping whose items were added in any order has the same key inside and outside."""
    mapping = kind()
    mapping["b"], mapping["a"] = jnp.ones(2), jnp.ones(3)
    assert traced_key(jax.jit, mapping) == key(mapping)


@pytest.mark.parametrize(
    "array",
    [
        jnp.ones((2, 3)),
        jnp.ones((), jnp.bfloat16),
        np.ones(3),
        np.ones(3, np.int64),
        jnp.asarray(1.0) * 1,
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
    ],
    ids=["float32", "bfloat16", "float64", "int64", "weak", "random key", "float0"],
)
def test_a_shape_without_array_is_the_array_it_stands_for(array):
    """A ShapeDtypeStruct gives the key of the array, also where JAX cuts 64 bits to 32."""
    assert key(jax.ShapeDtypeStruct(array.shape, array.dtype)) == key(array)


# Arrays whose types show a mesh.


@pytest.fixture
def explicit():
    """Puts an array on a mesh with explicit axes."""
    mesh = mesh_of()
    return lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_an_explicit_sharding_counts(explicit):
    """Where the array's type shows its sharding, mesh and spec count."""
    x = jnp.ones((4, 8))
    values = [x, explicit(x), explicit(x, "x"), explicit(x, None, "x"), explicit(x, "x", "y"), explicit(x, ("x", "y"))]
    assert len({key(v) for v in values}) == len(values)


def test_explicit_mesh_axis_sizes_count():
    """The same spec over an axis of another size is another key."""
    x = jnp.ones((4, 8))
    two, four = (jax.device_put(x, NamedSharding(mesh_of((n,), ("x",)), P("x"))) for n in (2, 4))
    assert key(two) != key(four)


def test_trailing_none_in_a_spec_does_not_count(explicit):
    """P("x") and P("x", None) are one sharding of a matrix."""
    x = jnp.ones((4, 8))
    assert key(explicit(x, "x")) == key(explicit(x, "x", None))


def test_a_tracer_of_an_explicitly_sharded_array_is_the_array(explicit):
    """jit: an explicitly sharded array has the same key inside and outside."""
    value = explicit(jnp.ones((4, 8)), "x")
    assert traced_key(jax.jit, value) == key(value)


def test_the_shape_of_an_explicitly_sharded_array_is_the_array(explicit):
    """A ShapeDtypeStruct with the array's sharding gives the array's key."""
    for spec in [(), ("x",), (None, "y"), (("x", "y"), None)]:
        value = explicit(jnp.ones((4, 8)), *spec)
        assert key(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)) == key(value)


def test_an_automatic_sharding_does_not_count():
    """Where the type does not show the spec, neither does the key: a tracer could not know it."""
    mesh = mesh_of(kind=AxisType.Auto)
    rows, columns = (jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec)) for spec in (P("x"), P(None, "x")))
    assert key(rows) == key(columns) == traced_key(jax.jit, rows)


def test_a_shape_with_an_automatic_sharding_is_the_array():
    """A ShapeDtypeStruct over automatic axes gives the key of the array."""
    value = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh_of(kind=AxisType.Auto), P("x")))
    assert key(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)) == key(value)


def test_local_shapes_count_inside_shard_map():
    """Inside shard_map the key depends on the local shape."""
    mesh = mesh_of((4,), ("x",), AxisType.Auto)
    seen = []

    def body(local):
        seen.append(Invocation("op", (local,), {}).parts["args[0]"])
        return local

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))).trace(jnp.ones((8, 3)))
    assert seen[0].startswith("float32[2,3]")


# What has no stable form.


class Opaque:
    """An object without a stable form."""


def test_an_unsupported_static_value_is_named():
    """A static value without a stable form is a TypeError that names the argument, its type and a way out."""
    with pytest.raises(TypeError, match=r"args\[1\].*Opaque.*key_builder") as caught:
        key(1, Opaque())
    assert isinstance(caught.value, OpsError)


def test_an_unsupported_keyword_is_named():
    """The same for a keyword."""
    with pytest.raises(TypeError, match=r"kwargs\['mode'\].*Opaque"):
        key(mode=Opaque())


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, Opaque()], r"args\[0\]\[1\]"),
        ({"a": (0, [Opaque()])}, r"args\[0\]\['a'\]\[1\]\[0\]"),
        (Options(table=Opaque()), r"args\[0\]\.table"),
        (Options(table={"k": Opaque()}), r"args\[0\]\.table\['k'\]"),
        (functools.partial(jnp.sum, Opaque()), r"args\[0\]\.args\[0\]"),
        (functools.partial(jnp.sum, axis=Opaque()), r"args\[0\]\.keywords\['axis'\]"),
        ({3: Opaque()}, r"args\[0\]\[3\]"),
    ],
    ids=["list", "dict", "dataclass", "dict in dataclass", "partial", "partial keyword", "int key"],
)
def test_a_nested_unsupported_value_is_named_with_its_path(value, path):
    """The message names the place inside the argument."""
    with pytest.raises(TypeError, match=path + r" is a .*Opaque"):
        key(value)


@pytest.mark.parametrize("field", ["batch_axes", "mesh", "in_specs", "out_specs"])
def test_an_unsupported_field_is_named(field):
    """The call's own fields are named in the same way."""
    with pytest.raises(TypeError, match=field):
        _ = Invocation("op", (), {}, **{field: Opaque()}).call_key


def test_an_array_that_jax_does_not_know_is_named():
    """A numpy array of strings is a TypeError that names the argument."""
    with pytest.raises(TypeError, match=r"args\[0\]"):
        key(np.array(["a"]))


def test_a_container_that_holds_itself_is_an_error():
    """A list that contains itself is a clear TypeError, not a crash."""
    loop = []
    loop.append(loop)
    with pytest.raises(TypeError, match=r"args\[0\]"):
        key(loop)


def test_a_dataclass_that_holds_itself_is_an_error():
    """A cycle through a field is a clear TypeError as well."""

    @dataclasses.dataclass
    class Node:
        next: object = None

    node = Node()
    node.next = node
    with pytest.raises(TypeError, match=r"args\[0\]"):
        key(node)


def test_a_pmap_without_an_axis_name_has_one_key():
    """JAX names its axis by an address, which differs from trace to trace and is no part of the call."""
    keys = []

    def look(x):
        keys.append(Invocation("op", (x,), {}).call_key)
        return x

    for _ in range(2):
        jax.make_jaxpr(lambda x: jax.pmap(lambda y: look(y))(x))(jnp.ones((2, 3)))
    assert len(set(keys)) == 1
    jax.make_jaxpr(jax.pmap(look, axis_name="i"))(jnp.ones((2, 3)))
    assert len(set(keys)) == 2
