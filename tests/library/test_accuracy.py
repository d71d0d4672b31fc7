"""How far off results and gradients are from float64, beside plain JAX, by the benchmark that measures it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED

from ejkernel import library
from ejkernel.library import (
    AttentionConfig,
    LinearCrossEntropyConfig,
    RaggedDotConfig,
    attention,
    linear_cross_entropy,
    ragged_dot,
)
from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.core.kernel import variant

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import library_accuracy
from library_accuracy_cases import CASES, Case

TITLES = {f"{case.operation} {case.name}": case for case in CASES}
# Those that the defects of narrow types were in; the whole grid is for the campaigns.
FEW = {
    "attention bias": ("bfloat16", ("sliced", "chunked"), ("one array", "common key")),
    "attention shared bias": ("bfloat16", ("sliced", "chunked"), ("large",)),
    "linear_cross_entropy mean": ("bfloat16", ("chunked_tokens", "chunked_vocab", "triton"), ("common word", "small")),
    "linear_cross_entropy sum": ("float32", ("chunked_tokens", "chunked_vocab", "triton"), ("large",)),
    "scaled_matmul blocks": ("float16", ("float32", "blocks"), ("cancelling",)),
    "sample ": ("bfloat16", ("parts", "bits"), ("common",)),
    "top_k ": ("bfloat16", ("parts", "bits"), ("equal",)),
    "ragged_dot to float32": (
        "float16",
        ("xla", "masked", "tiled", "triton"),
        ("cancelling", "large gradient", "small gradient"),
    ),
}


@pytest.mark.one_leg
@pytest.mark.parametrize("title", FEW)
def test_no_way_is_over_twice_as_far_off_as_plain_jax(title):
    """Results and gradients, for values that cancel and for those at the ends of the dtype."""
    dtype, ways, kinds = FEW[title]
    case = TITLES[title]
    fewer = replace(
        case,
        ways={way: case.ways[way] for way in ways},
        values=lambda rng: {kind: case.values(rng)[kind] for kind in kinds},
    )
    rows = list(library_accuracy.study(fewer, dtype))
    assert len(rows) == len(ways) * len(kinds)
    assert not [row for row in rows if library_accuracy.is_over(row)]


@pytest.mark.slow(at_length=True)
def test_no_way_of_any_operation_is_over_the_limit(monkeypatch):
    """Every operation, implementation and dtype."""
    monkeypatch.setattr(sys, "argv", ["library_accuracy.py"])
    assert library_accuracy.main() == 0


@dataclass(frozen=True)
class Times:
    """A config of an operation that multiplies."""

    implementation: str
    by: float


@pytest.mark.parametrize(("by", "status"), [(3.0, 0), (3.1, 1)])
def test_a_way_that_is_too_far_off_is_told(monkeypatch, capsys, by, status):
    """By the exit status, and by a word beside its figures."""
    case = Case(
        "triple",
        "",
        lambda x, cfg, executor: x * cfg.by,
        lambda x: x * 3,
        lambda x: x * 3,
        ("out", "dx"),
        {"by": Times("by", by)},
        lambda rng: {"normal": ((rng.standard_normal(50),), rng.standard_normal(50))},
    )
    monkeypatch.setattr(library_accuracy, "CASES", [case])
    monkeypatch.setattr(library_accuracy, "refusals", lambda case, arrays: {"by": ""})
    monkeypatch.setattr(sys, "argv", ["library_accuracy.py"])
    assert library_accuracy.main() == status
    assert ("OVER" in capsys.readouterr().out) == bool(status)


KERNELS = {
    kind.op_id.removeprefix("library."): kind
    for kind in (getattr(library, name) for name in library.__all__)
    if isinstance(kind, type) and issubclass(kind, Kernel)
}


def test_every_operation_is_compared():
    """An operation of the library without a case fails here."""
    assert set(KERNELS) == {case.operation for case in CASES}


@pytest.mark.parametrize("operation", sorted({case.operation for case in CASES}))
def test_every_implementation_that_is_offered_is_compared(operation):
    """On a CPU and on a GPU; Mosaic's kernels are compared in tests of their own, `test_mosaic_*.py`."""
    kernel = KERNELS[operation]()
    case = next(case for case in CASES if case.operation == operation)
    arrays, _ = case.values(np.random.default_rng(0))["normal"]
    static = {"top_k": {"k": 5}, "sample": {"top_k": 8}}.get(operation, {"scale": 1.0})
    given = tuple(jnp.asarray(a if a.dtype.kind in "iu" else a.astype(jnp.bfloat16)) for a in arrays)
    inv = Invocation("x", given, static)
    offered = [*kernel.candidate_cfgs(inv), *variant(kernel, "candidate_cfgs", platform="gpu")(inv)]
    compared = {cfg.implementation for cfg in case.ways.values()}
    left = {cfg.implementation for cfg in offered} - compared
    assert all(name.startswith("mosaic") for name in left)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", ["xla", "chunked_tokens", "chunked_vocab", "triton"])
