"""Messages between processes: the claim of a key, and the verdict on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..core import codec
from ..core.cfg import same
from ..core.errors import AgreementError, ConfigTypeError
from ..core.kernel import check_cfg_type
from ..core.record import Objective
from ..core.request import Decision, Hit, Request, revived
from .kv_store import LARGEST
from .manifest import Manifest


@dataclass(frozen=True)
class Claim:
    """A process's claim that it works on a key."""

    process: int
    # New at every start of the process: a claim of a former life will never be honoured.
    life: str
    manifest: Manifest

    def dumps(self) -> str:
        """The claim as JSON."""
        return json.dumps({"process": self.process, "life": self.life, "manifest": self.manifest.plain()})

    @staticmethod
    def loads(text: str) -> Claim:
        """The claim that `dumps` wrote."""
        data = json.loads(text)
        return Claim(data["process"], data["life"], Manifest.of(data["manifest"]))


@dataclass(frozen=True)
class Verdict:
    """The decision on a key: the process that made it, its tier and its cfg."""

    process: int
    tier: str
    cfg: Any
    tuned_for: Objective | None
    manifest: Manifest
    # Why the heuristic cfg was published in place of a decision.
    why: str = ""
    # False: a guess.
    measured: bool = False

    def dumps(self, request: Request) -> str:
        """The verdict as JSON; an `AgreementError` where the cfg cannot be sent."""
        data = {**vars(self), "cfg": _travelling(request, self.cfg), "manifest": self.manifest.plain()}
        return json.dumps(data, ensure_ascii=False)

    @staticmethod
    def loads(text: str) -> Verdict:
        """The verdict that `dumps` wrote, its cfg still as JSON has it."""
        data = json.loads(text)
        return Verdict(**{**data, "manifest": Manifest.of(data["manifest"])})

    def rebuilt(self, request: Request) -> Verdict:
        """The verdict with its cfg rebuilt as the kernel's type."""
        try:
            cfg = check_cfg_type(request.kernel, revived(request, self.cfg), "the agreed cfg")
        except ConfigTypeError as error:
            raise AgreementError(
                f"process {self.process} decided on a cfg of {request.key} that does not fit the kernel here: {error}; "
                "run the same code on all processes"
            ) from error
        return replace(self, cfg=cfg)


def by_this_process(
    process: int, manifest: Manifest, found: Decision | Hit, objective: Objective, why: str = ""
) -> Verdict:
    """The verdict that this process proposes."""
    if isinstance(found, Hit):
        return Verdict(process, found.tier, found.cfg, found.objective, manifest, why, found.measured)
    tuned_for = objective if found.record else None
    return Verdict(process, found.tier, found.cfg, tuned_for, manifest, why, found.measured)


def _travelling(request: Request, cfg: Any) -> Any:
    """The cfg as JSON that becomes the same cfg on the other side."""
    try:
        data = codec.encode(cfg)
        text = json.dumps(data, ensure_ascii=False)
        back = revived(request, json.loads(text))
    except ConfigTypeError as error:
        raise _cannot_travel(request, cfg, str(error)) from error
    if len(text.encode()) > LARGEST:
        raise _cannot_travel(request, cfg, f"it takes {len(text.encode()):,} bytes of JSON, over {LARGEST:,}")
    if not same(back, cfg):
        raise _cannot_travel(request, cfg, f"JSON makes {codec.describe(back)} of it; declare the kernel's cfg_type")
    return data


def _cannot_travel(request: Request, cfg: Any, why: str) -> AgreementError:
    return AgreementError(
        f"the cfg {codec.describe(cfg)} of {request.key} cannot be sent to the other processes: {why}. "
        "Use small cfgs of plain values or dataclasses, or EJKERNEL_OPS_AGREE=off on all processes"
    )
