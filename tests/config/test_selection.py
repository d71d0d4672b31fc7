"""Choosing: which tier answers, where the answer is kept, and which listener is told.

Covers `config/autotune_tier.py`, `config/selector_parts.py`, `config/tiers.py`, `config/tunability.py`,
`config/tuning_job.py`, `config/tuning_runs.py` and `core/single_flight.py`.
"""

from __future__ import annotations

import subprocess
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Blocks, DictStore, Doubling, Listener, TableTuner, call_of, child, key_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_recorded,
    overlay_cache,
    policy_override,
    record_invocation,
)
from ejkernel.ops.config import tunability, tuning_budget
from ejkernel.ops.config.events import ListenerWarning
from ejkernel.ops.config.tuning_budget import TuningWarning
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.store import StoredEntry


@dataclass
class World:
    """One selector with everything around it."""

    kernel: Kernel
    selector: ConfigSelectorChain
    inv: Invocation

    @property
    def key(self):
        return key_of(self.kernel, self.inv)

    @property
    def tuner(self):
        return self.selector.tuner

    @property
    def listener(self):
        return self.selector.on_event

    def choose(self, **changes):
        return self.selector.choose(replace(self.inv, **changes), self.kernel)

    def kept(self):
        """What is in memory and what is in the store."""
        store = self.selector.persistent
        return self.selector.cache._data.get(self.key), None if store is None else store.get(*self.key)


def world(kernel=None, *args, policy=None, tuner=None, persistent=None, cache=None, **more):
    kernel = kernel or Doubling()
    selector = ConfigSelectorChain(
        cache or ConfigCache(),
        policy or AutotunePolicy(),
        tuner or TableTuner(),
        DictStore() if persistent is None else persistent,
        on_event=Listener(),
        **more,
    )
    return World(kernel, selector, call_of(kernel, *args))


NO_TUNING = AutotunePolicy(allow_autotune=False)


# Construction.


def test_constructor_arguments_are_attributes():
    """Every argument of the selector can be read under its name."""
    cache, policy, tuner, store, listener = ConfigCache(), AutotunePolicy(), Tuner(), DictStore(), Listener()
    selector = ConfigSelectorChain(cache, policy, tuner, store, False, listener, False)

    assert selector.cache is cache
    assert selector.policy == policy
    assert selector.tuner is tuner
    assert selector.persistent is store
    assert selector.persist_autotune is False
    assert selector.on_event is listener
    assert selector.forbid_reautotune is False


def test_the_defaults_are_documented():
    """Only the cache must be given."""
    selector = ConfigSelectorChain(ConfigCache())

    assert isinstance(selector.tuner, Tuner)
    assert (selector.persistent, selector.on_event) == (None, None)
    assert (selector.persist_autotune, selector.forbid_reautotune) == (True, True)


# The order of the tiers.


def everything():
    """A world where every tier has an answer of its own."""
    w = world(Doubling((1, 2, 4, 8, 16, 32)), tuner=TableTuner({1: 9, 2: 1, 4: 9, 8: 9, 16: 9, 32: 9}))
    w.selector.persistent.put(*w.key, Blocks(4))
    w.selector.cache.put(*w.key, Blocks(8))
    return w, overlay_cache({w.key: Blocks(16)})


def test_an_override_comes_first():
    """A cfg given with the call wins over an overlay and everything below."""
    w, overlay = everything()
    with overlay:
        assert w.choose(override_cfg=Blocks(32)) == Blocks(32)
    assert w.listener.names == ["override"]


def test_an_overlay_comes_before_memory():
    """An overlay in force wins over memory."""
    w, overlay = everything()
    with overlay:
        assert w.choose() == Blocks(16)
    assert w.listener.names == ["overlay_hit"]


def test_memory_comes_before_the_store():
    """What this process knows wins over the disk."""
    w, _ = everything()

    assert w.choose() == Blocks(8)
    assert [(name, data["level"]) for name, data in w.listener.events] == [("cache_hit", "memory")]


def test_the_store_comes_before_tuning():
    """What is on disk is not measured again."""
    w, _ = everything()
    w.selector.cache.clear()

    assert w.choose() == Blocks(4)
    assert [(name, data["level"]) for name, data in w.listener.events] == [("cache_hit", "persistent")]
    assert w.tuner.calls == 0


def test_tuning_comes_before_heuristics():
    """Where nothing is known the candidates are measured."""
    w = world()

    assert w.choose() == Blocks(2)
    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_heuristics_come_last():
    """Where tuning is off the kernel's default answers."""
    w = world(policy=NO_TUNING)

    assert w.choose() == Blocks(1)
    assert w.listener.names == ["heuristics"]
    assert w.tuner.calls == 0


def test_nothing_left_is_a_runtime_error_with_every_reason():
    """The error says for each tier why it had no answer, for which key, and what to do."""
    w = world(policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False))
    with pytest.raises(RuntimeError) as caught:
        w.choose()
    message = str(caught.value)

    assert all(tier in message for tier in ("override", "overlay", "memory", "persistent", "autotune", "heuristics"))
    assert all(part in message for part in w.key)
    assert "allow_autotune=False" in message
    assert "allow_heuristics=False" in message
    assert "cfg=" in message
    assert w.listener.names == ["error"]


def test_every_event_holds_the_key():
    """`device`, `op_id` and `call_key` are in the data of all seven events."""
    w = world(policy=NO_TUNING)
    w.choose(override_cfg=Blocks(4))
    with overlay_cache({w.key: Blocks(4)}):
        w.choose()
    w.choose()
    w.selector.policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    with pytest.raises(RuntimeError):
        w.choose()
    w.selector.policy = AutotunePolicy()
    w.choose()
    w.choose()

    assert set(w.listener.names) == {
        *("override", "overlay_hit", "cache_hit", "autotune_start", "autotune_finish", "heuristics", "error"),
    }
    for _, data in w.listener.events:
        assert (data["device"], data["op_id"], data["call_key"]) == w.key


# Where an answer goes.


@pytest.mark.parametrize("store", ["DictStore", "PersistentCache"])
def test_an_override_is_not_kept(store, tmp_path):
    """A cfg given with the call reaches neither memory nor disk."""
    w = world(persistent=DictStore() if store == "DictStore" else PersistentCache(tmp_path / "x.json"))
    w.choose(override_cfg=Blocks(4))

    assert w.kept() == (None, None)


