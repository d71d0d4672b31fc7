"""Entries that were tuned for other code of their kernel: measured again where that is allowed, else used and said."""

from __future__ import annotations

import linecache
import sys
import types
import warnings

import jax.numpy as jnp
import pytest
from fakes import DictStore, Listener, TableTuner, call_of
from fakes_core import SCALING, imported, replaced

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
    explain,
    make_pack,
    policy_override,
)

X = jnp.arange(4.0)
EDITED = replaced(SCALING, "return x + 0.0", "return x + 1.0 - 1.0")
CHANGED_LAYOUT = replaced(SCALING, "# a comment", "# another comment")
TIMES = {1: 3.0, 2: 1.0, 4: 2.0}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """What a test imports is gone after it."""
    monkeypatch.setitem(sys.modules, "edited_kernels", types.ModuleType("edited_kernels"))


@pytest.fixture
def program(tmp_path):
    """One process of a program: a kernel of some text, and a selector over the store that all of them share."""

    def start(text, **settings):
        linecache.clearcache()
        kernel = imported(tmp_path, text).Scaling()
        store = PersistentCache("scaling", tmp_path / "s.json")
        settings = {"tuner": TableTuner(TIMES), "persistent": store} | settings
        return ConfigSelectorChain(ConfigCache(), **settings), kernel

    return start


def tier(selector, kernel):
    return selector.decide(call_of(kernel, X), kernel).tier


def test_an_entry_for_other_code_is_a_seed_and_tuned_again(program):
    """Once; the next process with that code finds its own."""
    assert tier(*program(SCALING)) == "autotune"
    selector, kernel = program(EDITED)
    decision = selector.decide(call_of(kernel, X), kernel)
    assert decision.tier == "autotune"
    assert any("was tuned for other code of the kernel" in reason for _, reason in decision.misses)
    assert tier(*program(EDITED)) == "persistent"


def test_a_seed_of_other_code_is_measured_with_the_candidates(program):
    """It may still be the fastest, though it is no candidate any more."""
    tier(*program(SCALING))
    selector, kernel = program(replaced(EDITED, "BLOCKS = (1, 2)", "BLOCKS = (1, 4)"))
    tier(selector, kernel)
    assert 2 in [cfg.size for cfg in selector.tuner.offered[0]]


def test_an_entry_for_the_same_code_in_another_layout_is_taken(program):
    """Comments and lines are not what was measured."""
    tier(*program(SCALING))
    assert tier(*program(CHANGED_LAYOUT)) == "persistent"


def test_where_nothing_may_be_measured_the_entry_is_used_with_one_warning(program):
    """The warning names the call, the reason and what to do; the event has the fingerprint."""
    tier(*program(SCALING))
    told = Listener()
    selector, kernel = program(EDITED, policy=AutotunePolicy(allow_autotune=False), on_event=told)
    with pytest.warns(UserWarning, match=r"scaling@v0.*tuned for other code.*allow_autotune=False.*version"):
        assert selector.choose(call_of(kernel, X), kernel).size == 2
    assert told.last[0] == "cache_hit"
    assert told.last[1]["code"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.choose(call_of(kernel, jnp.ones(3)), kernel)
        selector.choose(call_of(kernel, X), kernel)


def test_an_entry_that_was_used_with_a_warning_is_tuned_once_that_is_allowed(program):
    """A seed does not stand in the way of a later tuning."""
    tier(*program(SCALING))
    selector, kernel = program(EDITED)
    with policy_override(selector, allow_autotune=False), pytest.warns(UserWarning, match="other code"):
        selector.choose(call_of(kernel, X), kernel)
    assert tier(selector, kernel) == "autotune"


def test_an_entry_without_a_fingerprint_is_taken_as_it_is(program, tmp_path):
    """A cfg put by hand, an entry of an earlier version, and a store that keeps cfgs alone."""
    selector, kernel = program(SCALING)
    key = selector.decide(call_of(kernel, X), kernel).key
    by_hand = PersistentCache("scaling", tmp_path / "hand.json")
    by_hand.put(*key, {"size": 4})
    alone = DictStore()
    alone.put(*key, {"size": 4})
    for store in (by_hand, alone):
        assert tier(*program(EDITED, persistent=store)) == "persistent"


def test_a_kernel_with_a_version_is_known_by_that_alone(program):
    """Its code may change, and its entries stay."""
    versioned = [replaced(text, 'op_id = "scaling"', 'op_id = "scaling"; version = "2"') for text in (SCALING, EDITED)]
    assert tier(*program(versioned[0])) == "autotune"
    assert tier(*program(versioned[1])) == "persistent"


def test_a_cell_that_is_edited_and_run_again_is_tuned_again(program, tmp_path):
    """In one process, with one memory: the newer class replaces the older, and its entry is a seed."""
    selector, kernel = program(SCALING, persistent=None)
    executor = Executor(selector)
    executor(kernel, X)
    for text, tunings in ((CHANGED_LAYOUT, 1), (EDITED, 2), (EDITED, 2)):
        linecache.clearcache()
        executor(imported(tmp_path, text).Scaling(), X)
        assert selector.tuner.calls == tunings


def test_our_own_tuner_keeps_the_fingerprint_in_its_record(program, tmp_path):
    """So a result that is saved, or a pack that is made of the store, has it too."""
    tier(*program(SCALING, tuner=Tuner(0, 1, isolate=False)))
    pack = tmp_path / "scaling.pack.json"
    make_pack(pack, PersistentCache("scaling", tmp_path / "s.json"))
    selector, kernel = program(EDITED, persistent=None, policy=AutotunePolicy(allow_autotune=False))
    selector.settings = selector.settings.__class__(packs=(str(pack),))
    with pytest.warns(UserWarning, match="other code"):
        assert tier(selector, kernel) == "seeds"


def test_explain_says_that_the_code_is_another(program):
    """It tunes nothing, and warns of nothing."""
    tier(*program(SCALING))
    selector, kernel = program(EDITED, policy=AutotunePolicy(allow_autotune=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(explain(kernel, X, executor=Executor(selector)))
    assert "tuned for other code of the kernel" in text
