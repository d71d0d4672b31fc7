"""Choosing: how a selector is built and set, which listener is told, and what is refused.

Covers `config/selector_parts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, DictStore, Doubling, Listener, TableTuner
from fakes_config import NO_TUNING, Typed, World, heuristic_reason, world

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Invocation,
    PersistentCache,
    Tuner,
    autotune_recorded,
    overlay_cache,
    record_invocation,
)
from ejkernel.ops.config.events import ListenerWarning
from ejkernel.ops.store.persistent import StoreWarning

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


# Bad input.


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