def test_an_overlays_answer_is_not_kept():
    """A cfg of an overlay reaches neither memory nor disk."""
    w = world()
    with overlay_cache({w.key: Blocks(4)}):
        w.choose()

    assert w.kept() == (None, None)


def test_a_stored_answer_goes_to_memory():
    """The disk is asked once for a key."""
    w = world()
    w.selector.persistent.put(*w.key, Blocks(4))
    w.choose()
    w.choose()

    assert w.kept() == (Blocks(4), Blocks(4))
    assert [data["level"] for _, data in w.listener.events] == ["persistent", "memory"]


def test_a_tuned_answer_goes_to_memory_and_disk():
    """The winner is kept in both."""
    w = world()
    w.choose()

    assert w.kept() == (Blocks(2), Blocks(2))


def test_a_tuned_answer_stays_off_the_disk_where_that_is_asked():
    """With `persist_autotune=False` the winner is in memory alone."""
    w = world(persist_autotune=False)
    w.choose()

    assert w.kept() == (Blocks(2), None)


def test_a_guess_is_not_kept():
    """A heuristic answer reaches neither memory nor disk, and its event is `heuristics` each time."""
    w = world(policy=NO_TUNING)
    w.choose()
    w.choose()

    assert w.kept() == (None, None)
    assert w.listener.names == ["heuristics", "heuristics"]


def test_a_guess_does_not_stop_a_later_tuning():
    """A heuristic answer given while tuning was off is replaced once tuning is on."""
    w = world()
    with policy_override(w.selector, allow_autotune=False):
        w.choose()

    assert w.choose() == Blocks(2)


def test_a_guess_does_not_stop_a_later_store_entry():
    """A heuristic answer is replaced once the disk knows more."""
    w = world(policy=NO_TUNING)
    w.choose()
    w.selector.persistent.put(*w.key, Blocks(4))

    assert w.choose() == Blocks(4)


def test_the_next_process_answers_from_disk(tmp_path):
    """A tuned cfg comes back equal to a new selector on the same file, without a tuning."""
    w = world(persistent=PersistentCache(tmp_path / "x.json"))
    w.choose()
    later = world(persistent=PersistentCache(tmp_path / "x.json"))

    assert later.choose() == Blocks(2)
    assert later.tuner.calls == 0


# cache_miss_fallback.


def test_fallback_to_heuristics_means_no_tuning():
    """On a miss the heuristic answers, unmeasured."""
    w = world(policy=AutotunePolicy(cache_miss_fallback="heuristics"))

    assert w.choose() == Blocks(1)
    assert w.tuner.calls == 0


def test_fallback_to_heuristics_keeps_every_other_tier():
    """Override, overlay, memory and disk answer in their order under that policy too."""
    w, overlay = everything()
    w.selector.policy = AutotunePolicy(cache_miss_fallback="heuristics")
    with overlay:
        found = [w.choose(override_cfg=Blocks(32)), w.choose()]
    found.append(w.choose())
    w.selector.cache.clear()
    found.append(w.choose())

    assert found == [Blocks(32), Blocks(16), Blocks(8), Blocks(4)]


# Other environments, lesser tunings.


def aged(w, cfg, *, objective="forward", **changes):
    now = environment(jax.local_devices()[0])
    w.selector.persistent.keep(Key(*w.key), StoredEntry(cfg, {**now, **changes}, "autotune", objective))


def stored_world(tmp_path, **more):
    return world(persistent=PersistentCache(tmp_path / "x.json", cfg_type=Blocks), **more)


@pytest.mark.parametrize("change", [{"jaxlib": "0.1.7"}, {"platform": "another runtime"}], ids=str)
def test_an_entry_from_another_environment_is_tuned_again_with_it_as_a_seed(tmp_path, change):
    """Another jaxlib minor or platform version: the candidates are measured, the old winner among them."""
    w = stored_world(tmp_path, tuner=TableTuner({1: 3, 2: 2, 4: 2, 64: 1}))
    aged(w, Blocks(64), **change)

    assert w.choose() == Blocks(64)
    assert w.tuner.offered == [[Blocks(1), Blocks(2), Blocks(4), Blocks(64)]]
    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_a_seed_must_win_its_race(tmp_path):
    """An old winner that is slower now is replaced, in memory and on disk."""
    w = stored_world(tmp_path, tuner=TableTuner({1: 3, 2: 2, 4: 9, 64: 4}))
    aged(w, Blocks(64), jaxlib="0.1.7")

    assert w.choose() == Blocks(2)
    assert w.kept() == (Blocks(2), Blocks(2))


def test_an_entry_tuned_again_is_believed_by_the_next_process(tmp_path):
    """The new entry carries the new environment."""
    w = stored_world(tmp_path)
    aged(w, Blocks(4), jaxlib="0.1.7")
    w.choose()
    later = stored_world(tmp_path)

    assert later.choose() == Blocks(2)
    assert later.tuner.calls == 0


@pytest.mark.parametrize("policy", [NO_TUNING, AutotunePolicy(cache_miss_fallback="heuristics")])
def test_an_entry_from_another_environment_is_used_where_tuning_is_not_allowed(tmp_path, policy):
    """It is better than a guess, and the event says where it comes from."""
    w = stored_world(tmp_path, policy=policy)
    aged(w, Blocks(64), jaxlib="0.1.7")

    assert w.choose() == Blocks(64)
    name, data = w.listener.last
    assert (name, data["level"]) == ("cache_hit", "persistent")
    assert "0.1.7" in str(data["environment"])


def test_an_entry_that_cannot_run_here_is_not_used(tmp_path, monkeypatch):
    """Another version of JAX may have more ways: the kernel's guess is used, and the walk says why."""
    w = stored_world(tmp_path, policy=NO_TUNING)
    refuses = lambda self, inv, cfg: "not with this JAX" if cfg == Blocks(64) else True  # noqa: E731 - short
    monkeypatch.setattr(type(w.kernel), "valid_cfg", refuses)
    aged(w, Blocks(64), jaxlib="0.1.7")

    assert w.choose() == Blocks(1)
    misses = dict(w.selector.decide(w.inv, w.kernel).misses)
    assert misses["seeds"] == "the cfg of the entry cannot be used here: not with this JAX"


