"""A kernel's own gradient: values and gradients as of the plain function, and errors that name what is wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.core.bind import bind
from ejkernel.ops.core.gradients import positional


class Base(Kernel):
    """A kernel with one cfg."""

    op_id = "own"

    def heuristic_cfg(self, inv):
        return 1


class Product(Base):
    """sum of a tree: (x * w, sin x), with a gradient that says it was used by a factor `mark`."""

    mark = 1.0

    def run(self, params, x, *, cfg, scale=1.0):
        return params["w"] * x * scale, jnp.sin(x) + params["b"]

    def fwd_with_residuals(self, params, x, *, cfg, scale=1.0):
        return self.run(params, x, cfg=cfg, scale=scale), {"w": params["w"], "x": x, "scale": scale}

    def vjp(self, residuals, y, dy, params, x, *, cfg, scale=1.0):
        assert residuals["scale"] == scale
        first, second = dy
        grads = {"w": self.mark * first * residuals["x"] * scale, "b": self.mark * second}
        return grads, self.mark * (first * residuals["w"] * scale + second * jnp.cos(residuals["x"]))


def bound(kernel, *args, **kwargs):
    """The kernel as a function of its arguments."""
    return bind(kernel, 1, Invocation(kernel.op_id, args, kwargs), "cpu")


def plain(params, x, scale=1.0):
    """The same computation without an own gradient."""
    return params["w"] * x * scale, jnp.sin(x) + params["b"]


PARAMS = {"w": jnp.arange(1.0, 4.0), "b": jnp.ones(3)}
X = jnp.array([0.5, -1.0, 2.0])


def loss_of(fn):
    """A scalar of both outputs."""

    def loss(params, x, **kwargs):
        first, second = fn(params, x, **kwargs)
        return jnp.sum(first**2) + jnp.sum(3 * second)

    return loss


def same(one, other):
    """Are these trees equal up to rounding?"""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.allclose(a, b, rtol=1e-5) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


class Marked(Product):
    """The same with gradients that no automatic differentiation would give."""

    mark = 10.0


def test_values_are_those_of_run():
    """The function computes what `run` computes."""
    assert same(bound(Product())(PARAMS, X), plain(PARAMS, X))


def test_the_own_gradient_is_used():
    """The gradient is the kernel's own, not the one that JAX would derive of `run`."""
    own = jax.grad(loss_of(bound(Marked())))(PARAMS, X)
    derived = jax.grad(loss_of(plain))(PARAMS, X)
    assert same(own, jax.tree.map(lambda g: 10 * g, derived))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_gradients_agree_with_the_plain_function(wrap, argnums):
    """Gradients of pytrees and of several outputs agree with those of the plain function, eager and jitted."""
    own = wrap(jax.grad(loss_of(bound(Product())), argnums))(PARAMS, X)
    assert same(own, jax.grad(loss_of(plain), argnums)(PARAMS, X))


def test_values_and_gradients_agree_under_vmap():
    """vmap of the function, and of its gradient, agree with the plain function."""
    xs = jnp.stack([X, 2 * X, -X])
    own, expected = bound(Product()), plain
    axes = (None, 0)
    assert same(jax.vmap(own, axes)(PARAMS, xs), jax.vmap(expected, axes)(PARAMS, xs))
    assert same(
        jax.vmap(jax.grad(loss_of(own), (0, 1)), axes)(PARAMS, xs),
        jax.vmap(jax.grad(loss_of(expected), (0, 1)), axes)(PARAMS, xs),
    )


def test_gradients_agree_through_a_vmapped_loss():
    """grad of vmap agrees with the plain function."""
    xs = jnp.stack([X, 2 * X])

    def total(fn):
        return lambda params: sum(jnp.sum(part) for part in jax.vmap(fn, (None, 0))(params, xs))

    assert same(jax.jit(jax.grad(total(bound(Product()))))(PARAMS), jax.grad(total(plain))(PARAMS))


