"""One walk over the tiers, and what it takes to add a tier.

Covers `core/request.py`.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import Blocks, DictStore, Doubling, Listener, TableTuner, call_of, key_of

from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    autotune,
    counters,
    explain,
    freeze,
)
from ejkernel.ops.config.selection import _Proposal
from ejkernel.ops.config.tuning_budget import TuningWarning
from ejkernel.ops.config.walk import Off, Tier, preview, walk
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.request import Hit, Keep, Miss, Planned, Request, ask
from ejkernel.ops.store.layered import LayeredStore, MemoryStore, ReadOnlyStore
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()
CALL = call_of(KERNEL)


def request() -> Request:
    return ask(CALL, KERNEL, "forward")


@dataclass
class Fixed(Tier):
    """A tier that says what it is told to."""

    name: str
    answer: Hit | Miss
    planned: Planned | None = None
    exclusive: bool = False
    seeds: tuple[Hit, ...] = ()

    def find(self, request):
        self.seeds = request.seeds
        return self.answer

    def preview(self, request):
        return self.planned or self.answer


# The walk.


def test_the_first_answer_wins():
    """Tiers before it say why they have none; those behind it are not asked."""
    behind = Fixed("c", Hit(3, "c"), seeds=("never asked",))
    walked = walk([Fixed("a", Miss("no")), Fixed("silent", Miss("")), Fixed("b", Hit(2, "b")), behind], request())
    assert (walked.hit.cfg, walked.tier, walked.misses) == (2, "b", (("a", "no"),))
    assert behind.seeds == ("never asked",)


def test_without_an_answer_every_reason_is_there():
    """The tier is then called error."""
    walked = walk([Off("a", "off"), Off("b", "not given")], request())
    assert (walked.hit, walked.tier, walked.misses) == (None, "error", (("a", "off"), ("b", "not given")))


def test_seeds_gather_and_can_be_taken_back():
    """A tier sees the seeds of those before it; an empty tuple says that they failed."""
    seed, last = Hit(1, "a"), Fixed("last", Miss(""))
    walk([Fixed("a", Miss("", (seed,))), Fixed("b", Miss("", None)), last], request())
    assert last.seeds == (seed,)
    walk([Fixed("a", Miss("", (seed,))), Fixed("b", Miss("", ())), last], request())
    assert last.seeds == ()


def test_another_question_goes_to_every_tier():
    """A preview ends at the tier that would have to measure."""
    tiers = [Fixed("a", Miss("no")), Fixed("b", Hit(2, "b"), Planned(7))]
    walked = walk(tiers, request(), preview)
    assert (walked.hit, walked.tier, walked.planned, walked.misses) == (None, "b", Planned(7), (("a", "no"),))


def test_a_thread_that_waited_begins_again():
    """What was found meanwhile answers from an earlier tier, and the key is held once."""
    memory, held = Fixed("memory", Miss("no entry", (Hit(9, "memory"),))), []

    def hold():
        held.append(True)
        memory.answer = Hit(1, "memory")
        return True

    walked = walk([memory, Fixed("autotune", Hit(2, "autotune"), exclusive=True)], request(), hold=hold)
    assert (walked.hit.cfg, walked.misses, walked.request.seeds, held) == (1, (), (), [True])


def test_choosing_is_three_frames_above_the_tiers():
    """`choose`, `decide`, `walk`: then a tier is asked."""
    import traceback

    names: list[str] = []

    class Listing(Tier):
        name = "listing"

        def find(self, request):
            names.extend(frame.name for frame in traceback.extract_stack())
            return Hit(Blocks(1), self.name)

    class Chain(ConfigSelectorChain):
        def _tiers(self, policy, lock_file=None):
            return (Listing(),)

    Chain(ConfigCache()).choose(CALL, KERNEL)
    above = names[names.index("choose") :]
    assert [name for name in above if name != "find"] == ["choose", "decide", "walk"]


# Adding a tier: one class and one line.


@dataclass(frozen=True, eq=False)
class RemoteTier(Tier):
    """What another machine knows."""

    entries: dict[Any, Any]
    name = "remote"
    remembers = True

    def find(self, request):
        if request.key not in self.entries:
            return Miss("no entry there")
        data = {"level": "persistent", "source": self.name}
        cfg = self.entries[request.key]
        return Hit(cfg, self.name, "cache_hit", data, Keep.MEMORY_AND_STORE, measured=True)


@dataclass(frozen=True, eq=False)
class PredictedTier(Tier):
    """What a model would take: a guess."""

    cfg: Any
    name = "predicted"

    def find(self, request):
        return Hit(self.cfg, self.name, "heuristics", {"source": self.name, "confidence": 0.5})


class More(ConfigSelectorChain):
    """A selector whose list has a line more."""

    added: Tier = Off("remote", "off")
    place = 4

    def _tiers(self, policy, lock_file=None):
        tiers = super()._tiers(policy, lock_file)
        return (*tiers[: self.place], self.added, *tiers[self.place :])


def selector(tier, place=4, **more):
    chain = More(ConfigCache(), on_event=Listener(), tuner=TableTuner(), **more)
    chain.added, chain.place = tier, place
    return chain


def test_an_added_tier_answers_and_its_answer_goes_where_it_says():
    """Memory and the store have it, the event is the contract's and names the tier, and the counters know it."""
    store, key = DictStore(), key_of(KERNEL, CALL)
    chain = selector(RemoteTier({key: Blocks(4)}), persistent=store)
    before = counters()
    decision = chain.decide(CALL, KERNEL)
    assert (decision.cfg, decision.tier, decision.measured) == (Blocks(4), "remote", True)
    assert [tier for tier, _ in decision.misses] == ["override", "overlay", "memory", "persistent"]
    event, data = chain.on_event.last
    assert (event, data["level"], data["source"]) == ("cache_hit", "persistent", "remote")
    assert (counters() - before).as_dict()["remote"] == 1
    assert chain.cache.get(*key) == store.get(*key) == Blocks(4)
    assert chain.decide(CALL, KERNEL).tier == "memory"