def test_an_entry_of_this_environment_says_nothing_of_another(tmp_path):
    """The event of an ordinary hit does not name an environment."""
    w = stored_world(tmp_path)
    w.selector.persistent.put(*w.key, Blocks(4))
    w.choose()

    assert "environment" not in w.listener.last[1]


def test_an_old_entry_that_was_used_does_not_stop_a_later_tuning(tmp_path):
    """Once tuning is allowed, an entry from another environment is measured against the others."""
    w = stored_world(tmp_path)
    aged(w, Blocks(4), jaxlib="0.1.7")
    with policy_override(w.selector, allow_autotune=False):
        w.choose()

    assert w.choose() == Blocks(2)


def test_another_patch_version_is_the_same_environment(tmp_path):
    """Only the minor version of jaxlib counts, and not that of jax."""
    w = stored_world(tmp_path)
    minor = ".".join(environment(jax.local_devices()[0])["jaxlib"].split(".")[:2])
    aged(w, Blocks(4), jaxlib=f"{minor}.999", jax="0.0.1")

    assert w.choose() == Blocks(4)
    assert w.tuner.calls == 0


@pytest.mark.parametrize("kind", ["memory alone", "our store", "a store of the user's own"])
def test_a_forward_tuning_is_tuned_again_for_backward(tmp_path, kind):
    """An entry tuned forward only is not enough under `validate_backward`, wherever it was kept as well."""
    store = PersistentCache(tmp_path / "x.json", cfg_type=Blocks) if kind == "our store" else DictStore()
    w = world(persistent=store, persist_autotune=kind != "memory alone")
    w.choose()
    w.tuner.times = {1: 3, 2: 2, 4: 1}
    w.selector.policy = AutotunePolicy(validate_backward=True)

    assert w.choose() == Blocks(4)
    assert w.tuner.objectives == [False, True]
    assert w.kept() == (Blocks(4), None if kind == "memory alone" else Blocks(4))


def test_every_lesser_entry_is_a_seed(tmp_path):
    """An entry in memory that was tuned forward, and one on disk from another environment, are both measured."""
    w = stored_world(tmp_path, tuner=TableTuner({1: 9, 2: 9, 4: 9, 64: 1, 128: 2}))
    aged(w, Blocks(64), jaxlib="0.1.7")
    w.choose()
    aged(w, Blocks(128), jaxlib="0.1.7")
    w.selector.policy = AutotunePolicy(validate_backward=True)

    assert w.choose() == Blocks(64)
    assert {cfg.size for cfg in w.tuner.offered[-1]} == {1, 2, 4, 64, 128}


def test_a_forward_entry_on_disk_is_tuned_again_for_backward(tmp_path):
    """So is one that another process left, with it as a seed."""
    w = stored_world(
        tmp_path, policy=AutotunePolicy(validate_backward=True), tuner=TableTuner({1: 3, 2: 2, 4: 2, 64: 1})
    )
    aged(w, Blocks(64))

    assert w.choose() == Blocks(64)
    assert (w.tuner.calls, w.tuner.objectives) == (1, [True])


def test_a_backward_entry_serves_a_forward_policy(tmp_path):
    """What was tuned for more is enough for less, in memory and on disk."""
    w = stored_world(tmp_path)
    aged(w, Blocks(4), objective="forward+backward")

    assert [w.choose(), w.choose()] == [Blocks(4), Blocks(4)]
    assert w.tuner.calls == 0


def test_a_backward_tuning_is_not_repeated(tmp_path):
    """After the second tuning both policies, and the next process, are served from what is kept."""
    w = stored_world(tmp_path, policy=AutotunePolicy(validate_backward=True))
    w.choose()
    w.choose()
    w.selector.policy = AutotunePolicy()
    w.choose()
    later = stored_world(tmp_path, policy=AutotunePolicy(validate_backward=True))
    later.choose()

    assert (w.tuner.calls, later.tuner.calls) == (1, 0)


def test_a_cfg_put_by_hand_is_enough_for_backward():
    """A cfg that was put into memory by hand is taken as it is."""
    w = world(policy=AutotunePolicy(validate_backward=True))
    w.selector.cache.put(*w.key, Blocks(4))

    assert w.choose() == Blocks(4)
    assert w.tuner.calls == 0


def test_a_lesser_entry_is_used_where_tuning_is_not_allowed():
    """A cfg tuned forward beats a guess when backward is asked for and may not be measured."""
    w = world()
    w.choose()
    w.selector.policy = AutotunePolicy(allow_autotune=False, validate_backward=True)

    assert w.choose() == Blocks(2)


# Candidates.


class Listed(Doubling):
    """The heuristic is not among the candidates that the kernel lists."""

    def candidate_cfgs(self, inv):
        return [Blocks(size) for size in self.sizes[1:]]


def test_the_heuristic_always_takes_part():
    """A kernel whose candidates leave the heuristic out has it measured first."""
    w = world(Listed((1, 2, 4)))
    w.choose()

    assert w.tuner.offered == [[Blocks(1), Blocks(2), Blocks(4)]]


def test_the_heuristic_wins_ties():
    """Of equal times the heuristic's cfg is taken, wherever the kernel lists it."""

    class Last(Doubling):
        def candidate_cfgs(self, inv):
            return [Blocks(2), Blocks(4), Blocks(1)]

    class Even:
        name = "even"

        def time(self, call, leaves, calls):
            jax.block_until_ready(call(*leaves))
            return 1.0

    w = world(Last(), tuner=Tuner(clock=Even()))

    assert w.choose() == Blocks(1)


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1)])
def test_one_distinct_candidate_is_neither_measured_nor_stored(sizes):
    """There is nothing to find out, so the heuristic answers."""
    w = world(Doubling(sizes))

    assert w.choose() == Blocks(1)
    assert w.tuner.calls == 0
    assert w.kept() == (None, None)
    assert w.listener.names == ["heuristics"]


def test_one_distinct_candidate_answers_without_heuristics_too():
    """A policy without heuristics does not turn a sole candidate into an error."""
    w = world(Doubling((1,)), policy=AutotunePolicy(allow_heuristics=False))

    assert w.choose() == Blocks(1)
    assert (w.tuner.calls, w.kept()) == (0, (None, None))


def test_a_kernel_without_candidates_of_its_own_is_not_tuned():
    """By default the heuristic is the only candidate."""

    class Plain(Kernel):
        op_id = "plain"

        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return {"block": 1}

    w = world(Plain())

    assert w.choose() == {"block": 1}
    assert w.tuner.calls == 0


