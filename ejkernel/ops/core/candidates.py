"""The cfgs of a call: the kernel's candidates, the cfgs that it rules out, and stored cfgs rebuilt as its type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import codec
from .cfg import distinct
from .errors import KernelError
from .invocation import Invocation
from .kernel import Kernel, check_cfg_type, versioned
from .request import Request


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
