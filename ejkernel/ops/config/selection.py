"""Choosing a cfg: the tiers are walked, and the first answer wins, is kept and told."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

import jax

from .. import _jax
from ..core import invalidation
from ..core.cfg import distinct
from ..core.errors import RetuneError, SettingError
from ..core.invocation import Cfg, Invocation, Out
from ..core.kernel import Kernel
from ..core.kernel_names import names_in
from ..core.key import Key
from ..core.record import Objective, Record, Trial
from ..core.request import Decision as Decision
from ..core.request import Hit, Keep, Request, ask
from ..core.single_flight import SingleFlight
from ..settings import Settings, default_folder
from ..store.lock_file import LockFile, read_lock
from ..store.packs import found_packs
from ..store.persistent import StoreWarning
from ..store.store import KeepsRecords, Mapped, Store, StoredEntry, as_store
from ..tuning.budget import seconds_spent, spending
from ..tuning.custom_tuner import Autotuner, engine
from ..tuning.device_lock import device_lock, turn_name
from ..tuning.interrupted import TuningInterrupted
from ..tuning.job import TuningJob
from ..tuning.journal.folder import journal_folder
from ..tuning.progress import shown, tell
from ..tuning.search.effort import FEW
from ..tuning.tuner import PreparedAhead
from ..tuning.tuner import Tuner as Tuner
from . import call_log, inline_budget
from .autotune_tier import AutotuneTier, tuned
from .cache import ConfigCache, is_shadowed, lock_in_force
from .events import Teller
from .failed_calls import failures_of
from .policy import AutotunePolicy as AutotunePolicy
from .policy import forward_autotune_only as forward_autotune_only
from .policy import in_force
from .policy import policy_override as policy_override
from .predicted_tier import PredictedTier, Predictions
from .recall import Recall, question_of
from .remote_tier import RemoteTier
from .static_floats import StaticFloats
from .tiers import (
    OTHER_CODE,
    AgreedTier,
    HeuristicsTier,
    MemoryTier,
    OverlayTier,
    OverrideTier,
    PacksTier,
    SeedTier,
    StoreTier,
)
from .tuning_job import TuningWarning
from .walk import LOCKED, Misses, Off, Tier, Walked, nothing_left, preview, walk
from .warm_start import warm_start_configs

if TYPE_CHECKING:
    from ..store.remote.remote_store import RemoteStore

# Tiers that know nothing of a selector are made once: the list is made anew for every choice.
_OVERRIDE, _OVERLAY, _SEEDS, _HEURISTICS = OverrideTier(), OverlayTier(), SeedTier(), HeuristicsTier()


class ConfigSelectorChain(Generic[Cfg, Out]):
    """Answers every call with a cfg of the first tier that has one; `_tiers` lists them."""

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
        _check_part("tuner", tuner, "autotune", "such as Tuner()")
        _check_part("persistent", persistent, "get", "such as PersistentCache(path)")
        _check_part("remote", remote, "lookup", "such as RemoteStore('s3://bucket/folder')")
        self._cache = cache
        self.remote = remote
        self._policy = AutotunePolicy() if policy is None else _policy(policy)
        self.tuner: Autotuner = tuner or Tuner()
        self._take_store(persistent)
        self.persist_autotune = persist_autotune
        self.forbid_reautotune = forbid_reautotune
        self._settings = Settings.read()
        self._lock_file = read_lock(self._settings.lock) if self._settings.lock else None
        self._tell = Teller(on_event)
        self._flights = SingleFlight()
        # What this selector tuned, for what, and in which life of the cache.
        self._tuned: dict[Key, tuple[int, Objective, type]] = {}
        # What tunings left behind where no store keeps it.
        self._records: dict[Key, Record] = {}
        self._predictions = Predictions(self.stores, self._records)
        # Tunings that were traced ahead of their turn.
        self._prepared: dict[Key, PreparedAhead] = {}
        # What was answered from memory while programs were traced.
        self._recall = Recall()
        # The latest list of tiers, by what it was made of.
        self._listed: dict[Any, tuple[Sequence[Tier], Any]] = {}
        self._unwritable: set[str] = set()
        self._said: set[tuple[str, str]] = set()
        self._static_floats = StaticFloats()

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force here: this selector's, with the overrides of this context."""
        return in_force(self, self._policy)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = _policy(policy)
        invalidation.note_everything()

    @property
    def cache(self) -> ConfigCache[Cfg]:
        """The memory of this process; another one takes effect at the next choice."""
        return self._cache

    @cache.setter
    def cache(self, cache: ConfigCache[Cfg]) -> None:
        self._cache = cache
        invalidation.note_everything()

    @property
    def persistent(self) -> Mapped | None:
        """The store, as it was given."""
        return self._persistent

    @persistent.setter
    def persistent(self, persistent: Mapped | None) -> None:
        self._take_store(persistent)
        invalidation.note_everything()

    def _take_store(self, persistent: Mapped | None) -> None:
        self._persistent = persistent
        self._store: Store | None = None if persistent is None else as_store(persistent)
        self._store_names = None if persistent is None else names_in(persistent)

    @property
    def lock_file(self) -> LockFile | None:
        """The lock file in force here: that of a block around, else the setting's."""
        around = lock_in_force()
        return self._lock_file if around is None else around

    @property
    def on_event(self) -> Callable[..., Any] | None:
        """The function that is told about every choice."""
        return self._tell.listener

    @on_event.setter
    def on_event(self, listener: Callable[..., Any] | None) -> None:
        self._tell = Teller(listener)

    def choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Cfg:
        """The cfg for this call."""
        return self.decide(inv, kernel).cfg  # type: ignore[no-any-return]

    def decide(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """The cfg for this call, the tier that answered, and why the earlier ones did not."""
        question = None if self._is_shared() else question_of(inv, kernel)
        recalled = None if question is None else self._recall.find(question)
        if recalled is not None and recalled.key is not None:
            self._tell("cache_hit", recalled.key, "memory", cfg=recalled.cfg, level="memory")
            return recalled
        # Taken before the walk: a change that comes during it must not be overlooked.
        epoch = invalidation.epoch
        policy = self.policy
        request = self._asked(inv, kernel, policy)
        log = call_log.in_force()
        if log is not None:
            # A program is looked through, not run.
            return log.saw(self, request, self._look(request, policy))
        lock = self.lock_file
        tiers = self._tiers(policy, lock)
        # A lock is the same file for all processes, and what stands in the program is the same text.
        if lock is None and self._is_shared() and not is_program_text(request):
            decision = self._agree(_Proposal(self, request, tiers))
        else:
            with self._flights.on_demand(request.key) as flight:
                decision = self._settle(walk(tiers, request, hold=lambda: flight.hold() or request.key in self._tuned))
        call_log.collect(request, decision, lock)
        if question is not None:
            self._recall.keep(question, decision, epoch)
        return decision

    def look(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> Decision:
        """The answer without tuning, heuristics if need be; nothing is kept or told."""
        policy = self.policy
        return self._look(ask(inv, kernel, objective_of(policy)), policy)

    def _look(self, request: Request, policy: AutotunePolicy) -> Decision:
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
        lock = self.lock_file
        tiers = self._tiers(policy, lock)
        if lock is None and self._is_shared():
            # Behind what the program itself says, and before everything that this process knows by itself.
            tiers = (*tiers[:2], AgreedTier(), *tiers[2:])
        return walk(tiers, request, preview)

    def adopt(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], record: Record) -> None:
        """Keeps what another selector tuned for this call as if it were this one's own."""
        request = self._asked(replace(inv, override_cfg=None), kernel, self.policy)
        self._accept(request, tuned(request, record, record.cfg), ())

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
        job = self._complete(request, job, again=True)
        ahead = PreparedAhead(self.tuner, job, self._lock_for(request), is_next=is_next)
        self._prepared[request.key] = ahead

        def let_go() -> None:
            if self._prepared.pop(request.key, None) is not None:
                ahead.close()

        return let_go

    def stores(self) -> list[Store]:
        """The places of entries: the selector's own store, then the packs."""
        packs = self._settings.packs
        return [*([] if self._store is None else [self._store]), *([] if packs is None else found_packs(packs))]

    def record_of(self, key: Key) -> Record | None:
        """The record of the tuning behind the entry of a key, where it was kept."""
        record = self._records.get(key)
        if record is None and isinstance(self._persistent, KeepsRecords):
            record = self._persistent.record(*key)
        return record

    def tuning_is_off(self) -> str:
        """The reason why settings allow no tuning now; else empty."""
        if not self._settings.autotune:
            return "off (EJKERNEL_OPS_AUTOTUNE)"
        limit = self._settings.tune_seconds
        if limit is not None and seconds_spent() >= limit:
            return f"the process has spent its {limit:g} s of tuning (EJKERNEL_OPS_TUNE_SECONDS)"
        return ""

    def _tiers(self, policy: AutotunePolicy, lock: LockFile | None = None) -> Sequence[Tier]:
        """The list that policy and settings make of the tiers; a lock turns off what is behind the overlays."""
        # Made anew where any part of this selector was replaced: a choice from memory costs less than making it.
        parts = (policy, lock, *vars(self).values())
        over = inline_budget.why_over(self._settings) if policy.allow_autotune else ""
        known = (self.tuning_is_off(), over, *map(id, parts))
        listed = self._listed.get(known)
        if listed is None:
            self._listed.clear()
            # The parts are kept with it, so that their addresses stay their own.
            listed = self._listed[known] = (self._list_of_tiers(policy, lock), parts)
        return listed[0]

    def _list_of_tiers(self, policy: AutotunePolicy, lock: LockFile | None) -> Sequence[Tier]:
        packs = self._settings.packs
        autotune = self._autotune_or_why_not(policy)
        tiers = (
            _OVERRIDE,
            _OVERLAY if lock is None else OverlayTier(lock),
            MemoryTier(self.cache),
            Off("persistent", "none given") if self._store is None else StoreTier(self._store),
            Off("remote", "") if self.remote is None else RemoteTier(self.remote, autotune),
            Off("packs", "") if packs is None else PacksTier(packs),
            autotune,
            _SEEDS,
            self._predicted_or_why_not(policy),
            _HEURISTICS if policy.allow_heuristics else Off("heuristics", "off (allow_heuristics=False)"),
        )
        return tiers if lock is None else (*tiers[:2], *(Off(tier.name, LOCKED) for tier in tiers[2:]))

    def _is_shared(self) -> bool:
        """Does this process decide together with others?"""
        return self._settings.agree and _jax.distributed() is not None

    def _agree(self, proposal: _Proposal) -> Decision:
        # A program of one process never imports it.
        from ..fleet.agreement import agree

        return agree(proposal, self._settings.agree_seconds)

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
        why_not = self.tuning_is_off() or ("" if again else inline_budget.why_over(self._settings))
        if why_not:
            return Off("autotune", why_not)
        tune = functools.partial(self._tune, again=again)
        refusal = (lambda request: "") if again else self._refusal
        return AutotuneTier(tune, refusal, failures_of(self.tuner), self._said, sole_answers)

    def _propose(self, request: Request, tiers: Sequence[Tier]) -> Decision:
        with self._flights.on_demand(request.key) as flight:
            return self._settle(walk(tiers, request, hold=lambda: flight.hold() or request.key in self._tuned))

    def _repeat(self, request: Request, repetitions: int) -> Decision:
        decisions = []
        for _ in range(repetitions):
            failures_of(self.tuner).pop((request.key, type(request.kernel)), None)
            decisions.append(self._propose(request, (self._unless_off(again=True), _HEURISTICS)))
        best = min(decisions, key=_winner_seconds)
        if best is not decisions[-1] and best.record is not None:
            self._accept(request, tuned(request, best.record, best.cfg), ())
        return best

    def _settle(self, walked: Walked) -> Decision:
        """Keeps and tells the answer of a walk; without one, an error."""
        request, hit = walked.request, walked.hit
        if hit is None:
            self._tell("error", request.key, "error", misses=walked.misses)
            raise nothing_left(request.key, walked.misses)
        self._accept(request, hit, walked.misses)
        return Decision.of(request, hit, walked.misses, walked.failed)

    def _accept(self, request: Request, hit: Hit, misses: Misses) -> None:
        """Does with an answer what it says of itself."""
        key = request.key
        if hit.record is not None:
            self._tuned[key] = self._life(request)
        if hit.keep is not Keep.NOTHING:
            self.cache.keep_entry(key, hit.cfg, objective=hit.objective, call=request.call, code=hit.code)
        if "code" in hit.data:
            self._say_of_other_code(key, misses)
        if hit.keep is Keep.MEMORY_AND_STORE and self.persist_autotune:
            self._write(request, hit)
        if hit.record is not None and not (self.persist_autotune and isinstance(self._store, KeepsRecords)):
            self._records[key] = hit.record
        if hit.event:
            data = hit.data
            if hit.event == "heuristics" and "reason" not in data:
                # A guess says why nothing was measured.
                data = {"reason": dict(misses).get("autotune", ""), **data}
            self._tell(hit.event, key, hit.tier, cfg=hit.cfg, **data)

    def _write(self, request: Request, hit: Hit) -> None:
        key, record = request.key, hit.record
        if hit.entry is not None:
            entry = replace(hit.entry, cfg=hit.cfg)
        elif record is None:
            entry = StoredEntry(hit.cfg, request.environment, "imported", hit.objective, call=request.call)
        else:
            known = StoredEntry(hit.cfg, record.environment, "autotune", hit.objective)
            entry = replace(known, summary=record.summary(), call=request.call, record=record)
        try:
            if self._store is not None:
                self._store.keep(key, entry)
            if self.remote is not None and self.remote.write and record is not None and "confirmed" not in hit.data:
                self.remote.keep_later(key, entry)
        # A cfg that is not JSON, or a store that cannot take it: this process has the answer all the same.
        except (OSError, TypeError, ValueError) as error:
            if key.op_id not in self._unwritable:
                self._unwritable.add(key.op_id)
                where = self._store or self.remote
                warnings.warn(
                    f"the tuned cfg of {key} could not be kept in {where}, so the next process will tune "
                    f"again: {type(error).__name__}: {error}",
                    StoreWarning,
                    stacklevel=2,
                )

    def _say_of_other_code(self, key: Key, misses: Misses) -> None:
        said = ("code", key.op_id)
        if said not in self._said:
            self._said.add(said)
            why = dict(misses).get("autotune", "") or "nothing was measured"
            warnings.warn(
                f"{key} runs with a cfg that {OTHER_CODE}, and is not tuned again: {why}. Tune it, or give the "
                "kernel a version, which then says alone what entries are for",
                TuningWarning,
                stacklevel=2,
            )

    def _asked(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out], policy: AutotunePolicy) -> Request:
        """The request of a call, of a kernel that is alone with its name."""
        request = ask(inv, kernel, objective_of(policy))
        # A cfg given by hand is neither looked up nor kept.
        if inv.override_cfg is None:
            self.cache.kernel_names.claim(kernel)
            if self._store_names is not None:
                self._store_names.claim(kernel)
        return request

    def _tune(self, request: Request, job: TuningJob, *, again: bool) -> Record:
        """Runs a job, one at a time on a device, within what the process may still spend."""
        refused = "" if again else self._refusal(request)
        if refused:
            raise RetuneError(refused)
        if not again:
            self._static_floats.tuned(request)
        job = self._complete(request, job, again=again)
        ahead = self._prepared.pop(request.key, None)

        def answered() -> tuple[Any] | None:
            return None if again else self._settled(request)

        self._tell("autotune_start", request.key, None, candidates=len(job.candidates), objective=job.objective)
        start = time.perf_counter()
        cfg: Any = None
        record: Record | None = None
        try:
            title, wanted = f"{request.key.op_id} {request.key.call_key}", self._settings.progress
            with (
                spending(inline=not again),
                jax.default_device(request.device),
                shown(title, job.seconds, wanted) as watch,
            ):
                if ahead is not None:
                    record = ahead.measure(job.seconds, watch)
                else:
                    lock = self._lock_for(request)
                    record = engine(self.tuner).tune(
                        replace(job, watch=watch), device_lock=lock, answered_elsewhere=answered
                    )
            record = self._first_answer(answered, record)
            cfg = record.cfg
            if record.stop != "settled":
                tell(title, record, time.perf_counter() - start, wanted)
            if not again:
                inline_budget.tell_if_used_up(request.key, record, job.seconds)
        except KeyboardInterrupt as stopped:
            record = self._best_so_far(request, stopped)
            cfg = None if record is None else record.cfg
            raise
        finally:
            seconds = time.perf_counter() - start
            counted = "failed_tunings" if record is None else "autotune"
            self._tell("autotune_finish", request.key, counted, cfg=cfg, seconds=seconds, record=record)
        return record

    def _best_so_far(self, request: Request, stopped: KeyboardInterrupt) -> Record | None:
        """Keeps the best that was checked and timed before Ctrl-C, if the heuristic cfg was timed as well."""
        if not isinstance(stopped, TuningInterrupted) or not stopped.is_of_use:
            return None
        self._accept(request, tuned(request, stopped.record, stopped.record.cfg), ())
        return stopped.record

    def _complete(self, request: Request, job: TuningJob, *, again: bool) -> TuningJob:
        """The job with what this selector knows: budget, seeds of similar calls, and where its journal lies."""
        # A race of a few candidates needs no start.
        similar = self._known_elsewhere(request, job.candidates) if len(job.candidates) > FEW else ()
        seeds, seconds = [*job.seeds, *similar], self._seconds_left(request, again=again)
        return replace(job, seconds=seconds, seeds=seeds, offline=again, journal=journal_folder())

    def _known_elsewhere(self, request: Request, offered: Sequence[Any]) -> list[Any]:
        """The cfgs that records of other calls speak for: what they predict, then the best of the nearest ones."""
        found = self._predictions.ask(request, offered) if self.policy.allow_predictions else ""
        likely = [] if isinstance(found, str) else [found.cfg]
        return [*likely, *warm_start_configs(self.stores(), request, offered)]

    @staticmethod
    def _lock_for(request: Request) -> Callable[[float], AbstractContextManager[None]]:
        return lambda wait: device_lock(turn_name(request.device), default_folder() / "locks", wait)

    def _seconds_left(self, request: Request, *, again: bool) -> float | None:
        limit = self._settings.tune_seconds
        limits = [request.seconds, None if limit is None else max(limit - seconds_spent(), 0.0)]
        limits += [] if again else inline_budget.seconds_for(self._settings, self.tuner)
        # `inf` lifts a default, and is no number of seconds.
        return min((seconds for seconds in limits if seconds is not None and seconds < math.inf), default=None)

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
        found = None if self._store is None else StoreTier(self._store).find(request)
        return (found.cfg,) if isinstance(found, Hit) else None

    def _refusal(self, request: Request) -> str:
        """The reason why a tuning of this request would be an error; else empty."""
        if not self.forbid_reautotune or self._tuned.get(request.key) != self._life(request):
            return ""
        # An entry that was put for other code meanwhile, as by a reloaded module, is not this selector's own any more.
        if any("code" in seed.data for seed in request.seeds):
            return ""
        return (
            f"{request.key} was tuned by this selector before and is not in its cache any more; "
            "keep the entry, call cache.clear(), or pass forbid_reautotune=False"
        )

    def _life(self, request: Request) -> tuple[int, Objective, type]:
        # A class that was defined anew, as in a notebook, may need other configs than the one before.
        return self.cache.generation, request.objective, type(request.kernel)


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
        # What all processes run is in the memory of each.
        if hit.measured and hit.keep is Keep.NOTHING and cache.entry(self.request.key) is None:
            hit = replace(hit, keep=Keep.MEMORY)
        self.selector._accept(self.request, hit, misses)
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
