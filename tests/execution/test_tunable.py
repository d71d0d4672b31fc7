"""A function as a tuned kernel: what it does, what is kept, and which declarations are refused.

Covers `execution/tunable_space.py`.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TableTuner

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    OpsError,
    default_selector,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    tunable,
)
from ejkernel.ops.core.kernel import kernel_path
from ejkernel.ops.execution.default import forget_default

X = jnp.linspace(0.1, 1.0, 32).reshape(8, 4)
Y = jnp.arange(4.0)


class Way(enum.Enum):
    """How it is computed."""

    DIRECT = "direct"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Rows:
    """So many rows at a time."""

    rows: int
    shape: tuple[int, ...] = (1, 2)


def untuned() -> Executor:
    """An executor that never measures."""
    return Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))


@tunable(rows=[2, 4, 8], way=["direct", "blocked"])
def scale(x, y, *, rows, way, factor=1.0):
    """Rows times a vector."""
    if way == "direct":
        return x * y * factor
    return jax.lax.map(lambda block: block * y * factor, x.reshape(-1, rows, x.shape[1])).reshape(x.shape)


@tunable(tile=[(2, 2), (4, 1)], way=list(Way), limit=[None, 0.5], executor=untuned())
def tiled(x, *, tile, way, limit):
    """The sum, whatever the tile."""
    assert isinstance(tile, tuple)
    assert isinstance(way, Way)
    return jnp.sum(x)


@tunable(candidates=[Rows(2), Rows(4)], executor=untuned())
def whole(x, *, cfg):
    """The cfg as it is."""
    return jnp.sum(x.reshape(-1, cfg.rows), axis=1)


# What it computes.


def test_a_function_computes_what_it_did():
    """The first call tunes, the next one answers from memory, and both give the function's own result."""
    for _ in range(2):
        np.testing.assert_allclose(scale(X, Y), X * Y, rtol=1e-6)
    assert default_selector().cache.size() == 1


@pytest.mark.parametrize("cfg", [{"rows": 2, "way": "blocked"}, {"rows": 8, "way": "direct"}])
def test_a_cfg_of_the_call_is_used_as_it_is(cfg):
    """A dict, or a cfg, chooses by hand; nothing is measured."""
    np.testing.assert_allclose(scale(X, Y, factor=2.0, cfg=cfg), 2 * X * Y, rtol=1e-6)
    np.testing.assert_allclose(scale(X, Y, _cfg=scale.cfg_type(**cfg)), X * Y, rtol=1e-6)
    assert scale.choose(X, Y, cfg=cfg) == scale.cfg_type(**cfg)
    assert default_selector().cache.size() == 0


def declared(executor, size):
    """A function as a notebook's cell declares it each time it is run."""

    @tunable(size=size, executor=executor)
    def halves(x, *, size):
        return jnp.sum(x.reshape(size, -1))

    return halves


def test_a_cell_may_be_run_again():
    """The same function declared anew goes on with what was found for it, in memory and in overlays, unmeasured."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner({1: 3.0, 2: 1.0, 4: 2.0, 8: 4.0}))
    executor = Executor(selector)
    for _ in range(2):
        np.testing.assert_allclose(declared(executor, [1, 2])(X), X.sum(), rtol=1e-6)
    assert len(selector.tuner.offered) == 1
    with overlay_cache({selector.cache.keys()[0]: declared(executor, [1, 2]).cfg_type(1)}):
        assert declared(executor, [1, 2]).choose(X).size == 1


def test_a_cell_may_be_run_again_with_other_values():
    """What was found and is not declared any more is tuned again, without a store too."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner({1: 3.0, 2: 1.0, 4: 2.0, 8: 4.0}))
    executor = Executor(selector)
    found = [declared(executor, size).choose(X).size for size in ([1, 2], [4, 8])]
    assert found == [2, 4]


