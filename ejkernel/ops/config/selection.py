"""Choosing a cfg: the tiers are walked, and the first answer wins, is kept and told."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import _jax
from ..core import invalidation
from ..core.invocation import Cfg, Invocation, Out
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.record import Objective, Record
from ..core.request import Decision as Decision
from ..core.request import Hit, Keep, Request, ask
from ..core.single_flight import SingleFlight
from ..settings import Settings
from ..store.lock_file import LockFile, read_lock
from ..store.store import Mapped
from ..tuning.custom_tuner import Autotuner
from ..tuning.tuner import Tuner as Tuner
from . import call_log, tuning_budget
from .autotune_tier import AutotuneTier, failures_of, tuned
from .cache import ConfigCache, is_shadowed
from .events import Teller
from .kept_answers import KeptAnswers, Recall, question_of
from .policy import AutotunePolicy as AutotunePolicy
from .policy import forward_autotune_only as forward_autotune_only
from .policy import policy_override as policy_override
from .predicted_tier import PredictedTier, Predictions
from .remote_tier import RemoteTier
from .selector_parts import SelectorParts, check_part, checked
from .tiers import (
    AgreedTier,
    HeuristicsTier,
    MemoryTier,
    OverlayTier,
    OverrideTier,
    PacksTier,
    SeedTier,
    StoreTier,
)
from .tuning_runs import TuningRuns
from .walk import LOCKED, Misses, Off, Tier, Walked, nothing_left, preview, walk

if TYPE_CHECKING:
    from ..store.remote.remote_store import RemoteStore

# These tiers hold nothing of a selector, so all selectors share them.
_OVERRIDE, _OVERLAY, _SEEDS, _HEURISTICS = OverrideTier(), OverlayTier(), SeedTier(), HeuristicsTier()


class ConfigSelectorChain(SelectorParts[Cfg, Out]):
    """Answers every call with the cfg of the first tier that has one; `_list_of_tiers` has their order."""

    def __init__(
        self,
        cache: ConfigCache[Cfg],
        policy: AutotunePolicy | None = None,
        tuner: Autotuner | None = None,
        persistent: Mapped | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., Any] | None = None,
        forbid_reautotune: bool = True,
        *,
        remote: RemoteStore | None = None,
    ) -> None:
        check_part("tuner", tuner, "autotune", "such as Tuner()")
        check_part("persistent", persistent, "get", "such as PersistentCache(path)")
        check_part("remote", remote, "lookup", "such as RemoteStore('s3://bucket/folder')")
        self._cache = cache
        self.remote = remote
        self._policy = AutotunePolicy() if policy is None else checked(policy)
        self.tuner = tuner or Tuner()
        self._take_store(persistent)
        self.persist_autotune = persist_autotune
        self.forbid_reautotune = forbid_reautotune
        self.settings = Settings.read()
        self._lock_file = read_lock(self.settings.lock_file) if self.settings.lock_file else None
        self.tell = Teller(on_event)
        self._flights = SingleFlight()
        self._kept = KeptAnswers(self)
        self._predictions = Predictions(self.stores, self._kept.records)
        self._runs = TuningRuns(self, self._kept, self._predictions)
        # What was answered from memory while programs were traced.
        self._recall = Recall()
        # The latest list of tiers, by what it was made of.
        self._listed: dict[Any, tuple[Sequence[Tier], Any]] = {}
        self._said: set[tuple[str, str]] = set()

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """The cfg for this call."""
        return self.decide(inv, kernel).cfg  # type: ignore[no-any-return]

    def decide(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """The cfg for this call, the tier that answered, and why the earlier ones did not."""
        question = None if self._is_shared() else question_of(inv, kernel)
        recalled = None if question is None else self._recall.find(question)
        if recalled is not None and recalled.key is not None:
            self.tell("cache_hit", recalled.key, "memory", cfg=recalled.cfg, level="memory")
            return recalled
        # Taken before the walk: a change that comes during it must not be overlooked.
        epoch = invalidation.epoch
        policy = self.policy
        request = self._asked(inv, kernel, policy)
        log = call_log.in_force()
        if log is not None:
            # The program is traced for its calls, not run: the call is noted and answered without tuning.
            return log.saw(self, request, self._decide_untuned(request, policy))
        lock_file = self.lock_file
        tiers = self._tiers(policy, lock_file)
        # Processes need not agree under a lock file, or on a cfg in the program's text: all of them have the same.
        if lock_file is None and self._is_shared() and not is_program_text(request):
            decision = self._agree(_Proposal(self, request, tiers))
        else:
            with self._flights.on_demand(request.key) as flight:
                decision = self._accept(
                    walk(tiers, request, hold=lambda: flight.hold() or request.key in self._kept.tuned)
                )
        call_log.collect(request, decision, lock_file)
        if question is not None:
            self._recall.keep(question, decision, epoch)
        return decision

    def decide_untuned(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """The answer without tuning, heuristics if need be; nothing is kept or told."""
        policy = self.policy
        return self._decide_untuned(ask(inv, kernel, objective_of(policy)), policy)

    def _decide_untuned(self, request: Request, policy: AutotunePolicy) -> Decision:
        quiet = replace(policy, allow_autotune=False, allow_heuristics=True)
        seen = self._preview(request, quiet)
        if seen.hit is None:
            raise nothing_left(request.key, seen.misses)
        return Decision.of(request, seen.hit, seen.misses, seen.failed)

    def preview(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Walked:
        """The answer that `decide` would give now, or the tuning it would begin; nothing is tuned, kept or told."""
        policy = self.policy
        return self._preview(ask(inv, kernel, objective_of(policy)), policy)

    def _preview(self, request: Request, policy: AutotunePolicy) -> Walked:
        lock_file = self.lock_file
        tiers = self._tiers(policy, lock_file)
        if lock_file is None and self._is_shared():
            # The agreed cfg comes after override and overlay, which all processes share, and before what this process
            # alone knows.
            tiers = (*tiers[:2], AgreedTier(), *tiers[2:])
        return walk(tiers, request, preview)

    def adopt(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], record: Record) -> None:
        """Keeps what another selector tuned for this call as if it were this one's own."""
        request = self._asked(replace(inv, override_cfg=None), kernel, self.policy)
        self._kept.accept(request, tuned(request, record, record.cfg), ())

    def tune(
        self,
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        repetitions: int = 1,
        *,
        seconds: float | None = None,
    ) -> Decision:
        """Tunes this call now, whatever is known already; of several repetitions the fastest winner is kept."""
        request = self._asked(replace(inv, override_cfg=None), kernel, self.policy)
        request = replace(request, seconds=seconds)
        proposal = _Proposal(self, request, (_HEURISTICS,), repetitions=repetitions)
        return self._agree(proposal) if self._is_shared() else proposal.make()

    def prepare(
        self,
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        *,
        seconds: float | None = None,
        is_next: bool = True,
    ) -> Callable[[], None]:
        """Traces what `tune` will measure for this call, on this thread; the function that comes back lets it go.

        The next `tune` of the call, on any thread, goes on from there. `is_next`: another call is being measured
        meanwhile, so that the device is let alone.
        """
        request = ask(replace(inv, override_cfg=None), kernel, objective_of(self.policy))
        request = replace(request, seconds=seconds)
        tier = self._unless_off(again=True)
        if self._is_shared() or type(self.tuner) is not Tuner or not isinstance(tier, AutotuneTier):
            return lambda: None
        job = tier.job(request)
        if job is None:
            return lambda: None
        return self._runs.prepare(self.tuner, request, job, is_next=is_next)

    def record_of(self, key: Key) -> Record | None:
        """The record of the tuning behind the entry of a key, where it was kept."""
        return self._kept.record_of(key)

    def _tiers(self, policy: AutotunePolicy, lock_file: LockFile | None = None) -> Sequence[Tier]:
        """The list that policy and settings make of the tiers; a lock turns off what is behind the overlays."""
        # The list is kept until a part of this selector is replaced: to make it costs more than a choice from memory.
        parts = (policy, lock_file, *vars(self).values())
        over = tuning_budget.why_over(self.settings) if policy.allow_autotune else ""
        known = (self.tuning_is_off(), over, *map(id, parts))
        listed = self._listed.get(known)
        if listed is None:
            self._listed.clear()
            # `known` has the ids of the parts: they are kept alive with the list, so that no other object gets an id.
            listed = self._listed[known] = (self._list_of_tiers(policy, lock_file), parts)
        return listed[0]

    def _list_of_tiers(self, policy: AutotunePolicy, lock_file: LockFile | None) -> Sequence[Tier]:
        packs = self.settings.packs
        autotune = self._autotune_or_why_not(policy)
        tiers = (
            _OVERRIDE,
            _OVERLAY if lock_file is None else OverlayTier(lock_file),
            MemoryTier(self.cache),
            Off("persistent", "none given") if self.store is None else StoreTier(self.store),
            Off("remote", "") if self.remote is None else RemoteTier(self.remote, autotune),
            Off("packs", "") if packs is None else PacksTier(packs),
            autotune,
            _SEEDS,
            self._predicted_or_why_not(policy),
            _HEURISTICS if policy.allow_heuristics else Off("heuristics", "off (allow_heuristics=False)"),
        )
        return tiers if lock_file is None else (*tiers[:2], *(Off(tier.name, LOCKED) for tier in tiers[2:]))

    def _is_shared(self) -> bool:
        """Does this process decide together with others?"""
        return self.settings.agree and _jax.distributed() is not None

    def _agree(self, proposal: _Proposal) -> Decision:
        # A program of one process never imports it.
        from ..fleet.agreement import agree

        return agree(proposal, self.settings.agree_seconds)

    def _autotune_or_why_not(self, policy: AutotunePolicy) -> Tier:
        if not policy.allow_autotune:
            return Off("autotune", "off (allow_autotune=False)")
        if policy.cache_miss_fallback != "autotune":
            return Off("autotune", f"off (cache_miss_fallback={policy.cache_miss_fallback!r})")
        return self._unless_off(sole_answers=not policy.allow_heuristics)

    def _predicted_or_why_not(self, policy: AutotunePolicy) -> Tier:
        if not policy.allow_heuristics:
            return Off("predicted", "")
        if not policy.allow_predictions:
            return Off("predicted", "off (allow_predictions=False)")
        return PredictedTier(self._predictions)

    def _unless_off(self, *, sole_answers: bool = False, again: bool = False) -> Tier:
        """The tier that tunes, as far as the settings let it; `again` tunes whatever is known already."""
        why_not = self.tuning_is_off() or ("" if again else tuning_budget.why_over(self.settings))
        if why_not:
            return Off("autotune", why_not)
        tune = functools.partial(self._runs.run, again=again)
        refusal = (lambda request: "") if again else self._kept.refusal
        return AutotuneTier(tune, refusal, failures_of(self.tuner), self._said, sole_answers)

    def _propose(self, request: Request, tiers: Sequence[Tier]) -> Decision:
        with self._flights.on_demand(request.key) as flight:
            return self._accept(walk(tiers, request, hold=lambda: flight.hold() or request.key in self._kept.tuned))

    def _repeat(self, request: Request, repetitions: int) -> Decision:
        decisions = []
        for _ in range(repetitions):
            failures_of(self.tuner).pop((request.key, type(request.kernel)), None)
            decisions.append(self._propose(request, (self._unless_off(again=True), _HEURISTICS)))
        best = min(decisions, key=_winner_seconds)
        if best is not decisions[-1] and best.record is not None:
            self._kept.accept(request, tuned(request, best.record, best.cfg), ())
        return best

    def _accept(self, walked: Walked) -> Decision:
        """Keeps and tells the answer of a walk; without one, an error."""
        request, hit = walked.request, walked.hit
        if hit is None:
            self.tell("error", request.key, "error", misses=walked.misses)
            raise nothing_left(request.key, walked.misses)
        self._kept.accept(request, hit, walked.misses)
        return Decision.of(request, hit, walked.misses, walked.failed)

    def _asked(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], policy: AutotunePolicy) -> Request:
        """The request of a call; an error where another kernel class has the same name and version."""
        request = ask(inv, kernel, objective_of(policy))
        # A cfg given by hand is neither looked up nor kept.
        if inv.override_cfg is None:
            self.cache.kernel_names.claim(kernel)
            if self.store_names is not None:
                self.store_names.claim(kernel)
        return request