def test_gradients_agree_inside_scan_and_checkpoint():
    """grad through scan and checkpoint agrees with the plain function."""

    def total(fn):
        def loss(x):
            def step(carry, _):
                return jax.checkpoint(lambda c: fn(PARAMS, c)[1])(carry), None

            return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

        return loss

    assert same(jax.grad(total(bound(Product())))(X), jax.grad(total(plain))(X))


def test_an_unused_output_has_a_zero_cotangent():
    """The gradient of one output alone gets zeros for the other."""
    own = jax.grad(lambda x: jnp.sum(bound(Product())(PARAMS, x)[1]))(X)
    assert same(own, jax.grad(lambda x: jnp.sum(plain(PARAMS, x)[1]))(X))


def test_a_static_keyword_reaches_both_passes():
    """A keyword that is no array reaches `run`, forward and `vjp`."""
    own = jax.grad(loss_of(bound(Product())))(PARAMS, X, scale=3.0)
    assert same(own, jax.grad(loss_of(plain))(PARAMS, X, scale=3.0))


def test_a_positional_parameter_may_be_spelled_as_keyword():
    """An array given by the name of a positional parameter has its gradient."""
    own = jax.grad(lambda x: loss_of(bound(Product()))(PARAMS, x=x))(X)
    assert same(own, jax.grad(lambda x: loss_of(plain)(PARAMS, x))(X))


def test_all_positional_parameters_may_be_spelled_as_keywords():
    """The order of keywords does not matter."""
    fn = bound(Product())
    own = jax.grad(lambda p, x: sum(map(jnp.sum, fn(x=x, params=p))), (0, 1))(PARAMS, X)
    assert same(own, jax.grad(lambda p, x: sum(map(jnp.sum, plain(p, x))), (0, 1))(PARAMS, X))


def run_with_defaults(x, axis=0, weight=None, *, mode="a"):
    """A signature with parameters to skip."""


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, ((1,), {})),
        ((1,), {"axis": 2}, ((1, 2), {})),
        ((1,), {"weight": 3}, ((1, 0, 3), {})),
        ((), {"weight": 3, "x": 1}, ((1, 0, 3), {})),
        ((1,), {"mode": "b"}, ((1,), {"mode": "b"})),
        ((1,), {"mode": "b", "weight": 3}, ((1, 0, 3), {"mode": "b"})),
        ((1, 2, 3), {"mode": "b"}, ((1, 2, 3), {"mode": "b"})),
    ],
    ids=str,
)
def test_keywords_of_positional_parameters_become_positional(args, kwargs, expected):
    """Keywords take their places; parameters between them that were not given take their defaults."""
    assert positional(run_with_defaults, args, kwargs) == expected


class KeywordOnly(Base):
    """y = x * weight, where the weight comes by keyword alone."""

    def run(self, x, *, weight, cfg):
        return x * weight

    def fwd_with_residuals(self, x, *, weight, cfg):
        return x * weight, None

    def vjp(self, residuals, y, dy, x, *, weight, cfg):
        return (dy * weight,)


