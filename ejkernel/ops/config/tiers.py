"""The places a cfg can come from, each a small class; the selector asks them in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import jax

from ..core import codec
from ..core.candidates import Offer, offer, revived, vetted
from ..core.cfg import distinct
from ..core.device import environment, same_environment
from ..core.errors import ConfigTypeError, OutOfTimeError, TuningError
from ..core.kernel import check_cfg_type
from ..core.record import Objective, Record
from ..core.request import Hit, Miss, Request
from ..store.lock_file import LockFile
from ..store.packs import Pack, found_packs
from ..store.store import Store
from ..tuning.job import TuningJob
from .cache import ConfigCache, Plain, overlay_in_force
from .failed_calls import Failure
from .tunability import untunable_because
from .tuning_job import TuningWarning, job_for


class Tier(Protocol):
    """One place a cfg can come from."""

    @property
    def name(self) -> str:
        """As messages call it."""

    def find(self, request: Request) -> Hit | Miss:
        """The answer, or why there is none."""


@final
@dataclass(frozen=True, eq=False)
class Off:
    """A tier that policy or settings turned off."""

    name: str
    reason: str

    def find(self, request: Request) -> Miss:
        """Nothing."""
        return Miss(self.reason)


@final
class OverrideTier:
    """What the caller gave."""

    name = "override"

    def find(self, request: Request) -> Hit | Miss:
        """The cfg of the call itself."""
        cfg = request.inv.override_cfg
        if cfg is None:
            return Miss("not given")
        return Hit(check_cfg_type(request.kernel, cfg, "cfg="), self.name)


@final
@dataclass(frozen=True, eq=False)
class OverlayTier:
    """What the overlays around this call say, and the lock behind them."""

    lock: LockFile | None = None
    name = "overlay"

    def find(self, request: Request) -> Hit | Miss:
        """The innermost overlay's answer, or the lock's."""
        shadow = overlay_in_force()
        if request.key in shadow:
            cfg = shadow[request.key]
            cfg = revived(request, cfg.data) if isinstance(cfg, Plain) else _renewed(request, cfg)
            return Hit(check_cfg_type(request.kernel, cfg, "the overlay's cfg"), self.name)
        if self.lock is not None:
            return self._locked(request, self.lock)
        return Miss(f"none of {len(shadow)} entries in force is for this call" if shadow else "none active")

    def _locked(self, request: Request, lock: LockFile) -> Hit | Miss:
        entry = lock.entries.get(request.key)
        if entry is None:
            return Miss(lock.why_not(request.key, request.call))
        try:
            cfg = revived(request, entry.cfg)
        except ConfigTypeError as error:
            raise ConfigTypeError(f"the entry for {request.key} in {lock.path} does not fit: {error}") from error
        data = {"lock": lock.path}
        # A lock gives what it says, whatever was updated since; the listener may want to know.
        if entry.environment and not _believed(entry.environment, request.device):
            data["environment"] = ", ".join(f"{k} {v}" for k, v in entry.environment.items())
        return Hit(check_cfg_type(request.kernel, cfg, f"the entry in {lock.path}"), self.name, data)


@final
@dataclass(frozen=True, eq=False)
class MemoryTier:
    """What this process already knows."""

    cache: ConfigCache[Any]
    name = "memory"

    def find(self, request: Request) -> Hit | Miss:
        """The cache's answer, unless it was tuned for less than is asked now."""
        found = self.cache._find(request.key)
        if found is None:
            return Miss("no entry")
        cfg, objective = found
        try:
            cfg = _renewed(request, cfg)
        except ConfigTypeError as error:
            return Miss(f"the entry is of an earlier definition of the kernel, and does not fit: {error}")
        hit = Hit(check_cfg_type(request.kernel, cfg, "the cached cfg"), self.name, {"level": "memory"}, objective)
        if _covers(objective, request.objective):
            return hit
        return Miss(f"the entry was tuned for {objective} alone", (hit,))


@final
@dataclass(frozen=True, eq=False)
class StoreTier:
    """What is kept on disk."""

    store: Store
    name = "persistent"

    def find(self, request: Request) -> Hit | Miss:
        """The store's answer, unless it comes from another environment or was tuned for less."""
        entry = self.store.lookup(request.key)
        if entry is None:
            return Miss(f"no entry in {self.store}")
        try:
            cfg = revived(request, entry.cfg)
        except ConfigTypeError as error:
            return Miss(f"the entry in {self.store} does not fit the kernel: {error}")
        if not entry.trusted and not vetted(request, cfg):
            return Miss(f"the entry in {self.store} is another user's, and not among the kernel's candidates")
        objective = entry.objective
        if objective is None and "believed" in entry.environment:
            objective = _known_objective(request, cfg)
        hit = Hit(cfg, self.name, {"level": "persistent"}, objective)
        if not _believed(entry.environment, request.device):
            known = ", ".join(f"{k} {v}" for k, v in entry.environment.items()) or "unknown"
            # Not kept in memory: there it would stand in the way of a tuning that is allowed later.
            aged = replace(hit, data={**hit.data, "environment": known}, keep=False)
            return Miss(f"the entry in {self.store} is from another environment ({known})", (aged,))
        if not _covers(objective, request.objective):
            return Miss(f"the entry in {self.store} was tuned for {objective} alone", (replace(hit, keep=False),))
        return hit


