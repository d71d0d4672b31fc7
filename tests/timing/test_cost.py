"""What a function costs by its trace: bytes of arguments and results, and operations of its products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.cost import traffic_and_operations

A, B = jnp.ones((4, 8)), jnp.ones((8, 16))
PRODUCT = 2 * 4 * 8 * 16


def cost(fn, *args, **kwargs):
    return traffic_and_operations(fn, args, kwargs)


def operations(fn, *args):
    return cost(fn, *args)[1]


def test_traffic_is_that_of_arguments_and_results():
    """Each counts once, with the bytes of its dtype."""
    assert cost(lambda a: a.astype(jnp.bfloat16), A) == (4 * 32 + 2 * 32, 0)
    assert cost(lambda a, b: (a + 1, b.sum()), A, B) == (4 * (32 + 128) + 4 * (32 + 1), 0)


def test_shapes_and_keywords_will_do():
    """Nothing is run, and what is no array is constant."""
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    assert cost(lambda a, *, scale: a * scale, shape, scale=2)[0] == 2 * 4 * 2**40


def test_a_product_has_two_operations_for_each_pair_of_numbers():
    """Transposed, batched and in several products alike."""
    assert operations(jnp.matmul, A, B) == PRODUCT
    assert operations(lambda a, b: b.T @ a.T, A, B) == PRODUCT
    assert operations(lambda a, b: jnp.einsum("mk,kn->nm", a, b), A, B) == PRODUCT
    assert operations(jnp.matmul, jnp.ones((3, 4, 8)), jnp.ones((3, 8, 16))) == 3 * PRODUCT
    assert operations(lambda a, b: a @ b + jnp.sin(a @ b), A, B) == 2 * PRODUCT


def test_a_grouped_product_counts_each_row_once():
    """However the rows are spread over the groups."""
    sizes = jnp.array([1, 3])
    assert operations(jax.lax.ragged_dot, A, jnp.ones((2, 8, 16)), sizes) == PRODUCT


AROUND = {
    "jit": (lambda f: jax.jit(f), 1),
    "jit in jit": (lambda f: jax.jit(lambda a, b: jax.jit(f)(a, b)), 1),
    "checkpoint": (jax.checkpoint, 1),
    "custom_vjp": (jax.custom_vjp, 1),
    "scan": (lambda f: lambda a, b: jax.lax.scan(lambda c, _: (c, f(a + c, b)), 0.0, None, length=5), 5),
    "scan in scan": (
        lambda f: (
            lambda a, b: jax.lax.scan(
                lambda c, _: (c, jax.lax.scan(lambda d, _: (d, f(a + d, b)), c, None, length=3)[1]), 0.0, None, length=5
            )
        ),
        15,
    ),
    "while": (lambda f: lambda a, b: jax.lax.while_loop(lambda c: c < 1, lambda c: c + f(a, b).sum(), 0.0), 1),
    "cond": (lambda f: lambda a, b: jax.lax.cond(a.sum() > 0, f, lambda a, b: 2 * f(a, b), a, b), 1),
    "vmap": (lambda f: lambda a, b: jax.vmap(f, (0, None))(jnp.stack([a, a]), b), 2),
}


@pytest.mark.parametrize("around", AROUND)
def test_products_are_found_inside(around):
    """As often as they run: each step of a scan, one branch of several, a while loop once."""
    wrap, times = AROUND[around]
    fn = wrap(jnp.matmul)
    if around == "custom_vjp":
        fn.defvjp(lambda a, b: (a @ b, None), lambda saved, dy: (A, B))
    assert operations(fn, A, B) == times * PRODUCT


def test_the_costlier_branch_counts():
    """A budget is for what may run."""

    def fn(a, b):
        return jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: (a @ b) + (a + 1) @ b)

    assert operations(fn, A, B) == 2 * PRODUCT


def test_a_gradient_has_three_products():
    """The forward one, and one for each argument."""
    assert operations(jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1)), A, B) == 3 * PRODUCT


def test_what_cannot_be_traced_counts_by_its_arguments():
    """Whatever it raises."""

    def broken(a):
        raise KeyError("by design")

    assert cost(broken, A) == (A.nbytes, 0)
    assert cost(lambda a: a if a.sum() > 0 else -a, A) == (A.nbytes, 0)


def test_random_keys_and_host_arrays_have_a_size():
    """Whatever is an array counts."""
    assert cost(lambda key: key, jax.random.key(0))[0] > 0
    assert cost(lambda a: a, np.ones(3, np.int8))[0] == 6
