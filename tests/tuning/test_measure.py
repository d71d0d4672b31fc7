"""`Tuner.measure`: how long one function takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import ListClock, Ran

from ejkernel.ops import OpsError, Tuner


def test_settings_are_attributes():
    """`warmup` and `iters` are kept under their names and have the documented defaults."""
    tuner = Tuner()
    other = Tuner(4, 7)

    assert (tuner.warmup, tuner.iters) == (1, 3)
    assert (other.warmup, other.iters) == (4, 7)


def test_further_settings_are_keyword_only():
    """Two arguments may come by position."""
    with pytest.raises(TypeError):
        Tuner(1, 3, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup": -1},
        {"warmup": 1.5},
        {"warmup": True},
        {"warmup": "1"},
        {"iters": 0},
        {"iters": -3},
        {"iters": None},
        {"seconds": 0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_a_value_error(wrong):
    """The message names the setting, and the error is one of ours."""
    with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
        Tuner(**wrong)

    assert isinstance(caught.value, OpsError)


@pytest.mark.parametrize(("warmup", "iters"), [(0, 1), (1, 3), (2, 5)])
def test_it_runs_exactly_as_often_as_asked(warmup, iters):
    """`warmup` and then `iters` runs, not one more: counted where the compiled program runs."""
    ran = Ran()
    Tuner(warmup, iters).measure(ran.make_fn("cfg"), jnp.ones(4))

    assert len(ran.log) == warmup + iters


def test_it_returns_seconds():
    """The answer of the real clock is a positive float."""
    seconds = Tuner().measure(lambda x: x @ x, jnp.ones((32, 32)))

    assert isinstance(seconds, float)
    assert seconds > 0


@pytest.mark.parametrize(("times", "middle"), [([5.0, 1.0, 3.0], 3.0), ([9.0], 9.0), ([1.0, 2.0, 8.0, 4.0], 3.0)])
def test_it_is_the_median(times, middle):
    """One slow run does not move the answer."""
    assert Tuner(0, len(times), clock=ListClock(times)).measure(jnp.sin, jnp.ones(4)) == middle


def test_the_record_has_the_samples():
    """What was measured can be read afterwards."""
    tuner = Tuner(0, 3, clock=ListClock([5.0, 1.0, 3.0]))
    tuner.measure(jnp.sin, jnp.ones(4))

    assert tuner.record.trials[0].samples_s == (5.0, 1.0, 3.0)
    assert tuner.record.clock == "list"
    assert tuner.record.objective == "forward"
    assert tuner.record.trials[0].message == ""


# What is an argument and what is a constant.


def kinds_of(*args, **kwargs):
    """For each leaf: is it traced, or the very value that was given?"""
    seen = {}

    def fn(*args, **kwargs):
        for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=lambda x: x is None):
            seen[jax.tree_util.keystr(path)] = leaf
        return jnp.zeros(())

    Tuner(0, 1).measure(fn, *args, **kwargs)
    return {name: isinstance(leaf, jax.core.Tracer) for name, leaf in seen.items()}, list(seen.values())


@pytest.mark.parametrize("leaf", [jnp.ones(3), np.ones(3), np.float32(2), np.int64(3), np.bool_(True)], ids=repr)
def test_arrays_are_traced(leaf):
    """JAX arrays, numpy arrays and numpy scalars are arguments, also deep inside and by keyword."""
    traced, _ = kinds_of(leaf, [leaf, {"a": leaf}], key=(leaf,))

    assert len(traced) == 4
    assert all(traced.values())


@pytest.mark.parametrize(
    "leaf", [3, 2.5, True, "text", None, jnp.float32, jnp.sin, 1j], ids=lambda leaf: type(leaf).__name__
)
def test_everything_else_is_constant(leaf):
    """Python values reach the function as they are."""
    _, leaves = kinds_of(jnp.ones(2), leaf, {"deep": [leaf]}, key=leaf)

    assert [value is leaf for value in leaves[1:]] == [True, True, True]


def test_a_shape_becomes_random_values():
    """`jax.ShapeDtypeStruct` arguments are filled with values that are not zero."""
    seen = []

    def fn(x):
        return x * jax.pure_callback(lambda v: _noted(seen, v), jax.ShapeDtypeStruct((), x.dtype), x)

    Tuner(0, 1).measure(fn, jax.ShapeDtypeStruct((64,), jnp.float32))

    assert seen[0].shape == (64,)
    assert seen[0].all()
    assert len(np.unique(seen[0])) > 32


def _noted(seen, values):
    seen.append(np.asarray(values))
    return np.float32(1)


def test_values_that_are_there_are_used():
    """Concrete arguments are measured as they are given."""
    seen = []

    def fn(x):
        return x * jax.pure_callback(lambda v: _noted(seen, v), jax.ShapeDtypeStruct((), x.dtype), x)

    Tuner(0, 1).measure(fn, jnp.arange(4.0))

    assert seen[0].tolist() == [0, 1, 2, 3]


def test_a_donated_array_is_measured():
    """An array that was deleted is replaced by random values."""
    array = jnp.ones(8)
    array.delete()

    assert Tuner(0, 1).measure(jnp.sin, array) > 0


def test_sharded_arrays_stay_where_they_are():
    """The program is compiled for the devices of its arguments."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    devices = []

    class Where:
        name = "where"

        def time(self, call, leaves, calls):
            devices.append(jax.block_until_ready(call(*leaves)).sharding.device_set)
            return 1.0

    Tuner(0, 1, clock=Where()).measure(jnp.sin, jax.device_put(jnp.ones(8), sharding))

    assert devices == [set(jax.devices()[:4])]


