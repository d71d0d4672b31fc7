"""What a tuning runs on: real values of the right kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing import inputs


def rng():
    return np.random.default_rng(0)


def made(shape, dtype):
    return inputs.random_like(jax.ShapeDtypeStruct(shape, dtype), rng())


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def platform(request, monkeypatch):
    """Has every test draw as a CPU does, and as an accelerator does: that code runs on a CPU as well."""
    monkeypatch.setattr(inputs._jax, "default_platform", lambda: request.param)
    return request.param


FLOATS = [
    *("float32", "float16", "bfloat16", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu"),
]


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_random_finite_and_hardly_ever_zero(dtype):
    """Every kind of float gets values that differ, of its own dtype and shape."""
    array = made((16, 16), jnp.dtype(dtype))
    values = np.asarray(array).astype(np.complex64)

    assert (array.shape, array.dtype) == ((16, 16), jnp.dtype(dtype))
    assert np.isfinite(values).all()
    assert np.mean(values == 0) < 0.1
    assert len(np.unique(values)) > 4


def test_complex_values_have_both_parts():
    """A complex array is not a real one in disguise."""
    values = np.asarray(made((64,), jnp.complex64))

    assert values.real.any()
    assert values.imag.any()


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16"])
def test_wide_integers_are_zero_or_one(dtype):
    """What may be an index stays where no kernel reads out of bounds."""
    array = made((64,), dtype)

    assert array.dtype == dtype
    assert set(np.unique(array).tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4"])
def test_narrow_integers_are_spread(dtype):
    """Quantised data takes every value of its range."""
    array = made((8192,), jnp.dtype(dtype))
    values = np.asarray(array).astype(int)
    bounds = jnp.iinfo(dtype)

    assert array.dtype == jnp.dtype(dtype)
    assert set(values.tolist()) == set(range(int(bounds.min), int(bounds.max) + 1))
    counts = np.unique(values, return_counts=True)[1]
    assert counts.max() < 4 * counts.mean()


def test_booleans_are_mixed():
    """A mask is neither all true nor all false."""
    values = np.asarray(made((64,), bool))

    assert values.any()
    assert not values.all()


@pytest.mark.thinned
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_keys_are_keys_of_the_same_kind(impl, shape):
    """A PRNG key becomes random keys of its shape and implementation."""
    original = jax.random.split(jax.random.key(0, impl=impl), shape) if shape else jax.random.key(0, impl=impl)
    array = inputs.random_like(original, rng())

    assert (array.shape, array.dtype) == (original.shape, original.dtype)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_shape_of_a_key_becomes_a_key_of_the_same_kind(impl):
    """So does the mere shape of one."""
    shape = jax.eval_shape(lambda: jax.random.key(0, impl=impl))

    assert inputs.random_like(shape, rng()).dtype == shape.dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_traced_key_becomes_a_key_of_the_same_kind(impl):
    """So does a tracer of one, inside a jit."""
    dtypes = []

    @jax.jit
    def function(key):
        with jax.core.eval_context():
            dtypes.append(inputs.random_like(key, rng()).dtype)
        return key

    key = jax.random.key(0, impl=impl)
    function(key)

    assert dtypes == [key.dtype]


def test_the_sharding_of_a_committed_array_is_kept():
    """Random values lie where the call's own lie."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.ones((8, 2)), sharding)

    assert inputs.random_like(array, rng()).sharding == sharding


