"""Explaining a choice: which tier answers, why the earlier ones do not, and what is known about the answer.

Covers `config/preview.py` and `reporting/summary.py`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of
from fakes_execution import Asked

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    OpsError,
    PersistentCache,
    Record,
    Trial,
    explain,
    freeze,
    locked,
    make_pack,
    overlay_cache,
)
from ejkernel.ops.config import tuning_runs
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.standing import standings
from ejkernel.ops.store import packs
from ejkernel.ops.store.layered import LayeredStore, MemoryStore
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()
X = jnp.ones(8)
RECORD = Record(
    environment={"jax": "0.11.2", "jaxlib": "0.11.2"},
    clock="device",
    trials=(
        Trial(Blocks(1), samples_s=(4e-5, 4.1e-5, 4.2e-5), error=0.0),
        Trial(Blocks(2), samples_s=(1e-5, 1.1e-5, 1.4e-5), error=2e-7),
        Trial(Blocks(4), samples_s=(2.2e-5, 2.2e-5), error=0.0),
        Trial(Blocks(8), status="memory", message="out of memory\nat some place"),
    ),
    winner=1,
    heuristic=0,
    runner_up=2,
    gain=(3.7, 3.5, 3.9),
)


@pytest.fixture(autouse=True)
def fresh():
    """No test sees another's packs."""
    packs.forget_packs()


def selector(**settings):
    """A selector with an empty cache."""
    return ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), **settings)


def disk(tmp_path, name="ops"):
    """A store on disk."""
    return PersistentCache(name, tmp_path / f"{name}.json", cfg_type=Blocks)


def keep(store, x=X, size=2, **fields):
    """Puts a tuned entry for a call into a store, with its record."""
    inv = call_of(KERNEL, x)
    fields.setdefault("environment", environment(key_of(KERNEL, inv)[0]))
    fields.setdefault("call", {"args[0]": f"float32[{len(x)}]"})
    entry = StoredEntry(Blocks(size), source="autotune", objective="forward", summary=RECORD.summary(), **fields)
    store.keep(Key(*key_of(KERNEL, inv)), entry)


def why(chooser, x=X, **kwargs):
    """The explanation of a call."""
    return explain(KERNEL, x, selector=chooser, **kwargs)


# The seven tiers.


def test_an_override_is_the_answer():
    """`cfg=` of the call, and no tier before it."""
    found = why(selector(), cfg=Blocks(4))
    assert (found.tier, found.cfg, found.misses) == ("override", Blocks(4), ())


def test_an_overlay_is_the_answer():
    """The cfg of the innermost overlay, and why the override is none."""
    with overlay_cache({key_of(KERNEL, call_of(KERNEL, X)): Blocks(4)}):
        found = why(selector())
    assert (found.tier, found.cfg) == ("overlay", Blocks(4))
    assert found.misses == (("override", "not given"),)


def test_memory_is_the_answer(tmp_path):
    """With where the entry is kept, and the figures of its record."""
    store = disk(tmp_path)
    keep(store, record=RECORD)
    chooser = selector(persistent=store)
    chooser.choose(call_of(KERNEL, X), KERNEL)
    found = why(chooser)
    assert (found.tier, found.cfg, [tier for tier, _ in found.misses]) == (
        "memory",
        Blocks(2),
        ["override", "overlay"],
    )
    assert found.origin["kept in"] == store.path
    assert found.record.trials == RECORD.trials


def test_a_store_is_the_answer(tmp_path):
    """With its file, its environment, time, spread, runner-up, gain, check and failures."""
    store = disk(tmp_path)
    keep(store, record=RECORD)
    found = why(selector(persistent=store))
    assert (found.tier, found.cfg) == ("persistent", Blocks(2))
    assert dict(found.misses)["memory"] == "no entry"
    figures = found.figures
    assert (figures.seconds, figures.spread, figures.samples) == (1.1e-5, (1e-5, 1.4e-5), 3)
    assert (figures.runner_up, figures.runner_up_seconds) == (Blocks(4), standings(RECORD)[2].seconds)
    assert (figures.gain, figures.error) == ((3.7, 3.5, 3.9), 2e-7)
    assert figures.failures == ((Blocks(8), "memory", "out of memory"),)
    text = str(found)
    for line in (
        "persistent  <- size=2",
        f"kept in     {store.path}",
        "tuning      4 candidates, 1 failed, device clock, finished",
        "verdict     3.70 times as fast as the heuristic cfg (3.50 to 3.90 with 95%)",
        "time        11 us (10 us to 14 us, 3 samples)",
        "runner-up   size=4, 22 us, 2.00 times as long",
        "heuristic   3.70 times as long (3.50 to 3.90 with 95%)",
        "check       largest error 2.0e-07 of the reference's RMS",
        "failed      size=8: memory, out of memory",
    ):
        assert f"  {line}" in text.splitlines()


def test_a_tuning_is_the_answer(tmp_path):
    """It says how many candidates would be measured, and measures none."""
    chooser = selector(persistent=disk(tmp_path))
    found = why(chooser)
    assert (found.tier, found.cfg, found.answer) == ("autotune", None, "would be tuned: 3 candidates")
    assert [tier for tier, _ in found.misses] == ["override", "overlay", "memory", "persistent"]
    assert chooser.tuner.calls == 0


