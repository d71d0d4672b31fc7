"""What every candidate must compute: the reference in higher precision, and as it was written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.compile_pool import CompilePool
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.tuning.reference import NUMBER, PLAIN, ExportedReference, Reference

A = jnp.asarray(np.random.default_rng(0).standard_normal((32, 256)).astype(jnp.bfloat16))
X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 16)).astype(jnp.float32))


def made(fn, *args, platform="cpu"):
    """A reference that is compiled."""
    call = flatten_call(args, {})
    reference = Reference(fn, call, call.leaves, platform=platform)
    with CompilePool(1) as pool:
        reference.begin(pool)
        for built in pool.results(1e9):
            reference.arrived(built)
    return reference


def total(x):
    """A running sum in the dtype of the argument, which bfloat16 loses digits in."""
    return jax.lax.fori_loop(0, x.shape[1], lambda i, kept: kept + x[:, i], jnp.zeros(x.shape[0], x.dtype))


def test_narrow_inputs_are_computed_with_in_float32():
    """The output has its own dtype again, rounded once; beside it is what the reference gives as it was written."""
    right, plain = made(total, A)((A,))
    exact = np.asarray(A, np.float64).sum(1)

    assert right.dtype == plain.dtype == jnp.bfloat16
    np.testing.assert_array_equal(right, exact.astype(jnp.bfloat16))
    assert np.abs(np.asarray(plain, np.float64) - exact).max() > 4 * np.abs(np.asarray(right, np.float64) - exact).max()


def test_products_are_exact_on_an_accelerator():
    """There float32 is rounded to fewer digits before it is multiplied, unless that is asked for."""
    seen = []

    def reference(x):
        out = x @ x
        seen.append(jax.make_jaxpr(lambda y: y @ y)(x).eqns[0].params["precision"])
        return out

    made(reference, X, platform="gpu")

    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    assert seen == [None, highest]


def test_float32_on_a_cpu_is_one_program():
    """It is computed as exactly as it can be."""
    reference = made(lambda x: x * 2, X)
    right, plain = reference((X,))

    assert set(reference.staged) == {NUMBER}
    np.testing.assert_array_equal(right, X * 2)
    assert plain is None


def test_integers_are_those_of_the_reference_as_it_was_written():
    """Rounding decides which of two values is the larger."""

    def reference(x):
        rounded = x + x.dtype.type(256)
        return rounded, jnp.argmax(rounded, axis=1)

    right, plain = made(reference, A)((A,))

    np.testing.assert_array_equal(right[1], plain[1])


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: jax.lax.bitcast_convert_type(x, jnp.int16),
        lambda x: x * 2 if x.dtype == jnp.bfloat16 else 1 / 0,
        lambda x: (x, x) if x.dtype == jnp.bfloat16 else x,
    ],
    ids=["bits", "raises", "structure"],
)
def test_a_reference_for_its_own_dtypes_alone_runs_as_it_was_written(reference):
    """What it gives in float32 is no output of this call, or nothing at all."""
    one = made(reference, A)
    right, plain = one((A,))

    assert plain is None
    assert all(
        np.array_equal(*pair) for pair in zip(jax.tree.leaves(right), jax.tree.leaves(reference(A)), strict=True)
    )


def test_one_of_both_programs_will_do():
    """What has not been compiled when the time is up is left out."""
    call = flatten_call((A,), {})
    for number in (NUMBER, PLAIN):
        reference = Reference(total, call, call.leaves, platform="cpu")
        with CompilePool(1) as pool:
            reference.begin(pool)
            for built in pool.results(1e9):
                if built.number == number:
                    reference.arrived(built)
        right, plain = reference((A,))

        assert reference.is_there_by(0.0)
        assert plain is None
        exact = np.asarray(A, np.float64).sum(1).astype(jnp.bfloat16)
        assert np.array_equal(right, exact) == (number == NUMBER)


def test_where_float32_does_not_fit_the_reference_runs_as_it_was_written():
    """Want of memory, say, is no reason to have no reference."""
    reference = made(total, A)

    def fail(*leaves):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    exact, reference._built[NUMBER] = reference._built[NUMBER], fail
    right, plain = reference((A,))
    assert plain is None
    np.testing.assert_array_equal(right, reference._built[PLAIN](A))

    reference._built[NUMBER], reference._built[PLAIN] = exact, fail
    right, plain = reference((A,))
    assert plain is None
    np.testing.assert_array_equal(right, exact(A))


def cancelling(x):
    """Little but rounding is left."""
    half = x.shape[1] // 2
    return (x[:, :half] * 64 + x[:, half:]) - x[:, :half] * 64


def random(x):
    """Other random numbers for another dtype."""
    return x * jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def overflowing(x):
    """Infinite in float16 alone."""
    return x * 60000 * 60000 / 60000


def test_noise_is_what_rounding_of_the_inputs_does():
    """Where values cancel it is large, and is noise all the same; another computation is not."""
    for fn, x, noise in ((cancelling, A, True), (random, A, False), (overflowing, A.astype(jnp.float16), False)):
        reference = made(fn, x)
        right, plain = reference((x,))

        assert not np.array_equal(right, plain)
        assert reference.is_noise((x,), right, plain) == noise


def test_without_narrow_inputs_all_is_noise():
    """The two programs differ by their products alone."""
    reference = made(lambda x: x @ x, X, platform="gpu")

    assert reference.is_noise((X,), X, 2 * X)


def test_what_another_process_has_made_is_taken_as_it_is():
    """It has a more exact program, or it has none."""
    both = made(ExportedReference(lambda x: x * 2, lambda x: x * 3), A)((A,))
    one = made(ExportedReference(lambda x: x * 2), A)((A,))

    np.testing.assert_array_equal(both[0], A * 3)
    np.testing.assert_array_equal(both[1], A * 2)
    np.testing.assert_array_equal(one[0], A * 2)
    assert one[1] is None
