"""What a request gives to measure: its candidates, and the tuning of them as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._jax import clean_room
from ..core.bind import bind
from ..core.device import environment
from ..core.errors import KernelError, KeyPartError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, check_cfg_type, kernel_path, versioned
from ..core.variants import has_any
from ..timing.around import explicit_mesh, in_batch, local_mesh, on_local_devices, per_shard, placing, whole_batch
from ..timing.inputs import take_apart
from ..tuning.job import Job
from .request import Request


class TuningWarning(UserWarning):
    """A tuning that did not go as it should."""


@dataclass(frozen=True)
class Offer:
    """What a kernel offers for a call: the heuristic cfg and what may be measured, and what it rules out, and why."""

    cfgs: list[Any]
    refused: list[tuple[Any, str]]


def candidates(request: Request) -> list[Any]:
    """The heuristic cfg, then what the kernel says may be measured, without what it calls invalid."""
    return offer(request).cfgs


def offer(request: Request, empty: Callable[[str], None] = lambda message: None) -> Offer:
    """The same, with what the kernel calls invalid apart."""
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
    """What the kernel has against this cfg, or None."""
    verdict = kernel.valid_cfg(inv, cfg)
    if isinstance(verdict, str):
        return verdict
    return None if bool(verdict) else "valid_cfg says no"


def job_for(request: Request, cfgs: Sequence[Any], refused: Sequence[tuple[Any, str]] = ()) -> Job:
    """The tuning of one request: the call as it will run, batch and shards around it."""
    kernel, inv = request.kernel, request.inv
    mesh = local_mesh(request.platform) if inv.method is None else None
    sharded = explicit_mesh(take_apart(inv.args, inv.kwargs).leaves)
    explicit = sharded and on_local_devices(sharded.shape, request.platform, sharded.axis_types)

    def make_fn(cfg: Any) -> Callable[..., Any]:
        return per_shard(in_batch(bind(kernel, cfg, inv, request.platform), inv.batch_axes), mesh)

    def reference(*args: Any, **kwargs: Any) -> Any:
        return per_shard(in_batch(kernel.reference, inv.batch_axes), mesh)(*args, **kwargs)

    args, kwargs = whole_batch(inv.args, inv.kwargs, inv.batch_axes)
    # One example's values say nothing about a batch of them.
    has_example = has_any(type(kernel), "example_inputs") and not inv.batch_axes
    return Job(
        make_fn=make_fn,
        args=args,
        kwargs=kwargs,
        candidates=cfgs,
        refused=refused,
        objective=request.objective,
        reference=reference if has_any(type(kernel), "reference") else None,
        tolerance=kernel.tolerance,
        seeds=[hit.cfg for hit in request.seeds],
        heuristic_first=True,
        fresh_floats=True,
        example=(lambda rng: _example(kernel, inv, rng)) if has_example else None,
        room=lambda: clean_room(explicit),
        place=placing(inv, mesh, explicit),
        about={
            "key": request.key._asdict() | call_parts(inv),
            "kernel": kernel_path(kernel),
            "environment": environment(request.device),
        },
    )


def call_parts(inv: Invocation[Any, Any]) -> dict[str, str]:
    """The named parts of a call as a record keeps them; none where no key can be made of its arguments."""
    try:
        return {f"call.{name}": text for name, text in inv.parts.items()}
    # A kernel with its own key builder may have arguments that no key can be made of.
    except KeyPartError:
        return {}


def _example(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], rng: Any) -> tuple[Any, Any]:
    made = kernel.example_inputs(inv, rng)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return made
    if isinstance(made, (tuple, list)):
        return tuple(made), inv.kwargs
    raise KernelError(
        f"example_inputs of kernel {versioned(kernel)} must return (args, kwargs), or a tuple of args; got {made!r}"
    )
