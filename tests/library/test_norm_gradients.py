"""Gradients of rms_norm and layer_norm as the Triton kernel computes them: interpreted, against float64.

Covers `library/triton/norm_gradients.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import DTYPES, assert_near, lowered_for_a_gpu, normal, wide
from thinning import each_once

from ejkernel.library import LayerNorm, LayerNormConfig, RmsNorm, RmsNormConfig
from ejkernel.library.triton import norm_gradients

P = jax.sharding.PartitionSpec
KERNELS = {
    "rms_norm": (RmsNorm(), RmsNormConfig("triton", rows=1, num_warps=1)),
    "layer_norm": (LayerNorm(), LayerNormConfig("triton", rows=1, num_warps=1)),
}
GIVEN = {
    "rms_norm": ("rms_norm", ()),
    "rms_norm with weight": ("rms_norm", ("weight",)),
    "layer_norm": ("layer_norm", ()),
    "layer_norm with weight": ("layer_norm", ("weight",)),
    "layer_norm with bias": ("layer_norm", ("bias",)),
    "layer_norm with both": ("layer_norm", ("weight", "bias")),
}
every_norm = pytest.mark.parametrize(("name", "kinds"), [GIVEN["rms_norm with weight"], GIVEN["layer_norm with both"]])


def norm(name, kinds, *, eps=1e-6, interpret=True):
    """The Triton implementation as a function of x and of the vectors of these kinds."""
    kernel, cfg = KERNELS[name]

    def apply(x, *vectors):
        how: dict[str, Any] = {"eps": eps, "cfg": cfg, "interpret": interpret}
        return kernel.run(x, **dict(zip(kinds, vectors, strict=True)), **how)

    return apply


def pulled(fn, args, dy):
    """Gradients of a function that was not traced before, so that a number may have changed."""
    return jax.jit(lambda args, dy: jax.vjp(fn, *args)[1](dy))(args, dy)


def exact(name, kinds, args, dy, *, eps=1e-6):
    """Gradients that JAX derives in float64."""

    def apply(x, *vectors):
        off = x - jnp.mean(x, -1, keepdims=True) if name == "layer_norm" else x
        made = off / jnp.sqrt(jnp.mean(off * off, -1, keepdims=True) + eps)
        for kind, vector in zip(kinds, vectors, strict=True):
            made = made * vector if kind == "weight" else made + vector
        return made

    with jax.enable_x64(True):
        return [np.asarray(g) for g in pulled(apply, [wide(a) for a in args], wide(dy))]


def inputs(kinds, *shape, dtype="float32", weights="float32"):
    """x, vectors and dy."""
    vectors = [normal(shape[-1], dtype=weights, seed=seed) for seed, _ in enumerate(kinds, 1)]
    return (normal(*shape, dtype=dtype), *vectors), normal(*shape, dtype=dtype, seed=9)


def assert_right(found, args, expected, slack=5.0):
    """Each gradient has its argument's shape and dtype, and is as near as that allows."""
    assert len(found) == len(expected)
    for gradient, arg, wanted in zip(found, args, expected, strict=True):
        assert (gradient.shape, gradient.dtype) == (arg.shape, arg.dtype)
        assert_near(gradient, wanted, arg.dtype.name, slack)


@pytest.fixture
def few_programs(monkeypatch):
    """Programs with several steps each, for few rows."""
    monkeypatch.setattr(norm_gradients, "_WARPS_OF_ALL", 4)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("given", "dtype"), each_once(GIVEN, DTYPES))
def test_gradients_are_those_of_float64(given, dtype):
    """With and without vectors, in every dtype, for an odd width and rows in two leading axes."""
    name, kinds = given
    args, dy = inputs(kinds, 3, 5, 100, dtype=dtype, weights=dtype)
    assert_right(pulled(norm(name, kinds), args, dy), args, exact(name, kinds, args, dy))


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("given", "shape"), each_once(GIVEN, [(37, 513), (29, 100), (32, 512), (150, 16)]))
def test_programs_go_through_several_rows(few_programs, given, shape):
    """Narrow rows several at a time, wide ones one by one; the last program has fewer, except for even sizes."""
    name, kinds = given
    tall, steps = norm_gradients.portions(*shape)
    assert steps > 1
    assert bool(shape[0] % (tall * steps)) == (shape != (32, 512))
    args, dy = inputs(kinds, *shape)
    assert_right(pulled(norm(name, kinds), args, dy), args, exact(name, kinds, args, dy))


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [(7,), (1, 1024), (2, 3000)])
@every_norm
def test_few_rows_are_no_special_case(name, kinds, shape):
    """One row, with no leading axis too, and rows for several warps."""
    args, dy = inputs(kinds, *shape)
    assert_right(pulled(norm(name, kinds), args, dy), args, exact(name, kinds, args, dy))


@every_norm
def test_vectors_keep_their_own_dtype(few_programs, name, kinds):
    """Float32 vectors of bfloat16 rows get gradients that were never rounded to bfloat16."""
    args, dy = inputs(kinds, 33, 64, dtype="bfloat16")
    assert_right(pulled(norm(name, kinds), args, dy), args, exact(name, kinds, args, dy))


@every_norm
def test_without_eps_what_is_beyond_the_rows_does_not_count(few_programs, name, kinds):
    """A last program with fewer rows would add zero times infinity."""
    args, dy = inputs(kinds, 29, 100)
    assert_right(pulled(norm(name, kinds, eps=0.0), args, dy), args, exact(name, kinds, args, dy, eps=0.0))