TRACES = {
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "scan": lambda f, x: jax.lax.scan(lambda carry, y: (f(carry), y), x, jnp.arange(2)),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda y: f(y).sum()))(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "shard_map": lambda f, x: jax.shard_map(
        f,
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), "x"),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )(x),
}


@pytest.mark.parametrize("trace", TRACES)
def test_inside_a_trace_it_runs_for_real(trace):
    """Called with tracers it runs on random arrays of their shape, as often as asked, and the trace goes on."""
    seen, seconds = [], []

    def measured(x):
        return x * jax.pure_callback(lambda v: _noted(seen, v), jax.ShapeDtypeStruct((), x.dtype), x)

    def function(x):
        if not seconds:
            seconds.append(Tuner(1, 2).measure(measured, x))
        return x * 2

    TRACES[trace](function, jnp.zeros(5))

    assert isinstance(seconds[0], float)
    assert len(seen) == 3
    assert all(values.shape == (5,) and values.all() for values in seen)


# Forward and backward.


def counted(forward, backward):
    """A function whose two passes say when they really run."""

    def tell(log):
        return jax.pure_callback(
            lambda: (log.append(1), np.float32(2))[1], jax.ShapeDtypeStruct((), np.float32), vmap_method="sequential"
        )

    @jax.custom_vjp
    def fn(x):
        return x * tell(forward)

    fn.defvjp(lambda x: (x * tell(forward), x), lambda x, dy: (dy * tell(backward),))
    return fn


def tagged(fn):
    def call(*args, **kwargs):
        return fn(*args, **kwargs)

    call._ejk_validate_backward = True
    return call


def test_the_tag_measures_forward_and_gradient_together():
    """Each of the runs has both passes, and the record says so."""
    forward, backward = [], []
    tuner = Tuner(1, 3)
    tuner.measure(tagged(counted(forward, backward)), jnp.ones(4))

    assert (len(forward), len(backward)) == (4, 4)
    assert tuner.record.objective == "forward+backward"


def test_without_the_tag_there_is_no_gradient():
    """A plain function is timed forward."""
    forward, backward = [], []
    Tuner(1, 3).measure(counted(forward, backward), jnp.ones(4))

    assert (len(forward), len(backward)) == (4, 0)


def test_integers_among_the_arguments_are_not_differentiated():
    """Only floating-point arguments get a gradient; the others are passed along."""
    tuner = Tuner(0, 1)
    tuner.measure(tagged(lambda x, i, n: x[i] * n), jnp.ones(4), jnp.array([0, 1]), 3)

    assert tuner.record.objective == "forward+backward"


def test_integer_outputs_beside_floats_are_no_obstacle():
    """Outputs without a gradient take part forward."""
    tuner = Tuner(0, 1)
    tuner.measure(tagged(lambda x: (x * 2, jnp.argmax(x))), jnp.arange(4.0))

    assert tuner.record.objective == "forward+backward"


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16"])
def test_other_floats_have_gradients_too(dtype):
    """Complex and narrow floats are differentiated."""
    tuner = Tuner(0, 1)
    tuner.measure(tagged(lambda x: x * x), jnp.ones(4, dtype))

    assert tuner.record.objective == "forward+backward"


def no_rule(x):
    return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def loops(x):
    return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c + 1, x)


@pytest.mark.parametrize(
    ("fn", "argument"),
    [(no_rule, jnp.ones(4)), (loops, jnp.ones(4)), (lambda x: x + 1, jnp.arange(3))],
    ids=["no rule", "while loop", "integers alone"],
)
def test_what_cannot_be_differentiated_is_timed_forward(fn, argument):
    """It is measured all the same, and the record says what and why."""
    tuner = Tuner(0, 1)
    seconds = tuner.measure(tagged(fn), argument)

    assert seconds > 0
    assert tuner.record.objective == "forward"
    assert "differentiate" in tuner.record.trials[0].message


# What cannot be jitted.


PRECOMPILED = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()

UNJITTABLE = {
    "a branch on a value": lambda x: x * 2 if x.sum() > 0 else x,
    "a float of a value": lambda x: x * float(x.sum()),
    "a numpy array of it": lambda x: np.asarray(x) * 2,
    "a loop over a value": lambda x: sum(range(int(x.sum()))),
    "a value as an index": lambda x: [1, 2, 3, 4, 5][x.astype(int)[0]],
    "a selection by a mask": lambda x: x[x > 0],
    "a compiled function": lambda x: PRECOMPILED(x),
}


@pytest.mark.parametrize("name", UNJITTABLE)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradient"])
def test_what_cannot_be_jitted_is_timed_as_it_is(name, backward):
    """It runs as plain Python, exactly as often as asked, and the record says so."""
    runs = []

    def fn(x):
        out = UNJITTABLE[name](x)
        runs.append(1)
        return out

    tuner = Tuner(2, 3)
    seconds = tuner.measure(tagged(fn) if backward else fn, jnp.ones(4))

    assert seconds > 0
    assert len(runs) == 5
    assert "jit" in tuner.record.trials[0].message


def test_an_error_of_the_function_is_the_callers():
    """What fails for its own reasons is not hidden."""

    def fn(x):
        raise ZeroDivisionError("by design")

    with pytest.raises(ZeroDivisionError, match="by design"):
        Tuner().measure(fn, jnp.ones(4))
