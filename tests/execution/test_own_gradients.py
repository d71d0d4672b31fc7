"""Own gradients through the executor: what is differentiated, what a `vjp` may return, and what is refused by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Cubic, OwnCubic, Product, close, executor_with

from ejkernel.ops import Executor

X = jnp.array([0.5, -1.0, 2.0])
Y = jnp.array([3.0, 0.25, -2.0])


def cotangent(out):
    """A cotangent that is not all ones."""
    return jax.tree_util.tree_map(
        lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), out
    )


def pulled(function, *args):
    """Output and gradients of a function for that cotangent."""
    out, pull = jax.vjp(function, *args)
    return out, pull(cotangent(out))


class Marked(Counting):
    """A gradient that no differentiation of `run` would give: it shows whose gradient was used."""

    op_id = "marked"

    def run(self, x, *, cfg):
        self.log.append("run")
        return x * 2.0

    def fwd_with_residuals(self, x, *, cfg):
        self.log.append("fwd")
        return x * 2.0, None

    def vjp(self, residuals, y, dy, x, *, cfg):
        self.log.append("vjp")
        return (dy * 100.0 * cfg,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_the_kernel_s_own_gradient_is_used(wrap):
    """The gradient is the kernel's `vjp`, not that of `run`."""
    executor, kernel = executor_with(), Marked.fresh()()
    grad = jax.grad(wrap(lambda x: executor(kernel, x).sum()))(X)
    np.testing.assert_array_equal(grad, jnp.full(3, 200.0))


def test_forward_and_backward_have_the_same_cfg_chosen_once():
    """One choice serves the forward pass and the gradient."""
    chooser, kernel = Asked(3, 5, 7), Marked.fresh()()
    grad = jax.grad(lambda x: Executor(chooser)(kernel, x).sum())(X)
    np.testing.assert_array_equal(grad, jnp.full(3, 300.0))
    assert chooser.count == 1


def test_without_differentiation_the_forward_pass_is_run_alone():
    """`fwd_with_residuals` and `vjp` are for gradients."""
    kernel = Marked.fresh()()
    executor_with()(kernel, X)
    assert kernel.log == ["run"]


def test_gradients_of_several_arguments():
    """Each positional argument has its own gradient."""
    executor, kernel = executor_with(), Product.fresh()()
    close(pulled(lambda a, b: executor(kernel, a, b), X, Y), pulled(lambda a, b: a * b, X, Y))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_python_number_is_differentiated(wrap):
    """As with any function of JAX: `jax.grad(f)(3.0)`."""
    executor, kernel = executor_with(), Product.fresh()()
    assert jax.grad(wrap(lambda b: executor(kernel, 2.0 * b, b)))(3.0) == 12.0
    assert jax.grad(wrap(lambda b: executor(kernel, 5.0, b)))(3.0) == 5.0


def test_the_gradient_of_a_gradient():
    """Reverse mode over reverse mode differentiates the kernel's `vjp`."""
    executor, kernel = executor_with(), OwnCubic.fresh()()
    second = jax.grad(lambda x: jax.grad(lambda y: executor(kernel, y).sum())(x).sum())(X)
    close(second, 3.0 * X)


class Tree(Counting):
    """A linear layer over a dict of weights, a list and a static value between them."""

    op_id = "tree"

    def run(self, weights, factor, inputs, *, cfg):
        return {"out": (weights["w"] * inputs[0] + weights["b"]) * factor, "aux": (inputs[0] + inputs[1],)}

    def fwd_with_residuals(self, weights, factor, inputs, *, cfg):
        return self.run(weights, factor, inputs, cfg=cfg), {"w": weights["w"], "x": inputs[0], "factor": factor}

    def vjp(self, residuals, y, dy, weights, factor, inputs, *, cfg):
        out, aux = dy["out"] * residuals["factor"], dy["aux"][0]
        assert isinstance(residuals["factor"], float)
        return {"w": out * residuals["x"], "b": out}, None, [out * residuals["w"] + aux, aux]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_pytrees_of_arguments_residuals_and_outputs(wrap):
    """Dicts, lists and static values between them keep their places, and static residuals come back as they were."""
    executor, kernel = executor_with(), Tree.fresh()()
    weights, inputs = {"w": X, "b": Y}, [X + 1, Y + 1]
    got = pulled(wrap(lambda w, i: executor(kernel, w, 0.5, i)), weights, inputs)
    close(got, pulled(lambda w, i: kernel.run(w, 0.5, i, cfg=1), weights, inputs))


