"""Choosing a cfg: one loop over the tiers; the first answer wins, is kept and told."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic

import jax

from ..config.tiers import PacksTier
from ..core import invalidation
from ..core.cfg import distinct
from ..core.errors import NoConfigError, RetuneError, SettingError
from ..core.invocation import Cfg, Invocation, Out
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.record import Objective, Record, Trial
from ..core.request import Decision as Decision
from ..core.request import Hit, Miss, Request, ask
from ..core.single_flight import SingleFlight
from ..settings import Settings, default_folder
from ..store.lock_file import LockFile, read_lock
from ..store.packs import found_packs
from ..store.persistent import StoreWarning
from ..store.store import KeepsRecords, Mapped, Store, StoredEntry, as_store
from ..tuning.budget import seconds_spent, spending
from ..tuning.custom_tuner import Autotuner, engine
from ..tuning.device_lock import device_lock
from ..tuning.job import TuningJob
from ..tuning.journal.folder import journal_folder
from ..tuning.progress import shown, tell
from ..tuning.search.effort import FEW
from ..tuning.tuner import Tuner as Tuner
from . import call_log
from .cache import ConfigCache, lock_in_force
from .calls_made import collect
from .consensus import decide
from .events import Teller
from .failed_calls import failures_of
from .policy import AutotunePolicy as AutotunePolicy
from .policy import forward_autotune_only as forward_autotune_only
from .policy import in_force
from .policy import policy_override as policy_override
from .tiers import AutotuneTier, HeuristicsTier, MemoryTier, Off, OverlayTier, OverrideTier, SeedTier, StoreTier, Tier
from .warm_start import warm_start_configs


class ConfigSelectorChain(Generic[Cfg, Out]):
    """Answers every call with a cfg: override, overlay, memory, persistent, autotune, heuristics, error."""

    def __init__(
        self,
        cache: ConfigCache[Cfg],
        policy: AutotunePolicy | None = None,
        tuner: Autotuner | None = None,
        persistent: Mapped | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., Any] | None = None,
        forbid_reautotune: bool = True,
    ) -> None:
        _check_part("tuner", tuner, "autotune", "such as Tuner()")
        _check_part("persistent", persistent, "get", "such as PersistentCache(path)")
        self.cache = cache
        self._policy = AutotunePolicy() if policy is None else _policy(policy)
        self.tuner: Autotuner = tuner or Tuner()
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        self.forbid_reautotune = forbid_reautotune
        self._settings = Settings.read()
        self._lock = read_lock(self._settings.lock) if self._settings.lock else None
        self._tell = Teller(on_event)
        self._flights = SingleFlight()
        # What this selector tuned, for what, and in which life of the cache.
        self._tuned: dict[Key, tuple[int, Objective, type]] = {}
        # What tunings left behind where no store keeps it.
        self._records: dict[Key, Record] = {}
        self._unwritable: set[str] = set()
        self._said: set[tuple[str, str]] = set()

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force here: this selector's, with the overrides of this context."""
        return in_force(self, self._policy)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = _policy(policy)
        invalidation.note_everything()

    @property
    def lock(self) -> LockFile | None:
        """The lock in force here: that of a block around, else the setting's."""
        around = lock_in_force()
        return self._lock if around is None else around

    @property
    def on_event(self) -> Callable[..., Any] | None:
        """Who is told about every choice."""
        return self._tell.listener

    @on_event.setter
    def on_event(self, listener: Callable[..., Any] | None) -> None:
        self._tell = Teller(listener)

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """The cfg for this call."""
        return self.decide(inv, kernel).cfg  # type: ignore[no-any-return]

    def decide(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """The same, with the tier that answered and why the earlier ones did not."""
        policy = self.policy
        request = ask(inv, kernel, objective_of(policy))
        finder = call_log.in_force()
        if finder is not None:
            # A program is looked through, not run.
            return finder.saw(self, request, self._look(request, policy))
        tiers = self._tiers(policy)
        proposal = _Proposal(self, request, tiers)
        # A lock is the same file for all processes: there is nothing to agree on.
        decision = decide(proposal, self._settings) if self.lock is None else proposal.make()
        collect(request, decision.cfg, decision.tier, self.cache, self.lock)
        return decision

    def look(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """What would be answered without tuning, heuristics if need be; nothing is kept and nobody is told."""
        return self._look(ask(inv, kernel, objective_of(self.policy)), self.policy)

    def _look(self, request: Request, policy: AutotunePolicy) -> Decision:
        quiet = replace(policy, allow_autotune=False, allow_heuristics=True)
        return self._walk(request, self._tiers(quiet), contextlib.ExitStack(), keep=False)

    def adopt(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], record: Record) -> None:
        """Keeps what another selector tuned for this call as if it were this one's own."""
        request = ask(replace(inv, override_cfg=None), kernel, objective_of(self.policy))
        self._keep(request, Hit(record.cfg, "autotune", objective=request.objective, record=record), ())

    def tune(
        self,
        inv: Invocation[Cfg, Out],
        kernel: Kernel[Cfg, Out],
        repetitions: int = 1,
        *,
        seconds: float | None = None,
    ) -> Decision:
        """Tunes this call now, whatever is known already; of several repetitions the fastest winner is kept."""
        request = ask(replace(inv, override_cfg=None), kernel, objective_of(self.policy))
        request = replace(request, seconds=seconds)
        return decide(_Proposal(self, request, (HeuristicsTier(),), repetitions=repetitions), self._settings)

    def _repeat(self, request: Request, repetitions: int) -> Decision:
        decisions = []
        for _ in range(repetitions):
            failures_of(self.tuner).pop((request.key, type(request.kernel)), None)
            decisions.append(self._propose(request, (self._unless_off(again=True), HeuristicsTier())))
        best = min(decisions, key=_winner_seconds)
        if best is not decisions[-1] and best.record is not None:
            self._keep(request, Hit(best.cfg, "autotune", objective=request.objective, record=best.record), ())
        return best

    def _tiers(self, policy: AutotunePolicy) -> Sequence[Tier]:
        """The list that the policy makes of the tiers; a lock leaves those that the program itself speaks through."""
        lock = self.lock
        if lock is not None:
            return (OverrideTier(), OverlayTier(lock), *(Off(*tier) for tier in _LOCKED))
        packs = self._settings.packs
        return (
            OverrideTier(),
            OverlayTier(),
            MemoryTier(self.cache),
            Off("persistent", "none given") if self._store is None else StoreTier(self._store),
            Off("persistent", "") if packs is None else PacksTier(packs),
            self._autotune_or_why_not(policy),
            SeedTier(),
            HeuristicsTier() if policy.allow_heuristics else Off("heuristics", "off (allow_heuristics=False)"),
        )

    @property
    def _store(self) -> Store | None:
        return None if self.persistent is None else as_store(self.persistent)

    def _places(self) -> list[Store]:
        """Where entries are kept: the selector's own store, then the packs."""
        packs = self._settings.packs
        return [*([] if self._store is None else [self._store]), *([] if packs is None else found_packs(packs))]

    def _autotune_or_why_not(self, policy: AutotunePolicy) -> Tier:
        if not policy.allow_autotune:
            return Off("autotune", "off (allow_autotune=False)")
        if policy.cache_miss_fallback != "autotune":
            return Off("autotune", f"off (cache_miss_fallback={policy.cache_miss_fallback!r})")
        return self._unless_off(sole_answers=not policy.allow_heuristics)

    def _unless_off(self, *, sole_answers: bool = False, again: bool = False) -> Tier:
        """The tier that tunes, as far as the environment lets it; `again` tunes whatever is known already."""
        if not self._settings.autotune:
            return Off("autotune", "off (EJKERNEL_OPS_AUTOTUNE)")
        limit = self._settings.tune_seconds
        if limit is not None and seconds_spent() >= limit:
            return Off("autotune", f"the process has spent its {limit:g} s of tuning (EJKERNEL_OPS_TUNE_SECONDS)")
        tune = functools.partial(self._tune, again=again)
        return AutotuneTier(tune, failures_of(self.tuner), self._said, sole_answers)

    def _propose(self, request: Request, tiers: Sequence[Tier]) -> Decision:
        with contextlib.ExitStack() as held:
            return self._walk(request, tiers, held)

    def _walk(
        self,
        request: Request,
        tiers: Sequence[Tier],
        held: contextlib.ExitStack,
        *,
        keep: bool = True,
        again: bool = False,
    ) -> Decision:
        misses: list[tuple[str, str]] = []
        failed: Record | None = None
        for tier in tiers:
            if isinstance(tier, AutotuneTier) and not again:
                waited = held.enter_context(self._flights.hold(request.key))
                # Another thread worked on this key while we waited, or since we asked: ask again from the top.
                if waited or request.key in self._tuned:
                    return self._walk(replace(request, seeds=()), tiers, held, keep=keep, again=True)
            answer = tier.find(request)
            if isinstance(answer, Hit):
                if keep:
                    self._keep(request, answer, misses)
                return Decision(answer.cfg, answer.source, tuple(misses), answer.record, failed)
            failed = answer.record or failed
            if answer.seeds is not None:
                # None at all: they were measured with the rest, and failed with it.
                request = replace(request, seeds=(*request.seeds, *answer.seeds) if answer.seeds else ())
            if answer.reason:
                misses.append((tier.name, answer.reason))
        if keep:
            self._tell("error", request.key, misses=tuple(misses))
        raise nothing_left(request.key, misses)

    def _keep(self, request: Request, hit: Hit, misses: Sequence[tuple[str, str]]) -> None:
        """The contract's table: which answer goes where, and what the listener is told."""
        key = request.key
        if hit.source == "override":
            self._tell("override", key, cfg=hit.cfg)
        elif hit.source == "overlay":
            self._tell("overlay_hit", key, cfg=hit.cfg, **hit.data)
        elif hit.source in ("memory", "persistent"):
            if hit.source == "persistent" and hit.keep:
                self.cache._keep(key, hit.cfg, objective=hit.objective, call=request.call)
            self._tell("cache_hit", key, cfg=hit.cfg, **hit.data)
        elif hit.source == "agreed":
            self._follow(request, hit)
        elif hit.source == "heuristics":
            self._tell("heuristics", key, cfg=hit.cfg, reason=dict(misses).get("autotune", ""))
        elif hit.record is not None:
            self._tuned[key] = (self.cache._generation, request.objective, type(request.kernel))
            self.cache._keep(key, hit.cfg, objective=hit.objective, call=request.call)
            if self.persist_autotune and hit.record.stop != "settled":
                self._write(request, hit)
            if not (self.persist_autotune and isinstance(self._store, KeepsRecords)):
                self._records[key] = hit.record
        else:
            # The only candidate is the heuristic cfg, and nothing was measured.
            self._tell("heuristics", key, cfg=hit.cfg, reason="one candidate, nothing to measure")

    def _follow(self, request: Request, hit: Hit) -> None:
        """What the processes agreed on is what this one remembers, unless it was told otherwise since."""
        if hit.keep or self.cache._find(request.key) is None:
            self.cache._keep(request.key, hit.cfg, objective=hit.objective, call=request.call)
        self._tell("cache_hit", request.key, cfg=hit.cfg, level="memory", **hit.data)

    def _write(self, request: Request, hit: Hit) -> None:
        if self._store is None or hit.record is None:
            return
        key, record = request.key, hit.record
        known = StoredEntry(hit.cfg, record.environment, "autotune", hit.objective)
        entry = replace(known, summary=record.summary(), call=request.call, record=record)
        try:
            self._store.keep(key, entry)
        # A cfg that is not JSON, or a store that cannot take it: this process has the answer all the same.
        except (OSError, TypeError, ValueError) as error:
            if key.op_id not in self._unwritable:
                self._unwritable.add(key.op_id)
                warnings.warn(
                    f"the tuned cfg of {key} could not be kept in {self._store}, so the next process will tune "
                    f"again: {type(error).__name__}: {error}",
                    StoreWarning,
                    stacklevel=2,
                )

    def _tune(self, request: Request, job: TuningJob, *, again: bool) -> Record:
        """Runs a job, one at a time on a device, within what the process may still spend."""
        if not again:
            self._refuse_a_second_time(request)
        job = replace(
            job,
            seconds=self._seconds_left(request),
            # A race of a few candidates needs no start.
            seeds=[
                *job.seeds,
                *(warm_start_configs(self._places(), request, job.candidates) if len(job.candidates) > FEW else ()),
            ],
            offline=again,
            journal=journal_folder(),
        )

        def lock(wait: float) -> AbstractContextManager[None]:
            return device_lock(request.key.device, default_folder() / "locks", wait)

        def answered() -> tuple[Any] | None:
            return None if again else self._settled(request)

        self._tell("autotune_start", request.key, candidates=len(job.candidates), objective=job.objective)
        start = time.perf_counter()
        cfg, record = None, None
        try:
            title, wanted = f"{request.key.op_id} {request.key.call_key}", self._settings.progress
            with spending(), jax.default_device(request.device), shown(title, job.seconds, wanted) as watch:
                record = engine(self.tuner).tune(
                    replace(job, watch=watch), device_lock=lock, answered_elsewhere=answered
                )
            record = self._first_answer(answered, record)
            cfg = record.cfg
            if record.stop != "settled":
                tell(title, record, time.perf_counter() - start, wanted)
        finally:
            seconds = time.perf_counter() - start
            self._tell("autotune_finish", request.key, cfg=cfg, seconds=seconds, record=record)
        return record

    def _seconds_left(self, request: Request) -> float | None:
        limit = self._settings.tune_seconds
        limits = [request.seconds, None if limit is None else max(limit - seconds_spent(), 0.0)]
        return min((seconds for seconds in limits if seconds is not None), default=None)

    @staticmethod
    def _first_answer(answered: Callable[[], tuple[Any] | None], record: Record) -> Record:
        """This tuning's record, unless another process put its answer into the store meanwhile.

        A turn ends before what it found is written, so that two may measure one after the other; both use the first.
        """
        first = answered() if record.stop != "settled" else None
        if first is None or len(distinct([first[0], record.cfg])) == 1:
            return record
        found = Trial(first[0], "skipped", "found by another process meanwhile")
        return replace(record, stop="settled", trials=(*record.trials, found), winner=len(record.trials))

    def _settled(self, request: Request) -> tuple[Any] | None:
        found = StoreTier(self._store).find(request) if self._store is not None else Miss("")
        return (found.cfg,) if isinstance(found, Hit) else None

    def _refuse_a_second_time(self, request: Request) -> None:
        # A class that was defined anew, as in a notebook, may need other configs than the one before.
        asked = (self.cache._generation, request.objective, type(request.kernel))
        if not self.forbid_reautotune or self._tuned.get(request.key) != asked:
            return
        raise RetuneError(
            f"{request.key} was tuned by this selector before and is not in its cache any more; "
            "keep the entry, call cache.clear(), or pass forbid_reautotune=False"
        )


def _check_part(name: str, part: Any, method: str, such: str) -> None:
    if part is not None and not callable(getattr(part, method, None)):
        raise SettingError(f"{name}={part!r} has no method {method}; give an object that has, {such}")


def _policy(policy: Any) -> AutotunePolicy:
    if not isinstance(policy, AutotunePolicy):
        raise SettingError(
            f"policy={policy!r} is no AutotunePolicy; give one, such as AutotunePolicy(allow_autotune=False)"
        )
    return policy


@dataclass(frozen=True)
class _Proposal:
    """What a selector can say about one request."""

    selector: ConfigSelectorChain[Any, Any]
    request: Request
    tiers: Sequence[Tier]
    # Given where a tuning was asked for.
    repetitions: int | None = None

    @property
    def is_tuning(self) -> bool:
        return self.repetitions is not None

    def known(self) -> Hit | None:
        request = self.request
        for tier in self.tiers:
            if not isinstance(tier, (MemoryTier, StoreTier, PacksTier)):
                continue
            answer = tier.find(request)
            if isinstance(answer, Hit):
                return answer
            # A store that keeps cfgs alone learns from memory what they were tuned for.
            request = replace(request, seeds=(*request.seeds, *(answer.seeds or ())))
        return None

    def make(self, seconds: float | None = None) -> Decision:
        each = None if seconds is None else seconds / (self.repetitions or 1)
        limits = [limit for limit in (self.request.seconds, each) if limit is not None]
        limit = min(limits, default=None)
        request = self.request if limit == self.request.seconds else replace(self.request, seconds=limit)
        if self.repetitions is None:
            return self.selector._propose(request, self.tiers)
        return self.selector._repeat(request, self.repetitions)

    def guess(self) -> Hit:
        tier = next(tier for tier in self.tiers if tier.name == "heuristics")
        answer = tier.find(self.request)
        if isinstance(answer, Miss):
            raise nothing_left(self.request.key, [(tier.name, answer.reason)])
        return answer

    def keep(self, hit: Hit, misses: Sequence[tuple[str, str]] = ()) -> Decision:
        self.selector._keep(self.request, hit, misses)
        return Decision(hit.cfg, str(hit.data.get("tier", hit.source)), tuple(misses))


def _winner_seconds(decision: Decision) -> float:
    record = decision.record
    seconds = None if record is None or record.winner is None else record.trials[record.winner].seconds
    return math.inf if seconds is None else seconds


def objective_of(policy: AutotunePolicy) -> Objective:
    return "forward+backward" if policy.validate_backward else "forward"


# What a lock answers in place of.
_LOCKED = tuple((name, "not asked: locked") for name in ("memory", "persistent", "autotune", "heuristics"))


def nothing_left(key: Key, misses: Sequence[tuple[str, str]]) -> NoConfigError:
    width = max(len(name) for name, _ in misses)
    lines = "\n".join(f"  {name:<{width}}  {reason}" for name, reason in misses)
    if _LOCKED[0] in misses:
        advice = "Freeze the program again and review the change, or pass cfg=...; without the lock other tiers answer."
    else:
        advice = "Pass cfg=..., put one into a cache, or allow autotuning or heuristics in the policy."
    return NoConfigError(f"no configuration for {key}\n{lines}\n{advice}")