def test_candidates_may_be_an_iterator():
    """Anything that can be iterated once is enough."""

    class Lazy(Doubling):
        def candidate_cfgs(self, inv):
            yield from (Blocks(1), Blocks(2))

    assert world(Lazy()).choose() == Blocks(2)


def test_an_invalid_candidate_is_not_measured():
    """What `valid_cfg` gives a reason against is left out."""

    class Picky(Doubling):
        def valid_cfg(self, inv, cfg):
            return True if cfg.size != 2 else "two is too few"

    w = world(Picky())

    assert w.choose() == Blocks(4)
    assert Blocks(2) not in w.tuner.offered[0]


def test_candidates_that_raise_are_an_error_that_names_the_kernel():
    """The message has kernel, reason and a way out; nothing is kept."""

    class Faulty(Doubling):
        op_id = "faulty"

        def candidate_cfgs(self, inv):
            raise ZeroDivisionError("by design")

    w = world(Faulty())
    with pytest.raises(TypeError, match=r"faulty@v3.*by design"):
        w.choose()

    assert (w.kept(), w.tuner.calls) == ((None, None), 0)
    with policy_override(w.selector, allow_autotune=False):
        assert w.choose() == Blocks(1)


def test_no_candidates_at_all_is_one_warning():
    """An empty list means the heuristic; the warning names the kernel, once."""

    class Empty(Doubling):
        op_id = "empty"

        def candidate_cfgs(self, inv):
            return []

    w = world(Empty())
    with pytest.warns(TuningWarning, match="empty@v3") as caught:
        found = [w.choose(), w.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert len(caught) == 1
    assert w.kept() == (None, None)


# Failed tunings.


class Failing(Doubling):
    """No candidate can be compiled."""

    op_id = "failing"

    def run(self, x, *, cfg):
        raise ValueError(f"size {cfg.size} is impossible")


def test_all_candidates_failed_is_one_warning_with_each_reason():
    """The warning has every candidate's reason; the heuristic answers."""
    w = world(Failing(), tuner=Tuner())
    with pytest.warns(TuningWarning, match="failing@v3") as caught:
        assert w.choose() == Blocks(1)

    assert len(caught) == 1
    assert all(f"size {size} is impossible" in str(caught[0].message) for size in (1, 2, 4))
    assert w.kept() == (None, None)
    assert w.listener.names == ["autotune_start", "autotune_finish", "heuristics"]


def test_a_failed_tuning_is_remembered():
    """There is no second tuning and no second warning for that key."""
    w = world()
    w.tuner.broken = True
    with pytest.warns(TuningWarning):
        w.choose()
    found = [w.choose(), w.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert w.tuner.calls == 1
    assert w.listener.names[-2:] == ["heuristics", "heuristics"]


@pytest.mark.parametrize("shared", [True, False], ids=["one cache", "own caches"])
def test_a_failed_tuning_is_remembered_for_the_process(shared):
    """Another selector of the process does not try those candidates again."""
    cache = ConfigCache()
    tuner = TableTuner()
    tuner.broken = True
    first = world(tuner=tuner, cache=cache)
    second = world(tuner=tuner, cache=cache if shared else ConfigCache())
    with pytest.warns(TuningWarning) as caught:
        found = [first.choose(), second.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert (len(caught), tuner.calls) == (1, 1)


def test_a_failed_tuning_leaves_an_error_without_heuristics():
    """Where no heuristic may answer, the error has the reason of the failed tuning."""
    w = world(policy=AutotunePolicy(allow_heuristics=False))
    w.tuner.broken = True
    with pytest.warns(TuningWarning), pytest.raises(RuntimeError, match="no candidate ran"):
        w.choose()

    assert w.kept() == (None, None)


def test_a_key_that_failed_is_served_from_what_is_put_later():
    """Memory and disk come before the memory of a failure."""
    w = world()
    w.tuner.broken = True
    with pytest.warns(TuningWarning):
        w.choose()
    w.selector.persistent.put(*w.key, Blocks(4))

    assert w.choose() == Blocks(4)


def test_some_candidates_that_fail_do_not_stop_the_others():
    """The fastest of those that run wins, without a warning."""

    class Half(Doubling):
        op_id = "half"

        def run(self, x, *, cfg):
            if cfg.size != 4:
                raise ValueError("impossible")
            return x * 2.0

    w = world(Half(), tuner=Tuner())

    assert w.choose() == Blocks(4)
    assert w.kept() == (Blocks(4), Blocks(4))


def test_a_tuner_that_breaks_otherwise_is_heard():
    """An error of the tuner itself reaches the caller, and the key can be asked for again."""

    class Buggy(TableTuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            if not self.offered:
                self.offered.append(list(candidates))
                raise KeyError("a bug of the tuner")
            return super().autotune(make_fn, args, kwargs, candidates)

    w = world(tuner=Buggy())
    with pytest.raises(KeyError):
        w.choose()
    assert w.kept() == (None, None)
    assert w.choose() == Blocks(2)


# forbid_reautotune.


def forget(w):
    """Drops the key from memory and disk, without a clear."""
    w.selector.cache._data.clear()
    w.selector.persistent.data.clear()


def test_a_second_tuning_of_a_key_is_an_error():
    """It names the key and the switch."""
    w = world()
    w.choose()
    forget(w)
    with pytest.raises(RuntimeError, match="forbid_reautotune") as caught:
        w.choose()

    assert all(part in str(caught.value) for part in w.key)
    assert w.tuner.calls == 1


def test_forbid_reautotune_false_allows_it():
    """With the switch off a key is tuned as often as it is missing."""
    w = world(forbid_reautotune=False)
    w.choose()
    forget(w)
    w.choose()

    assert w.tuner.calls == 2


def test_the_switch_can_be_assigned():
    """The attribute is read at each choice."""
    w = world()
    w.choose()
    forget(w)
    w.selector.forbid_reautotune = False

    assert w.choose() == Blocks(2)


def test_clearing_the_cache_lifts_it():
    """`cache.clear()` is how a user asks for a new tuning."""
    w = world(persist_autotune=False)
    w.choose()
    w.selector.cache.clear()
    w.choose()

    assert w.tuner.calls == 2


@pytest.mark.parametrize("kept", [True, False], ids=["stored", "in memory alone"])
def test_offline_tuning_lifts_it(kept):
    """An explicit tuning of recorded calls measures what was tuned, and stored, before."""
    w = world(persist_autotune=kept)
    w.choose()
    record_invocation(*w.key, w.kernel, w.inv.args, w.inv.kwargs)
    w.tuner.times = {1: 3, 2: 2, 4: 1}
    result = autotune_recorded(w.selector)

    assert [entry.cfg for entry in result.entries] == [Blocks(4)]
    assert w.tuner.calls == 2
    assert w.choose() == Blocks(4)


def test_another_key_is_not_forbidden():
    """Only the same key counts."""
    w = world()
    w.choose()
    w.choose(args=(jnp.ones(9),))

    assert w.tuner.calls == 2


# Listeners.


def test_a_listener_that_raises_is_reported_once():
    """The choice goes on, the first error is a warning, and the listener is still called."""
    told = []

    def listener(event, **data):
        told.append(event)
        raise ValueError("a broken listener")

    w = world()
    w.selector.on_event = listener
    with pytest.warns(ListenerWarning, match="a broken listener") as caught:
        found = [w.choose(), w.choose()]

    assert found == [Blocks(2), Blocks(2)]
    assert told == ["autotune_start", "autotune_finish", "cache_hit"]
    assert len(caught) == 1


# Threads and processes.


class CountingStore(DictStore):
    """Says when so many have looked."""

    def __init__(self, awaited):
        super().__init__()
        self.left = awaited
        self.all_looked = threading.Event()
        self.lock = threading.Lock()

    def get(self, *key):
        found = super().get(*key)
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.all_looked.set()
        return found


class WaitingTuner(TableTuner):
    """Does not finish before all threads have missed."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def autotune(self, *args):
        assert self.store.all_looked.wait(60)
        return super().autotune(*args)


@pytest.mark.parametrize("broken", [False, True], ids=["tuned", "failed"])
def test_ten_threads_share_one_tuning(broken):
    """Ten threads that ask for one new key at once get ten answers from one tuning, and at most one warning."""
    store = CountingStore(10)
    w = world(persistent=store, tuner=WaitingTuner(store))
    w.tuner.broken = broken
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda _: w.choose(), range(10)))

    assert answers == [Blocks(1 if broken else 2)] * 10
    assert w.tuner.calls == 1
    assert len(caught) == broken


def test_two_keys_are_tuned_by_two_threads():
    """A thread that tunes one key does not stop a hit of another."""
    w = world()
    w.selector.cache.put(*key_of(w.kernel, call_of(w.kernel, jnp.ones(3))), Blocks(4))
    answers = []

    class Asking(TableTuner):
        def autotune(self, *args):
            with ThreadPoolExecutor(1) as pool:
                answers.append(pool.submit(lambda: w.choose(args=(jnp.ones(3),))).result(60))
            return super().autotune(*args)

    w.selector.tuner = Asking()

    assert w.choose() == Blocks(2)
    assert answers == [Blocks(4)]


NESTED = """
import jax.numpy as jnp
from fakes import Doubling, TableTuner, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain

class Composed(TableTuner):
    def autotune(self, make_fn, args, kwargs, candidates):
        found = super().autotune(make_fn, args, kwargs, candidates)
        if len(self.offered) == 1:
            selector.choose(call_of(inner, jnp.ones(5)), inner)
        return found

outer, inner = Doubling((1, 2, 4)), Doubling((1, 2))
selector = ConfigSelectorChain(ConfigCache(), tuner=Composed())
print(selector.choose(call_of(outer), outer).size, selector.tuner.calls)
"""


def test_a_tuning_inside_a_tuning_does_not_wait_for_itself():
    """A tuner whose candidates call another kernel has that one tuned on the way."""
    with child(NESTED) as process:
        try:
            out, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            pytest.fail("the inner tuning waits for the outer one")

    assert out == "2 2\n"


PROCESS = """
import sys, time
import jax, numpy as np
from fakes import Blocks, Doubling, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Tuner

name, log = sys.argv[1:3]

def say(text):
    print(text, flush=True)

def work(run):
    with open(log, "a") as file:
        file.write(name + "\\n")
    if name == "first" and not said:
        said.append(1)
        say("timing")
        sys.stdin.readline()
    # Work, so that the tuning is still going on when the other process could begin.
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return np.float32(2)

said = []

class Slow(Doubling):
    op_id = name
    def run(self, x, *, cfg):
        if cfg.size == 4 and not isinstance(x, (np.ndarray,)):
            say("last candidate traced")
        return x * jax.pure_callback(work, jax.ShapeDtypeStruct((), np.float32), np.int32(cfg.size))

kernel = Slow()
inv = call_of(kernel)
selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 3))
say("ready")
sys.stdin.readline()
selector.choose(inv, kernel)
say("chosen")
"""


def test_two_processes_tune_one_after_the_other(tmp_path):
    """On one device the runs of two processes' tunings do not mix."""
    log = tmp_path / "log"

    def expect(process, text):
        while (line := process.stdout.readline()) != text + "\n":
            assert line

    def go(process):
        process.stdin.write("go\n")
        process.stdin.flush()

    with child(PROCESS, "first", str(log)) as first, child(PROCESS, "second", str(log)) as second:
        expect(first, "ready")
        expect(second, "ready")
        go(first)
        expect(first, "timing")
        go(second)
        expect(second, "last candidate traced")
        go(first)
        expect(first, "chosen")
        expect(second, "chosen")
    runs = log.read_text().split()

    assert runs.count("first") > 3
    assert runs.count("second") > 3
    assert runs == sorted(runs)


def test_a_process_that_waited_takes_the_others_answer(tmp_path):
    """What another process stored while this one waited for its turn is not measured again."""
    path = tmp_path / "x.json"
    w = stored_world(tmp_path, tuner=TableTuner())
    other = PersistentCache(path, cfg_type=Blocks)

    class Late(Doubling):
        """The other process finishes while this one makes its candidates."""

        def candidate_cfgs(self, inv):
            other.put(*w.key, Blocks(4))
            return super().candidate_cfgs(inv)

    w.kernel = Late()

    assert w.choose() == Blocks(4)
    assert w.tuner.calls == 0
    assert w.selector.cache._data[w.key] == Blocks(4)


# What may be measured.


class Logged(Kernel):
    """Says what it was really run on, first argument first; the cfg makes no difference."""

    op_id = "logged"

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def run(self, x, *more, cfg):
        def note(values):
            self.seen.append(np.asarray(values))
            return np.float32(2)

        return x * jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), x).astype(x.dtype)

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return [Blocks(1), Blocks(2)]


