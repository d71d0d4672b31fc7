"""Says whether Pallas-Triton serves: JAX will remove it, and a setting leaves it out before that."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from types import ModuleType

import jax

from ...ops.settings import Settings
from ..arguments import ArgumentError

_MODULE = "jax.experimental.pallas.triton"


def missing() -> str:
    """The reason that no way of Pallas-Triton takes part; empty where they do."""
    if not Settings.read().triton:
        return "EJKERNEL_OPS_TRITON=off leaves Pallas-Triton out"
    return "" if _is_there() else f"jax {jax.__version__} has no Pallas-Triton"


@functools.cache
def _is_there() -> bool:
    try:
        return find_spec(_MODULE) is not None
    # A module that is blocked, or that has no parent.
    except (ValueError, ImportError):
        return False


def backend() -> ModuleType:
    """Pallas's Triton backend; an error where it does not take part."""
    why = missing()
    if why:
        raise ArgumentError(f"this way of computing needs Pallas-Triton: {why}; choose another implementation")
    return importlib.import_module(_MODULE)