def test_every_transformation_works():
    """jit, grad, vmap, scan, jvp and shard_map, all through the same decorator."""

    @tunable(rows=[2, 4], executor=untuned())
    def times(x, y, *, rows):
        return jax.lax.map(lambda block: block * y, x.reshape(-1, rows, x.shape[1])).reshape(x.shape)

    expected = np.asarray(X * Y)
    np.testing.assert_allclose(jax.jit(times)(X, Y), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: times(x, Y).sum())(X), np.broadcast_to(Y, X.shape), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(times, in_axes=(0, None))(jnp.stack([X, 2 * X]), Y)[1], 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(jax.lax.scan(lambda c, x: (c, times(x, Y)), 0, X[None])[1][0], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(lambda x: times(x, Y), (X,), (X,))[1], expected, rtol=1e-6)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    layout = {"mesh": mesh, "in_specs": (spec, jax.sharding.PartitionSpec()), "out_specs": spec}
    np.testing.assert_allclose(jax.shard_map(times, **layout)(X, Y), expected, rtol=1e-6)
    np.testing.assert_allclose(times(X, Y, method="shard_map", **layout), expected, rtol=1e-6)


def test_a_method_gets_its_instance():
    """An instance that is a hashable value or a tree of arrays is the first argument."""

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Layer:
        weight: jax.Array

        @tunable(rows=[2, 4], executor=untuned())
        def apply(self, x, *, rows):
            return x * self.weight

    layer = Layer(Y)
    np.testing.assert_allclose(layer.apply(X), X * Y, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda layer: layer.apply(X).sum())(layer).weight, X.sum(0), rtol=1e-6)


def test_it_looks_like_the_function():
    """Name, docstring and signature are the function's own, with `cfg` instead of what is tuned."""
    assert (scale.__name__, scale.__doc__) == ("scale", "Rows times a vector.")
    assert str(inspect.signature(scale)) == "(x, y, *, factor=1.0, cfg=None)"
    assert "scale@v0: rows, way" in repr(scale)


# What is chosen.


def test_the_first_values_serve_untuned():
    """Without a heuristic, the first combination does."""
    assert tiled.choose(X) == tiled.cfg_type((2, 2), Way.DIRECT, None)


