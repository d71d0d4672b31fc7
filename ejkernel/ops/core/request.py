"""One question to the tiers (a call, its kernel, its key and its device), the answers that they may give, and the cfgs
of a call: the kernel's candidates, the cfgs that it rules out, and stored cfgs rebuilt as its type.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from . import codec, formatting
from .cfg import distinct
from .description import described
from .device import device_fingerprint, device_of, environment, get_device_platform
from .errors import KernelError
from .invocation import Invocation
from .kernel import Kernel, check_cfg_type, check_kernel, key_builder_of, variant, versioned
from .kernel_code import code_of
from .key import Key
from .record import Objective, Record
from .shown import Shown


class Keep(enum.Enum):
    """The places that a selector puts a tier's answer into."""

    NOTHING = enum.auto()
    MEMORY = enum.auto()
    MEMORY_AND_STORE = enum.auto()


@dataclass(frozen=True)
class Hit:
    """A tier's answer, and what happens to it: where it is kept, and which event reports it."""

    cfg: Any
    # The tier's name, as `explain`, counters and errors have it.
    tier: str
    # One of the contract's events; empty where the tier has told everything itself.
    event: str = ""
    # What the event says besides the key and the cfg.
    data: Mapping[str, Any] = field(default_factory=dict)
    keep: Keep = Keep.NOTHING
    # False: a guess, or what the caller gave.
    measured: bool = False
    # What it was tuned for, where that is known.
    objective: Objective | None = None
    # The record of the tuning that found it just now.
    record: Record | None = None
    # The fingerprint of the kernel's code that it was tuned for, where that is known.
    code: str = ""
    # The stored entry that it comes from, where another store is to keep that as it is.
    entry: Any = None
    # False for a seed of another user: measured with the candidates, and never used without that.
    usable: bool = True


@dataclass(frozen=True)
class Miss:
    """A tier without an answer, and the reason; `seeds` are known cfgs that must be measured before they are used."""

    # Empty: not worth a line.
    reason: str
    # None leaves the seeds that earlier tiers found as they are.
    seeds: tuple[Hit, ...] | None = None
    # The record of a tuning in which every candidate failed.
    record: Record | None = None


@dataclass(frozen=True)
class Planned:
    """The answer to a preview of a tier that would have to measure first."""

    # How many candidates it would measure.
    candidates: int
    # Why that would be an error.
    refused: str = ""


@dataclass(frozen=True, repr=False)
class Decision(Shown):
    """The cfg chosen for a request, its tier, and the reasons why earlier tiers had no answer."""

    cfg: Any
    tier: str
    misses: tuple[tuple[str, str], ...] = ()
    record: Record | None = None
    # The record of a tuning in which every candidate failed.
    failed: Record | None = None
    measured: bool = False
    objective: Objective | None = None
    # The request's own, so that they need not be derived again. Its arrays are left out: tracers must not outlive
    # their trace.
    key: Key | None = None
    device: jax.Device | None = None

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{formatting.short(self.cfg)} from {self.tier}" + (f" for {self.key}" if self.key else "")

    @staticmethod
    def of(request: Request, hit: Hit, misses: Sequence[tuple[str, str]], failed: Record | None = None) -> Decision:
        """The decision for a request that was answered with a hit."""
        said = hit.measured, hit.objective
        return Decision(hit.cfg, hit.tier, tuple(misses), hit.record, failed, *said, request.key, request.device)


