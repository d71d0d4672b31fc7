"""Empties a GPU's caches before a call: in a program other arrays pass through them between two calls of a kernel.

A product of a decode step was a case on an H200: its 23 MB stayed in the second-level cache from call to call, and the
best candidate took 0.75 of the time of XLA's product; with the caches emptied 0.93.
"""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp

from .cost import free_memory

# Twice what the largest second-level cache of a GPU holds; to read that takes an H200 some 60 us.
_BYTES = 256 * 2**20
# With less free memory on the device there is no flush: candidates need the rest.
_LEAST_FREE = 8 * _BYTES


@final
class CacheFlush:
    """Reads more than the caches hold. It writes nothing, so the next call need not wait for cached writes."""

    def __init__(self, device: jax.Device) -> None:
        self._array = jax.device_put(jnp.zeros(_BYTES // 4, jnp.int32), device)
        # Compiled here, not within a round.
        jax.block_until_ready(_ejkernel_flush(self._array))

    def __call__(self) -> None:
        """Begins the flush, without waiting: a device runs the calls of one process in order."""
        _ejkernel_flush(self._array)


@jax.jit
def _ejkernel_flush(array: Any) -> Any:
    return jnp.sum(array)


def flush_for(device: jax.Device | None) -> CacheFlush | None:
    """The flush of a device; None where caches are not a GPU's, or its memory is nearly full."""
    if device is None or device.platform not in ("gpu", "cuda", "rocm"):
        return None
    free = free_memory(device)
    if free is not None and free < _LEAST_FREE:
        return None
    try:
        return CacheFlush(device)
    # Another process holds the memory: the caches are then as the call before left them, and the record says so.
    except jax.errors.JaxRuntimeError:
        return None
