"""Who decides: this process by itself, or all processes of a `jax.distributed` program together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _jax
from ..core.request import Decision, Hit, Request
from ..settings import Settings
from .cache import is_shadowed

if TYPE_CHECKING:
    from ..fleet.proposal import Proposal


def decide(proposal: Proposal, settings: Settings) -> Decision:
    """The proposal itself in a program of one process, else what its processes agree on."""
    if not _is_shared(settings) or _is_program_text(proposal):
        return proposal.make()
    # A program of one process never imports it.
    from ..fleet.agreement import agree

    return agree(proposal, settings.agree_seconds)


def agreed(request: Request, settings: Settings) -> Hit | None:
    """What the processes of this program agreed on already, as far as this one asked; None where it is alone."""
    if not _is_shared(settings):
        return None
    from ..fleet.agreement import standing

    return standing(request)


def _is_shared(settings: Settings) -> bool:
    return settings.agree and _jax.distributed() is not None


def _is_program_text(proposal: Proposal) -> bool:
    # `cfg=` and overlays are written in the program, which all processes share: there is nothing to find out.
    request = proposal.request
    return not proposal.is_tuning and (request.inv.override_cfg is not None or is_shadowed(request.key))
