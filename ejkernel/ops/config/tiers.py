"""The places a cfg can come from, each a small class; the selector lists them in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax

from ..core import codec
from ..core.cfg import same
from ..core.device import environment, same_environment
from ..core.errors import ConfigTypeError
from ..core.kernel import check_cfg_type
from ..core.record import Objective
from ..core.request import Hit, Keep, Miss, Request, revived, vetted, why_invalid
from ..store.lock_file import LockFile
from ..store.packs import Pack, found_packs
from ..store.store import Store, StoredEntry, peek
from .cache import ConfigCache, Plain, overlay_in_force
from .walk import Tier

# Two answers of nearly every walk, made once.
_NOT_GIVEN, _NONE_ACTIVE = Miss("not given"), Miss("none active")
# The reason of a tier that has an entry which the present code must be measured for.
OTHER_CODE = "was tuned for other code of the kernel"


@final
class OverrideTier(Tier):
    """The cfg that the caller gave."""

    name = "override"

    def find(self, request: Request) -> Hit | Miss:
        """The cfg of the call itself."""
        cfg = request.inv.override_cfg
        if cfg is None:
            return _NOT_GIVEN
        return Hit(check_cfg_type(request.kernel, cfg, "cfg="), self.name, "override")


@final
@dataclass(frozen=True, eq=False)
class OverlayTier(Tier):
    """The cfg of an overlay around this call, or of the lock behind the overlays."""

    lock_file: LockFile | None = None
    name = "overlay"

    def find(self, request: Request) -> Hit | Miss:
        """The innermost overlay's answer, or the lock's."""
        shadow = overlay_in_force()
        if request.key in shadow:
            cfg = shadow[request.key]
            cfg = revived(request, cfg.data) if isinstance(cfg, Plain) else _renewed(request, cfg)
            return self._hit(request, cfg, "the overlay's cfg", {})
        if self.lock_file is not None:
            return self._locked(request, self.lock_file)
        return Miss(f"none of {len(shadow)} entries in force is for this call") if shadow else _NONE_ACTIVE

    def _hit(self, request: Request, cfg: Any, what: str, data: Mapping[str, str]) -> Hit:
        return Hit(check_cfg_type(request.kernel, cfg, what), self.name, "overlay_hit", data, measured=True)

    def _locked(self, request: Request, lock_file: LockFile) -> Hit | Miss:
        entry = lock_file.entries.get(request.key)
        if entry is None:
            return Miss(lock_file.why_not(request.key, request.call))
        try:
            cfg = revived(request, entry.cfg)
        except ConfigTypeError as error:
            raise ConfigTypeError(f"the entry for {request.key} in {lock_file.path} does not fit: {error}") from error
        data = {"lock": lock_file.path}
        # A lock gives what it says, whatever was updated since; the listener may want to know.
        if entry.environment and not _believed(entry.environment, request.device):
            data["environment"] = _spelled(entry.environment)
        return self._hit(request, cfg, f"the entry in {lock_file.path}", data)


@final
class AgreedTier(Tier):
    """The cfg that the processes of this program agreed on: for previews alone, since choosing asks the processes."""

    name = "agreed"

    def find(self, request: Request) -> Miss:
        """Gives no answer: a walk that chooses makes this process's own proposal."""
        return Miss("")

    def preview(self, request: Request) -> Hit | Miss:
        """The cfg that was agreed on, as far as this process asked."""
        # A program of one process never imports it.
        from ..fleet.agreement import standing

        return standing(request) or Miss("")


@final
@dataclass(frozen=True, eq=False)
class MemoryTier(Tier):
    """A cfg in the memory of this process."""

    cache: ConfigCache[Any]
    name = "memory"
    remembers = True

    def find(self, request: Request) -> Hit | Miss:
        """The cache's answer, unless it was tuned for less than is asked now."""
        found = self.cache.entry(request.key)
        if found is None:
            return Miss("no entry")
        try:
            cfg = _renewed(request, found.cfg)
        except ConfigTypeError as error:
            return Miss(f"the entry is of an earlier definition of the kernel, and does not fit: {error}")
        check_cfg_type(request.kernel, cfg, "the cached cfg")
        hit = Hit(cfg, self.name, "cache_hit", {"level": "memory"}, measured=True, objective=found.objective)
        code = self.cache.code(request.key)
        if _is_of_other_code(code, request):
            seed = replace(hit, objective=None, data={**hit.data, "code": code})
            return Miss(f"the entry {OTHER_CODE}", (seed,))
        if _covers(found.objective, request.objective):
            return hit
        return Miss(f"the entry was tuned for {found.objective} alone", (hit,))


