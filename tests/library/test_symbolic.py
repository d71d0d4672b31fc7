"""Programs that are exported for any number of rows: results, gradients and guesses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel.library import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    MoeDispatch,
    RaggedDot,
    TopK,
    linear_cross_entropy,
    moe,
    ragged_dot,
)
from ejkernel.library.moe_experts import MoeExperts
from ejkernel.ops import Invocation


def losses(hidden, weight, labels):
    """A loss for each token."""
    return linear_cross_entropy(hidden, weight, labels, reduction="none", executor=UNTUNED)


def mean_loss(hidden, weight, labels):
    """One loss, as training has it."""
    return linear_cross_entropy(hidden, weight, labels, executor=UNTUNED)


def layer(*arrays):
    """Two experts of each token."""
    return moe(*arrays, k=2, executor=UNTUNED)


def grouped(rows, matrices, sizes):
    """Rows of all but the last group."""
    return ragged_dot(rows, matrices, sizes, executor=UNTUNED)


def loss_arrays(rows):
    """Hidden states, a weight and labels."""
    return normal(rows, 8), normal(8, 40, seed=1), jnp.arange(rows, dtype=jnp.int32) % 40


def layer_arrays(rows):
    """Tokens, a router and four experts."""
    experts = normal(4, 8, 6, seed=2), normal(4, 8, 6, seed=3), normal(4, 6, 8, seed=4)
    return normal(rows, 8), normal(rows, 4, seed=1), *experts


def grouped_arrays(rows):
    """Rows of four groups, the last without any."""
    return normal(rows, 8), normal(4, 8, 6, seed=1), jnp.array([1, rows - 1, 0, 0], jnp.int32)


CASES = {
    "losses": (losses, loss_arrays, ("n, 8", "8, 40", "n")),
    "mean loss": (mean_loss, loss_arrays, ("n, 8", "8, 40", "n")),
    "moe": (layer, layer_arrays, ("n, 8", "n, 4", "4, 8, 6", "4, 8, 6", "4, 6, 8")),
    "ragged_dot": (grouped, grouped_arrays, ("n, 8", "4, 8, 6", "4")),
}


@pytest.mark.parametrize(("function", "arrays", "forms"), CASES.values(), ids=CASES)
def test_one_program_serves_any_number_of_rows(function, arrays, forms):
    """One row, and more than a block of 256 of them, with gradients."""
    floats = [at for at, array in enumerate(arrays(1)) if array.dtype == jnp.float32]

    def both(*given):
        return function(*given), *jax.grad(lambda *a: jnp.sum(function(*a) ** 2), floats)(*given)

    scope = jax.export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(form, scope=scope), array.dtype)
        for form, array in zip(forms, arrays(1), strict=True)
    ]
    exported = jax.export.export(jax.jit(both))(*shapes)
    for rows in (1, 300):
        given = arrays(rows)
        for one, other in zip(exported.call(*given), both(*given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [LinearCrossEntropy(), RaggedDot(), MoeExperts(), MoeDispatch(), TopK()])
def test_a_guess_and_candidates_for_any_number_of_rows_can_run(kernel):
    """On a GPU as well, where no kernel of Pallas is among the guesses."""
    [n] = jax.export.symbolic_shape("n")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    matrices, sizes = array(4, 256, 512), array(4, dtype=jnp.int32)
    args, kwargs = {
        LinearCrossEntropy: ((array(n, 256), array(256, 32000), array(n, dtype=jnp.int32)), {}),
        RaggedDot: ((array(n, 256), matrices, sizes), {}),
        MoeExperts: ((array(n, 256), matrices, matrices, array(4, 512, 256), sizes), {}),
        MoeDispatch: ((array(n, 256), array(n, 2, dtype=jnp.int32)), {"count": 4}),
        TopK: ((array(n, 200),), {"k": 8}),
    }[type(kernel)]
    inv = Invocation(kernel.op_id, args, kwargs)
    hooks = [getattr(kernel, name, None) for name in ("heuristic_cfg", "heuristic_cfg_cpu", "heuristic_cfg_gpu")]
    for guess in (hook(inv) for hook in hooks if hook is not None):
        assert kernel.valid_cfg(inv, guess) is True
        assert guess.implementation not in ("triton", "triton_lists", "mosaic", "mosaic_rolling")
    if not isinstance(kernel, (RaggedDot, MoeExperts)):
        assert [*kernel.candidate_cfgs(inv), *kernel.candidate_cfgs_gpu(inv)]


def test_chunks_of_tokens_that_nothing_can_count_are_refused():
    """The reason names what serves."""
    shapes = [((*jax.export.symbolic_shape("n"), 8), jnp.float32), ((8, 40), jnp.float32)]
    shapes.append((jax.export.symbolic_shape("n"), jnp.int32))
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
    for way in ("xla", "chunked_tokens"):
        assert "chunked_vocab" in LinearCrossEntropy().valid_cfg(inv, LinearCrossEntropyConfig(way, 4))
