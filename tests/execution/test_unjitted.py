"""Kernels that cannot be jitted: what runs as it is, and what is said about it."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Counting, close, executor_with

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner

X = jnp.arange(1.0, 4.0)
TWO = jnp.float32(2.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    """A function of JAX's own that takes no traced factor."""
    return x * factor


scaled.defvjp(lambda x, factor: (x * factor, ()), lambda factor, residuals, dy: (dy * factor,))


class Scaled(Counting):
    """An array where a concrete value is needed."""

    op_id = "unjitted.scaled"

    def run(self, x, factor, *, cfg):
        self.log.append(cfg)
        return scaled(x, factor)


def test_a_traced_value_in_nondiff_argnums_runs_unjitted_and_is_said_once():
    """Right every time, with a value of its own every time."""
    executor, kernel = executor_with(), Scaled.fresh()()
    with pytest.warns(UserWarning, match=r"unjitted.scaled@v0 looks at values.*without jit"):
        close(executor(kernel, X, TWO), X * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(executor(kernel, X, jnp.float32(3.0)), X * 3)
        close(executor(kernel, jnp.ones(5), TWO), jnp.ones(5) * 2)


def test_a_kernel_with_nondiff_argnums_is_differentiated_unjitted():
    """As it is when it is called by hand."""
    executor, kernel = executor_with(), Scaled.fresh()()
    with pytest.warns(UserWarning, match="without jit"):
        close(jax.grad(lambda x: executor(kernel, x, TWO).sum())(X), jnp.full(3, 2.0))


def test_a_kernel_with_nondiff_argnums_is_tuned_as_it_is():
    """Its candidates are timed without jit, and the record says so."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1, isolate=False))
    executor, kernel = Executor(selector), Scaled.fresh()()
    with pytest.warns(UserWarning, match="without jit"):
        close(executor(kernel, X, TWO), X * 2)
    [key] = selector.cache.keys()
    notes = [trial.message for trial in selector.record_of(key).trials]
    assert all("cannot be jitted, timed as it is" in note for note in notes)


def test_a_kernel_that_lets_its_tracers_escape_fails_as_it_did():
    """Without jit it fails too: its error is JAX's own, and nothing is said about jit."""
    escaped = []

    class Leaks(Counting):
        op_id = "unjitted.leaks"

        def run(self, x, *, cfg):
            escaped.append(x)
            return x + escaped[0].sum()

    executor = executor_with()
    executor(Leaks(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(jax.errors.UnexpectedTracerError):
            executor(Leaks(), jnp.ones(5))
