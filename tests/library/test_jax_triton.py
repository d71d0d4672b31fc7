"""Row kernels in Triton's language: computed here by a stand-in for the language, and lowered where Triton is.

Covers `library/provided/jax_triton.py` and `library/provided/jax_triton_kernels.py`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull

from ejkernel.library import (
    LayerNormConfig,
    RmsNormConfig,
    SoftmaxConfig,
    layer_norm,
    register_provider,
    rms_norm,
    softmax,
    unregister_provider,
)
from ejkernel.library.provided import jax_triton as provided
from ejkernel.ops import Invocation

KERNELS = "ejkernel.library.provided.jax_triton_kernels"
OPERATIONS = {"softmax": (softmax, SoftmaxConfig, 0), "rms_norm": (rms_norm, RmsNormConfig, 1)}
OPERATIONS["layer_norm"] = (layer_norm, LayerNormConfig, 2)


class Values(np.ndarray):
    """What the language computes with."""

    def to(self, dtype):
        return self.astype(dtype)


class Pointer:
    """An array's memory, at a place or at many."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, more):
        return Pointer(self.memory, self.at + more)


def values(made):
    return np.asarray(made).view(Values)


def language(program):
    """As much of `triton.language` as the kernels use."""
    made = ModuleType("triton.language")
    made.constexpr, made.float32, made.int64 = object, np.float32, np.int64
    made.program_id = lambda axis: values(np.int32(program[axis]))
    made.arange = lambda begin, end: values(np.arange(begin, end))

    def load(pointer, *, mask, other):
        inside = np.where(mask, pointer.at, 0)
        return values(np.where(mask, pointer.memory[inside].astype(np.float32), np.float32(other)))

    def store(pointer, made, *, mask):
        pointer.memory[pointer.at[mask]] = made[mask].astype(pointer.memory.dtype)

    made.load, made.store = load, store
    made.max = lambda x, axis: values(x.max(axis))
    made.sum = lambda x, axis: values(x.sum(axis))
    made.where = lambda which, one, other: values(np.where(which, one, np.float32(other)))
    made.exp, made.rsqrt = np.exp, lambda x: 1 / np.sqrt(x)
    return made


@pytest.fixture
def stand_in(monkeypatch):
    """Modules in place of Triton and jax_triton; the calls that were made."""
    program, calls = [0], []
    triton, jax_triton = ModuleType("triton"), ModuleType("jax_triton")
    triton.jit, triton.language = (lambda fn: fn), language(program)

    def triton_call(*operands, kernel, out_shape, grid, name, num_warps, **sizes):
        calls.append((name, grid, num_warps))

        def run(*arrays):
            memory = [np.array(one).reshape(-1) for one in arrays]
            out = np.full(out_shape.size, np.nan, out_shape.dtype)
            for program[0] in range(*grid):
                kernel(*map(Pointer, memory), Pointer(out), **sizes)
            return out.reshape(out_shape.shape)

        return jax.pure_callback(run, out_shape, *operands)

    jax_triton.triton_call = triton_call
    for one in (triton, triton.language, jax_triton):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    monkeypatch.setattr(provided, "find_spec", lambda name: name)
    yield calls
    sys.modules.pop(KERNELS, None)


@pytest.fixture
def registered(stand_in):
    """Every operation has the provider."""
    for name in OPERATIONS:
        register_provider(name, "jax_triton")
    yield stand_in
    for name in OPERATIONS:
        unregister_provider(name, "jax_triton")


def computed(name, implementation, *args):
    """The operation by an implementation."""
    function, config, _ = OPERATIONS[name]
    return function(*args, cfg=config(implementation), executor=UNTUNED)


def inputs(name, *shape):
    """Rows far from zero, and vectors."""
    return normal(*shape) + 3.0, *(normal(shape[-1], seed=seed) for seed in range(1, 1 + OPERATIONS[name][2]))


