"""rms_norm, layer_norm and softmax: every implementation against float64, values and gradients.

Covers `library/layer_norm.py`, `library/reduce.py`, `library/rms_norm.py`, `library/softmax.py` and
`library/triton/rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import DTYPES, UNTUNED, assert_near, lowered_for_a_gpu, normal, numeric_pull, pull

from ejkernel.library import (
    LayerNorm,
    LayerNormConfig,
    RmsNorm,
    RmsNormConfig,
    Softmax,
    SoftmaxConfig,
    layer_norm,
    rms_norm,
    softmax,
)
from ejkernel.ops import Invocation, check, default_selector

P = jax.sharding.PartitionSpec


def rms_norm_64(x, weight=None):
    """In float64."""
    normed = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
    return normed if weight is None else normed * weight


def layer_norm_64(x, weight=None, bias=None):
    """In float64."""
    off = x - np.mean(x, -1, keepdims=True)
    normed = off / np.sqrt(np.mean(off * off, -1, keepdims=True) + 1e-6)
    return (normed if weight is None else normed * weight) + (0 if bias is None else bias)


def softmax_64(x):
    """In float64."""
    powers = np.exp(x - np.max(x, -1, keepdims=True))
    return powers / np.sum(powers, -1, keepdims=True)


@dataclass(frozen=True)
class Operation:
    """One operation as the tests see it."""

    function: Callable[..., Any]
    kernel: Any
    config: Any
    exact: Callable[..., Any]
    vectors: int
    ways: tuple[Any, ...]

    def __call__(self, *args, way=None, **kwargs):
        return self.function(*args, cfg=way, executor=UNTUNED, **kwargs)

    def inputs(self, *shape, dtype="float32", weights="float32"):
        """Rows and as many vectors as it takes."""
        vectors = [normal(shape[-1], dtype=weights, seed=seed) for seed in range(1, 1 + self.vectors)]
        return (normal(*shape, dtype=dtype), *vectors)


TRITON = {"rows": 4, "num_warps": 2}
OPERATIONS = {
    "rms_norm": Operation(
        *(rms_norm, RmsNorm(), RmsNormConfig, rms_norm_64, 1),
        (*tuple(map(RmsNormConfig, ("xla", "recompute"))), RmsNormConfig("triton", **TRITON)),
    ),
    "layer_norm": Operation(
        *(layer_norm, LayerNorm(), LayerNormConfig, layer_norm_64, 2),
        (*tuple(map(LayerNormConfig, ("xla", "recompute"))), LayerNormConfig("triton", **TRITON)),
    ),
    "softmax": Operation(
        *(softmax, Softmax(), SoftmaxConfig, softmax_64, 0),
        (*tuple(map(SoftmaxConfig, ("xla", "jax"))), SoftmaxConfig("triton", **TRITON)),
    ),
}
WAYS = [(name, way) for name, operation in OPERATIONS.items() for way in operation.ways]
EVERY = [
    *WAYS,
    ("rms_norm", RmsNormConfig("lanes", lanes=16)),
    ("layer_norm", LayerNormConfig("lanes", lanes=16)),
    ("softmax", SoftmaxConfig("lanes", lanes=16)),
    ("softmax", SoftmaxConfig("split", parts=4)),
]


def spelled(value: Any) -> str | None:
    """Names of parametrised tests."""
    return getattr(value, "implementation", None)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "way"), EVERY, ids=spelled)
def test_values_are_those_of_float64(name, way, dtype):
    """Every implementation in the narrow dtypes, on rows in two leading axes; float32 is in the tests below."""
    operation = OPERATIONS[name]
    args = operation.inputs(3, 5, 48, dtype=dtype, weights=dtype)
    out = operation(*args, way=way)
    assert out.dtype == dtype
    assert_near(out, operation.exact(*[np.asarray(a, np.float64) for a in args]), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [(7,), (9, 129)])
@pytest.mark.parametrize(("name", "way"), WAYS, ids=spelled)
def test_no_block_needs_to_divide_the_shape(name, way, shape):
    """A single row, and odd numbers of rows and columns."""
    operation = OPERATIONS[name]
    args = operation.inputs(*shape)
    assert_near(operation(*args, way=way), operation.exact(*[np.asarray(a, np.float64) for a in args]), "float32")


@pytest.mark.parametrize(("name", "way"), EVERY, ids=spelled)
def test_gradients_are_those_of_float64(name, way):
    """Every implementation, for every argument, against differences in float64."""
    operation = OPERATIONS[name]
    args = operation.inputs(3, 16) if getattr(way, "lanes", None) is None else operation.inputs(2, 32)
    dy = normal(*args[0].shape, seed=9)
    found = pull(lambda *a: operation(*a, way=way), args, dy)
    for at, gradient in enumerate(found):
        assert_near(gradient, numeric_pull(operation.exact, args, dy, at), "float32", slack=10)


@pytest.mark.parametrize(("name", "way"), WAYS, ids=spelled)
def test_it_works_under_every_transformation(name, way):
    """jit, vmap, scan, and shard_map over the batch, with gradients that are summed over it."""
    operation = OPERATIONS[name]
    x, *vectors = operation.inputs(4, 6, 24)
    expected = operation(x, *vectors, way=operation.ways[0])

    def apply(x, *vectors):
        return operation(x, *vectors, way=way)

    near = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(jax.jit(apply)(x, *vectors), expected, **near)
    np.testing.assert_allclose(jax.vmap(lambda x: apply(x, *vectors), 1, 1)(x), expected, **near)
    np.testing.assert_allclose(jax.lax.scan(lambda c, x: (c, apply(x, *vectors)), 0, x)[1], expected, **near)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    # JAX's interpreter of Pallas kernels, which stands in for a GPU here, cannot check how its values vary.
    specs = {"in_specs": (P("batch"), *(P() for _ in vectors)), "check_vma": way.implementation != "triton"}
    sharded = jax.shard_map(apply, mesh=mesh, out_specs=P("batch"), **specs)
    np.testing.assert_allclose(jax.jit(sharded)(x, *vectors), expected, **near)
    dy = normal(*x.shape, seed=9)
    for one, other in zip(pull(sharded, (x, *vectors), dy), pull(apply, (x, *vectors), dy), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_works_where_the_plain_way_runs(name):
    """On a CPU the heuristic choice can be differentiated by every mode."""
    operation = OPERATIONS[name]
    x, *vectors = operation.inputs(3, 16)
    _, tangent = jax.jvp(lambda x: operation(x, *vectors), (x,), (x,))
    assert tangent.shape == x.shape


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "way"), [*((name, None) for name in OPERATIONS), *EVERY], ids=spelled)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_nothing_gives_nothing(name, way, shape):
    """Empty rows and no rows at all keep their shape, by every way that is asked for; vectors get no gradient."""
    operation = OPERATIONS[name]
    args = operation.inputs(*shape)
    out, grads = jax.vjp(lambda *a: operation(*a, way=way), *args)
    assert out.shape == shape
    assert not any(np.any(grad) for grad in grads(out))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_candidate_agrees(name):
    """`check` runs the candidates of this machine, gradients included, and finds none wrong."""
    operation = OPERATIONS[name]
    trials = check(operation.kernel, *operation.inputs(6, 128, dtype="bfloat16"))
    assert {trial.status for trial in trials} == {"ok"}, [(t.cfg, t.message) for t in trials if t.status != "ok"]
    assert len(trials) >= 4


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_tuned_on_this_machine(name):
    """The function itself, through the default executor: a real tuning, a right result, one entry on disk."""
    operation = OPERATIONS[name]
    args = operation.inputs(16, 64)
    assert_near(operation.function(*args), operation.exact(*[np.asarray(a, np.float64) for a in args]), "float32")
    (key,) = default_selector().persistent.keys()
    assert key[1] == f"library.{name}@v{operation.kernel.version}"


@pytest.mark.parametrize("width", [24, 8192])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gpu_candidates_lower_for_a_gpu(name, width):
    """What a GPU would measure becomes a Triton program, whatever the width; on a CPU none of it is offered."""
    operation = OPERATIONS[name]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operation.inputs(7, width, dtype="bfloat16")]
    inv = Invocation("x", tuple(shapes), {})
    offered = [cfg for cfg in operation.kernel.candidate_cfgs_gpu(inv) if operation.kernel.valid_cfg(inv, cfg) is True]
    blocks = [cfg for cfg in offered if cfg.implementation == "triton"]
    assert len(blocks) >= 3
    text = lowered_for_a_gpu(lambda *a: operation.kernel.run(*a, cfg=blocks[-1]), *shapes)
    assert "triton" in text
    assert "triton" not in {cfg.implementation for cfg in operation.kernel.candidate_cfgs(inv)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 128, 1000])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_gpu_candidate_is_right_when_interpreted(name, width, dtype):
    """All blocks and launches that a GPU would measure, values and gradients."""
    operation = OPERATIONS[name]
    args = operation.inputs(7, width, dtype=dtype, weights=dtype)
    inv = Invocation("x", args, {})
    expected = operation.exact(*[np.asarray(a, np.float64) for a in args])
    dy = normal(7, width, dtype=dtype, seed=9)
    plain = pull(lambda *a: operation(*a, way=operation.ways[0]), args, dy)
    for cfg in operation.kernel.candidate_cfgs_gpu(inv):
        if operation.kernel.valid_cfg(inv, cfg) is True:
            assert_near(operation(*args, way=cfg), expected, dtype)
            for one, other in zip(pull(lambda *a, cfg=cfg: operation(*a, way=cfg), args, dy), plain, strict=True):
                assert_near(one, np.asarray(other, np.float64), dtype, slack=5)


def test_a_large_mean_is_taken_off_exactly():
    """Rows far from zero keep their variance; one pass is not offered where it would lose it."""
    x = normal(4, 64) + 1000.0
    exact = layer_norm_64(np.asarray(x, np.float64))
    for way in OPERATIONS["layer_norm"].ways:
        assert_near(layer_norm(x, cfg=way, executor=UNTUNED), exact, "float32", slack=20)
    inv = Invocation("x", (x,), {})
    assert "too coarse for float32" in LayerNorm().valid_cfg(inv, LayerNormConfig("one_pass"))
    assert LayerNorm().valid_cfg(Invocation("x", (x.astype(jnp.bfloat16),), {}), LayerNormConfig("one_pass")) is True


@pytest.mark.parametrize("way", [*OPERATIONS["softmax"].ways, SoftmaxConfig("split", parts=2)], ids=spelled)
def test_softmax_of_what_is_ruled_out(way):
    """-inf gets no share, huge values do not overflow."""
    x = jnp.array([[-jnp.inf, 1.0, -jnp.inf, 2.0], [1e30, 0.0, -1e30, 1e30], [-jnp.inf, -jnp.inf, -500.0, -500.0]])
    expected = [[0, 0.26894142, 0, 0.73105858], [0.5, 0, 0, 0.5], [0, 0, 0.5, 0.5]]
    np.testing.assert_allclose(softmax(x, cfg=way, executor=UNTUNED), expected, rtol=1e-6)


def test_softmax_over_any_axis():
    """Counted from either end; what works on the last axis alone is not offered for others."""
    x = normal(3, 4, 5)
    for axis in (0, 1, -2):
        np.testing.assert_allclose(softmax(x, axis=axis, executor=UNTUNED), jax.nn.softmax(x, axis), rtol=1e-5)
    assert "last axis" in Softmax().valid_cfg(Invocation("x", (x,), {"axis": -2}), SoftmaxConfig("lanes", lanes=4))


def test_layer_norm_without_weight_or_bias():
    """Either, both or none."""
    x, weight, bias = OPERATIONS["layer_norm"].inputs(3, 16)
    exact = [np.asarray(a, np.float64) for a in (x, weight, bias)]
    for way in OPERATIONS["layer_norm"].ways:
        for use in ((False, False), (True, False), (False, True)):
            given = [v if used else None for v, used in zip((weight, bias), use, strict=True)]
            wanted = [v if used else None for v, used in zip(exact[1:], use, strict=True)]
            found = layer_norm(x, *given, cfg=way, executor=UNTUNED)
            assert_near(found, layer_norm_64(exact[0], *wanted), "float32")
    gradient = jax.grad(lambda bias: layer_norm(x, None, bias, executor=UNTUNED).sum())(bias)
    np.testing.assert_allclose(gradient, np.full(16, 3.0))


BAD = {
    "an integer array": (lambda: rms_norm(jnp.arange(4)), TypeError, "x is int32; use one of float32"),
    "no array": (lambda: rms_norm([1.0]), TypeError, "x must be an array, got list"),
    "a scalar": (lambda: softmax(jnp.float32(1)), ValueError, r"x has the shape \(\)"),
    "a weight of another size": (
        lambda: rms_norm(jnp.ones((2, 4)), jnp.ones(3)),
        ValueError,
        r"weight has the shape \(3,\) and x the shape \(2, 4\)",
    ),
    "a bias with two axes": (
        lambda: layer_norm(jnp.ones((2, 4)), None, jnp.ones((1, 4))),
        ValueError,
        r"bias has the shape \(1, 4\) and x the shape \(2, 4\)",
    ),
    "a negative eps": (lambda: rms_norm(jnp.ones(4), eps=-1.0), ValueError, "eps=-1.0 is no finite number"),
    "no such axis": (lambda: softmax(jnp.ones((2, 3)), axis=2), ValueError, r"axis=2 is no axis of x.*\(2, 3\)"),
    "no such implementation": (
        lambda: rms_norm(jnp.ones((2, 4)), cfg=RmsNormConfig("cuda"), executor=UNTUNED),
        ValueError,
        "names no implementation of rms_norm; use xla",
    ),
    "a cfg of another operation": (
        lambda: rms_norm(jnp.ones((2, 4)), cfg=SoftmaxConfig("xla"), executor=UNTUNED),
        TypeError,
        "cfg_type = RmsNormConfig",
    ),
}


def test_an_eps_of_numpy_is_a_number():
    """It is as good as Python's own."""
    x = jnp.arange(4.0)
    made = rms_norm(x, eps=np.float32(1e-6), executor=UNTUNED)
    np.testing.assert_array_equal(made, rms_norm(x, eps=float(np.float32(1e-6)), executor=UNTUNED))


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_tuning(call, kind, message):
    """With an error that names the argument and what it has."""
    with pytest.raises(kind, match=message):
        call()
    assert default_selector().cache.size() == 0


def test_what_cannot_run_says_why():
    """Reasons of `valid_cfg`."""
    inv = Invocation("x", (jnp.ones((4, 100)),), {})
    for cfg, reason in (
        (RmsNormConfig("lanes", lanes=16), "16 lanes do not divide rows of 100"),
        (RmsNormConfig("triton", rows=3, num_warps=2), "powers of two"),
        (RmsNormConfig("triton", rows=2), "must be given"),
        (RmsNormConfig("triton", rows=1024, num_warps=1), "too many for the registers"),
    ):
        assert reason in RmsNorm().valid_cfg(inv, cfg)
