"""The opponents of the library in benchmarks: each adapter computes the library's operation."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import lowered_for_a_gpu
from fakes_mosaic import needs_mosaic

from ejkernel.library.jax_pallas import gpu_kernels

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from cases import attention, layer_norm, rms_norm, softmax
from library_programs import both_passes
from opponents import collected, pages, pallas_attention, pallas_rows
from opponents.opponent import Call
from opponents.table import ENTRIES


def normal(*shape, seed=0):
    """Random values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.float32))


SEEN = {"causal": True, "scale": 0.25}
PLAIN_ATTENTION = functools.partial(attention.ready, window=None, implementation="xla")
ROWS = normal(6, 200), normal(200, seed=1), normal(200, seed=2)
HEADS = tuple(normal(1, 64, 2, 16, seed=seed) for seed in range(3))
KEYS = normal(2, 1, 4, 16), *(normal(2, 256, 2, 16, seed=seed) for seed in (1, 2))
TABLE = jnp.arange(8, dtype=jnp.int32)[::-1].reshape(2, 4)
PAGES = normal(2, 1, 4, 16), *(normal(8, 8, 2, 16, seed=seed) for seed in (1, 2)), jnp.array([20, 32]), TABLE


def by_pages(*arrays):
    """In the layout that JAX's kernel wants."""
    return pallas_attention.paged(*pallas_attention.scaled_pages(0.25)(*arrays), splits=2, interpret=True)


# Each adapter, interpreted, and the plain function of the same arrays; are there gradients?
ADAPTERS = {
    "rms_norm": (functools.partial(pallas_rows.rms_norm, interpret=True), rms_norm.plain, ROWS[:2], True),
    "layer_norm": (functools.partial(pallas_rows.layer_norm, interpret=True), layer_norm.plain, ROWS, True),
    "softmax": (functools.partial(pallas_rows.softmax, num_warps=4, interpret=True), softmax.plain, ROWS[:1], False),
    "attention": (
        functools.partial(pallas_attention.by_triton, config=(32, 32, 32, 4), interpret=True, **SEEN),
        functools.partial(PLAIN_ATTENTION, **SEEN),
        HEADS,
        True,
    ),
    "decode_attention": (
        functools.partial(pallas_attention.decode, splits=4, scale=0.25, interpret=True),
        functools.partial(PLAIN_ATTENTION, causal=False, scale=0.25),
        KEYS,
        False,
    ),
    "paged_attention": (by_pages, functools.partial(pages.gathered, scale=0.25), PAGES, False),
}


@pytest.fixture(autouse=True)
def old_kernels():
    """JAX calls some of its kernels deprecated; as opponents they serve as long as they are there."""
    for name in ("attention", "decode_attention", "layer_norm", "paged_attention", "rms_norm", "softmax"):
        gpu_kernels(name)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_jaxs_kernels_computes_the_operation(name):
    """Values, and gradients where the kernel has them."""
    theirs, plain, arrays, backward = ADAPTERS[name]
    if backward:
        theirs, plain = both_passes(theirs, arrays), both_passes(plain, arrays)
        arrays = (*arrays, normal(*arrays[0].shape, seed=9))
    found, wanted = jax.jit(theirs)(*arrays), jax.jit(plain)(*arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def call_of(entry):
    """The call of an entry, in shapes, and the shape of its result."""
    static = []

    def make():
        arrays, keywords = entry.case.make(np.random.default_rng(0))
        static.append(keywords)
        return arrays

    arrays = jax.eval_shape(make)
    out = jax.eval_shape(functools.partial(entry.case.plain, **static[0]), *arrays)
    return Call(entry.case.op, arrays, static[0], entry.case.backward), out


LOWERED = ["ragged_dot: 16384x2048 by 64 of 1408, skewed", "ragged_dot: 8192x4096 by 8 of 4096, even, gradient"]
LOWERED += ["matmul: projection 2048x4096 by 4096", "attention: 4x2048, 16 heads of 64"]


@needs_mosaic
@pytest.mark.parametrize("name", LOWERED)
def test_a_mosaic_kernel_of_jax_takes_its_calls(monkeypatch, name):
    """The first config of each, lowered for a GPU in the call's own shapes, gives the shapes that ours gives."""
    (entry,) = [entry for entry in ENTRIES if entry.name == name]
    call, out = call_of(entry)
    versions = SimpleNamespace(cuda_runtime_get_version=lambda: 12091)
    monkeypatch.setattr(gpu_kernels("attention_mgpu"), "cuda_versions", versions)
    device = SimpleNamespace(core_count=132)
    backend = SimpleNamespace(get_default_device=lambda: device)
    monkeypatch.setattr(gpu_kernels("hopper_matmul_mgpu"), "backend", backend)
    one = next(one for one in collected(call, ("torch", "tokamax", "jax attention("))[0] if "(64, 256" not in one.name)
    given = (*call.arrays, out) if call.backward else call.arrays
    given = given if one.prepare is None else jax.eval_shape(one.prepare, *given)
    if call.backward:
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert "mosaic_gpu" in lowered_for_a_gpu(one.fn, *given)
    found = jax.eval_shape(one.fn, *given)
    monkeypatch.undo()
    wanted = [out, *call.arrays[:2]] if call.backward else [out]
    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [leaf.shape for leaf in wanted]


def test_every_row_has_opponents_of_jax_and_every_operation_some_of_torch(monkeypatch):
    """No two have one name, and nothing but a package that was not asked for is left out."""
    torch = SimpleNamespace(
        nn=SimpleNamespace(functional=SimpleNamespace(), attention=None),
        compile=lambda fn, **_: fn,
        matmul=None,
        _grouped_mm=lambda *_, **__: None,
    )
    backends = SimpleNamespace(SDPBackend=SimpleNamespace(FLASH_ATTENTION=1, CUDNN_ATTENTION=2), sdpa_kernel=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn", torch.nn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention", backends)
    for entry in ENTRIES:
        call, _ = call_of(entry)
        found, left_out = collected(call, ("tokamax",))
        names = [one.name for one in found]
        assert len(set(names)) == len(names)
        assert list(left_out) == ["tokamax"]
        assert entry.case.op == "decode_attention" or any(name.startswith("torch") for name in names), entry.name
        # Those of JAX know no gradient of attention with shared heads, and no cross entropy.
        known = any(name.startswith("jax") for name in names) or "cudnn" in entry.case.ready
        assert known or entry.case.op == "linear_cross_entropy", entry.name


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    """The others still take part."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    found, left_out = collected(Call("softmax", (jax.ShapeDtypeStruct((4, 64), jnp.bfloat16),), {}, False))
    assert {one.name for one in found} >= {"jax softmax(4 warps)"}
    assert set(left_out) == {"torch", "tokamax"}
    assert "torch" in left_out["torch"]
