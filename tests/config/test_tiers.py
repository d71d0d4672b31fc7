"""The tiers: the order in which they answer, where an answer is kept, and which entry is believed."""

from __future__ import annotations

import jax
import pytest
from fakes import Blocks, DictStore, Doubling, TableTuner, call_of
from fakes_config import NO_TUNING, Typed, stored_world, world

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.store import StoredEntry

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


# Cfgs that do not fit, and cfgs that were put by hand.


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