class Masked(Counting):
    """Arguments without a gradient: an integer array, a key, and a float one that `vjp` answers None for."""

    op_id = "masked"

    def run(self, x, index, key, frozen, *, cfg):
        noise = jax.random.normal(key, x.shape)
        return x[index] * frozen + noise

    def fwd_with_residuals(self, x, index, key, frozen, *, cfg):
        return self.run(x, index, key, frozen, cfg=cfg), (index, frozen)

    def vjp(self, residuals, y, dy, x, index, key, frozen, *, cfg):
        kept, scale = residuals
        return jnp.zeros_like(x).at[kept].add(dy * scale), None, None, None


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_none_gradients_integers_and_keys(wrap):
    """None means zeros, and float0 for integers and keys."""
    executor, kernel = executor_with(), Masked.fresh()()
    index, key = jnp.array([2, 0, 0]), jax.random.key(0)
    _, pull = jax.vjp(wrap(lambda *args: executor(kernel, *args)), X, index, key, Y)
    dx, dindex, dkey, dfrozen = pull(jnp.ones(3))
    close(dx, jnp.array([0.25 - 2.0, 0.0, 3.0]))
    assert dindex.dtype == jax.dtypes.float0
    assert dindex.shape == (3,)
    assert dkey.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(dfrozen, jnp.zeros(3))


def test_a_gradient_for_an_integer_argument_is_ignored():
    """What a `vjp` answers for an integer array can only be zero."""

    class Shift(Counting):
        op_id = "shift"

        def run(self, x, n, *, cfg):
            return x * n

        def fwd_with_residuals(self, x, n, *, cfg):
            return x * n, n

        def vjp(self, n, y, dy, *args, cfg):
            return dy * n, jnp.zeros(n.shape)

    executor = executor_with()
    close(jax.grad(lambda x: executor(Shift(), x, jnp.array([1, 2, 3])).sum())(X), jnp.array([1.0, 2.0, 3.0]))


def test_none_inside_a_tree_of_gradients():
    """None may stand for one leaf of an argument."""

    class Pair(Counting):
        op_id = "pair"

        def run(self, pair, *, cfg):
            return pair["a"] * 2 + pair["b"]

        def fwd_with_residuals(self, pair, *, cfg):
            return self.run(pair, cfg=cfg), ()

        def vjp(self, residuals, y, dy, pair, *, cfg):
            return ({"a": dy * 2, "b": None},)

    executor = executor_with()
    grads = jax.grad(lambda pair: executor(Pair(), pair).sum())({"a": X, "b": Y})
    close(grads, {"a": jnp.full(3, 2.0), "b": jnp.zeros(3)})


def test_a_none_argument_has_a_none_gradient():
    """An optional argument that is not there keeps its place among the gradients."""

    class Optional(Counting):
        op_id = "optional"

        def run(self, x, bias, scale, *, cfg):
            return x * scale if bias is None else x * scale + bias

        def fwd_with_residuals(self, x, bias, scale, *, cfg):
            return self.run(x, bias, scale, cfg=cfg), ()

        def vjp(self, residuals, y, dy, x, bias, scale, *, cfg):
            return dy * scale, None if bias is None else dy, dy * x

    executor = executor_with()
    close(jax.grad(lambda x, s: executor(Optional(), x, None, s).sum(), (0, 1))(X, Y), (Y, X))
    close(jax.grad(lambda x, s: executor(Optional(), x, X, s).sum(), (0, 1))(X, Y), (Y, X))


