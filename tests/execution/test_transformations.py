"""Pairs of JAX's transformations around a kernel call: right values, right gradients, tuned once, on its own shapes.

The kernels compute a polynomial element by element, so that what a pair of transformations must give is known without
JAX: maps over an axis leave the polynomial as it is, a derivative takes its derivative, the loop applies it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Cubic, OwnCubic, Picking, executor_with, mesh_of
from jax.sharding import PartitionSpec as P
from numpy.polynomial import Polynomial

CUBIC = Polynomial([0.0, 1.0, 0.0, 0.5])
SHAPE = (4, 4)
X = jnp.asarray(np.linspace(-1.0, 1.2, 16, dtype=np.float32).reshape(SHAPE))


def same(shape):
    """The call inside sees the shape outside."""
    return shape


def without_the_first(shape):
    """The call inside sees one of the rows."""
    return shape[1:]


@dataclass(frozen=True)
class Around:
    """One transformation: how it is applied, what it makes of a polynomial and of the shape that the call sees."""

    apply: Callable
    polynomial: Callable = lambda p: p
    shape: Callable = same
    # Forward mode exists for kernels without an own gradient alone.
    forward_mode: bool = False
    # Does a vmap outside still show at the call?
    shows_batch: bool = False


def looped(f):
    return lambda x: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]


def scanned(f):
    return lambda x: jax.lax.scan(lambda carry, row: (carry, f(row)), 0.0, x)[1]


def mapped_over_shards(f):
    return jax.shard_map(f, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))


def of_sum(derivative):
    return lambda f: derivative(lambda x: f(x).sum())


def pulled(f):
    return lambda x: jax.vjp(f, x)[1](jnp.ones_like(x))[0]


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


def linearized(f):
    return lambda x: jax.linearize(f, x)[1](jnp.ones_like(x))


AROUND = {
    "jit": Around(jax.jit),
    "grad": Around(of_sum(jax.grad), Polynomial.deriv, shows_batch=True),
    "vjp": Around(pulled, Polynomial.deriv, shows_batch=True),
    "vmap": Around(jax.vmap, shape=without_the_first, shows_batch=True),
    "shard_map": Around(mapped_over_shards, shape=lambda s: (s[0] // 2, *s[1:]), shows_batch=True),
    "scan": Around(scanned, shape=without_the_first),
    "while": Around(looped, lambda p: p(p)),
    "cond": Around(lambda f: lambda x: jax.lax.cond(x.sum() > -1e6, f, jnp.zeros_like, x)),
    "checkpoint": Around(jax.checkpoint),
    "pmap": Around(jax.pmap, shape=without_the_first),
    "jvp": Around(pushed, Polynomial.deriv, forward_mode=True, shows_batch=True),
    "linearize": Around(linearized, Polynomial.deriv, forward_mode=True, shows_batch=True),
    "jacfwd": Around(of_sum(jax.jacfwd), Polynomial.deriv, forward_mode=True, shows_batch=True),
}
REVERSE = ("grad", "vjp")
# What JAX itself does not do: a mesh inside another one's axis, and reverse mode through a loop of unknown length.
NESTED_MESHES = {("shard_map", "shard_map"), ("shard_map", "pmap"), ("pmap", "shard_map"), ("pmap", "pmap")}


def possible(outer, inner):
    # Forward mode of forward mode adds nothing to what the other pairs show.
    twice_forward = AROUND[outer].forward_mode and AROUND[inner].forward_mode
    return (outer, inner) not in NESTED_MESHES and not (outer in REVERSE and inner == "while") and not twice_forward


def pairs(names):
    return [pytest.param(o, i, id=f"{o}-{i}") for o, i in itertools.product(names, names) if possible(o, i)]


EVERY = pairs(AROUND)
WITHOUT_FORWARD_MODE = pairs([name for name, around in AROUND.items() if not around.forward_mode])


def compose(f, *names):
    """The transformations around a function, the outermost first."""
    for name in reversed(names):
        f = AROUND[name].apply(f)
    return f


def expected(*names):
    """The polynomial that they leave."""
    p = CUBIC
    for name in reversed(names):
        p = AROUND[name].polynomial(p)
    return p


def seen_shape(outer, inner):
    """What is measured: the call's own shape, with the batch that shows at the call."""
    shape = AROUND[outer].shape(SHAPE)
    if inner != "vmap":
        shape = AROUND[inner].shape(shape)
    # A batch that shows at the call keeps its axis in front.
    return (SHAPE[0], *shape) if outer == "vmap" and AROUND[inner].shows_batch else shape


def right(got, p):
    np.testing.assert_allclose(np.asarray(got, np.float64), p(np.asarray(X, np.float64)), rtol=2e-4, atol=2e-4)


def check_pair(kernel, outer, inner):
    tuner = Picking()
    executor = executor_with(tuner)
    pair = compose(lambda x: executor(kernel, x), outer, inner)
    p = expected(outer, inner)

    right(pair(X), p)
    if outer != "jit":
        right(jax.jit(pair)(X), p)
    # A derivative outside is a gradient already.
    if "while" not in (outer, inner) and AROUND[outer].polynomial is not Polynomial.deriv:
        right(jax.grad(lambda x: pair(x).sum())(X), p.deriv())

    assert tuner.shapes == [[seen_shape(outer, inner)]]
    assert executor.chooser.cache.size() == 1


@pytest.mark.parametrize(("outer", "inner"), EVERY)
def test_a_pair_around_a_kernel(outer, inner):
    """Eager, jitted and differentiated the pair gives what it gives around the bare function, after one tuning."""
    check_pair(Cubic.fresh()(), outer, inner)


@pytest.mark.parametrize(("outer", "inner"), WITHOUT_FORWARD_MODE)
def test_a_pair_around_an_own_gradient(outer, inner):
    """The same for a kernel with a gradient of its own."""
    check_pair(OwnCubic.fresh()(), outer, inner)


@pytest.mark.parametrize("name", AROUND)
def test_a_transformation_of_the_bare_function_is_what_the_table_says(name):
    """The expectations above hold for JAX itself, so that a wrong table can't hide a wrong executor."""
    pair = compose(lambda x: x * x * x * 0.5 + x, name)
    right(pair(X), expected(name))


TRIPLES = [
    ("vmap", "grad", "jit"),
    ("grad", "scan", "checkpoint"),
    ("shard_map", "vmap", "grad"),
    ("jit", "shard_map", "scan"),
    ("vmap", "vmap", "grad"),
    ("grad", "grad", "vmap"),
]


@pytest.mark.parametrize("kernel", [Cubic, OwnCubic], ids=["plain", "own gradient"])
@pytest.mark.parametrize("names", TRIPLES, ids="-".join)
def test_three_at_once(names, kernel):
    """Deeper nests give the right values after one tuning."""
    tuner = Picking()
    executor = executor_with(tuner)
    fresh = kernel.fresh()()
    triple = compose(lambda x: executor(fresh, x), *names)
    right(triple(X), expected(*names))
    right(jax.jit(triple)(X), expected(*names))
    assert tuner.calls == 1