class Exemplary(Logged):
    """A kernel that knows which integers are harmless."""

    op_id = "exemplary"

    def example_inputs(self, inv, rng):
        return tuple(np.full(a.shape, 7, a.dtype) for a in inv.args), dict(inv.kwargs)


def real_world(kernel_type, *args, **more):
    seen = []
    w = world(kernel_type(seen), *args, tuner=Tuner(1, 1), **more)
    return w, seen


TRACES = {
    "jit": lambda f, x: jax.jit(f)(x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "grad": lambda f, x: jax.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "jit of grad of vmap": lambda f, x: jax.jit(jax.grad(lambda y: jax.vmap(f)(jnp.stack([y, y])).sum()))(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, y: (f(carry), y), x, jnp.arange(2)),
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "while": lambda f, x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x)),
    "checkpoint": lambda f, x: jax.grad(lambda y: jax.checkpoint(f)(y).sum())(x),
    "export": lambda f, x: jax.export.export(jax.jit(f))(x),
}


@pytest.mark.parametrize("trace", TRACES)
def test_tracing_may_tune(trace):
    """Inside any trace the candidates are run for real, on random values of the right shape."""
    w, seen = real_world(Logged)
    chosen = []

    def function(x):
        chosen.append(w.selector.choose(call_of(w.kernel, x), w.kernel))
        return x * 1.0

    TRACES[trace](function, jnp.zeros(5))

    assert chosen[0] in (Blocks(1), Blocks(2))
    assert w.listener.names[:2] == ["autotune_start", "autotune_finish"]
    assert w.listener.names.count("autotune_start") == 1
    assert seen
    assert all(values.shape == (5,) and values.all() for values in seen)


