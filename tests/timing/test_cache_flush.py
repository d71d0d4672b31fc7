"""Caches are emptied on GPUs that have the memory for it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest

from ejkernel.ops.timing import cache_flush
from ejkernel.ops.timing.cache_flush import CacheFlush, flush_for


@dataclass
class Fake:
    """A device as far as its memory goes."""

    platform: str
    free: int

    def memory_stats(self):
        return {"bytes_limit": self.free}


def test_a_flush_runs_as_often_as_it_is_asked_to(monkeypatch):
    """The second one compiles nothing."""
    monkeypatch.setattr(cache_flush, "_BYTES", 4096)
    flush = CacheFlush(jax.devices("cpu")[0])
    flush()
    compiled = cache_flush._ejkernel_flush._cache_size()
    flush()
    assert cache_flush._ejkernel_flush._cache_size() == compiled


@pytest.mark.parametrize("device", [None, Fake("cpu", 2**40), Fake("tpu", 2**40), Fake("gpu", 2**30)])
def test_no_flush_without_a_gpu_or_without_memory(device):
    """What is needed for candidates is left to them."""
    assert flush_for(device) is None


def test_a_device_whose_memory_another_process_holds_has_none(monkeypatch):
    """The allocation fails, and the tuning goes on."""

    def full(device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(cache_flush, "CacheFlush", full)
    assert flush_for(Fake("gpu", 2**40)) is None