@dataclass(frozen=True)
class _Proposal:
    """A selector's own answers to one request."""

    selector: ConfigSelectorChain[Any, Any]
    request: Request
    tiers: Sequence[Tier]
    # Given where a tuning was asked for.
    repetitions: int | None = None

    @property
    def is_tuning(self) -> bool:
        return self.repetitions is not None

    def known(self) -> Hit | None:
        return walk([tier for tier in self.tiers if tier.remembers], self.request).hit

    def make(self, seconds: float | None = None) -> Decision:
        each = None if seconds is None else seconds / (self.repetitions or 1)
        limits = [limit for limit in (self.request.seconds, each) if limit is not None]
        limit = min(limits, default=None)
        request = self.request if limit == self.request.seconds else replace(self.request, seconds=limit)
        if self.repetitions is None:
            return self.selector._propose(request, self.tiers)
        return self.selector._repeat(request, self.repetitions)

    def guess(self) -> Hit:
        # The last tier is the one that needs nothing but the kernel.
        walked = walk(self.tiers[-1:], self.request)
        if walked.hit is None:
            raise nothing_left(self.request.key, walked.misses)
        return walked.hit

    def keep(self, hit: Hit, misses: Misses = ()) -> Decision:
        cache = self.selector.cache
        # A measured cfg that all processes agreed on goes into the memory of each.
        if hit.measured and hit.keep is Keep.NOTHING and cache.entry(self.request.key) is None:
            hit = replace(hit, keep=Keep.MEMORY)
        self.selector._kept.accept(self.request, hit, misses)
        return replace(Decision.of(self.request, hit, misses), tier=str(hit.data.get("tier", hit.tier)))


def is_program_text(request: Request) -> bool:
    """Does `cfg=`, an overlay or a lock answer this? They are written in the program, which all processes share."""
    return request.inv.override_cfg is not None or is_shadowed(request.key)


def _winner_seconds(decision: Decision) -> float:
    record = decision.record
    seconds = None if record is None or record.winner is None else record.trials[record.winner].seconds
    return math.inf if seconds is None else seconds


def objective_of(policy: AutotunePolicy) -> Objective:
    return "forward+backward" if policy.validate_backward else "forward"