def test_a_policy_prevents_tuning_in_a_trace():
    """With tuning off a trace gets the heuristic and nothing is run."""
    w, seen = real_world(Logged, policy=NO_TUNING)
    jax.eval_shape(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1], jnp.ones(5))

    assert (w.listener.names, seen) == (["heuristics"], [])


def test_a_trace_and_its_eager_call_share_their_entry():
    """What was tuned while tracing answers the eager call of the same shapes."""
    w, _ = real_world(Logged)
    jax.eval_shape(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1], jnp.ones(8))
    w.choose()

    assert w.listener.names == ["autotune_start", "autotune_finish", "cache_hit"]


def heuristic_reason(w):
    name, data = w.listener.last
    assert name == "heuristics"
    return str(data["reason"])


def test_symbolic_shapes_are_never_measured():
    """An exported function of any size gets the heuristic, with the reason."""
    w, seen = real_world(Logged)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32)
    jax.export.export(jax.jit(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1]))(shape)

    assert "symbolic" in heuristic_reason(w)
    assert seen == []


def test_a_call_of_symbolic_shape_is_answered_by_a_store():
    """What was put for it is found."""
    w, _ = real_world(Logged)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32)
    inv = call_of(w.kernel, shape)
    w.selector.persistent.put(*key_of(w.kernel, inv), Blocks(2))

    assert w.selector.choose(inv, w.kernel) == Blocks(2)


def test_a_call_whose_inputs_are_too_large_is_never_measured():
    """Sixteen terabytes are refused by their shape, before anything is made, with the reason."""
    w, seen = real_world(Logged, jax.ShapeDtypeStruct((2**42,), jnp.float32))

    assert w.choose() == Blocks(1)
    assert "memory" in heuristic_reason(w)
    assert seen == []


def test_a_call_whose_outputs_are_too_large_is_never_measured(monkeypatch):
    """Outputs count as inputs do."""

    class Wide(Logged):
        def run(self, x, *, cfg):
            return jnp.broadcast_to(super().run(x, cfg=cfg)[:, None], (x.size, 1000))

    monkeypatch.setattr(tunability, "free_memory", lambda device: 16_000)
    small, _ = real_world(Logged)
    wide, seen = real_world(Wide)
    small.choose()
    wide.choose()

    assert small.listener.names == ["autotune_start", "autotune_finish"]
    assert "memory" in heuristic_reason(wide)
    assert seen == []


def test_a_call_that_is_too_large_is_answered_by_memory(monkeypatch):
    """Only the measuring is refused."""
    monkeypatch.setattr(tunability, "free_memory", lambda device: 1)
    w, _ = real_world(Logged)
    w.selector.cache.put(*w.key, Blocks(2))

    assert w.choose() == Blocks(2)


def trace_with(w, *others):
    jax.jit(lambda x, *more: (w.selector.choose(call_of(w.kernel, x, *more), w.kernel), x)[1])(jnp.ones(8), *others)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_a_traced_call_with_integers_is_not_tuned(dtype):
    """Random indices could read out of bounds: the heuristic answers, with the reason."""
    w, seen = real_world(Logged)
    trace_with(w, jnp.ones(3, dtype))

    assert "integer" in heuristic_reason(w)
    assert seen == []


def test_a_traced_call_with_a_mask_is_tuned():
    """True and false are no indices."""
    w, _ = real_world(Logged)
    trace_with(w, jnp.ones(3, bool))

    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_a_traced_call_with_a_random_key_is_tuned():
    """A PRNG key is no integer array."""
    w, _ = real_world(Logged)
    trace_with(w, jax.random.key(0))

    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_a_traced_call_with_integers_is_tuned_on_the_kernels_examples():
    """With `example_inputs` it is tuned, on those values."""
    w, seen = real_world(Exemplary)
    trace_with(w, jnp.ones(3, jnp.int32))

    assert w.listener.names == ["autotune_start", "autotune_finish"]
    assert seen
    assert all((values == 7).all() for values in seen)


def test_an_eager_call_uses_its_own_integers():
    """Indices that the caller gave are in bounds, so they are the ones to measure with."""
    w, seen = real_world(Logged, jnp.array([3, 1, 2], jnp.int32))
    w.choose()

    assert w.listener.names == ["autotune_start", "autotune_finish"]
    assert all(values.tolist() == [3, 1, 2] for values in seen)


