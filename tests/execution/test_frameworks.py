"""Kernel calls inside the frameworks that models are written in: values, gradients and training steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import OwnCubic, Picking, close, executor_with

pytestmark = pytest.mark.engines

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def cubic(x):
    """What the kernel computes, without it."""
    return x * x * x * 0.5 + x


@pytest.fixture
def tuner():
    return Picking()


@pytest.fixture
def call(tuner):
    """A kernel with a gradient of its own, behind an executor."""
    executor, kernel = executor_with(tuner), OwnCubic.fresh()()
    return lambda x: executor(kernel, x)


def test_a_flax_module_calls_a_kernel(call, tuner):
    """Under `nnx.jit` and `nnx.grad`, after one tuning."""
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, activation):
            self.scale = nnx.Param(jnp.full(4, 2.0))
            self.activation = activation

        def __call__(self, x):
            return self.activation(x * self.scale[...])

    layer, plain = Layer(call), Layer(cubic)

    def loss(layer, x):
        return (layer(x) ** 2).sum()

    close(nnx.jit(lambda layer, x: layer(x))(layer, X), plain(X))
    found, wanted = (nnx.jit(nnx.grad(loss))(one, X) for one in (layer, plain))
    close(nnx.to_pure_dict(found), nnx.to_pure_dict(wanted))
    assert tuner.calls == 1


def test_a_flax_linen_module_calls_a_kernel(call, tuner):
    """With parameters outside, under `jax.jit` and `jax.grad`."""
    from flax import linen

    class Layer(linen.Module):
        activation: object

        @linen.compact
        def __call__(self, x):
            return self.activation(linen.Dense(4)(x))

    layer, plain = Layer(call), Layer(cubic)
    variables = plain.init(jax.random.key(0), X)

    def loss(layer):
        return jax.jit(jax.grad(lambda variables: layer.apply(variables, X).sum()))

    close(loss(layer)(variables), loss(plain)(variables))
    assert tuner.calls == 1


def test_an_equinox_module_calls_a_kernel(call, tuner):
    """Under `filter_jit`, `filter_vmap` and `filter_value_and_grad`."""
    import equinox

    class Layer(equinox.Module):
        linear: equinox.nn.Linear
        activation: object = equinox.field(static=True)

        def __call__(self, x):
            return self.activation(self.linear(x))

    linear = equinox.nn.Linear(4, 4, key=jax.random.key(0))

    @equinox.filter_jit
    @equinox.filter_value_and_grad
    def loss(layer, x):
        return equinox.filter_vmap(layer)(x).sum()

    (value, gradient), (wanted, wanted_gradient) = (loss(Layer(linear, f), X) for f in (call, cubic))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    close(gradient.linear, wanted_gradient.linear)
    assert tuner.calls == 1


def test_optax_trains_through_a_kernel_as_through_the_bare_function(call, tuner):
    """The losses of five jitted steps, with one tuning in all."""
    import optax

    optimizer = optax.adam(0.1)

    def losses(function):
        @jax.jit
        def step(scale, state):
            value, gradient = jax.value_and_grad(lambda scale: (function(X * scale) ** 2).sum())(scale)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(scale, updates), state, value

        scale = jnp.ones(4)
        state = optimizer.init(scale)
        for _ in range(5):
            scale, state, value = step(scale, state)
            yield float(value)

    found = list(losses(call))
    np.testing.assert_allclose(found, list(losses(cubic)), rtol=1e-4)
    assert found == sorted(found, reverse=True)
    assert tuner.calls == 1