@dataclass(frozen=True)
class Request:
    """One question to the tiers."""

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: Key
    device: jax.Device
    # The passes that a tuning must have covered: forward, or forward and backward.
    objective: Objective
    seeds: tuple[Hit, ...] = ()
    # Did every candidate of this call fail?
    none_ran: bool = False
    # The limit of a tuning that other processes wait for; the process's own budget holds as well.
    seconds: float | None = None

    @cached_property
    def platform(self) -> str:
        """`gpu`, `tpu` or `cpu`."""
        return get_device_platform(self.device)

    @cached_property
    def call(self) -> Mapping[str, str]:
        """The call in readable parts."""
        return described(self.inv)

    @property
    def code(self) -> str:
        """The fingerprint of the kernel's code; empty where it has a version of its own, or no source."""
        return code_of(self.kernel)

    @property
    def environment(self) -> dict[str, str]:
        """Versions of JAX, its runtime and the driver, and the kernel's code: a tuning done now depends on them."""
        return environment(self.device) | ({"code": self.code} if self.code else {})

    def hook(self, name: str) -> Callable[..., Any]:
        """The kernel's variant of a method for this platform, sharded or not."""
        return variant(self.kernel, name, platform=self.platform, method=self.inv.method)


def ask(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], objective: Objective) -> Request:
    """Makes the request of a call."""
    check_kernel(kernel)
    if inv.op_id != kernel.op_id:
        raise KernelError(f"the invocation is one of {inv.op_id!r}, but the kernel is {kernel.op_id!r}")
    device = device_of(inv)
    call_key = inv.make_key(key_builder_of(kernel))
    return Request(inv, kernel, Key(device_fingerprint(device), versioned(kernel), call_key), device, objective)


@dataclass(frozen=True)
class Offer:
    """A kernel's cfgs for a call: the heuristic one and the candidates, and the refused ones with their reasons."""

    cfgs: list[Any]
    refused: list[tuple[Any, str]]


def candidates(request: Request) -> list[Any]:
    """The heuristic cfg, then the kernel's candidates without the invalid ones."""
    return offer(request).cfgs


def offer(request: Request, empty: Callable[[str], None] = lambda message: None) -> Offer:
    """The candidates of a call, and apart from them the cfgs that the kernel calls invalid."""
    kernel, inv = request.kernel, request.inv
    heuristic = check_cfg_type(kernel, request.hook("heuristic_cfg")(inv), "heuristic_cfg")
    try:
        offered = list(request.hook("candidate_cfgs")(inv))
    # Any exception is the kernel's fault, and the message must name the kernel.
    except Exception as error:
        raise KernelError(
            f"candidate_cfgs of kernel {versioned(kernel)} raised {type(error).__name__}: {error}; "
            "correct it, or turn tuning off with allow_autotune=False"
        ) from error
    if not offered:
        empty(
            f"candidate_cfgs of kernel {versioned(kernel)} gave nothing for {request.key}, so the heuristic cfg is "
            "used; return at least one cfg, or do not define it"
        )
    found = Offer([heuristic], [])
    for cfg in offered:
        reason = why_invalid(kernel, inv, check_cfg_type(kernel, cfg, "a candidate"))
        if reason is None:
            found.cfgs.append(cfg)
        else:
            found.refused.append((cfg, reason))
    return found


def why_invalid(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any) -> str | None:
    """The reason why the kernel calls this cfg invalid, or None."""
    verdict = kernel.valid_cfg(inv, cfg)
    if isinstance(verdict, str):
        return verdict
    return None if bool(verdict) else "valid_cfg says no"


def vetted(request: Request, cfg: Any) -> bool:
    """May a cfg of another user or a pack run: is it a candidate, or does the kernel itself call it valid?"""
    offered = candidates(request)
    if len(distinct([*offered, cfg])) == len(distinct(offered)):
        return True
    judges = type(request.kernel).valid_cfg is not Kernel.valid_cfg
    return judges and why_invalid(request.kernel, request.inv, cfg) is None


def revived(request: Request, cfg: Any) -> Any:
    """A stored cfg rebuilt as the kernel's type: a store without a `cfg_type` gives plain JSON back."""
    kind = request.kernel.cfg_type
    if kind is None and isinstance(cfg, (dict, list)):
        guess = type(request.hook("heuristic_cfg")(request.inv))
        if guess is tuple and isinstance(cfg, list):
            return _tuples(cfg)
        kind = guess if codec.has_fields(guess) else None
    if kind is None or isinstance(cfg, kind):
        return cfg
    return codec.decode(kind, cfg)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