def test_an_added_tier_is_explained_and_named_in_errors():
    """Its answer, or why it had none."""
    key = key_of(KERNEL, CALL)
    found = explain(KERNEL, *CALL.args, selector=selector(RemoteTier({key: Blocks(4)})))
    assert (found.tier, found.cfg) == ("remote", Blocks(4))
    off = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    with pytest.raises(RuntimeError, match=r"remote +no entry there"):
        selector(RemoteTier({}), policy=off).choose(CALL, KERNEL)


def test_an_added_tier_that_remembers_is_told_to_other_processes():
    """Its answer is known without measuring; a guess is not."""
    key = key_of(KERNEL, CALL)
    for tier, known in [(RemoteTier({key: Blocks(4)}), Blocks(4)), (PredictedTier(Blocks(2)), None)]:
        chain = selector(tier)
        hit = _Proposal(chain, request(), chain._tiers(chain.policy)).known()
        assert (hit and hit.cfg) == known


def test_an_added_guess_is_kept_nowhere_and_says_why_nothing_was_measured():
    """It is told as `heuristics` with its source, and a later tuning is free to replace it."""
    chain = selector(PredictedTier(Blocks(4)), place=-1, policy=AutotunePolicy(allow_autotune=False))
    assert Executor(chain).choose_config(KERNEL, *CALL.args) == Blocks(4)
    event, data = chain.on_event.last
    assert (event, data["source"], data["confidence"]) == ("heuristics", "predicted", 0.5)
    assert data["reason"] == "off (allow_autotune=False)"
    assert chain.cache.size() == 0
    chain.policy = AutotunePolicy()
    assert chain.decide(CALL, KERNEL).tier == "autotune"


def test_a_program_that_is_frozen_calls_an_added_guess_a_guess():
    """Whatever the tier is called."""
    from ejkernel.ops import calls_made

    chain = selector(PredictedTier(Blocks(4)), place=-1, policy=AutotunePolicy(allow_autotune=False))
    with calls_made() as calls:
        chain.choose(CALL, KERNEL)
    assert [entry.source for entry in calls.entries.values()] == ["guess"]


@dataclass(frozen=True, eq=False)
class NearbyTier(PredictedTier):
    """The cfg of a call of nearly this shape: a guess of a tier that no list of names has."""

    name = "nearby"


