"""JAX's own Pallas kernels for GPUs, where the installed JAX has them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def gpu_kernels(name: str) -> ModuleType:
    """One of the modules in `jax.experimental.pallas.ops.gpu`."""
    with warnings.catch_warnings():
        # JAX 0.12 calls some of them deprecated; as candidates they serve as long as they are there.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")
