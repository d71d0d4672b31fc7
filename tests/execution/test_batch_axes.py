"""The batch around a call: found under vmap, part of the key, and tuned after `prepare`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, OwnCubic, Picking, Times, close, executor_with

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner

EXAMPLE = jnp.arange(3.0)


def asked_under(wrap, kernel=None, *args):
    """What a chooser is asked where the call stands inside `wrap`."""
    chooser = Asked(2)
    executor, kernel = Executor(chooser), kernel or Times.fresh()()
    wrap(lambda *each: executor(kernel, *each))(*args)
    return chooser


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_vmap_shows_as_size_and_axis(around):
    """One vmap over the second axis: the example's shape, the batch's size and the axis it lies on."""
    chooser = asked_under(lambda f: around(jax.vmap(f, in_axes=1)), None, jnp.ones((3, 5)))
    assert chooser.last.shapes == ((3,),)
    [(size, axes)] = chooser.last.batch_axes
    assert size == 5
    assert tuple(axes) == (1,)
    assert chooser.count == 1


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_nested_vmaps_show_innermost_first(around):
    """The vmap next to the call comes first."""
    chooser = asked_under(lambda f: around(jax.vmap(jax.vmap(f))), None, jnp.ones((7, 5, 3)))
    assert chooser.last.shapes == ((3,),)
    assert chooser.last.batch_sizes == [5, 7]


def test_arguments_outside_the_batch_have_no_axis():
    """None stands where an argument is the same for the whole batch."""

    class Add(Counting):
        op_id = "add"

        def run(self, a, b, *, cfg):
            return a + b

    chooser = asked_under(lambda f: jax.vmap(f, in_axes=(None, 0)), Add(), EXAMPLE, jnp.ones((5, 3)))
    [(size, axes)] = chooser.last.batch_axes
    assert (size, tuple(axes)) == (5, (None, 0))


def test_a_call_without_a_vmap_has_no_batch():
    """Nothing around, nothing said."""
    assert asked_under(lambda f: f, None, EXAMPLE).last.batch_axes is None


def test_the_batch_is_part_of_the_key():
    """One example and batches of two sizes are three keys."""
    chooser = Asked(2)
    executor, kernel = Executor(chooser), Times.fresh()()
    executor(kernel, EXAMPLE)
    for size in (4, 5):
        jax.vmap(lambda x: executor(kernel, x))(jnp.ones((size, 3)))
    assert len({question.call_key for question in chooser.questions}) == 3


@pytest.mark.parametrize(
    "inside",
    [jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x[None])[1][0]],
    ids=["jit", "checkpoint", "scan"],
)
def test_a_vmap_outside_what_holds_the_call_is_not_seen(inside):
    """The key is then one example's."""
    chooser = asked_under(lambda f: jax.vmap(inside(f)), None, jnp.ones((5, 3)))
    plain = asked_under(lambda f: f, None, EXAMPLE)
    assert chooser.last.call_key == plain.last.call_key


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("derivative", [jax.grad, lambda f: jax.value_and_grad(f)], ids=["grad", "value_and_grad"])
@pytest.mark.parametrize("kernel", [Times, OwnCubic], ids=["plain", "own gradient"])
def test_the_batch_is_seen_through_a_gradient(kernel, derivative, around):
    """Per-example gradients are tuned for the batch that they run as."""
    wrap = lambda f: around(jax.vmap(derivative(lambda x: f(x).sum())))  # noqa: E731
    chooser = asked_under(wrap, kernel.fresh()(), jnp.ones((5, 3)))
    assert chooser.last.batch_sizes == [5]
    assert chooser.count == 1


class Turned(Counting):
    """A `prepare` that moves the arrays around."""

    op_id = "turned"

    def prepare(self, x, bias):
        return (bias, x.T), {}

    def run(self, bias, x, *, cfg):
        return x + bias


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_the_batch_s_axes_are_those_after_prepare(around):
    """What is tuned is the prepared call: its shapes, its order of arguments, its axes."""
    tuner = Picking()
    executor = executor_with(tuner)
    x, bias = jnp.ones((2, 3, 5)), jnp.ones(())
    call = around(jax.vmap(lambda each: executor(Turned(), each, bias), in_axes=2))
    np.testing.assert_array_equal(call(x), jnp.full((5, 3, 2), 2.0))
    [shapes] = tuner.shapes
    assert shapes[0] == ()
    assert sorted(shapes[1]) == [2, 3, 5]


def test_eager_and_jitted_batches_have_one_key():
    """Also behind a `prepare`."""
    keys = set()
    for around in (lambda f: f, jax.jit):
        wrap = lambda f, around=around: around(jax.vmap(f, in_axes=(2, None)))  # noqa: E731
        keys.add(asked_under(wrap, Turned(), jnp.ones((2, 3, 5)), jnp.ones(())).last.call_key)
    assert len(keys) == 1


def test_a_batch_of_trees():
    """Each array of an argument has its axis."""

    class Sum(Counting):
        op_id = "sum"

        def run(self, pair, *, cfg):
            return pair["a"] + pair["b"]

    chooser = asked_under(
        lambda f: jax.vmap(f, in_axes=({"a": 1, "b": None},)), Sum(), {"a": jnp.ones((3, 5)), "b": jnp.ones(3)}
    )
    [(size, axes)] = chooser.last.batch_axes
    assert (size, tuple(axes)) == (5, (1, None))


def test_two_batch_sizes_run_with_their_own_programs():
    """The same eager vmap with another size gives right values."""
    executor, kernel = executor_with(), Times.fresh()()
    for size in (2, 5, 2):
        x = jnp.ones((size, 3))
        close(jax.vmap(lambda y: executor(kernel, y))(x), x * 2)


def test_a_kernel_that_sums_over_the_batch():
    """A named batch axis can be used inside the kernel, and its batch is tuned like any other."""

    class Centred(Counting):
        op_id = "centred"

        def run(self, x, *, cfg):
            return x - jax.lax.pmean(x, "batch")

    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    executor = Executor(selector)
    x = jnp.arange(6.0).reshape(2, 3)
    for around in (lambda f: f, jax.jit):
        close(around(jax.vmap(lambda y: executor(Centred(), y), axis_name="batch"))(x), x - x.mean(0))
    assert selector.cache.size() == 1
