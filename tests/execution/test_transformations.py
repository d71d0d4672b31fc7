"""Pairs of JAX's transformations around a kernel call: right values, right gradients, tuned once, on its own shapes.

The kernels compute a polynomial element by element, so that what a pair of transformations must give is known without
JAX: maps over an axis leave the polynomial as it is, a derivative takes its derivative, the loop applies it twice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Cubic, OwnCubic, Picking, executor_with, mesh_of
from jax.sharding import PartitionSpec as P
from numpy.polynomial import Polynomial
from thinning import AT_LENGTH

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


KERNELS = {"plain": Cubic, "own gradient": OwnCubic}
WAYS = ("eager", "jitted", "differentiated")


@dataclass(frozen=True)
class Case:
    """One way to call a pair of transformations around a kernel."""

    outer: str
    inner: str
    kernel: str
    way: str

    @property
    def exists(self):
        both = (self.outer, self.inner)
        without_forward_mode = not any(AROUND[name].forward_mode for name in both)
        # A derivative outside is a gradient already.
        differentiable = "while" not in both and AROUND[self.outer].polynomial is not Polynomial.deriv
        return (
            possible(*both)
            and (self.kernel == "plain" or without_forward_mode)
            and (self.way != "jitted" or self.outer != "jit")
            and (self.way != "differentiated" or differentiable)
        )

    @property
    def twos(self):
        """Its values, two at a time."""
        return set(itertools.combinations(vars(self).items(), 2))

    def __str__(self):
        return f"{self.outer}-{self.inner}, {self.kernel}, {self.way}"


def covering(cases):
    """Few of the cases, in which any two values that occur together at all do so."""
    chosen, covered, used = [], set(), Counter()
    for _, group in itertools.groupby(cases, lambda case: (case.outer, case.inner)):
        # The one that shows most that is new, else that of the kind seen least.
        best = max(group, key=lambda case: (len(case.twos - covered), -used[case.kernel, case.way]))
        chosen.append(best)
        covered |= best.twos
        used[best.kernel, best.way] += 1
    return chosen


EVERY = [case for case in itertools.starmap(Case, itertools.product(AROUND, AROUND, KERNELS, WAYS)) if case.exists]
COVERING = covering(EVERY)


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


def check(around, p, way):
    """Called in a way, the transformations leave this polynomial."""
    if way == "eager":
        right(around(X), p)
    elif way == "jitted":
        right(jax.jit(around)(X), p)
    else:
        right(jax.grad(lambda x: around(x).sum())(X), p.deriv())


def check_pair(kernel, outer, inner, ways):
    tuner = Picking()
    executor = executor_with(tuner)
    pair = compose(lambda x: executor(kernel, x), outer, inner)
    for way in ways:
        check(pair, expected(outer, inner), way)

    assert tuner.shapes == [[seen_shape(outer, inner)]]
    assert executor.chooser.cache.size() == 1


def test_the_covering_cases_hold_every_two_values_that_occur_together():
    """Each pair of transformations, and each of them with each kernel and in each way."""
    assert set().union(*(case.twos for case in COVERING)) == set().union(*(case.twos for case in EVERY))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_pair_around_a_kernel(case):
    """The pair gives what it gives around the bare function, after one tuning."""
    check_pair(KERNELS[case.kernel].fresh()(), case.outer, case.inner, [case.way])


def whole_product():
    """The cases of each pair and kernel together. A checkpoint outside changes nothing: those few are quick enough."""
    for (outer, inner, kernel), group in itertools.groupby(EVERY, lambda case: (case.outer, case.inner, case.kernel)):
        marks = () if outer == "checkpoint" else AT_LENGTH
        ways = [case.way for case in group]
        yield pytest.param(outer, inner, kernel, ways, id=f"{outer}-{inner}, {kernel}", marks=marks)


@pytest.mark.parametrize(("outer", "inner", "kernel", "ways"), list(whole_product()))
def test_all_ways_to_call_a_pair_share_one_tuning(outer, inner, kernel, ways):
    """Eager, jitted and differentiated, one after the other."""
    check_pair(KERNELS[kernel].fresh()(), outer, inner, ways)


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


@pytest.mark.thinned
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
