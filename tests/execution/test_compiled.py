"""`compile`: a jitted function with its cfg fixed for good, its defaults, and functions compiled ahead of time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import (
    Asked,
    Counting,
    OwnCubic,
    Picking,
    Product,
    Times,
    close,
    executor_with,
    key_for,
    mesh_of,
    put,
)
from jax.sharding import PartitionSpec as P

from ejkernel.ops import AutotunePolicy, Executor, overlay_cache, refresh

X = jnp.arange(1.0, 5.0)


@pytest.fixture
def kernel():
    return Times.fresh()()


def test_a_compiled_function_runs_with_the_cfg_of_its_example(kernel):
    """The cfg is chosen when `compile` is called."""
    chooser = Asked(7)
    compiled = Executor(chooser).compile(kernel, X)
    assert chooser.count == 1
    close(compiled(X + 1), (X + 1) * 7)


def test_a_compiled_function_is_jitted(kernel):
    """It is traced once, and can be lowered like any jitted function."""
    compiled = executor_with().compile(kernel, X)
    for _ in range(4):
        compiled(X)
    assert len(kernel.log) == 1
    close(compiled.lower(X).compile()(X), X * 2)


@pytest.mark.parametrize("spelling", ["cfg", "_cfg"])
def test_a_compiled_function_may_be_given_its_cfg(spelling, kernel):
    """`cfg=`, in both spellings, is what it runs with."""
    close(executor_with().compile(kernel, X, **{spelling: 11})(X), X * 11)


CHANGES = {
    "put": lambda executor, kernel: put(executor, kernel, 7, X),
    "clear": lambda executor, kernel: executor.chooser.cache.clear(),
    "policy": lambda executor, kernel: setattr(executor.chooser, "policy", AutotunePolicy()),
    "refresh": lambda executor, kernel: (put(executor, kernel, 7, X), refresh()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_changes_a_compiled_function(change, kernel):
    """Its cfg is fixed: for warm calls, for new shapes and for gradients."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    compiled = executor.compile(kernel, X)
    close(compiled(X), X * 2)
    CHANGES[change](executor, kernel)
    close(compiled(X), X * 2)
    close(compiled(X[:2]), X[:2] * 2)
    close(jax.grad(lambda x: compiled(x).sum())(X), jnp.full(4, 2.0))


def test_an_overlay_does_not_change_a_compiled_function(kernel):
    """Also where it is first called inside one."""
    executor = executor_with()
    compiled = executor.compile(kernel, X)
    with overlay_cache({key_for(kernel, X): 9}):
        close(compiled(X), X * 2)
        inside = executor.compile(kernel, X)
    close(inside(X), X * 9)