class Affine(Counting):
    """Parameters by position or keyword, with a default, and one by keyword alone."""

    op_id = "affine"

    def run(self, x, scale=2.0, bias=None, *, offset=None, cfg):
        self.log.append((scale is not None, offset is not None))
        out = x * scale
        out = out if bias is None else out + bias
        return out if offset is None else out + offset

    def fwd_with_residuals(self, x, scale=2.0, bias=None, *, offset=None, cfg):
        return self.run(x, scale, bias, offset=offset, cfg=cfg), ()

    def vjp(self, residuals, y, dy, /, *args, cfg, **kwargs):
        x, scale, bias = (*args, *(2.0, None)[len(args) - 1 :])
        grads = (dy * scale, None if isinstance(scale, float) else dy * x, None if bias is None else dy)
        return grads[: len(args)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize(
    "names", [("x",), ("x", "scale"), ("scale", "x"), ("x", "bias"), ("bias", "scale", "x")], ids=" ".join
)
def test_keywords_of_positional_parameters_are_differentiated(names, wrap):
    """An array given by the name of a positional parameter has its gradient, in any order and with a gap between."""
    executor, kernel = executor_with(), Affine.fresh()()
    values = {"x": X, "scale": Y, "bias": X + Y}
    given = [values[name] for name in names]
    got = pulled(wrap(lambda *args: executor(kernel, **dict(zip(names, args, strict=True)))), *given)
    close(got, pulled(lambda *args: kernel.run(**dict(zip(names, args, strict=True)), cfg=1), *given))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jitted", "checkpoint"])
def test_differentiating_a_keyword_only_array_is_refused(wrap):
    """A `TypeError` that names the kernel and says what to do, never a silent zero."""
    executor, kernel = executor_with(), Affine.fresh()()
    with pytest.raises(TypeError, match=r"(?s)affine@v0.*keyword.*position"):
        jax.grad(wrap(lambda offset: executor(kernel, X, offset=offset).sum()))(Y)


def test_the_refusal_names_the_argument():
    """The message says which keyword is being differentiated."""
    executor, kernel = executor_with(), Affine.fresh()()
    with pytest.raises(TypeError, match="offset"):
        jax.grad(lambda offset: executor(kernel, X, offset=offset).sum())(Y)


AROUND = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x[None])[1][0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > -1e6, f, lambda y: y, x),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_keyword_only_array_that_is_not_differentiated_is_no_matter(around):
    """Other arguments have their gradients; the keyword's array is a constant, whatever is around."""
    executor, kernel = executor_with(), Affine.fresh()()
    grad = jax.grad(lambda x: AROUND[around](lambda y: executor(kernel, y, offset=Y))(x).sum())(X)
    close(grad, jnp.full(3, 2.0))


@pytest.mark.parametrize("around", AROUND)
def test_a_stopped_keyword_only_array_is_no_matter(around):
    """`stop_gradient` is the way to give one that depends on what is differentiated."""
    executor, kernel = executor_with(), Affine.fresh()()
    call = AROUND[around](lambda y: executor(kernel, y, offset=jax.lax.stop_gradient(y)))
    close(jax.grad(lambda x: call(x).sum())(X), jnp.full(3, 2.0))


def test_residuals_y_and_dy_are_positional_only():
    """A kernel may have keywords of these names."""

    class Named(Counting):
        op_id = "named"

        def run(self, x, *, cfg, y, dy, residuals):
            return x * y * dy * residuals

        def fwd_with_residuals(self, x, *, cfg, y, dy, residuals):
            return x * y * dy * residuals, y * dy * residuals

        def vjp(self, saved, out, ct, /, x, *, cfg, y, dy, residuals):
            return (ct * saved,)

    executor = executor_with()
    grad = jax.grad(lambda x: executor(Named(), x, y=2.0, dy=3.0, residuals=jnp.float32(5.0)).sum())(X)
    close(grad, jnp.full(3, 30.0))


