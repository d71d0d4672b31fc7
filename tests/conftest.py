"""What every test shares: no test touches the user's own caches or settings."""

from __future__ import annotations

import os

# Before JAX starts: several CPU devices, for tests of sharding and of more than one device. Most of the suite's time
# is compiling, a third of which is optimising programs that run once.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

# Threads of small matrix products wait for each other by spinning: with several test processes that costs most.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from ejkernel.ops import registry
from ejkernel.ops.execution.default import forget_default


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Every test has its own cache folder and none of the variables that steer the library."""
    for name in list(os.environ):
        if name.startswith("EJKERNEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "cache"))
    registry.forget_invocations()
    forget_default()