def test_a_large_mean_is_taken_off_first(few_programs):
    """Rows far from zero keep their variance."""
    kinds = ("weight", "bias")
    (x, *vectors), dy = inputs(kinds, 9, 100)
    args = (x + 1000.0, *vectors)
    assert_right(pulled(norm("layer_norm", kinds), args, dy), args, exact("layer_norm", kinds, args, dy), slack=20)


@pytest.mark.one_leg(but_first=True)
@every_norm
def test_vmap_maps_rows_and_vectors(few_programs, name, kinds):
    """Over an inner axis with shared vectors, whose gradients add up, and with a set of vectors for each."""
    args, dy = inputs(kinds, 6, 4, 48)
    shared = jax.vmap(norm(name, kinds), (1, *(None for _ in kinds)), 1)
    assert_right(pulled(shared, args, dy), args, exact(name, kinds, args, dy))

    x, *vectors = args
    own = (x, *(jnp.stack([vector * (1 + n) for n in range(6)]) for vector in vectors))
    found = pulled(jax.vmap(norm(name, kinds)), own, dy)
    for n in range(6):
        one = tuple(arg[n] for arg in own)
        assert_right([gradient[n] for gradient in found], one, exact(name, kinds, one, dy[n]))


@every_norm
def test_gradients_work_without_jit(name, kinds):
    """Eagerly they are the same."""
    args, dy = inputs(kinds, 5, 24)
    assert_right(jax.vjp(norm(name, kinds), *args)[1](dy), args, exact(name, kinds, args, dy))


@every_norm
def test_wide_rows_are_left_to_xla(name, kinds):
    """A row that fits no registers has the gradient recomputed; the widest that does, the kernel's."""

    def program(width):
        args, dy = inputs(kinds, 2, width)
        return str(jax.make_jaxpr(lambda args, dy: jax.vjp(norm(name, kinds), *args)[1](dy))(args, dy))

    assert f"library_{name}_gradient" in program(8192)
    assert f"library_{name}_gradient" not in program(8193)
    args, dy = inputs(kinds, 2, 8193)
    assert_right(pulled(norm(name, kinds), args, dy), args, exact(name, kinds, args, dy))


def test_without_vectors_nothing_is_added_up():
    """The kernel makes dx, and a row of sums for each program and vector."""

    def made(kinds):
        args, dy = inputs(kinds, 4096, 1024, dtype="bfloat16")
        how: dict[str, Any] = {"centred": True, "eps": 1e-6, "interpret": False, "name": "some"}
        vectors = dict(zip(kinds, args[1:], strict=True))
        traced = jax.make_jaxpr(lambda x, dy: norm_gradients.norm_gradients(x, dy, **vectors, **how))(args[0], dy)
        (call,) = [equation for equation in traced.eqns if equation.primitive.name == "pallas_call"]
        return [(out.aval.shape, out.aval.dtype.name) for out in call.outvars]

    assert made(()) == [((4096, 1024), "bfloat16")]
    assert made(("weight", "bias")) == [((4096, 1024), "bfloat16"), *[((1024, 1024), "float32")] * 2]


@pytest.mark.parametrize("width", [1, 100, 128, 1280, 4096, 8192])
@pytest.mark.parametrize("count", [1, 100, 4096, 1_000_003])
def test_rows_are_shared_out_among_enough_programs(count, width):
    """No more than a GPU runs at once, and over half of that unless a program has one step."""
    tall, steps = norm_gradients.portions(count, width)
    assert tall & (tall - 1) == 0
    warps = -(-count // (tall * steps)) * norm_gradients.warps_for(width)
    assert warps <= 2048
    assert steps == 1 or warps > 1024


LARGE = [((7, 24), "float16"), ((70_000, 128), "bfloat16"), ((40_000, 1000), "float32"), ((5000, 8192), "bfloat16")]


@pytest.mark.parametrize(("given", "rows"), each_once(GIVEN, LARGE))
def test_it_lowers_for_a_gpu(given, rows):
    """It becomes a Triton program, with one step and with several."""
    (name, kinds), (shape, dtype) = given, rows
    shapes = [jax.ShapeDtypeStruct(shape, dtype), *(jax.ShapeDtypeStruct(shape[-1:], "float32") for _ in kinds)]
    text = lowered_for_a_gpu(lambda *a: jax.vjp(norm(name, kinds, interpret=False), *a)[1](a[0]), *shapes)
    assert f"library_{name}_gradient" in text


def test_it_lowers_for_a_gpu_in_64_bits():
    """Where Python's numbers have 64 bits, those of the kernel do not; and no rank is promoted."""
    shapes = [jax.ShapeDtypeStruct((40_000, 1000), "float32"), *[jax.ShapeDtypeStruct((1000,), "float32")] * 2]
    fn = norm("layer_norm", ("weight", "bias"), interpret=False)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        assert "library_layer_norm_gradient" in lowered_for_a_gpu(lambda *a: jax.vjp(fn, *a)[1](a[0]), *shapes)


@every_norm
def test_shards_add_up_the_gradients_of_what_they_share(name, kinds):
    """Under `check_vma` as well; the interpreter cannot run that, so it is only traced."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, dy, *vectors):
        return jax.vjp(norm(name, kinds, interpret=False), x, *vectors)[1](dy)

    specs = {
        "in_specs": (P("batch"), P("batch"), *(P() for _ in kinds)),
        "out_specs": (P("batch"), *(P() for _ in kinds)),
    }
    (x, *vectors), dy = inputs(kinds, 4, 24)
    # An output that differs between shards would be refused, since its spec says that it does not.
    traced = jax.make_jaxpr(jax.shard_map(local, mesh=mesh, **specs))(x, dy, *vectors)
    assert [out.aval.shape for out in traced.jaxpr.outvars] == [x.shape, *(vector.shape for vector in vectors)]