def test_the_sharding_of_a_shape_is_kept():
    """A shape that says where its array lies is filled there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)

    assert inputs.random_like(shape, rng()).sharding == sharding


def test_an_uncommitted_array_stays_uncommitted():
    """Values for an array that JAX may move are not pinned to a device."""
    assert not inputs.random_like(jnp.ones(4), rng()).committed


def test_a_deleted_array_is_replaced():
    """An array that was donated has a shape and no values: random ones take its place."""
    array = jnp.ones(16)
    array.delete()
    (found,) = inputs.concrete([array], rng())

    assert found.shape == (16,)
    assert len(np.unique(found)) > 4


def test_arrays_with_values_stay():
    """What can be read is used as it is."""
    array, numbers = jnp.arange(4.0), np.arange(3)
    found = inputs.concrete([array, numbers], rng())

    assert found[0] is array
    assert found[1] is numbers


def test_fresh_floats_replace_floats_alone():
    """A selector's tuning takes random floats and the call's own integers."""
    zeros, indices, mask = jnp.zeros(16), jnp.arange(3), jnp.ones(3, bool)
    found = inputs.concrete([zeros, indices, mask], rng(), fresh_floats=True)

    assert np.asarray(found[0]).all()
    assert found[1] is indices
    assert found[2] is mask


def test_one_seed_gives_one_set_of_values():
    """The same generator state makes the same arrays, another seed others."""
    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)]
    one, two = inputs.concrete(shapes, rng()), inputs.concrete(shapes, rng())
    other = inputs.concrete(shapes, np.random.default_rng(1))

    assert [a.tolist() for a in one] == [a.tolist() for a in two]
    assert one[0].tolist() != one[1].tolist()
    assert one[0].tolist() != other[0].tolist()


def test_empty_and_scalar_arrays_work():
    """Shapes without an element, or without an axis, are shapes too."""
    assert made((0, 3), jnp.float32).shape == (0, 3)
    assert made((0,), jnp.int32).shape == (0,)
    assert made((), jnp.float32).shape == ()
    assert made((), jnp.complex64).shape == ()
    assert made((), jnp.int8).shape == ()
    assert float(made((), jnp.float32)) != 0
    assert inputs.draw([], 0) == ()


def test_arrays_of_one_draw_differ():
    """Two arguments of one shape and dtype are not one array twice, and neither are parts of them."""
    shapes = [jax.ShapeDtypeStruct((64,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.bfloat16, jnp.int8)]
    one, other, half, narrow = (np.asarray(array).astype(np.float32) for array in inputs.draw(shapes, 3))

    assert len({array.tobytes() for array in (one, other, half, narrow)}) == 4
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.6
    assert abs(np.corrcoef(one, half)[0, 1]) < 0.6


def test_a_draw_is_the_same_every_time():
    """Equal shapes, dtypes and seeds give equal values, in this process, a worker or a later process."""
    shapes = [jax.ShapeDtypeStruct((9, 7), dtype) for dtype in (jnp.float32, jnp.int8, jnp.int32, bool)]
    first, again, other = inputs.draw(shapes, 5), inputs.draw(shapes, 5), inputs.draw(shapes, 6)

    assert [np.asarray(a).tobytes() for a in first] == [np.asarray(a).tobytes() for a in again]
    assert [np.asarray(a).tobytes() for a in first] != [np.asarray(a).tobytes() for a in other]


def test_keys_stand_among_other_arrays():
    """Each array has its own place, whatever is drawn for it."""
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    shapes = [jax.ShapeDtypeStruct((2,), jnp.float32), key, jax.ShapeDtypeStruct((4,), jnp.int32)]

    assert [(a.shape, a.dtype) for a in inputs.draw(shapes, 0)] == [(s.shape, s.dtype) for s in shapes]


def test_a_large_array_repeats_a_block_at_an_odd_place():
    """Every number of it would take longer than a tuning; its rows are not alike all the same."""
    array = np.asarray(made((3, 1 << 20), jnp.float32))

    assert np.isfinite(array).all()
    assert np.mean(array == 0) < 1e-5
    assert (np.abs(array.std(axis=1) - 1) < 0.01).all()
    assert not np.array_equal(array[0], array[1])
    assert not np.array_equal(array[1], array[2])


def test_a_large_array_of_bytes_has_every_value():
    """Beyond the block too."""
    array = np.asarray(made((2, 1 << 20), jnp.int8))

    assert all(len(np.unique(row)) == 256 for row in array)
    assert not np.array_equal(array[0], array[1])


def test_an_accelerator_gets_one_block_of_numbers(platform, monkeypatch):
    """It fills its arrays itself, however many and large they are."""
    copied = []
    real = inputs._spread

    def spread(specs, block, starts):
        copied.append(block.nbytes + starts.nbytes)
        return real(specs, block, starts)

    monkeypatch.setattr(inputs, "_spread", spread)
    shapes = [jax.ShapeDtypeStruct((1 << 20, 4), jnp.float32)] * 2
    inputs.draw(shapes, 0)

    assert copied == ([] if platform == "cpu" else [4 * inputs._BLOCK + 4 * len(shapes)])


def test_taking_a_call_apart_keeps_its_constants():
    """Array leaves come out in order and go back to their places; everything else never moves."""
    one, two = jnp.ones(2), np.float32(3)
    call = inputs.flatten_call((one, 5, {"deep": [two, "text"]}), {"flag": True, "none": None})
    args, kwargs = call.rebuild(["first", "second"])

    assert [id(leaf) for leaf in call.leaves] == [id(one), id(two)]
    assert args == ("first", 5, {"deep": ["second", "text"]})
    assert kwargs == {"flag": True, "none": None}