@pytest.mark.parametrize("heuristic", [{"rows": 4}, lambda x: {"rows": x.shape[0] // 2}])
def test_a_heuristic_is_a_dict_or_a_function_of_the_call(heuristic):
    """It serves where nothing was measured."""

    @tunable(rows=[2, 4, 8], heuristic=heuristic, executor=untuned())
    def total(x, *, rows):
        return jnp.sum(x)

    assert total.choose(X).rows == 4


def test_a_constraint_is_called_as_the_function_is():
    """It rules out candidates for a call, and the first that is left serves untuned."""

    @tunable(rows=[3, 5, 4, 8], constraint=lambda x, *, rows: x.shape[0] % rows == 0 or f"{rows} does not divide")
    def total(x, *, rows):
        return jnp.sum(x.reshape(-1, rows, x.shape[1]), axis=1).sum()

    assert [trial.cfg.rows for trial in total.check(X)] == [4, 8]
    assert total.tune(X).cfg.rows in (4, 8)
    with pytest.raises(TypeError, match=r"leaves no candidate.*7,4.*loosen the constraint"):
        total(X[:7])


def test_a_heuristic_that_the_constraint_forbids_is_an_error_of_the_call():
    """It is named with the reason."""

    @tunable(rows=[2, 4], heuristic={"rows": 2}, constraint=lambda x, *, rows: rows > 2 or "too few rows")
    def total(x, *, rows):
        return jnp.sum(x)

    with pytest.raises(TypeError, match=r"forbids the heuristic.*too few rows"):
        total(X)


def test_a_wrong_candidate_is_found_by_the_reference():
    """`check` compares each candidate with the reference, and tuning never picks a wrong one."""

    @tunable(way=["right", "wrong"], reference=lambda x: 2 * x, heuristic={"way": "wrong"}, tolerance=1e-4)
    def double(x, *, way):
        return 2 * x if way == "right" else 2 * x + 1

    assert {trial.cfg.way: trial.status for trial in double.check(X)} == {"right": "ok", "wrong": "wrong"}
    assert double.tune(X).cfg.way == "right"


def test_example_inputs_are_measured_with():
    """They get a generator and the call's arguments, so that traced integers can be tuned."""
    asked = []

    def draw(rng, x, rows):
        asked.append(rows.shape)
        return x, rng.integers(0, x.shape[0], rows.shape).astype(np.int32)

    @tunable(way=["take", "index"], example_inputs=draw, op_id="taking")
    def take(x, rows, *, way):
        return jnp.take(x, rows, axis=0) if way == "take" else x[rows]

    jax.jit(take)(X, jnp.array([1, 2, 3]))
    assert asked
    assert set(asked) == {(3,)}


def test_an_overlay_reaches_it():
    """Every tier of the selector works."""
    cfg = scale.cfg_type(4, "blocked")
    scale(X, Y)
    (key,) = default_selector().cache.keys()
    with overlay_cache({key: cfg}):
        assert scale.choose(X, Y) == cfg


# What is kept.


def test_the_next_process_finds_what_was_tuned():
    """The pick is on disk under the function's own name, and comes back as the same cfg."""
    picked = scale.tune(X, Y).cfg
    forget_default()
    told = []
    default_selector().on_event = lambda event, **data: told.append((event, data.get("level"), data["cfg"]))
    scale(X, Y)
    assert told == [("cache_hit", "persistent", picked)]
    assert scale.kernel.op_id == f"{__name__}.scale"


def test_values_that_json_changes_come_back_equal():
    """Tuples and enums are looked up among what was declared."""
    from ejkernel.ops import from_json, to_json

    cfg = tiled.cfg_type((4, 1), Way.BLOCKED, 0.5)
    again = from_json(to_json(cfg), tiled.cfg_type)
    assert again == cfg
    assert (again.tile, again.way) == ((4, 1), Way.BLOCKED)
    assert whole(X, cfg=Rows(4)).shape == (8,)


def test_a_stored_value_that_is_no_longer_declared_is_tuned_again():
    """Taking a value out of the list is enough; the old entry does not fit any more."""

    def declare(rows):
        @tunable(rows=rows, op_id="shrinking")
        def total(x, *, rows):
            return jnp.sum(x) * rows / rows

        return total

    first = declare([8, 4])
    key = (device_fingerprint(), "shrinking@v0", first.tune(X).record.key["call_key"])
    default_selector().persistent.put(*key, first.cfg_type(8))
    forget_default()
    assert declare([4, 2]).choose(X).rows in (4, 2)


def test_a_kernel_is_found_again_by_its_path(monkeypatch):
    """The path that a record names leads to the kernel's class, and cfg and kernel can be pickled."""
    module, _, name = kernel_path(scale.kernel).partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(scale.kernel, found)
    assert pickle.loads(pickle.dumps(scale.cfg_type(2, "direct"))) == scale.cfg_type(2, "direct")
    assert type(pickle.loads(pickle.dumps(scale.kernel))) is scale.kernel_type


def test_calls_are_recorded(monkeypatch):
    """Recording sees the kernel and the call."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    scale(X, Y, cfg={"rows": 2, "way": "direct"})
    ((kernel, args, _),) = get_invocations(device_fingerprint())[f"{__name__}.scale@v0"].values()
    assert type(kernel) is scale.kernel_type
    assert [a.shape for a in args] == [X.shape, Y.shape]


# What is refused, and where.

BAD = {
    "nothing to tune": ({}, "needs value lists"),
    "values and candidates": ({"rows": [1], "candidates": [{"rows": 1}]}, "needs value lists"),
    "unknown parameter": ({"columns": [1, 2]}, r"no parameter 'columns'.*it has x, rows, hidden"),
    "empty list": ({"rows": []}, "rows of total has no values"),
    "a string for a list": ({"rows": "ab"}, r"rows='ab' of total is no list.*rows=\['ab'\]"),
    "a number for a list": ({"rows": 4}, r"write rows=\[4\]"),
    "unhashable": ({"rows": [[1, 2]]}, "cannot be hashed; use a tuple"),
    "not JSON": ({"rows": [jnp.float32]}, "cannot be kept in a store"),
    "not finite": ({"rows": [float("nan")]}, "cannot be kept in a store"),
    "alike in a store": ({"rows": [Way.DIRECT, "direct"]}, 'both "direct" in a store'),
    "no candidates": ({"candidates": []}, "candidates of total is empty"),
    "candidates no list": ({"candidates": {"rows": 1}}, "give a list of dicts"),
    "uneven candidates": ({"candidates": [{"rows": 1}, {}]}, "the same parameters"),
    "mixed candidates": ({"candidates": [Rows(1), 2]}, "more than one type"),
    "whole cfg, no parameter": ({"candidates": [Rows(1)]}, "no parameter 'cfg'.*passed whole"),
    "heuristic not declared": ({"rows": [1], "heuristic": {"rows": 3}}, "rows=3 is not declared for total; it has 1"),
    "heuristic incomplete": ({"rows": [1], "heuristic": {}}, "a value for each of rows"),
    "constraint no function": ({"rows": [1], "constraint": True}, "constraint=True of total is no function"),
    "reference no function": ({"rows": [1], "reference": 3}, "reference=3 of total is no function"),
    "tolerance below zero": ({"rows": [1], "tolerance": -1}, "has the tolerance -1; give the largest error"),
    "tolerance no number": ({"rows": [1], "tolerance": "1e-3"}, "has the tolerance '1e-3'"),
    "version no name": ({"rows": [1], "version": [1, 2]}, r"version=\[1, 2\] of total is no version"),
    "executor": ({"rows": [1], "executor": 3}, "is no Executor"),
    "op_id": ({"rows": [1], "op_id": "a b"}, "use letters, digits"),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD)
def test_a_bad_declaration_fails_where_it_is_written(settings, message):
    """Before any call, with a message that says what to do."""

    def total(x, rows=1, *, hidden=0):
        return x

    with pytest.raises(OpsError, match=message):
        tunable(**settings)(total)


def test_a_parameter_must_be_a_keyword_of_the_functions_own():
    """Positional-only ones cannot be filled in, and those of the executor are taken."""

    def positional(rows, /, x):
        return x

    def taken(x, *, rows, mesh):
        return x

    with pytest.raises(TypeError, match="cannot be passed by keyword"):
        tunable(rows=[1])(positional)
    with pytest.raises(TypeError, match="'mesh', a keyword of the executor's own; rename it"):
        tunable(rows=[1])(taken)


def test_what_is_no_plain_function():
    """A class is refused, a lambda needs an op_id, a staticmethod goes above."""
    with pytest.raises(TypeError, match="decorates a function"):
        tunable(rows=[1])(Rows)
    with pytest.raises(TypeError, match="give @tunable an op_id"):
        tunable(rows=[1])(lambda x, *, rows: x)
    named = tunable(rows=[1, 2], op_id="identity", executor=untuned())(lambda x, *, rows: x)
    assert named(X) is not None


def test_a_tuned_parameter_cannot_be_passed_by_itself():
    """The message says how to choose by hand."""
    with pytest.raises(TypeError, match=r"rows of .*scale@v0 is chosen by tuning.*cfg=\{...\}"):
        scale(X, Y, rows=2)


MISFITS = {
    "missing": (lambda f: f(X), "missing 1 required positional argument: 'y'"),
    "too many": (lambda f: f(X, Y, Y), "takes 2 positional arguments but 3"),
    "unknown": (lambda f: f(X, Y, z=1), "got an unexpected keyword argument 'z'"),
    "twice": (lambda f: f(X, Y, x=X), "got multiple values for argument 'x'"),
    "chosen": (lambda f: f.choose(X), "missing 1 required positional argument: 'y'"),
    "tuned": (lambda f: f.tune(X), "missing 1 required positional argument: 'y'"),
    "checked": (lambda f: f.check(X), "missing 1 required positional argument: 'y'"),
    "traced": (lambda f: jax.jit(f)(X), "missing 1 required positional argument: 'y'"),
}


@pytest.mark.parametrize(("call", "words"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("decorate", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_arguments_that_do_not_fit_are_an_error_before_anything_is_tuned(decorate, call, words):
    """In Python's own words, with the function's name."""
    tuner = TableTuner({})

    @tunable(rows=[2, 4], executor=Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner)))
    @decorate
    def double(x, y, *, rows):
        return x + y

    with pytest.raises(TypeError, match=rf"double\(\) {words}") as error:
        call(double)
    assert error.value.__context__ is None, "nothing else is said"
    assert not tuner.calls


def test_a_decorator_may_give_arguments_of_its_own():
    """What it shows of the function inside says nothing about the calls that it takes."""

    def with_y(function):
        @functools.wraps(function)
        def wrapper(x, **chosen):
            return function(x, Y, **chosen)

        return wrapper

    @tunable(rows=[2, 4], executor=untuned())
    @with_y
    def double(x, y, *, rows):
        return x + y

    np.testing.assert_array_equal(double(X), X + Y)


@pytest.mark.parametrize("cfg", [{"rows": 2}, 7, {"rows": 3, "way": "direct"}])
def test_a_cfg_that_does_not_fit_is_refused(cfg):
    """By the names that are missing, or the values that are declared."""
    with pytest.raises(OpsError, match=r"give a value for each of rows, way|give a dict of rows, way|it has 2, 4, 8"):
        scale(X, Y, cfg=cfg)


def test_traced_parameters_are_arrays_whatever_a_call_gives():
    """Three values of a Python number are one program and one tuning, by keyword and by position."""
    tuner = TableTuner({1: 2.0, 2: 1.0})
    traces = []

    @tunable(
        size=[1, 2], traced=("factor", "shift"), executor=Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner))
    )
    def scaled(x, factor, *, shift=0.0, size):
        traces.append(size)
        return x * factor + shift

    def call(value):
        np.testing.assert_allclose(scaled(X, value, shift=value), X * value + value, rtol=1e-6)
        np.testing.assert_allclose(scaled(X, factor=value, shift=value), X * value + value, rtol=1e-6)

    call(1.5)
    known = tuner.calls, len(traces)
    for value in (2.5, -0.0, 2.5):
        call(value)
    assert known[0] == 2
    assert (tuner.calls, len(traces)) == known


def test_a_traced_number_does_not_widen_a_narrow_array():
    """It is weak, as a number that JAX traces is; and gradients reach it."""

    @tunable(size=[1], traced=["factor"], executor=untuned())
    def scaled(x, factor, *, size):
        return x * factor

    assert scaled(X.astype(jnp.bfloat16), 2.0).dtype == jnp.bfloat16
    np.testing.assert_allclose(jax.grad(lambda f: scaled(Y, f).sum())(3.0), Y.sum())


def test_the_other_doors_know_traced_parameters_too():
    """`choose`, `tune` and `check` ask for the call that is made."""
    tuner = TableTuner({1: 2.0, 2: 1.0})

    @tunable(size=[1, 2], traced=("factor",), executor=Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner)))
    def scaled(x, factor, *, size):
        return x * factor

    scaled(X, 1.0)
    assert scaled.choose(X, 2.0).size == scaled.tune(X, 3.0).cfg.size == 2
    assert {trial.status for trial in scaled.check(X, 4.0)} == {"ok"}
    assert len(scaled.executor.chooser.cache.keys()) == 1


@pytest.mark.parametrize(
    ("traced", "words"),
    [("factor", "no list of parameters"), (("size",), "which is tuned"), (("other",), "it has x, factor")],
)
def test_traced_parameters_are_those_of_the_call(traced, words):
    """A name that means nothing is an error where it is written."""
    with pytest.raises(OpsError, match=words):

        @tunable(size=[1, 2], traced=traced)
        def scaled(x, factor, *, size):
            return x * factor