class Several(Counting):
    """Several outputs, one of them of integers."""

    op_id = "several"

    def run(self, x, *, cfg):
        return x * 2, jnp.argmax(x), (x * 3).sum()

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), ()

    def vjp(self, residuals, y, dy, x, *, cfg):
        assert len(y) == 3
        assert y[1].dtype == jnp.int32
        assert dy[1].dtype == jax.dtypes.float0
        return (dy[0] * 2 + dy[2] * 3,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_several_outputs(wrap):
    """Each output has its cotangent: zeros where it was not used, float0 for integers."""
    executor, kernel = executor_with(), Several.fresh()()
    close(jax.grad(lambda x: wrap(lambda y: executor(kernel, y))(x)[0].sum())(X), jnp.full(3, 2.0))
    close(jax.grad(lambda x: wrap(lambda y: executor(kernel, y))(x)[2])(X), jnp.full(3, 3.0))


def test_forward_and_backward_come_from_one_level():
    """A `vjp` for this platform without its forward is not mixed with another level's forward."""

    class Mixed(Marked.fresh()):
        op_id = "mixed"

        def vjp_cpu(self, residuals, y, dy, x, *, cfg):
            return (dy * -1.0,)

    executor = executor_with()
    close(jax.grad(lambda x: executor(Mixed(), x).sum())(X), jnp.full(3, 200.0))


def test_the_platform_s_own_gradient_goes_first():
    """With both halves for this platform, those are used."""

    class Both(Marked.fresh()):
        op_id = "both"

        def fwd_with_residuals_cpu(self, x, *, cfg):
            return x * 2.0, "cpu"

        def vjp_cpu(self, residuals, y, dy, x, *, cfg):
            assert residuals == "cpu"
            return (dy * -1.0,)

    executor = executor_with()
    close(jax.grad(lambda x: executor(Both(), x).sum())(X), jnp.full(3, -1.0))


def answering(answer):
    """A kernel of two arguments whose `vjp` gives this answer."""

    class Answers(Counting):
        op_id = "answers"

        def run(self, left, right, *, cfg):
            return left * right["w"]

        def fwd_with_residuals(self, left, right, *, cfg):
            return left * right["w"], ()

        def vjp(self, residuals, y, dy, left, right, *, cfg):
            return answer(dy)

    return Answers()


WRONG = {
    "too few": (lambda dy: (dy,), "2 gradients.*left, right"),
    "too many": (lambda dy: (dy, {"w": dy}, dy), "2 gradients"),
    "no tuple": (lambda dy: dy, "2 gradients"),
    "wrong shape": (lambda dy: (dy[:2], {"w": dy}), r"left.*\[2\].*\[3\]"),
    "wrong shape in a tree": (lambda dy: (dy, {"w": dy[:2]}), r"right.*\[2\].*\[3\]"),
    "wrong dtype": (lambda dy: (dy.astype(jnp.float16), {"w": dy}), "left.*float16.*float32"),
    "wrong structure": (lambda dy: (dy, {"w": dy, "v": dy}), "right"),
    "another structure of as many leaves": (lambda dy: (dy, [dy]), "right"),
    "another name of as many leaves": (lambda dy: (dy, {"v": dy}), "right"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_of_vjp_is_named(case, wrap):
    """Number, shape, dtype and structure are checked, with the kernel and the argument in the message."""
    answer, message = WRONG[case]
    executor, kernel = executor_with(), answering(answer)
    with pytest.raises(TypeError, match=rf"(?s)answers@v0.*{message}"):
        jax.grad(wrap(lambda x, y: executor(kernel, x, y).sum()), (0, 1))(X, {"w": Y})


def test_a_forward_that_returns_no_pair_is_named():
    """`fwd_with_residuals` returns (out, residuals)."""

    class Single(OwnCubic.fresh()):
        op_id = "single"

        def fwd_with_residuals(self, x, *, cfg):
            return x

    executor = executor_with()
    with pytest.raises(TypeError, match="fwd_with_residuals of kernel single@v0"):
        jax.grad(lambda x: executor(Single(), x).sum())(X)


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X,), (jnp.ones(3),)),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "linearize": lambda f: jax.linearize(f, X)[1](jnp.ones(3)),
}
HOLDERS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x)[1],
}