def test_an_eager_call_of_zeros_is_not_measured_on_zeros():
    """Zeros mislead the clock: floats are random."""
    w, seen = real_world(Logged, jnp.zeros(8))
    w.choose()

    assert seen
    assert all(values.all() for values in seen)


# Settings.


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false"])
def test_the_environment_turns_tuning_off(monkeypatch, word):
    """`EJKERNEL_OPS_AUTOTUNE=off` leaves heuristics, and the reason names the variable."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", word)
    w = world()

    assert w.choose() == Blocks(1)
    assert w.tuner.calls == 0
    assert "EJKERNEL_OPS_AUTOTUNE" in heuristic_reason(w)


def test_tuning_off_means_everywhere(monkeypatch):
    """`EJKERNEL_OPS_AUTOTUNE=off` holds for offline tuning of recorded calls as well."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    w = world()
    record_invocation(*w.key, w.kernel, w.inv.args, w.inv.kwargs)
    autotune_recorded(w.selector)

    assert w.tuner.calls == 0


def test_a_switch_that_is_none_is_an_error(monkeypatch):
    """A value that means nothing is a ValueError that names the variable."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "perhaps")
    with pytest.raises(ValueError, match=r"EJKERNEL_OPS_AUTOTUNE.*perhaps"):
        world()


def test_seconds_bound_the_tuning_of_a_process(monkeypatch):
    """Once the process has spent its seconds, heuristics serve, with the reason."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "5")
    monkeypatch.setattr(tuning_budget, "_spent", 4.0)
    w = world()
    tuned = w.choose()
    monkeypatch.setattr(tuning_budget, "_spent", 5.0)
    guessed = w.choose(args=(jnp.ones(9),))

    assert (tuned, guessed, w.choose()) == (Blocks(2), Blocks(1), Blocks(2))
    assert w.tuner.calls == 1


def test_the_reason_names_the_bound(monkeypatch):
    """A caller that gets a guess for lack of seconds is told so."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "0")
    w = world()
    w.choose()

    assert "EJKERNEL_OPS_TUNE_SECONDS" in heuristic_reason(w)


def test_a_tuning_spends_of_the_bound(monkeypatch):
    """What a tuning took counts against the seconds of the process, whatever tuner did it."""
    monkeypatch.setattr(tuning_budget, "_spent", 0.0)
    world().choose()

    assert tuning_budget.seconds_spent() > 0


def test_a_tuning_gets_what_is_left(monkeypatch):
    """Our own tuner is told to end when the process's seconds end."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "50")
    monkeypatch.setattr(tuning_budget, "_spent", 20.0)
    w = world(tuner=Tuner(1, 1))
    w.choose()

    assert w.tuner.record.budget_s == pytest.approx(30.0)


def test_offline_tuning_keeps_to_the_bound(monkeypatch):
    """Recorded calls are not tuned either once the seconds are spent."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "5")
    monkeypatch.setattr(tuning_budget, "_spent", 6.0)
    w = world()
    record_invocation(*w.key, w.kernel, w.inv.args, w.inv.kwargs)
    autotune_recorded(w.selector)

    assert w.tuner.calls == 0


# Bad input.


class Typed(Doubling):
    """Declares what its cfgs are."""

    op_id = "typed"
    cfg_type = Blocks


class WrongTuner:
    def autotune(self, make_fn, args, kwargs, candidates):
        return {"size": 2}


class WrongHeuristic(Typed):
    def heuristic_cfg(self, inv):
        return {"size": 1}


class WrongCandidate(Typed):
    def candidate_cfgs(self, inv):
        return [Blocks(1), {"size": 2}]


def wrong_override(w):
    w.choose(override_cfg={"size": 1})


def wrong_overlay(w):
    with overlay_cache({w.key: {"size": 1}}):
        w.choose()


@pytest.mark.parametrize(
    ("kernel", "tuner", "act"),
    [
        (Typed, None, wrong_override),
        (Typed, None, wrong_overlay),
        (Typed, WrongTuner(), World.choose),
        (WrongHeuristic, None, World.choose),
        (WrongCandidate, None, World.choose),
    ],
    ids=["override", "overlay", "tuner", "heuristic", "candidate"],
)
def test_a_cfg_of_another_type_is_an_error_that_names_the_kernel(kernel, tuner, act):
    """Wherever it comes from, the message has kernel, cfg and declared type; nothing is kept."""
    w = world(kernel(), tuner=tuner)
    with pytest.raises(TypeError, match=r"typed@v3.*'size'.*Blocks"):
        act(w)

    assert w.kept() == (None, None)


def test_a_wrong_tuner_can_be_replaced():
    """After a tuner gave a cfg of another type, a right one is not refused as a second tuning."""
    w = world(Typed(), tuner=WrongTuner())
    with pytest.raises(TypeError):
        w.choose()
    w.selector.tuner = TableTuner()

    assert w.choose() == Blocks(2)


def test_a_cached_cfg_of_another_type_is_an_error():
    """A wrong put is told at the choice, and stays for the user to see."""
    w = world(Typed())
    w.selector.cache.put(*w.key, {"size": 1})
    with pytest.raises(TypeError, match=r"typed@v3"):
        w.choose()

    assert w.kept() == ({"size": 1}, None)


def test_a_stored_cfg_is_rebuilt_as_the_kernel_declares(tmp_path):
    """A store without `cfg_type` gives plain JSON, and the kernel still gets its own type."""
    PersistentCache(tmp_path / "x.json").put(*world(Typed()).key, Blocks(4))
    w = world(Typed(), persistent=PersistentCache(tmp_path / "x.json"))

    assert w.choose() == Blocks(4)


def test_a_stored_cfg_that_does_not_fit_is_a_miss(tmp_path):
    """An entry of an older shape is tuned anew and replaced."""
    cache = PersistentCache(tmp_path / "x.json")
    w = world(Typed(), persistent=cache)
    cache.put(*w.key, {"width": 4})

    assert w.choose() == Blocks(2)
    assert w.kept() == (Blocks(2), {"size": 2})


def test_a_key_builder_that_returns_no_string_is_an_error():
    """The message names kernel and value, and nothing is kept."""

    class Odd(Doubling):
        op_id = "odd"
        key_builder = staticmethod(lambda inv: 7)

    w = world(Odd())
    with pytest.raises(TypeError, match=r"odd.*7"):
        w.choose()

    assert w.selector.cache.size() == 0
    assert w.selector.persistent.data == {}


def test_a_key_builders_string_is_the_call_key():
    """Events and caches have the string as it was returned."""

    class Named(Doubling):
        key_builder = staticmethod(lambda inv: "my | own: key")

    w = world(Named())
    w.choose()

    assert w.listener.last[1]["call_key"] == "my | own: key"
    assert [key[2] for key in w.selector.cache.keys()] == ["my | own: key"]


@dataclass(frozen=True)
class Opaque:
    """A cfg that JSON cannot hold."""

    size: int
    function: object = print


class OpaqueKernel(Doubling):
    op_id = "opaque"

    def heuristic_cfg(self, inv):
        return Opaque(1)

    def candidate_cfgs(self, inv):
        return [Opaque(1), Opaque(2)]


def test_a_cfg_that_is_not_json_is_served_without_the_disk(tmp_path):
    """The tuned answer is in memory, one warning says that it could not be kept, and the file is not there."""
    w = world(OpaqueKernel(), persistent=PersistentCache(tmp_path / "x.json"))
    with pytest.warns(StoreWarning, match="opaque@v3") as caught:
        found = [w.choose(), w.choose(), w.choose(args=(jnp.ones(9),))]

    assert found == [Opaque(2)] * 3
    assert len(caught) == 1
    assert not (tmp_path / "x.json").exists()


def test_an_unwritable_store_is_one_warning(tmp_path):
    """Tuning works, the answer is served from memory, and the user is told once."""
    (tmp_path / "file").write_text("in the way")
    w = world(persistent=PersistentCache("ops", tmp_path / "file" / "ops.json"))
    with pytest.warns(StoreWarning, match="EJKERNEL_PERSISTENT_CACHE_DIR") as caught:
        found = [w.choose(), w.choose(), w.choose(args=(jnp.ones(9),))]

    assert found == [Blocks(2)] * 3
    assert len(caught) == 1


def test_an_invocation_of_another_kernel_is_an_error():
    """A call and a kernel that do not belong together are refused, naming both."""
    w = world()
    with pytest.raises(TypeError, match=r"other.*doubling"):
        w.selector.choose(Invocation("other", (jnp.ones(3),), {}), w.kernel)

    assert w.selector.cache.size() == 0


# Devices.


def test_a_committed_array_decides_the_device():
    """A call on the second device is tuned there, on arrays that live there."""
    second = jax.local_devices()[1]
    seen = []

    class Where:
        name = "where"

        def time(self, call, leaves, calls):
            seen.extend(leaf.devices() for leaf in leaves)
            jax.block_until_ready(call(*leaves))
            return 1.0

    w = world(None, jax.device_put(jnp.ones(8), second), tuner=Tuner(clock=Where()))
    w.choose()

    assert seen
    assert all(devices == {second} for devices in seen)


def test_of_two_processes_that_measure_one_after_the_other_both_use_the_first_answer():
    """One may get its turn before the other has written what it found: its own answer is not written over that."""

    class Beside(TableTuner):
        """Another process's answer is written while this one measures."""

        def autotune(self, make_fn, args, kwargs, candidates):
            here.selector.persistent.put(*here.key, Blocks(4))
            return super().autotune(make_fn, args, kwargs, candidates)

    here = world(tuner=Beside())
    assert here.choose() == Blocks(4)
    assert here.kept() == (Blocks(4), Blocks(4))
    assert here.listener.last[1]["record"].stop == "settled"


