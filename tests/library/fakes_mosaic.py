"""What tests of Mosaic kernels share: a fixture that looks for races, and programs lowered for a GPU without one."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ejkernel.ops import Invocation, _jax
from ejkernel.ops.core import device
from ejkernel.ops.timing.program import has_kernel

# Mosaic GPU of JAX 0.10 imports absl, which JAX does not install.
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) and importlib.util.find_spec("absl") is None,
    reason="Mosaic GPU of this JAX needs absl-py, the extra `mosaic`",
)
# Its interpreter has no loops over references, and takes seconds for several warpgroups.
needs_loops = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="this JAX interprets no loops over references"
)
# It has no copy from a place that is known only as it runs, either.
needs_copies = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="this JAX interprets no copies from places that are computed"
)


@pytest.fixture
def races():
    """Fails a test whose kernel raced; newer versions of JAX raise by themselves."""
    _jax.forget_interpreted()
    yield
    try:
        found = _jax.interpreted_races()
    except AssertionError:
        found = None
    _jax.forget_interpreted()
    assert found is not None, "nothing was interpreted"
    assert not found


def lowered_by_mosaic(fn: Any, *shapes: Any) -> str:
    """The program as it would be handed to a Hopper GPU; layouts and shared memory have been checked by then."""
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    # A tuning compiles it as a program with a kernel.
    assert "mosaic_gpu" in text
    assert has_kernel(text)
    return str(text)


def hopper(monkeypatch: Any, capability: str = "9.0", kind: str = "NVIDIA H200") -> SimpleNamespace:
    """Calls that Mosaic kernels are asked about have this device."""
    found = SimpleNamespace(device_kind=kind, platform="cuda", compute_capability=capability)
    monkeypatch.setattr("ejkernel.library.mosaic.served.device_of", lambda inv: found)
    return found


@pytest.fixture
def asked():
    """`asked(kernel, *shapes, capability=..., cores=..., **static)`: the guess for a GPU that is not there."""
    tokens = []

    def ask(
        kernel: Any, *shapes: Any, capability: str = "9.0", cores: int = 132, batch: Any = None, **static: Any
    ) -> Any:
        # A target must be a real device, so the variable behind it is set.
        tokens.append(device._target.set(gpu(capability, cores)))  # type: ignore[arg-type]
        inv = Invocation(kernel.op_id, tuple(jax.ShapeDtypeStruct(*one) for one in shapes), static, batch_axes=batch)
        cfg = kernel.heuristic_cfg_gpu(inv)
        assert kernel.valid_cfg(inv, cfg) is True
        assert cfg in [*kernel.candidate_cfgs_gpu(inv), *kernel.candidate_cfgs(inv), kernel.heuristic_cfg(inv)]
        return cfg

    yield ask
    for token in reversed(tokens):
        device._target.reset(token)


def gpu(capability: str, cores: int = 132) -> SimpleNamespace:
    """A GPU of NVIDIA's with so many multiprocessors, as far as the library asks."""
    kind = "NVIDIA H200" if capability == "9.0" else "NVIDIA A100"
    return SimpleNamespace(device_kind=kind, platform="cuda", compute_capability=capability, core_count=cores, id=0)