def test_a_result_calls_an_added_guess_a_guess(tmp_path):
    """A call that was not tuned keeps it, no store has it, a frozen program calls it a guess, and files say so."""
    chain = selector(NearbyTier(Blocks(4)), place=-1)
    chain.tuner.broken = True
    with pytest.warns(TuningWarning, match="no candidate ran"):
        result = autotune([(KERNEL, CALL)], tuning=AutotuneOptions(selector=chain, progress=False))
    (entry,) = result.entries
    assert (entry.source, entry.cfg, entry.is_guess) == ("nearby", Blocks(4), True)
    store = DictStore()
    assert result.save(store) == 0
    assert AutotuningResult.loads(result.dumps()).entries[0].is_guess
    freeze(tmp_path / "calls.lock", result)
    raws = json.loads((tmp_path / "calls.lock").read_text()).values()
    assert [raw["source"] for raw in raws if "cfg" in raw] == ["guess"]


# What a decision carries.


def test_a_decision_has_the_key_and_the_device_of_its_request():
    """So that the executor need not derive them again."""
    decision = ConfigSelectorChain(ConfigCache(), tuner=TableTuner()).decide(CALL, KERNEL)
    assert (tuple(decision.key), decision.device) == (key_of(KERNEL, CALL), request().device)


def test_the_executor_takes_key_and_device_from_the_decision(monkeypatch):
    """It asks for the device of a traced call no second time; the label is that of the selector's key."""
    from ejkernel.ops.execution import kernel_run as module

    monkeypatch.setattr(module, "device_of", lambda inv: pytest.fail("asked again"))
    chain = ConfigSelectorChain(ConfigCache(), tuner=TableTuner())
    Executor(chain)(KERNEL, *CALL.args)
    assert chain.cache.size() == 1


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_choose_of_the_users_own_is_asked(where):
    """A selector's subclass, or an object, whose `choose` is another one decides by that."""

    class Mine(ConfigSelectorChain):
        pass

    def choose(*args):
        return Blocks(16)

    chain = Mine(ConfigCache(), tuner=TableTuner())
    (Mine if where == "class" else chain).choose = choose
    seen = []

    class Showing(Doubling):
        def run(self, x, *, cfg):
            seen.append(cfg)
            return x

    Executor(chain)(Showing(), *CALL.args)
    assert seen == [Blocks(16)]


def test_assigning_a_store_takes_effect_at_the_next_choice():
    """The selector asks the new one."""
    chain = ConfigSelectorChain(ConfigCache(), policy=AutotunePolicy(allow_autotune=False))
    store = DictStore()
    store.put(*key_of(KERNEL, CALL), Blocks(8))
    chain.persistent = store
    assert (chain.persistent is store, chain.choose(CALL, KERNEL)) == (True, Blocks(8))
    chain.persistent = None
    chain.cache.clear()
    assert dict(chain.decide(CALL, KERNEL).misses)["persistent"] == "none given"


def test_ten_threads_tune_once_and_the_others_read_memory():
    """The single flight is part of the walk."""
    chain = ConfigSelectorChain(ConfigCache(), tuner=TableTuner())
    start, tiers = threading.Barrier(10), []

    def ask_it():
        start.wait()
        tiers.append(chain.decide(CALL, KERNEL).tier)

    threads = [threading.Thread(target=ask_it) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tiers) == ["autotune", *["memory"] * 9]


@pytest.mark.parametrize("around", [lambda store: store, ReadOnlyStore], ids=["layered", "read-only around layered"])
def test_looking_promotes_nothing_and_choosing_does(around):
    """A layered store brings an entry to its top when it is used, not when it is looked at."""
    top, below = MemoryStore(), MemoryStore()
    below.keep(request().key, StoredEntry(Blocks(8), environment(request().device), "autotune", "forward"))
    chain = ConfigSelectorChain(ConfigCache(), persistent=around(LayeredStore(top, below)))
    assert chain.decide_untuned(CALL, KERNEL).cfg == chain.preview(CALL, KERNEL).hit.cfg == Blocks(8)
    assert top.keys() == []
    assert chain.choose(CALL, KERNEL) == Blocks(8)
    assert top.keys() == [request().key]