def test_a_chooser_that_changes_its_mind_does_not_change_a_compiled_function(kernel):
    """The chooser is asked when `compile` is called and never again, whatever it would answer now."""
    chooser = Asked(2, 3, 4, 5, 6)
    compiled = Executor(chooser).compile(kernel, X)
    close(compiled(X), X * 2)
    close(compiled(X[:2]), X[:2] * 2)
    assert chooser.count == 1


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_changes_a_function_compiled_ahead_of_time(change, kernel):
    """A user's lowered and compiled program keeps its cfg."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    compiled = jax.jit(lambda x: executor(kernel, x)).lower(X).compile()
    CHANGES[change](executor, kernel)
    with overlay_cache({key_for(kernel, X): 9}):
        close(compiled(X), X * 2)


class Powers(Counting):
    """Static values by position and by keyword."""

    op_id = "powers"

    def run(self, x, n=1, *, scale=1.0, name="plain", offset=None, cfg):
        self.log.append((n, scale, name))
        assert isinstance(n, int)
        assert isinstance(scale, float)
        out = x**n * scale
        return out if offset is None else out + offset


def test_static_example_keywords_are_defaults():
    """They need not be given again, and may be given anew."""
    kernel = Powers.fresh()()
    compiled = executor_with().compile(kernel, X, scale=3.0, name="given")
    close(compiled(X), X * 3)
    close(compiled(X, scale=4.0), X * 4)
    assert kernel.log == [(1, 3.0, "given"), (1, 4.0, "given")]


def test_array_example_keywords_are_no_defaults():
    """An array is an argument of every call."""
    kernel = Powers.fresh()()
    compiled = executor_with().compile(kernel, X, offset=X)
    close(compiled(X, offset=X + 1), X + X + 1)
    close(compiled(X), X)


def test_a_static_example_argument_by_position():
    """It is static in the compiled function too."""
    kernel = Powers.fresh()()
    compiled = executor_with().compile(kernel, X, 2)
    close(compiled(X, 2), X**2)
    close(compiled(X, 3), X**3)


def test_static_values_inside_a_tree_stay_static():
    """A dict of arrays and numbers: the numbers are constants, as in a call."""

    class Tree(Counting):
        op_id = "tree"

        def run(self, settings, *, cfg):
            assert isinstance(settings["n"], int)
            assert isinstance(settings["name"], str)
            return settings["x"] ** settings["n"]

    executor = executor_with()
    settings = {"x": X, "n": 2, "name": "square"}
    close(executor(Tree(), settings), X**2)
    close(executor.compile(Tree(), settings)(settings), X**2)


def test_a_static_list_may_be_given_anew():
    """What a call takes as a static keyword, the compiled function takes."""

    class Listed(Counting):
        op_id = "list"

        def run(self, x, *, sizes, cfg):
            return x * sum(sizes)

    compiled = executor_with().compile(Listed(), X, sizes=[1, 2])
    close(compiled(X), X * 3)
    close(compiled(X, sizes=[3, 4]), X * 7)


def test_compile_takes_shapes_as_examples(kernel):
    """No array is needed to compile for one."""
    compiled = executor_with().compile(kernel, jax.ShapeDtypeStruct((4,), jnp.float32))
    close(compiled(X), X * 2)


def test_compile_learns_what_a_call_then_uses(kernel):
    """A tuning for `compile` is one for the eager call of the same shapes."""
    tuner = Picking()
    executor = executor_with(tuner)
    close(executor.compile(kernel, X)(X), X * 5)
    close(executor(kernel, X), X * 5)
    assert tuner.calls == 1


def test_a_compiled_function_runs_no_tuning_for_other_shapes(kernel):
    """Its cfg is fixed, so there is nothing to choose."""
    tuner = Picking()
    compiled = executor_with(tuner).compile(kernel, X)
    compiled(X), compiled(X[:2]), compiled(jnp.ones((2, 2)))
    assert tuner.calls == 1


def test_a_compiled_function_with_prepare():
    """`prepare` is part of it."""

    class Flat(Times.fresh()):
        op_id = "flat"

        def prepare(self, x, **kwargs):
            return (x.ravel(),), kwargs

    chooser = Asked(3)
    compiled = Executor(chooser).compile(Flat(), jnp.ones((2, 2)))
    assert chooser.last.shapes == ((4,),)
    close(compiled(jnp.ones((2, 2))), jnp.full(4, 3.0))


def test_a_compiled_sharded_function():
    """Every keyword of a call is one of `compile`."""

    class Local(Counting):
        op_id = "local"

        def run(self, x, *, cfg):
            return x + x.sum()

    keywords = {
        "method": "shard_map",
        "mesh": mesh_of(2),
        "in_specs": (P("i"),),
        "out_specs": P("i"),
        "check_vma": True,
    }
    compiled = executor_with().compile(Local(), X, stamp=False, **keywords)
    close(compiled(X), jnp.concatenate([p + p.sum() for p in jnp.split(X, 2)]))


@pytest.mark.parametrize("method", ["pmap", "shardmap"])
def test_compile_refuses_an_unknown_method(method, kernel):
    """At once, with the same error as a call."""
    with pytest.raises((TypeError, ValueError), match=rf"(?s){method}.*times@v0"):
        executor_with().compile(kernel, X, method=method)


def test_a_compiled_own_gradient():
    """Gradients of a compiled function are the kernel's own."""
    compiled = executor_with().compile(OwnCubic.fresh()(), X)
    close(jax.grad(lambda x: compiled(x).sum())(X), 1.5 * X * X + 1)
    product = executor_with().compile(Product.fresh()(), X, X)
    close(jax.grad(lambda a, b: product(a, b).sum(), (0, 1))(X, X + 1), (X + 1, X))


def test_a_compiled_function_under_transformations(kernel):
    """It can be mapped, scanned and jitted again."""
    compiled = executor_with().compile(kernel, X)
    rows = jnp.stack([X, X + 1])
    close(jax.vmap(compiled)(rows), rows * 2)
    close(jax.jit(lambda r: jax.lax.map(compiled, r))(rows), rows * 2)


def test_a_compiled_function_never_donates(kernel):
    """Its arguments are alive after the call."""
    x = jnp.arange(3.0)
    executor_with().compile(kernel, x)(x)
    np.testing.assert_array_equal(x, [0, 1, 2])


def test_integers_of_the_example_are_measured_with():
    """`compile` has the example's arrays at hand: its integers, not random ones."""

    class Take(Counting):
        op_id = "take"

        def run(self, x, index, *, cfg):
            return x[index]

    tuner = Picking()
    index = jnp.array([3, 1])
    close(executor_with(tuner).compile(Take(), X, index)(X, index), X[index])
    assert tuner.integers == [[[3, 1]]]


class Weighted(Counting):
    """The argument times an attribute, which lies in containers of several kinds."""

    op_id = "weighted.compiled"

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.factors = {"list": [factor], "array": np.full(3, factor, np.float32)}

    def run(self, x, *, cfg):
        return x * self.factor + self.factors["list"][0] + float(self.factors["array"][0])


def test_a_compiled_kernel_keeps_its_attributes():
    """What is changed later, in place too, reaches no shape of a function that was compiled before."""
    kernel = Weighted(2.0)
    fn = executor_with().compile(kernel, X)
    kernel.factor = kernel.factors["list"][0] = 5.0
    kernel.factors["array"][:] = 5.0
    for x in (X, jnp.ones(7)):
        close(fn(x), x * 2.0 + 4.0)