BAD_PARTS = {
    "a path for a store": ({"persistent": "store.json"}, "persistent='store.json' has no method get"),
    "no tuner": ({"tuner": 5}, "tuner=5 has no method autotune"),
    "a word for a policy": ({"policy": "heuristics"}, "policy='heuristics' is no AutotunePolicy"),
}


@pytest.mark.parametrize(("parts", "message"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_a_part_that_does_not_fit_is_refused_where_it_is_given(parts, message):
    """Not at the first call, by a missing attribute."""
    with pytest.raises(ValueError, match=message):
        ConfigSelectorChain(ConfigCache(), **parts)


def test_a_policy_that_is_none_cannot_be_assigned():
    """The one before stays."""
    here = world(policy=NO_TUNING)
    with pytest.raises(ValueError, match="is no AutotunePolicy"):
        here.selector.policy = "heuristics"
    assert here.selector.policy == NO_TUNING


def test_a_put_over_a_forward_only_entry_is_taken_as_asked():
    """What was known of the older cfg is not known of the one that was put by hand: neither what it was tuned for."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner())
    inv, kernel = call_of(Doubling()), Doubling()
    tuned = selector.decide(inv, kernel)
    selector.cache.put(*tuned.key, Blocks(4))
    with policy_override(selector, validate_backward=True):
        decision = selector.decide(inv, kernel)
    assert (decision.cfg, decision.tier, decision.objective) == (Blocks(4), "memory", None)
    assert selector.tuner.calls == 1


def test_a_put_over_a_forward_only_entry_of_a_store_is_taken_as_asked(tmp_path):
    """The next process finds the cfg that was put, and tunes nothing."""
    inv, kernel, path = call_of(Doubling()), Doubling(), tmp_path / "doubling.json"
    key = (
        ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), persistent=PersistentCache("doubling", path))
        .decide(inv, kernel)
        .key
    )
    PersistentCache("doubling", path).put(*key, Blocks(4))
    both = AutotunePolicy(validate_backward=True)
    fresh = ConfigSelectorChain(ConfigCache(), both, TableTuner(), PersistentCache("doubling", path))
    decision = fresh.decide(inv, kernel)
    assert (decision.cfg, decision.tier, fresh.tuner.calls) == (Blocks(4), "persistent", 0)


def test_a_put_over_an_entry_for_other_code_is_taken_as_asked():
    """Nor for which code."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner())
    unversioned = type("Unversioned", (Doubling,), {"version": "0", "op_id": "unversioned"})()
    inv = call_of(unversioned)
    key = selector.decide(inv, unversioned).key
    selector.cache.keep_entry(key, Blocks(1), code="other")
    assert selector.decide(inv, unversioned).tier == "autotune"
    selector.cache.keep_entry(key, Blocks(1), code="other")
    selector.cache.put(*key, Blocks(4))
    assert (selector.decide(inv, unversioned).cfg, selector.tuner.calls) == (Blocks(4), 2)