@pytest.mark.thinned
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_of_an_own_gradient_is_refused_by_name(mode, holder):
    """A `TypeError` that names the kernel, wherever the call stands.

    But for one place: where JAX maps a forward derivative of a program, it refuses first, in its own words.
    """
    nameless = mode == "jacfwd" and holder in ("jit", "checkpoint", "scan")
    executor, kernel = executor_with(), OwnCubic.fresh()()
    with pytest.raises(TypeError, match="custom_vjp" if nameless else "own_cubic"):
        FORWARD[mode](HOLDERS[holder](lambda x: executor(kernel, x)))


@pytest.mark.thinned
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_without_an_own_gradient_works(mode, holder):
    """Forward mode is JAX's own for a kernel without a `vjp`."""
    executor, kernel = executor_with(), Cubic.fresh()()
    got = FORWARD[mode](HOLDERS[holder](lambda x: executor(kernel, x)))
    close(got, FORWARD[mode](HOLDERS[holder](lambda x: x * x * x * 0.5 + x)))


def test_the_hessian_without_an_own_gradient():
    """Forward over reverse mode."""
    executor, kernel = executor_with(), Cubic.fresh()()
    close(jax.hessian(lambda x: executor(kernel, x).sum())(X), jnp.diag(3.0 * X))


def test_jacrev_of_an_own_gradient():
    """The full Jacobian in reverse mode, as the refusal of forward mode advises."""
    executor, kernel = executor_with(), OwnCubic.fresh()()
    close(jax.jacrev(lambda x: executor(kernel, x))(X), jnp.diag(1.5 * X * X + 1))


def test_value_and_grad_with_aux():
    """Aux outputs travel beside the value."""
    executor, kernel = executor_with(), Product.fresh()()

    def loss(a, b):
        out = executor(kernel, a, b)
        return out.sum(), out

    (value, aux), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(X, Y)
    close((value, aux, grads), ((X * Y).sum(), X * Y, (Y, X)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_gradients_keep_the_dtype_of_their_arguments(dtype):
    """Half precision and complex arrays are differentiated as they are."""
    executor, kernel = executor_with(), Product.fresh()()
    x, y = X.astype(dtype), Y.astype(dtype)
    got = pulled(lambda a, b: executor(kernel, a, b), x, y)
    assert all(leaf.dtype == dtype for leaf in jax.tree_util.tree_leaves(got))
    close(got, pulled(lambda a, b: a * b, x, y))


def test_an_argument_without_a_tangent_costs_no_gradient_of_another():
    """Differentiating one of two arguments gives that one's gradient."""
    executor, kernel = executor_with(), Product.fresh()()
    close(jax.grad(lambda b: executor(kernel, X, b).sum())(Y), X)


def test_an_own_gradient_of_numpy_arguments():
    """Numpy arrays beside the differentiated one are arrays like any other."""
    executor, kernel = executor_with(), Product.fresh()()
    close(jax.grad(lambda a: executor(kernel, a, np.asarray(Y)).sum())(X), Y)


def test_a_gradient_measured_with_the_forward_pass_is_right(tmp_path):
    """Under `validate_backward` a real tuning of an own gradient leaves right gradients behind."""
    from ejkernel.ops import AutotunePolicy, Tuner

    executor = executor_with(Tuner(0, 1), policy=AutotunePolicy(validate_backward=True))
    kernel = OwnCubic.fresh()()
    close(jax.grad(lambda x: executor(kernel, x).sum())(X), 1.5 * X * X + 1)
    assert executor.chooser.cache.size() == 1


def test_a_partial_run_is_bound_by_its_own_signature():
    """The variant that runs decides which keywords are positional."""

    class Variant(Affine.fresh()):
        op_id = "variant"

        def run_cpu(self, x, bias=None, scale=2.0, *, offset=None, cfg):
            return x * scale + bias

        def fwd_with_residuals_cpu(self, x, bias=None, scale=2.0, *, offset=None, cfg):
            return x * scale + bias, ()

        def vjp_cpu(self, residuals, y, dy, /, x, bias=None, scale=2.0, *, offset=None, cfg):
            return dy * scale, dy, None if isinstance(scale, float) else dy * x

    executor = executor_with()
    call = functools.partial(executor, Variant(), X)
    close(jax.grad(lambda bias, scale: call(scale=scale, bias=bias).sum(), (0, 1))(X, Y), (jnp.ones(3), X))