@final
class PacksTier:
    """What packs say, after the user's own store had no answer."""

    name = "persistent"

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)

    def find(self, request: Request) -> Hit | Miss:
        """The first pack's answer; what does not fit this environment or is not a candidate is left out."""
        reasons, seeds = [], []
        for pack in found_packs(self.paths):
            answer = StoreTier(pack).find(request)
            if isinstance(answer, Hit):
                return _marked(answer, pack)
            reasons.append(answer.reason)
            seeds += [_marked(seed, pack) for seed in answer.seeds or ()]
        return Miss("; ".join(reasons), tuple(seeds) or None)


def _marked(hit: Hit, pack: Pack) -> Hit:
    return replace(hit, data={**hit.data, "pack": pack.path})


def _known_objective(request: Request, cfg: Any) -> Objective | None:
    # A store that keeps cfgs alone does not know; where memory has the same cfg, it does.
    return next((seed.objective for seed in request.seeds if seed.cfg == cfg), None)


def _believed(kept: Mapping[str, str], device: jax.Device) -> bool:
    return "believed" in kept or same_environment(kept, environment(device))


def _covers(tuned: Objective | None, asked: Objective) -> bool:
    # Unknown is a cfg that somebody put by hand: taken as asked.
    return asked == "forward" or tuned != "forward"


def _renewed(request: Request, cfg: Any) -> Any:
    # A notebook's cell that is run again, and a module that is reloaded, define the class of the same name anew.
    kind, old = request.kernel.cfg_type, type(cfg)
    if kind is None or old is kind or (old.__module__, old.__qualname__) != (kind.__module__, kind.__qualname__):
        return cfg
    return codec.decode(kind, codec.encode(cfg))


@final
class SeedTier:
    """An entry from another environment, or tuned for less, where nothing better could be measured."""

    name = "persistent"

    def find(self, request: Request) -> Hit | Miss:
        """The first seed that earlier tiers left."""
        return request.seeds[0] if request.seeds else Miss("")


@final
class HeuristicsTier:
    """What the kernel's author would take: a guess, never measured."""

    name = "heuristics"

    def find(self, request: Request) -> Hit | Miss:
        """The kernel's heuristic cfg."""
        cfg = request.hook("heuristic_cfg")(request.inv)
        return Hit(check_cfg_type(request.kernel, cfg, "heuristic_cfg"), self.name)


Tune = Callable[[Request, TuningJob], Record]


@final
@dataclass(frozen=True, eq=False)
class AutotuneTier:
    """Measures the candidates."""

    # Runs a job and tells the listener; raises TuningError where no candidate can be used.
    tune: Tune
    # Calls whose candidates all failed before, with the reasons.
    failed: dict[Failure, str]
    # What was said of which operation.
    said: set[tuple[str, str]]
    # Answer with a sole candidate, unmeasured: where no heuristics tier comes behind.
    sole_answers: bool = False
    name = "autotune"

    def field(self, request: Request, say: Callable[[tuple[str, str], str], None]) -> Offer | Hit | Miss:
        """What would be measured, or the answer without that."""
        failure = (request.key, type(request.kernel))
        if failure in self.failed:
            return Miss(f"failed before in this process: {self.failed[failure]}", ())
        offered = offer(request, empty=lambda message: say(("empty", request.key.op_id), message))
        cfgs = offered.cfgs
        if len(distinct(cfgs)) == 1:
            sole = Hit(cfgs[0], self.name, keep=False)
            ruled_out = f" ({len(offered.refused)} ruled out by valid_cfg)" if offered.refused else ""
            return sole if self.sole_answers else Miss(f"one candidate, nothing to measure{ruled_out}")
        found = untunable_because(request, cfgs[0])
        if found is None:
            return offered
        if found.surprising:
            message = f"{request.key} is not tuned: {found.reason}. Until then stores and heuristics serve"
            say(("obstacle", request.key.op_id), message)
        return Miss(found.reason)

    def find(self, request: Request) -> Hit | Miss:
        """The winner of a tuning."""
        offered = self.field(request, self._say_once)
        if not isinstance(offered, Offer):
            return offered
        failure = (request.key, type(request.kernel))
        try:
            record = self.tune(request, job_for(request, offered.cfgs, offered.refused))
        except OutOfTimeError as error:
            # Another process, with more time, may do better.
            self.failed[failure] = str(error)
            return Miss(str(error), None, error.record)
        except TuningError as error:
            self.failed[failure] = f"all {len(error.reasons)} candidates failed; first: {error.reasons[0]}"
            _warn_of_failure(request, error)
            return Miss(self.failed[failure], (), error.record)
        cfg = check_cfg_type(request.kernel, record.cfg, "the tuner's choice")
        # What was asked for, even where the tuner had to time less: asking again would find no more.
        return Hit(cfg, self.name, objective=request.objective, record=record)

    def _say_once(self, what: tuple[str, str], message: str) -> None:
        if what not in self.said:
            self.said.add(what)
            _warn(message)


def _warn_of_failure(request: Request, error: TuningError) -> None:
    reasons = "\n  ".join(error.reasons)
    _warn(
        f"tuning {request.key} left no candidate, so the heuristic cfg is used from now on:\n  {reasons}\n"
        "Correct the kernel's candidate_cfgs, or rule out what cannot run with valid_cfg"
    )


def _warn(message: str) -> None:
    warnings.warn(message, TuningWarning, stacklevel=2)
