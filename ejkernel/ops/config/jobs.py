"""What a request gives to measure: its candidates, and the tuning of them as a value."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..core.bind import bind
from ..core.device import environment
from ..core.errors import KernelError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, check_cfg_type, kernel_path, versioned
from ..core.variants import has_any
from ..tuning.job import Job
from .request import Request


class TuningWarning(UserWarning):
    """A tuning that did not go as it should."""


def candidates(request: Request) -> list[Any]:
    """The heuristic cfg, then what the kernel says may be measured, without what it calls invalid."""
    kernel, inv = request.kernel, request.inv
    heuristic = check_cfg_type(kernel, request.hook("heuristic_cfg")(inv), "heuristic_cfg")
    try:
        offered = list(request.hook("candidate_cfgs")(inv))
    # Whatever it raises is the kernel's fault, and the message must name the kernel.
    except Exception as error:
        raise KernelError(
            f"candidate_cfgs of kernel {versioned(kernel)} raised {type(error).__name__}: {error}; "
            "correct it, or turn tuning off with allow_autotune=False"
        ) from error
    if not offered:
        warnings.warn(
            f"candidate_cfgs of kernel {versioned(kernel)} gave nothing for {request.key}, so the heuristic cfg is "
            "used; return at least one cfg, or do not define it",
            TuningWarning,
            stacklevel=2,
        )
    for cfg in offered:
        check_cfg_type(kernel, cfg, "a candidate")
    valid = [cfg for cfg in offered if kernel.valid_cfg(inv, cfg) is True]
    return [heuristic, *valid]


def job_for(request: Request, cfgs: Sequence[Any]) -> Job:
    """The tuning of one request."""
    kernel, inv = request.kernel, request.inv
    has_example = has_any(type(kernel), "example_inputs")
    return Job(
        make_fn=lambda cfg: bind(kernel, cfg, inv, request.platform),
        args=inv.args,
        kwargs=inv.kwargs,
        candidates=cfgs,
        objective=request.objective,
        reference=kernel.reference if has_any(type(kernel), "reference") else None,
        tolerance=kernel.tolerance,
        seeds=[hit.cfg for hit in request.seeds],
        heuristic_first=True,
        fresh_floats=True,
        example=(lambda rng: _example(kernel, inv, rng)) if has_example else None,
        about={
            "key": {"device": request.key.device, "op_id": request.key.op_id, "call_key": request.key.call_key}
            | {f"call.{name}": text for name, text in inv.parts.items()},
            "kernel": kernel_path(kernel),
            "environment": environment(request.device),
        },
    )


def _example(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], rng: Any) -> tuple[Any, Any]:
    made = kernel.example_inputs(inv, rng)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return made
    if isinstance(made, (tuple, list)):
        return tuple(made), inv.kwargs
    raise KernelError(
        f"example_inputs of kernel {versioned(kernel)} must return (args, kwargs), or a tuple of args; got {made!r}"
    )