@pytest.mark.thinned
@pytest.mark.parametrize("width", [1, 64, 300])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_is_that_of_the_plain_way(registered, name, width):
    """With vectors and without, for widths that no block divides."""
    for args in (inputs(name, 3, width), inputs(name, 3, width)[:1]):
        wanted = np.asarray(computed(name, "xla", *args), np.float64)
        assert_near(computed(name, "provider:jax_triton", *args), wanted, "float32")
    assert {grid for _, grid, _ in registered} == {(3,)}


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_the_plain_way(registered, name):
    """Computed from the arguments alone."""
    args = inputs(name, 3, 100)
    found, wanted = (
        pull(lambda *a, way=way: jnp.sum(computed(name, way, *a) ** 2), args, 1.0)
        for way in ("provider:jax_triton", "xla")
    )
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, np.asarray(other, np.float64), "float32", slack=10)


def test_another_axis_by_hand_is_that_axis(registered):
    """It is no candidate then; a cfg that names it gets the right result all the same."""
    x = normal(3, 5, 64)
    cfg = SoftmaxConfig("provider:jax_triton")
    for axis in (0, 1, -1):
        assert_near(provided.softmax(x, axis=axis), np.asarray(jax.nn.softmax(x, axis), np.float64), "float32")
    made = softmax(x, axis=-1, cfg=cfg, executor=UNTUNED)
    assert_near(made, np.asarray(jax.nn.softmax(x, -1), np.float64), "float32")


def test_under_vmap_there_are_more_rows(registered):
    """And one call after the other where each has vectors of its own."""
    x, weight = normal(2, 3, 64), normal(2, 64, seed=1)

    def run(way, axes, *args):
        return jax.vmap(lambda *a: computed("rms_norm", way, *a), in_axes=axes)(*args)

    for axes, args in (((0, None), (x, weight[0])), ((0, 0), (x, weight)), ((None, 0), (x[0], weight))):
        found, wanted = (run(way, axes, *args) for way in ("provider:jax_triton", "xla"))
        assert_near(found, np.asarray(wanted, np.float64), "float32")
    assert ("library_rms_rows", (6,), 1) in registered


def test_what_it_does_not_support_says_why(monkeypatch):
    """Another axis, wide rows, and a package that is not there."""
    wide, x = (jax.ShapeDtypeStruct((2, width), jnp.float32) for width in (40_000, 64))
    monkeypatch.setattr(provided, "find_spec", lambda name: name)
    assert provided.supports_softmax(x) is True
    assert "axis=0 is not the last one" in provided.supports_softmax(x, axis=0)
    assert "rows of 40000 are none that one block holds" in provided.supports_layer_norm(wide)
    monkeypatch.setattr(provided, "find_spec", lambda name: None)
    assert "jax_triton is not installed: pip install 'ejkernel-ops[triton]'" in provided.supports_rms_norm(x)


def test_registering_it_imports_nothing():
    """Triton is large, and is imported when a call is traced."""
    register_provider("softmax", "jax_triton")
    try:
        assert KERNELS not in sys.modules
        reason = provided.supports_softmax(jax.ShapeDtypeStruct((2, 64), jnp.float32))
        assert reason is True or "pip install" in reason
    finally:
        unregister_provider("softmax", "jax_triton")


@pytest.mark.engines
@pytest.mark.skipif(find_spec("jax_triton") is None, reason="needs the extra `triton` and JAX's CUDA plugin")
@pytest.mark.parametrize("width", [64, 1000, 32768])
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_lowered_for_a_gpu(monkeypatch, name, width):
    """By Triton itself, for Hopper."""
    triton = importlib.import_module("jax_triton")
    monkeypatch.setattr(triton, "triton_call", functools.partial(triton.triton_call, compute_capability=90))
    shapes = [jax.ShapeDtypeStruct((8, width), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((width,), jnp.float32)] * OPERATIONS[name][2]
    inv = Invocation("x", tuple(shapes), {})
    assert getattr(provided, f"supports_{name}")(*inv.args) is True
    text = jax.jit(getattr(provided, name)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