def test_a_keyword_only_array_may_be_used():
    """A keyword-only array that is not differentiated is fine."""
    fn = bound(KeywordOnly())
    assert same(jax.grad(lambda x: jnp.sum(fn(x, weight=2 * X)))(X), 2 * X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_differentiating_a_keyword_only_array_is_an_error(wrap):
    """A gradient with respect to it is a TypeError that names the kernel, never a silent zero."""
    fn = bound(KeywordOnly())
    with pytest.raises(TypeError, match=r"own@v0.*keyword"):
        wrap(jax.grad(lambda w: jnp.sum(fn(X, weight=w))))(X)


def test_stopping_the_gradient_of_a_keyword_only_array_is_no_error():
    """An array whose gradient was stopped is not differentiated."""
    fn = bound(KeywordOnly())
    gradient = jax.grad(lambda w: jnp.sum(fn(w, weight=jax.lax.stop_gradient(w))))(X)
    assert same(gradient, X)


class Lookup(Base):
    """Rows of a table with noise: an integer argument and a random key, which have no gradient."""

    integer_gradient = None

    def run(self, table, rows, key, *, cfg):
        return table[rows] + jax.random.normal(key, (2, 3))

    def fwd_with_residuals(self, table, rows, key, *, cfg):
        return self.run(table, rows, key, cfg=cfg), rows

    def vjp(self, residuals, y, dy, table, rows, key, *, cfg):
        return jnp.zeros_like(table).at[residuals].add(dy), self.integer_gradient, None


TABLE = jnp.arange(12.0).reshape(4, 3)
ROWS = jnp.array([2, 0])


def lookup(table, rows, key):
    """The same without an own gradient."""
    return table[rows] + jax.random.normal(key, (2, 3))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_integers_and_random_keys_need_no_gradient(wrap):
    """Integer and PRNG-key arguments get None, and the float argument its gradient."""
    key = jax.random.key(0)
    fn = bound(Lookup())
    own = wrap(jax.grad(lambda t: jnp.sum(fn(t, ROWS, key) ** 2)))(TABLE)
    assert same(own, jax.grad(lambda t: jnp.sum(lookup(t, ROWS, key) ** 2))(TABLE))


def test_integers_and_random_keys_have_float0_gradients():
    """Pulling back through integer and key arguments gives the zeros that JAX uses for them."""
    key = jax.random.key(0)
    out, pull = jax.vjp(bound(Lookup()), TABLE, ROWS, key)
    _, rows, keys = pull(jnp.ones_like(out))
    assert rows.dtype == jax.dtypes.float0
    assert rows.shape == ROWS.shape
    assert keys.dtype == jax.dtypes.float0


def test_vmap_over_integers_and_random_keys():
    """A batch of integer arguments and keys agrees with the plain function."""
    keys = jax.random.split(jax.random.key(0), 2)
    rows = jnp.array([[2, 0], [1, 1]])

    def total(fn):
        return lambda t: jnp.sum(jax.vmap(fn, (None, 0, 0))(t, rows, keys) ** 2)

    assert same(jax.grad(total(bound(Lookup())))(TABLE), jax.grad(total(lookup))(TABLE))


class Returning(Base):
    """y = a * b with whatever gradients a test wants."""

    def __init__(self, grads):
        self.grads = grads

    def run(self, a, b, *, cfg):
        return a * b

    def fwd_with_residuals(self, a, b, *, cfg):
        return a * b, None

    def vjp(self, residuals, y, dy, a, b, *, cfg):
        return self.grads(dy)


def gradient_of(kernel, a=X, b=X, argnums=0):
    """The gradient of the sum of a call."""
    return jax.grad(lambda a, b: jnp.sum(bound(kernel)(a, b)), argnums)(a, b)


def test_a_none_gradient_means_zeros():
    """None for a float argument is a gradient of zeros of its shape and dtype."""
    first, second = gradient_of(Returning(lambda dy: (dy, None)), argnums=(0, 1))
    assert same(first, jnp.ones(3))
    assert same(second, jnp.zeros(3))
    assert second.dtype == X.dtype


def test_a_list_of_gradients_is_taken():
    """A list is as good as a tuple."""
    assert same(gradient_of(Returning(lambda dy: [dy, None])), jnp.ones(3))


class Biased(Base):
    """y = 2 x + bias, where the bias may be left out."""

    def run(self, x, bias=None, *, cfg):
        return 2 * x if bias is None else 2 * x + bias

    def fwd_with_residuals(self, x, bias=None, *, cfg):
        return self.run(x, bias, cfg=cfg), None

    def vjp(self, residuals, y, dy, x, bias=None, *, cfg):
        return 2 * dy, None if bias is None else dy


def test_a_gradient_may_be_none_for_a_parameter_that_was_left_out():
    """A vjp that answers for each of its parameters serves calls with and without the optional one."""
    fn = bound(Biased())
    assert same(jax.grad(lambda x: jnp.sum(fn(x)))(X), jnp.full(3, 2.0))
    assert same(jax.grad(lambda b: jnp.sum(fn(X, b)))(X), jnp.ones(3))


@pytest.mark.parametrize(
    "grads",
    [lambda dy: (dy,), lambda dy: (dy, dy, dy), lambda dy: dy, lambda dy: None],
    ids=["1", "3", "array", "None"],
)
def test_a_wrong_number_of_gradients_names_kernel_and_arguments(grads):
    """Too few, too many or no tuple is a TypeError that names the kernel and the arguments."""
    with pytest.raises(TypeError, match=r"own@v0.*2 gradients.*a, b"):
        gradient_of(Returning(grads))


def test_a_gradient_of_another_shape_names_the_argument():
    """A gradient of the wrong shape is a TypeError that names kernel, argument and both shapes."""
    with pytest.raises(TypeError, match=r"own@v0.* b .*\[1\].*\[3\]"):
        gradient_of(Returning(lambda dy: (dy, dy[:1])))


def test_a_gradient_of_another_dtype_names_the_argument():
    """A gradient of the wrong dtype is a TypeError that names kernel, argument and both dtypes."""
    with pytest.raises(TypeError, match=r"own@v0.* a .*bfloat16.*float32"):
        gradient_of(Returning(lambda dy: (dy.astype(jnp.bfloat16), dy)))


class Tree(Base):
    """y = params["a"] * 2, with whatever gradient a test wants for the dict."""

    def __init__(self, grads):
        self.grads = grads

    def run(self, params, *, cfg):
        return params["a"] * 2

    def fwd_with_residuals(self, params, *, cfg):
        return params["a"] * 2, None

    def vjp(self, residuals, y, dy, params, *, cfg):
        return (self.grads(dy),)


def tree_gradient(grads, params):
    """The gradient of a dict argument."""
    return jax.grad(lambda p: jnp.sum(bound(Tree(grads))(p)))(params)


def test_none_inside_a_gradient_means_zeros_there():
    """A part of a gradient may be None."""
    found = tree_gradient(lambda dy: {"a": 2 * dy, "b": None}, {"a": X, "b": X})
    assert same(found, {"a": jnp.full(3, 2.0), "b": jnp.zeros(3)})


def test_none_for_a_whole_tree_means_zeros():
    """None stands for zeros of every array in the argument."""
    found = tree_gradient(lambda dy: None, {"a": X, "b": X})
    assert same(found, {"a": jnp.zeros(3), "b": jnp.zeros(3)})


def test_an_argument_that_holds_none_takes_a_gradient_of_its_own_structure():
    """A gradient that mirrors its argument is right, also where the argument holds None (an optional bias)."""
    found = tree_gradient(lambda dy: {"a": 2 * dy, "b": None}, {"a": X, "b": None})
    assert same(found["a"], jnp.full(3, 2.0))


@pytest.mark.parametrize(
    "grads",
    [lambda dy: {"a": dy}, lambda dy: {"a": dy, "b": dy, "c": dy}, lambda dy: {"a": dy, "c": dy}, lambda dy: dy],
    ids=["fewer", "more", "another name", "an array"],
)
def test_a_gradient_of_another_structure_names_the_argument(grads):
    """A gradient that is not built as its argument is a TypeError that names kernel and argument."""
    with pytest.raises(TypeError, match=r"own@v0.*params"):
        tree_gradient(grads, {"a": X, "b": X})


class NoPair(Returning):
    """A forward that forgets its residuals."""

    def fwd_with_residuals(self, a, b, *, cfg):
        return a * b


def test_a_forward_without_residuals_is_named():
    """A forward that does not return (out, residuals) is a TypeError that names the kernel."""
    with pytest.raises(TypeError, match=r"fwd_with_residuals.*own@v0.*\(out, residuals\)"):
        gradient_of(NoPair(lambda dy: (dy, dy)))


class Mixed(Base):
    """Residuals of arrays, strings, numbers, None and nested containers."""

    def run(self, x, *, cfg):
        return x * 2

    def fwd_with_residuals(self, x, *, cfg):
        return x * 2, ("two", {"x": x, "n": 2, "none": None}, [None, (x,)])

    def vjp(self, residuals, y, dy, x, *, cfg):
        word, found, (nothing, (again,)) = residuals
        assert (word, found["n"], found["none"], nothing) == ("two", 2, None, None)
        return (dy * found["n"] + 0 * found["x"] + 0 * again + 0 * y,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_residuals_may_hold_anything(wrap):
    """What is no array comes through to `vjp` as it was."""
    fn = bound(Mixed())
    assert same(wrap(jax.grad(lambda x: jnp.sum(fn(x))))(jnp.ones((2, 3))), jnp.full((2, 3), 2.0))


class IntegerOutput(Base):
    """Two outputs, one of them integers."""

    def run(self, x, *, cfg):
        return x * 2, jnp.argmax(x)

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), None

    def vjp(self, residuals, y, dy, x, *, cfg):
        assert dy[1].dtype == jax.dtypes.float0
        return (dy[0] * 2,)


def test_an_integer_output_has_no_cotangent():
    """The cotangent of an integer output is the zero that JAX uses for it."""
    fn = bound(IntegerOutput())
    assert same(jax.grad(lambda x: jnp.sum(fn(x)[0]))(X), jnp.full(3, 2.0))


class WithStatic(Base):
    """A positional argument that is no array."""

    def run(self, x, power, *, cfg):
        return x**power

    def fwd_with_residuals(self, x, power, *, cfg):
        return x**power, None

    def vjp(self, residuals, y, dy, x, power, *, cfg):
        return dy * power * x ** (power - 1), None


def test_a_static_positional_argument_has_no_gradient():
    """A Python number among the positional arguments stays one, and its gradient is None."""
    fn = bound(WithStatic())
    assert same(jax.grad(lambda x: jnp.sum(fn(x, 3)))(X), 3 * X**2)


@pytest.mark.parametrize("other", [np.full(3, 2.0), np.full(3, 2.0, np.float32)], ids=["float64", "float32"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_numpy_arguments_are_taken(wrap, other):
    """A numpy array beside the differentiated argument is as good as a jax array, with x64 off too."""
    fn = bound(Returning(lambda dy: (2 * dy, dy)))
    assert same(wrap(jax.grad(lambda a: jnp.sum(fn(a, other))))(X), jnp.full(3, 2.0))


def test_gradients_in_half_precision_keep_their_dtype():
    """A bfloat16 argument has a bfloat16 gradient."""
    x = X.astype(jnp.bfloat16)
    assert gradient_of(Returning(lambda dy: (dy, dy)), x, x).dtype == jnp.bfloat16


def test_without_an_own_gradient_jax_derives_one():
    """A kernel that defines none is differentiated as any function, forward mode included."""

    class Derived(Base):
        def run(self, a, *, cfg):
            return a**2 * cfg

    fn = bound(Derived())
    assert same(jax.grad(lambda a: jnp.sum(fn(a)))(X), 2 * X)
    assert same(jax.jvp(fn, (X,), (X,))[1], 2 * X * X)


def test_the_own_gradient_of_the_platform_is_used():
    """Forward and vjp of the platform's own level go before the plain ones."""

    class ForCpu(Returning):
        def fwd_with_residuals_cpu(self, a, b, *, cfg):
            return a * b, None

        def vjp_cpu(self, residuals, y, dy, a, b, *, cfg):
            return 7 * dy, None

    assert same(gradient_of(ForCpu(lambda dy: (dy, dy))), jnp.full(3, 7.0))
