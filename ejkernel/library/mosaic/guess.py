"""Calls for which guesses were measured: on Hopper GPUs, by JAX 0.11 or later."""

from __future__ import annotations

from typing import Any

import jax

from ...ops import Invocation
from . import served


def is_measured(inv: Invocation[Any, Any], *sizes: int) -> bool:
    """Does a call with arrays of so many elements run where Mosaic kernels were measured?"""
    return jax.__version_info__ >= (0, 11) and not served.refuses(inv, *sizes, hopper=True)
