"""One question to the tiers: a call, its kernel, its key and its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from .description import described
from .device import device_fingerprint, device_of, get_device_platform
from .errors import KernelError
from .invocation import Invocation
from .kernel import Kernel, check_kernel, key_builder_of, versioned
from .key import Key
from .record import Objective, Record
from .variants import variant


@dataclass(frozen=True)
class Hit:
    """An answer, where it came from, and what the listener is told about it."""

    cfg: Any
    source: str
    data: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective | None = None
    record: Record | None = None
    # False: an answer that must not be kept, since nothing was measured for it here.
    keep: bool = True


@dataclass(frozen=True)
class Miss:
    """Why a tier had no answer; `seeds` are cfgs that are known but not good enough to be used unmeasured."""

    reason: str
    # None leaves the seeds that earlier tiers found as they are.
    seeds: tuple[Hit, ...] | None = None
    # A tuning that left no candidate.
    record: Record | None = None


@dataclass(frozen=True)
class Decision:
    """What was chosen for a request, by which tier, and why the earlier ones had no answer."""

    cfg: Any
    tier: str
    misses: tuple[tuple[str, str], ...] = ()
    record: Record | None = None
    # The record of a tuning that left no candidate.
    failed: Record | None = None


@dataclass(frozen=True)
class Request:
    """One question to the tiers."""

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: Key
    device: jax.Device
    # What a tuning must cover to be good enough.
    objective: Objective
    seeds: tuple[Hit, ...] = ()
    # The most that a tuning may take, besides what the process may spend: others wait for it.
    seconds: float | None = None

    @cached_property
    def platform(self) -> str:
        """`gpu`, `tpu` or `cpu`."""
        return get_device_platform(self.device)

    @cached_property
    def call(self) -> Mapping[str, str]:
        """The call in readable parts."""
        return described(self.inv)

    def hook(self, name: str) -> Callable[..., Any]:
        """The kernel's method for this platform and way of running."""
        return variant(self.kernel, name, platform=self.platform, method=self.inv.method)


def ask(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], objective: Objective) -> Request:
    """The question that a call asks."""
    check_kernel(kernel)
    if inv.op_id != kernel.op_id:
        raise KernelError(f"the invocation is one of {inv.op_id!r}, but the kernel is {kernel.op_id!r}")
    device = device_of(inv)
    call_key = inv.make_key(key_builder_of(kernel))
    return Request(inv, kernel, Key(device_fingerprint(device), versioned(kernel), call_key), device, objective)
