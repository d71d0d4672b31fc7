"""Measures stored entries again, each against its heuristic and its runner-up: which of them are stale?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..config.cache import ConfigCache
from ..config.selection import ConfigSelectorChain
from ..config.tuning_job import job_for
from ..core import formatting
from ..core.cfg import distinct, places
from ..core.description import one_line
from ..core.device import device_fingerprint
from ..core.errors import OpsError, SignatureError
from ..core.key import Key
from ..core.record import Record
from ..core.request import ask, offer, revived
from ..core.shown import Shown
from ..store.store import KeepsRecords, Store, StoredEntry, peek
from ..timing.staleness import LEAST_ROUNDS, Loss, loss_of
from ..tuning.runner import InProcessRunner
from .found_call import FoundCall
from .rebuilt import rebuilt_call

EntryState = Literal["fine", "stale", "noisy", "broken", "skipped"]


@dataclass(frozen=True, repr=False)
class Remeasured(Shown):
    """One entry, measured again."""

    key: Key
    state: EntryState
    cfg: Any
    call: FoundCall | None = None
    # The faster cfg of a stale entry, and the time of the entry's over its: middle, low and high end.
    rival: Any = None
    loss: tuple[float, float, float] | None = None
    # Why it could not be measured, or is of no use any more.
    why: str = ""
    name: str = ""

    def in_short(self) -> str:
        """The entry in a line."""
        return str(self)

    def __str__(self) -> str:
        """The entry in a line."""
        what = f"{self.name or self.key}: {self.state}"
        if self.loss is not None and self.state == "stale":
            middle, low, high = self.loss
            kept, faster = formatting.short(self.cfg), formatting.short(self.rival)
            return f"{what}: {kept} takes {middle:.3f} times as long as {faster} ({low:.3f} to {high:.3f} with 95%)"
        return f"{what}: {self.why}" if self.why else what


def worth_of(entry: StoredEntry) -> float:
    """Seconds that an entry saves in each call, as far as its summary says; then seconds of a call."""
    seconds, gain = entry.summary.get("seconds"), entry.summary.get("gain")
    if not isinstance(seconds, (int, float)):
        return 0.0
    middle = gain[0] if isinstance(gain, list) and gain and isinstance(gain[0], (int, float)) else 1.0
    return float(seconds) * (max(middle, 1.0) - 1.0) + 1e-3 * float(seconds)


def remeasure(
    store: Store,
    *,
    keys: Iterable[Key] | None = None,
    calls: Sequence[FoundCall] = (),
    sample: int | None = None,
    seconds: float | None = None,
    told: Callable[[Remeasured], None] = lambda found: None,
) -> list[Remeasured]:
    """The entries of a store that are for this device, each measured again; those worth most first.

    `calls` are those of a program or a recording; other calls are rebuilt from their records. `sample` takes so many of
    the entries that are worth most. What the seconds do not cover is skipped, and says so.
    """
    device = device_fingerprint()
    wanted = [key for key in map(Key._make, store.keys() if keys is None else keys) if key.device == device]
    entries = {key: entry for key in wanted if (entry := peek(store, key)) is not None and entry.source != "guess"}
    ordered = sorted(entries, key=lambda key: (-worth_of(entries[key]), key))[:sample]
    known = {call.key: call for call in calls}
    until = float("inf") if seconds is None else time.perf_counter() + seconds
    given: Any = store
    selector = ConfigSelectorChain[Any, Any](ConfigCache(), persistent=given)
    done = []
    for key in ordered:
        if time.perf_counter() >= until:
            found = Remeasured(key, "skipped", entries[key].cfg, why="the time was up")
        else:
            found = _remeasured(key, entries[key], store, known.get(key), selector)
        told(found)
        done.append(found)
    return done


def _remeasured(
    key: Key, entry: StoredEntry, store: Store, call: FoundCall | None, selector: ConfigSelectorChain[Any, Any]
) -> Remeasured:
    record = store.record(*key) if isinstance(store, KeepsRecords) else None
    name = one_line(key.op_id, entry.call) if entry.call else str(key)
    try:
        if call is None:
            if record is None:
                raise SignatureError("no record of its tuning is kept; name the program or a recording with --calls")
            call = rebuilt_call(key, record, selector)
        with call.restored():
            return _raced(key, entry, record, call, name)
    except SignatureError as error:
        return Remeasured(key, "skipped", entry.cfg, why=str(error), name=name)
    except OpsError as error:
        return Remeasured(key, "broken", entry.cfg, call, why=str(error).splitlines()[0], name=name)


def _raced(key: Key, entry: StoredEntry, record: Record | None, call: FoundCall, name: str) -> Remeasured:
    request = ask(call.inv, call.kernel, entry.objective or "forward")
    kept = revived(request, entry.cfg)
    # Without a reference of the kernel's own, what the heuristic cfg computes is right by definition: it comes first.
    cfgs = [offer(request).cfgs[0], kept]
    if record is not None and record.runner_up is not None:
        cfgs.append(revived(request, record.trials[record.runner_up].cfg))
    cfgs = distinct(cfgs)
    if len(cfgs) == 1:
        return Remeasured(key, "fine", kept, call, why="it is the heuristic cfg, and had no rival", name=name)
    runner = InProcessRunner(job_for(request, cfgs), seed=0, device=request.device)
    with jax.default_device(request.device), runner.job.room():
        try:
            runner.candidates.enter(cfgs)
            runner.compile(float("inf"))
            runner.check(float("inf"))
            place = places(cfgs, [kept])[0]
            trial = runner.candidates.trials()[place]
            if trial.status != "ok":
                why = f"its cfg is {trial.status} now: {trial.message}"
                return Remeasured(key, "broken", kept, call, why=why, name=name)
            return _judged(key, runner, place, call, name)
        finally:
            runner.close()


def _judged(key: Key, runner: InProcessRunner, place: int, call: FoundCall, name: str) -> Remeasured:
    candidates = runner.candidates
    kept, mine = candidates.cfg(place), candidates.runs_as(place)
    # A twin has the program of the kept cfg, and cannot be faster.
    rivals = [n for n in candidates.running if candidates.runs_as(n) == n != mine]
    noisy = None
    for rival in rivals:
        found = _loss(runner, mine, rival, seed=1)
        # Twice, in samples of its own: of many entries one is far off by chance alone.
        again = _loss(runner, mine, rival, seed=2) if found.is_found else found
        if again.is_found:
            return Remeasured(key, "stale", kept, call, candidates.cfg(rival), again.as_ratio(), name=name)
        noisy = again if again.is_too_noisy else noisy
    if noisy is not None:
        why = f"too noisy to tell, to {noisy.error:.1%}: measure it again on an idle machine"
        return Remeasured(key, "noisy", kept, call, loss=noisy.as_ratio(), why=why, name=name)
    return Remeasured(key, "fine", kept, call, name=name)


def _loss(runner: InProcessRunner, mine: int, rival: int, *, seed: int) -> Loss:
    """Rounds of the two alone, until the loss is known well enough."""
    sampler = runner.sampler_of([mine, rival], seed=seed)
    # The first round finds out how many calls make a sample.
    sampler.pairs(1)
    pairs: list[tuple[float, float]] = []
    while True:
        # Both in each round: a race would drop one of them by chance, and with it what it has to find.
        pairs += sampler.pairs(LEAST_ROUNDS)
        found = loss_of([kept for kept, _ in pairs], [other for _, other in pairs])
        if found.is_sure:
            return found


def summary_line(done: Sequence[Remeasured]) -> str:
    """All entries in one line."""
    counts = Counter(one.state for one in done)
    words: dict[EntryState, str] = {
        "fine": "as before",
        "stale": "stale",
        "broken": "broken",
        "noisy": "too noisy to tell",
        "skipped": "not measured",
    }
    said = [f"{counts[state]} {word}" for state, word in words.items() if counts[state] or state in ("fine", "stale")]
    return f"{len(done)} entries: {', '.join(said)}"