def test_a_mean_is_divided_before_it_is_narrowed(way):
    """The sum over tokens is too large for float16, and the mean is not."""
    cfg = LinearCrossEntropyConfig(way, None if way == "xla" else 4096 if way != "chunked_vocab" else 3)
    hidden, labels = jnp.full((16384, 2), 10.0, jnp.float16), jnp.zeros(16384, jnp.int32)

    def loss(weight):
        return linear_cross_entropy(hidden, weight, labels, cfg=cfg, executor=UNTUNED)

    grad = jax.grad(loss)(jnp.zeros((2, 4), jnp.float16))
    np.testing.assert_array_equal(grad, [[-7.5, 2.5, 2.5, 2.5]] * 2)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", ["chunked_tokens", "chunked_vocab", "triton"])
def test_a_price_on_the_normaliser_does_not_overflow_float16(way):
    """Large logits make derivatives that are hundreds of times those without it."""
    rng = np.random.default_rng(0)
    given = (jnp.asarray((rng.standard_normal(shape) * 8).astype(jnp.float16)) for shape in ((12, 16), (16, 40)))
    hidden, weight = given
    labels = jnp.asarray(rng.integers(0, 40, 12))

    def grads(cfg, dtype):
        def loss(hidden, weight):
            return linear_cross_entropy(hidden, weight, labels, z_loss=0.5, cfg=cfg, executor=UNTUNED)

        return jax.grad(loss, argnums=(0, 1))(hidden.astype(dtype), weight.astype(dtype))

    right = grads(LinearCrossEntropyConfig("xla"), jnp.float32)
    for got, want in zip(grads(LinearCrossEntropyConfig(way, 5), jnp.float16), right, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3 * float(jnp.max(jnp.abs(want))))


@pytest.mark.one_leg
def test_gradients_of_a_bias_that_blocks_share_are_added_up_in_float32():
    """Each block's part is below what float16 has, and their sum is not."""
    q = jnp.ones((1, 64, 1, 8), jnp.float16) * 1e-3
    bias, v = jnp.zeros((1, 1, 1, 64), jnp.float16), jnp.linspace(-1e-3, 1e-3, 64)[None, :, None, None]
    values = jnp.broadcast_to(v, q.shape).astype(jnp.float16)

    def out(bias, cfg):
        return attention(q, q, values, bias=bias, cfg=cfg, executor=UNTUNED)

    def grad(cfg):
        made, pull = jax.vjp(lambda bias: out(bias, cfg), bias)
        return np.asarray(pull(jnp.ones_like(made))[0], np.float64)

    right = 64 * 8 * (v[0, :, 0, 0] - jnp.mean(v)) / 64
    for cfg in (AttentionConfig("sliced", block_q=4), AttentionConfig("chunked", block_q=4, block_k=8)):
        np.testing.assert_allclose(grad(cfg)[0, 0, 0], right, atol=1e-5)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("way", ["xla", "masked", "tiled", "triton"])
def test_a_gradient_wider_than_the_factors_is_not_rounded_to_them(way):
    """1e5 is no float16, and neither is one and a thousandth of a thousandth."""
    cfg = RaggedDotConfig(way, *((16, 16, 16) if way == "triton" else ()))
    lhs, rhs = jnp.full((4, 2), 1e-2, jnp.float16), jnp.asarray([[[1.0, -1.0]] * 2] * 2, jnp.float16) / 64
    sizes = jnp.array([2, 2])

    def product(lhs, rhs):
        return ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32, cfg=cfg, executor=UNTUNED)

    _, pull = jax.vjp(product, lhs, rhs)
    d_lhs, d_rhs = pull(jnp.tile(jnp.array([[1e5 + 1, 1e5]]), (4, 1)))
    np.testing.assert_allclose(d_lhs, np.full((4, 2), 1 / 64), rtol=1e-2)
    np.testing.assert_allclose(d_rhs, np.full((2, 2, 2), 2e3), rtol=2e-3)
