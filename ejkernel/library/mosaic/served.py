"""Calls that Mosaic GPU serves: asked before any of its kernels is imported."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from ...ops import Invocation
from ...ops.core.device import device_of, get_device_platform
from ..extent import too_large

# Tensor cores by warpgroups are of this generation alone; what came after has other instructions.
HOPPER = (9,)
# Row by row nothing but loads, stores and barriers is used.
_ROWS_FROM = 9


@functools.cache
def missing() -> str:
    """The reason that the installed JAX has no Mosaic GPU; empty where it has."""
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        if error.name == "absl":
            return f"Mosaic GPU of jax {jax.__version__} needs absl-py: pip install 'ejkernel-ops[mosaic]'"
        return f"jax {jax.__version__} has no Mosaic GPU: {error}"
    return ""


def refuses(inv: Invocation[Any, Any], *sizes: int, hopper: bool) -> str:
    """The reason that a call with arrays of so many elements has no Mosaic kernel; empty where it may have one."""
    device = device_of(inv)
    if get_device_platform(device) != "gpu":
        return "mosaic runs on GPUs alone"
    capability = str(getattr(device, "compute_capability", "0"))
    major = int(capability.split(".")[0]) if capability.split(".")[0].isdigit() else 0
    if hopper and major not in HOPPER:
        return f"this Mosaic kernel is for GPUs of capability 9, not {capability}"
    if major < _ROWS_FROM:
        return f"Mosaic kernels are for NVIDIA GPUs of capability 9 and later, not {capability}"
    return missing() or (too_large(inv, *sizes) if sizes else "")