def test_heuristics_are_the_answer():
    """A guess, with the reason why nothing was measured."""
    found = why(selector(policy=AutotunePolicy(allow_autotune=False)))
    assert (found.tier, found.cfg) == ("heuristics", Blocks(1))
    assert dict(found.misses)["autotune"] == "off (allow_autotune=False)"
    assert "a guess, never measured" in found.answer


def test_an_error_is_the_answer():
    """Every tier has its reason, and nothing is raised."""
    found = why(selector(policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False)))
    assert (found.tier, found.cfg) == ("error", None)
    assert [tier for tier, _ in found.misses] == [
        *("override", "overlay", "memory", "persistent", "autotune", "heuristics")
    ]


# Variants of them.


def test_a_lock_is_named(tmp_path):
    """The file that answers, or that does not, with its nearest entry."""
    chooser = selector()
    path = freeze(tmp_path / "lock.json", lambda x: Executor(chooser)(KERNEL, x), X).path
    with locked(path):
        inside, missing = why(chooser), why(chooser, jnp.ones(3))
    assert (inside.tier, inside.cfg, inside.origin["kept in"]) == ("overlay", Blocks(2), path)
    assert f"locked by {path}" in inside.answer
    assert missing.tier == "error"
    assert missing.nearest[0].fields == {"args[0]": ("float32[8]", "float32[3]")}


def test_a_pack_is_named(tmp_path, monkeypatch):
    """The pack's path, and the figures that it brings."""
    store = MemoryStore()
    keep(store)
    path = make_pack(tmp_path / "pack.json", store).path
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", path)
    chooser = selector()
    found = why(chooser)
    assert (found.tier, found.cfg, found.figures.seconds) == ("packs", Blocks(2), 1.1e-5)
    assert f"from the pack {path}" in found.answer
    chooser.choose(call_of(KERNEL, X), KERNEL)
    assert why(chooser).origin["kept in"] == f"pack {path}"


def test_an_entry_of_another_environment_is_a_seed_of_the_tuning_or_the_answer(tmp_path):
    """Where tuning is off it is used, and the explanation says so."""
    store = disk(tmp_path)
    keep(store, size=16, environment={"jaxlib": "0.1.0"})
    found = why(selector(persistent=store))
    assert (found.tier, found.answer) == ("autotune", "would be tuned: 4 candidates")
    assert "another environment (jaxlib 0.1.0)" in dict(found.misses)["persistent"]
    found = why(selector(persistent=store, policy=AutotunePolicy(allow_autotune=False)))
    assert (found.tier, found.cfg) == ("seeds", Blocks(16))
    assert "tuned in another environment (jaxlib 0.1.0)" in found.answer


def test_a_record_is_there_without_a_store():
    """Where no store keeps records the selector does."""
    chooser = selector()
    Executor(chooser)(KERNEL, X)
    assert why(chooser).figures.candidates == 3


def test_a_cfg_put_by_hand_has_no_figures():
    """What was not measured has no times."""
    chooser = selector()
    chooser.cache.put(*key_of(KERNEL, call_of(KERNEL, X)), Blocks(4))
    found = why(chooser)
    assert (found.tier, found.figures, found.record) == ("memory", None, None)


def test_a_record_of_another_cfg_is_not_shown():
    """A cfg that was put over a tuned one is not the record's."""
    chooser = selector()
    Executor(chooser)(KERNEL, X)
    chooser.cache.put(*key_of(KERNEL, call_of(KERNEL, X)), Blocks(4))
    assert why(chooser).record is None


def test_a_second_tuning_that_is_forbidden_is_an_error():
    """What `choose` would raise is told."""
    chooser = selector()
    chooser.choose(call_of(KERNEL, X), KERNEL)
    chooser.cache._data.clear()
    found = why(chooser)
    assert found.tier == "error"
    assert "forbid_reautotune" in dict(found.misses)["autotune"]


def test_the_nearest_calls_of_memory_store_and_packs_are_told(tmp_path, monkeypatch):
    """Each with its place and the fields that differ, the nearest first; a call in two places is told once."""
    pack, store = MemoryStore(), disk(tmp_path)
    keep(pack, jnp.ones(64))
    keep(store, jnp.ones(32))
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", make_pack(tmp_path / "pack.json", pack).path)
    chooser = selector(persistent=store)
    chooser.choose(call_of(KERNEL, jnp.ones(32)), KERNEL)
    monkeypatch.setattr(chooser, "persist_autotune", False)
    chooser.choose(call_of(KERNEL, jnp.ones(16)), KERNEL)
    found = why(chooser)
    assert [(near.fields["args[0]"][0], near.where) for near in found.nearest] == [
        ("float32[16]", "memory"),
        ("float32[32]", store.path),
        ("float32[64]", f"pack {tmp_path / 'pack.json'}"),
    ]
    assert "nearest     doubling@v3" in str(found)


# It looks, and does no more.


