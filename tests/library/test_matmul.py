"""matmul: every implementation against float64, values and gradients.

Covers `library/triton/launch.py` and `library/triton/matmul.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import DTYPES, UNTUNED, assert_near, lowered_for_a_gpu, normal, numeric_pull, pull, wide

from ejkernel.library import Matmul, MatmulConfig, matmul
from ejkernel.ops import Invocation, check, default_selector

P = jax.sharding.PartitionSpec
TILES = MatmulConfig("triton", 16, 32, 16, num_warps=2, num_stages=2)
NARROW = [MatmulConfig("xla"), MatmulConfig("wide"), MatmulConfig("upcast"), TILES]
FLOAT32 = [MatmulConfig("xla"), TILES]

EXACT = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}


def product(*args, **kwargs):
    """Never tuned."""
    return matmul(*args, executor=UNTUNED, **kwargs)


def inputs(m, k, n, dtype="float32"):
    """Two factors and a bias, scaled so that the product is about one."""
    return normal(m, k, dtype=dtype) / k**0.5, normal(k, n, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)


def spelled(value):
    """Names of parametrised tests."""
    return getattr(value, "implementation", None)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cfg", NARROW, ids=spelled)
def test_values_are_those_of_float64(cfg, dtype):
    """With bias and activation, in sizes that no tile divides."""
    a, b, bias = inputs(21, 50, 37, dtype)
    out = product(a, b, bias, activation="gelu", cfg=cfg)
    assert out.dtype == dtype
    assert_near(out, EXACT["gelu"](wide(a) @ wide(b) + wide(bias)), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("size", [(16, 16, 32), (1, 7, 1), (17, 64, 33)])
@pytest.mark.parametrize("cfg", FLOAT32, ids=spelled)
def test_no_tile_needs_to_divide_the_shape(cfg, size):
    """Even and odd sizes, without bias."""
    a, b, _ = inputs(*size)
    assert_near(product(a, b, cfg=cfg), wide(a) @ wide(b), "float32")


@pytest.mark.thinned
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("cfg", FLOAT32, ids=spelled)
def test_activations_are_what_they_are_called(cfg, activation):
    """By name, in the computation itself."""
    a, b, bias = inputs(5, 8, 6)
    found = product(a, b, bias, activation=activation, cfg=cfg)
    assert_near(found, EXACT[activation](wide(a) @ wide(b) + wide(bias)), "float32", slack=5)


def test_an_activation_may_be_a_function():
    """Any elementwise one."""
    a, b, _ = inputs(5, 8, 6)
    assert_near(product(a, b, activation=jnp.square), (wide(a) @ wide(b)) ** 2, "float32")


@pytest.mark.parametrize("cfg", FLOAT32, ids=spelled)
def test_gradients_are_those_of_float64(cfg):
    """For both factors and the bias, against differences."""
    args = inputs(3, 5, 4)
    dy = normal(3, 4, seed=9)

    def exact(a, b, bias):
        return EXACT["silu"](a @ b + bias)

    found = pull(lambda *a: product(*a, activation="silu", cfg=cfg), args, dy)
    for at, gradient in enumerate(found):
        assert_near(gradient, numeric_pull(exact, args, dy, at), "float32", slack=10)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_factors_may_lie_transposed(transpose_a, transpose_b):
    """The product is that of the transposed factors, leading axes included."""
    a, b = normal(2, 5, 8), normal(2, 8, 6, seed=1)
    given = jnp.swapaxes(a, 1, 2) if transpose_a else a, jnp.swapaxes(b, 1, 2) if transpose_b else b
    found = product(*given, transpose_a=transpose_a, transpose_b=transpose_b)
    assert_near(found, wide(a) @ wide(b), "float32")


@pytest.mark.parametrize("cfg", NARROW, ids=spelled)
def test_the_result_may_have_another_dtype(cfg):
    """float32 out of narrow factors is not rounded on the way."""
    a, b, bias = inputs(9, 200, 7, "bfloat16")
    out = product(a, b, bias, preferred_element_type=jnp.float32, cfg=cfg)
    assert out.dtype == jnp.float32
    assert_near(out, wide(a) @ wide(b) + wide(bias), "float32", slack=5)


@pytest.mark.parametrize("cfg", FLOAT32, ids=spelled)
def test_it_works_under_every_transformation(cfg):
    """jit, vmap, scan, leading axes, and shard_map over the batch."""
    a, b, bias = normal(4, 6, 10), normal(10, 5, seed=1), normal(5, seed=2)
    expected = wide(a) @ wide(b) + wide(bias)

    def apply(a, b, bias):
        return product(a, b, bias, cfg=cfg)

    assert_near(jax.jit(apply)(a, b, bias), expected, "float32")
    assert_near(jax.vmap(lambda a: apply(a, b, bias))(a), expected, "float32")
    assert_near(jax.lax.scan(lambda c, a: (c, apply(a, b, bias)), 0, a)[1], expected, "float32")
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("batch"), P(), P()), "out_specs": P("batch"), "check_vma": cfg.implementation != "triton"}
    sharded = jax.shard_map(apply, mesh=mesh, **specs)
    assert_near(jax.jit(sharded)(a, b, bias), expected, "float32")
    dy = normal(4, 6, 5, seed=9)
    for one, other in zip(pull(sharded, (a, b, bias), dy), pull(apply, (a, b, bias), dy), strict=True):
        assert_near(one, wide(other), "float32")


def test_forward_mode_works_where_the_plain_way_runs():
    """On a CPU the heuristic choice can be differentiated by every mode."""
    a, b, _ = inputs(3, 5, 4)
    assert jax.jvp(lambda a: product(a, b), (a,), (a,))[1].shape == (3, 4)


@pytest.mark.parametrize("size", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_gives_nothing_or_zeros(size):
    """A sum over nothing is zero."""
    a, b = jnp.ones(size[:2]), jnp.ones(size[1:])
    assert np.array_equal(product(a, b), np.zeros((size[0], size[2])))


def test_every_candidate_agrees():
    """`check` runs the candidates of this machine, gradients included, and finds none wrong."""
    trials = check(Matmul(), *inputs(16, 32, 24, "bfloat16"), activation="silu")
    assert {trial.status for trial in trials} == {"ok"}, [(t.cfg, t.message) for t in trials if t.status != "ok"]
    assert {trial.cfg.implementation for trial in trials} == {"xla", "wide", "upcast"}


def test_it_is_tuned_on_this_machine():
    """The function itself, through the default executor: a real tuning, a right result, one entry on disk."""
    a, b, bias = inputs(32, 64, 32, "bfloat16")
    assert_near(matmul(a, b, bias), wide(a) @ wide(b) + wide(bias), "bfloat16")
    assert [key[1] for key in default_selector().persistent.keys()] == ["library.matmul@v1"]


@pytest.mark.parametrize("size", [(1, 4096, 4096), (200, 300, 500), (4096, 4096, 4096)])
def test_gpu_candidates_lower_for_a_gpu(size):
    """Tiles that suit the rows become a Triton program; on a CPU none is offered."""
    m, k, n = size
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n), (n,))]
    inv = Invocation("x", tuple(shapes), {})
    tiles = [cfg for cfg in Matmul().candidate_cfgs_gpu(inv) if cfg.implementation == "triton"]
    valid = [cfg for cfg in tiles if Matmul().valid_cfg(inv, cfg) is True]
    assert 8 <= len(valid) <= 40
    assert "triton" in lowered_for_a_gpu(lambda *a: Matmul().run(*a, activation="gelu", cfg=valid[0]), *shapes)
    assert "triton" not in {cfg.implementation for cfg in Matmul().candidate_cfgs(inv)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 100, 70), (130, 300, 270)])
def test_every_gpu_candidate_is_right_when_interpreted(size, dtype):
    """All tiles and launches that a GPU would measure."""
    a, b, bias = inputs(*size, dtype)
    inv = Invocation("x", (a, b, bias), {})
    expected = wide(a) @ wide(b) + wide(bias)
    for cfg in Matmul().candidate_cfgs_gpu(inv):
        if Matmul().valid_cfg(inv, cfg) is True:
            assert_near(product(a, b, bias, cfg=cfg), expected, dtype)


def test_what_cannot_run_says_why():
    """Reasons of `valid_cfg`."""
    a, b = jnp.ones((16, 16)), jnp.ones((16, 16))
    for cfg, static, reason in (
        (MatmulConfig("wide"), {}, "float32 already"),
        (TILES, {"transpose_b": True}, "nothing transposed"),
        (MatmulConfig("triton", 16, 24, 16, num_warps=2, num_stages=2), {}, "powers of two"),
        (MatmulConfig("triton", 256, 256, 128, num_warps=8, num_stages=4), {}, "shared memory"),
        (MatmulConfig("triton"), {}, "must be given"),
    ):
        assert reason in Matmul().valid_cfg(Invocation("x", (a, b), static), cfg)


BAD = {
    "inner sizes": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((4, 5))),
        ValueError,
        r"differ in the axis that is summed over: 3 and 4, of shapes \(2, 3\) and \(4, 5\)",
    ),
    "inner sizes, transposed": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), transpose_a=True),
        ValueError,
        r"2 and 3, of shapes \(2, 3\) \(transposed\)",
    ),
    "leading axes": (lambda: matmul(jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))), ValueError, "do not broadcast"),
    "a vector": (lambda: matmul(jnp.ones(3), jnp.ones((3, 5))), ValueError, r"a must be a matrix.*\(3,\)"),
    "a bias of another size": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones(4)),
        ValueError,
        r"bias has the shape \(4,\) and b the shape \(3, 5\)",
    ),
    "two dtypes": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 5), jnp.bfloat16)),
        TypeError,
        "a is float32 and b is bfloat16",
    ),
    "integers": (lambda: matmul(jnp.ones((2, 3), int), jnp.ones((3, 5), int)), TypeError, "a is int32; use one of"),
    "activation": (lambda: product(jnp.ones((2, 3)), jnp.ones((3, 5)), activation="swish"), ValueError, "relu, gelu"),
    "result dtype": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), preferred_element_type="int8"),
        TypeError,
        "preferred_element_type is int8",
    ),
    "implementation": (
        lambda: product(jnp.ones((2, 3)), jnp.ones((3, 5)), cfg=MatmulConfig("blas")),
        ValueError,
        "names no implementation of matmul",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_tuning(call, kind, message):
    """With an error that names the argument and both shapes."""
    with pytest.raises(kind, match=message):
        call()
    assert default_selector().cache.size() == 0


@pytest.mark.parametrize(
    ("a", "b", "options", "reason"),
    [
        ((4, 0), (0, 5), {}, r"nothing to compute of shapes \(4, 0\) and \(0, 5\)"),
        ((4, 3), (5, 3), {"transpose_b": True}, "nothing transposed"),
        ((4, 3), (2, 3, 5), {}, "a plain matrix b"),
    ],
)
def test_tiles_that_cannot_compute_a_call_say_so(a, b, options, reason):
    """A config that is given by hand has not been held against the call before."""
    with pytest.raises(ValueError, match=f"cannot compute this call: .*{reason}"):
        product(jnp.ones(a), jnp.ones(b), cfg=TILES, **options)


def test_a_sum_of_nothing_is_zero():
    """By every other way."""
    for cfg in (None, MatmulConfig("xla"), MatmulConfig("wide"), MatmulConfig("upcast")):
        out = product(jnp.ones((4, 0), jnp.bfloat16), jnp.ones((0, 5), jnp.bfloat16), jnp.ones(5), cfg=cfg)
        np.testing.assert_array_equal(out, np.ones((4, 5)))