@final
@dataclass(frozen=True, eq=False)
class StoreTier(Tier):
    """A cfg from the store on disk."""

    store: Store
    name = "persistent"
    remembers = True

    def find(self, request: Request) -> Hit | Miss:
        """The store's answer, unless it comes from another environment or was tuned for less."""
        return self.judged(request, self.store.lookup(request.key))

    def preview(self, request: Request) -> Hit | Miss:
        """The store's answer; a layered store promotes nothing."""
        return self.judged(request, peek(self.store, request.key))

    def judged(self, request: Request, entry: StoredEntry | None) -> Hit | Miss:
        """The answer that an entry of this store gives."""
        if entry is None:
            return Miss(f"no entry in {self.store}")
        try:
            cfg = revived(request, entry.cfg)
        except ConfigTypeError as error:
            return Miss(f"the entry in {self.store} does not fit the kernel: {error}")
        if not entry.trusted and not vetted(request, cfg):
            return Miss(f"the entry in {self.store} is another user's, and not among the kernel's candidates")
        if not entry.answers:
            seed = replace(self._hit(cfg, None, Keep.NOTHING), usable=False)
            return Miss(f"the entry in {self.store} is another user's: to be measured, no answer by itself", (seed,))
        objective = entry.objective
        if objective is None and "believed" in entry.environment:
            objective = _known_objective(request, cfg)
        if not _believed(entry.environment, request.device):
            known = _spelled(entry.environment) or "unknown"
            # What it was tuned for there does not count here.
            aged = self._hit(cfg, None, Keep.NOTHING, environment=known)
            return Miss(f"the entry in {self.store} is from another environment ({known})", (aged,))
        code = entry.environment.get("code", "")
        if _is_of_other_code(code, request):
            # What it was tuned for there does not count here either.
            return Miss(f"the entry in {self.store} {OTHER_CODE}", (self._hit(cfg, None, Keep.NOTHING, code=code),))
        if not _covers(objective, request.objective):
            seed = self._hit(cfg, objective, Keep.NOTHING)
            return Miss(f"the entry in {self.store} was tuned for {objective} alone", (seed,))
        return replace(self._hit(cfg, objective, Keep.MEMORY), code=code)

    def _hit(self, cfg: Any, objective: Objective | None, keep: Keep, **data: str) -> Hit:
        # A seed is not kept in memory: there it would stand in the way of a tuning that is allowed later.
        return Hit(cfg, self.name, "cache_hit", {"level": "persistent", **data}, keep, True, objective)


@final
@dataclass(frozen=True, eq=False)
class PacksTier(Tier):
    """A cfg from a pack, after the user's own store had no answer."""

    paths: Sequence[str]
    name = "packs"
    remembers = True

    def find(self, request: Request) -> Hit | Miss:
        """The first pack's answer; what does not fit this environment or is not a candidate is left out."""
        reasons, seeds = [], []
        for pack in found_packs(self.paths):
            answer = StoreTier(pack).find(request)
            if isinstance(answer, Hit):
                return self._from(pack, answer)
            reasons.append(answer.reason)
            seeds += [self._from(pack, seed) for seed in answer.seeds or ()]
        return Miss("; ".join(reasons), tuple(seeds) or None)

    def _from(self, pack: Pack, hit: Hit) -> Hit:
        return replace(hit, tier=self.name, data={**hit.data, "source": self.name, "pack": pack.path})


@final
class SeedTier(Tier):
    """A valid entry from another environment, for other code, or tuned for less, where nothing could be measured."""

    name = "seeds"

    def find(self, request: Request) -> Hit | Miss:
        """The first seed that earlier tiers left and the kernel calls valid: another environment may have more ways."""
        reason = ""
        for seed in request.seeds:
            if not seed.usable:
                continue
            refused = why_invalid(request.kernel, request.inv, seed.cfg)
            if refused is None:
                return replace(seed, tier=self.name, data={**seed.data, "source": self.name})
            reason = reason or f"the cfg of the entry cannot be used here: {refused}"
        return Miss(reason)


@final
class HeuristicsTier(Tier):
    """The cfg that the kernel's author would take: a guess, never measured."""

    name = "heuristics"

    def find(self, request: Request) -> Hit | Miss:
        """The kernel's heuristic cfg."""
        cfg = request.hook("heuristic_cfg")(request.inv)
        return Hit(check_cfg_type(request.kernel, cfg, "heuristic_cfg"), self.name, "heuristics")


def _known_objective(request: Request, cfg: Any) -> Objective | None:
    # A store that keeps cfgs alone does not know; where memory has the same cfg, it does.
    return next((seed.objective for seed in request.seeds if same(seed.cfg, cfg)), None)


def _believed(kept: Mapping[str, str], device: jax.Device) -> bool:
    return "believed" in kept or same_environment(kept, environment(device))


def _is_of_other_code(code: str, request: Request) -> bool:
    # Unknown on either side is no difference: a cfg put by hand, a version of the kernel's own, a missing source.
    return bool(code) and bool(request.code) and code != request.code


def _spelled(kept: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in kept.items())


def _covers(tuned: Objective | None, asked: Objective) -> bool:
    # Unknown is a cfg that was put by hand: taken as asked.
    return asked == "forward" or tuned != "forward"


def _renewed(request: Request, cfg: Any) -> Any:
    # A notebook's cell that is run again, and a module that is reloaded, define the class of the same name anew.
    kind, old = request.kernel.cfg_type, type(cfg)
    if kind is None or old is kind or (old.__module__, old.__qualname__) != (kind.__module__, kind.__qualname__):
        return cfg
    return codec.decode(kind, codec.encode(cfg))