def test_nothing_is_told_kept_or_warned_about(tmp_path):
    """No event, no warning, no entry in memory or on disk, no promotion between layers."""
    top, below, listener = MemoryStore(), MemoryStore(), Listener()
    keep(below)
    chooser = selector(persistent=LayeredStore(top, below), on_event=listener)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why(chooser).tier == "persistent"
        empty = Doubling(sizes=(1, 2))
        empty.candidate_cfgs = lambda inv: []
        explain(empty, X, selector=chooser)
    assert (top.keys(), chooser.cache.keys(), listener.events) == ([], [], [])


SETTINGS = {
    "override": (None, Blocks(4)),
    "overlay": (False, True),
    "memory": (False, True),
    "store": (None, "here", "elsewhere"),
    "autotune": (False, True),
    "heuristics": (False, True),
}


def test_explaining_and_choosing_agree(tmp_path):
    """In every combination of what tiers hold, the explanation names the tier and the cfg that are then chosen."""
    inv = call_of(KERNEL, X)
    for values in itertools.product(*SETTINGS.values()):
        given = dict(zip(SETTINGS, values, strict=True))
        policy = AutotunePolicy(allow_autotune=given["autotune"], allow_heuristics=given["heuristics"])
        store = MemoryStore()
        if given["store"]:
            keep(store, size=4, **({"environment": {"jaxlib": "0"}} if given["store"] == "elsewhere" else {}))
        chooser = selector(policy=policy, persistent=store)
        if given["memory"]:
            chooser.cache.put(*key_of(KERNEL, inv), Blocks(1))
        overlay = {key_of(KERNEL, inv): Blocks(2)} if given["overlay"] else {}
        with overlay_cache(overlay):
            seen = why(chooser, cfg=given["override"])
            try:
                chosen = chooser.decide(call_of(KERNEL, X, cfg=given["override"]), KERNEL)
            except RuntimeError:
                assert seen.tier == "error", given
                continue
        assert seen.tier == chosen.tier, given
        assert seen.misses == chosen.misses, given
        assert seen.cfg == (None if chosen.tier == "autotune" else chosen.cfg), given


# Asking.


def test_shapes_serve_as_well_as_arrays():
    """No array is needed, and the key is the same."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert explain(KERNEL, shape, selector=selector()).call_key == why(selector()).call_key


def test_an_executor_stands_for_its_selector():
    """`executor=` asks its chooser; without either the default executor is asked."""
    chooser = selector()
    chooser.cache.put(*key_of(KERNEL, call_of(KERNEL, X)), Blocks(4))
    assert explain(KERNEL, X, executor=Executor(chooser)).cfg == Blocks(4)
    assert explain(KERNEL, X).tier == "autotune"


def test_who_would_choose_must_be_clear():
    """Both, or a chooser that cannot be looked into, is an error that says so."""
    with pytest.raises(ValueError, match="both executor= and selector=") as caught:
        explain(KERNEL, X, selector=selector(), executor=Executor(selector()))
    assert isinstance(caught.value, OpsError)
    with pytest.raises(ValueError, match="this is a Asked"):
        explain(KERNEL, X, executor=Executor(Asked()))


def test_the_data_is_json(tmp_path):
    """`as_dict` survives JSON, whatever the cfg is made of."""
    store = disk(tmp_path)
    keep(store, record=RECORD)
    for chooser, cfg in ((selector(persistent=store), None), (selector(), object()), (selector(), Blocks(1))):
        data = why(chooser, cfg=cfg).as_dict()
        assert json.loads(json.dumps(data)) == data


# The documentation.


class Settled:
    """An engine that measures nothing: a busy machine may find other winners than the page shows."""

    def tune(self, job, **turns):
        trials = (Trial("count", samples_s=(2e-3,) * 3, error=0.0), Trial("sort", samples_s=(3e-4,) * 3, error=0.0))
        return Record(**job.about, trials=trials, winner=1, heuristic=0, runner_up=0, gain=(5.8, 4.1, 23.2))


def test_the_texts_of_the_documentation_are_what_is_printed(monkeypatch):
    """Every text block of the page is the output of the block before it, but for numbers, paths and the machine."""
    monkeypatch.setattr(tuning_runs, "engine", lambda tuner: Settled())
    page = (Path(__file__).parents[2] / "docs" / "explaining.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(python)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope = {}
    pairs = 0
    for (kind, text), (next_kind, expected) in itertools.pairwise([*found, ("", "")]):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(text, scope)
        if printed.getvalue():
            assert next_kind == ""
            assert plain(printed.getvalue()) == plain(expected)
            pairs += 1
    assert pairs == 7


def plain(text):
    """A text without what differs from machine to machine and run to run."""
    text = re.sub(r" on \w+\|.*, call [0-9a-f]{16}", " on DEVICE", text)
    text = re.sub(r"\(call [0-9a-f]{16}\)", "(call KEY)", text)
    text = re.sub(r"\S*/ranks\.json", "FILE", text)
    text = re.sub(r"ejkernel-ops \S+", "ejkernel-ops VERSION", text)
    text = re.sub(r"\d[\d.e:T+-]*( us| ms| s| ns)?", "N", text)
    return text.strip()
