"""The tier of a remote: signed entries answer, unsigned ones are measured first, and nothing local waits for it."""

from __future__ import annotations

import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of
from fakes_remote import OTHER_SECRET, MemoryObjects, remote, remote_warnings, writing

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    Tuner,
    counters,
    default_selector,
    explain,
    make_pack,
)
from ejkernel.ops.config.selection import _Proposal
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.errors import NoConfigError, SettingError
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.request import ask
from ejkernel.ops.store.remote.remote_store import RemoteWarning
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()
CALL = call_of(KERNEL)
OFF = AutotunePolicy(allow_autotune=False)


@pytest.fixture
def key():
    """The key of the call."""
    return Key(*key_of(KERNEL, CALL))


def there(key, cfg, *, secret=None, here=True, **more):
    """A remote with one entry: of this environment, or of another one."""
    objects = MemoryObjects()
    known = environment(key.device) if here else {"jax": "0.1", "jaxlib": "0.1"}
    entry = StoredEntry(cfg, known, "autotune", "forward", summary={"seconds": 1e-5}, **more)
    writing(objects, **({} if secret is None else {"key": secret})).keep(key, entry)
    objects.log.clear()
    return objects


def selector(objects, tmp_path=None, **more):
    """A selector over a remote, with a tuner that reads a table."""
    store = None if tmp_path is None else PersistentCache("mine", tmp_path / "mine.json")
    more.setdefault("tuner", TableTuner())
    opened = more.pop("remote", None) or remote(objects)
    return ConfigSelectorChain(ConfigCache(), persistent=store, on_event=Listener(), remote=opened, **more)


# Signed entries.


def test_a_signed_entry_answers_without_tuning(key, tmp_path):
    """The event is the contract's, the counters know the tier, and memory and the user's store have it from then on."""
    chain = selector(there(key, Blocks(4)), tmp_path)
    before = counters()
    decision = chain.decide(CALL, KERNEL)
    assert (decision.cfg, decision.tier, decision.measured) == (Blocks(4), "remote", True)
    event, data = chain.on_event.last
    assert (event, data["level"], data["source"]) == ("cache_hit", "persistent", "remote")
    assert (counters() - before).remote == 1
    assert (counters() - before).autotune == 0
    assert chain.tuner.calls == 0
    assert chain.decide(CALL, KERNEL).tier == "memory"
    assert ConfigSelectorChain(ConfigCache(), persistent=chain.persistent).decide(CALL, KERNEL).tier == "persistent"


def test_the_users_own_store_keeps_its_origin(key, tmp_path):
    """When, by which version and with which figures it was tuned stays with it."""
    chain = selector(there(key, Blocks(4), when="2026-02-03", by="ejkernel-ops 9"), tmp_path)
    chain.choose(CALL, KERNEL)
    kept = chain.persistent.lookup(key)
    assert (kept.when, kept.by, kept.source, kept.summary) == (
        "2026-02-03",
        "ejkernel-ops 9",
        "autotune",
        {"seconds": 1e-5},
    )


def test_without_persisting_nothing_goes_to_the_users_store(key, tmp_path):
    """`persist_autotune=False` holds for a remote's answers, too."""
    chain = selector(there(key, Blocks(4)), tmp_path, persist_autotune=False)
    assert chain.decide(CALL, KERNEL).tier == "remote"
    assert chain.persistent.keys() == []


def test_a_signed_entry_answers_where_tuning_is_off(key):
    """An empty machine runs tuned without measuring anything."""
    assert selector(there(key, Blocks(4)), policy=OFF).decide(CALL, KERNEL).tier == "remote"


def test_a_signed_entry_of_another_environment_is_a_seed(key):
    """It is measured with the candidates; where nothing may be measured it is used, and the event says so."""
    objects = there(key, Blocks(2), here=False)
    chain = selector(objects)
    assert chain.decide(CALL, KERNEL).tier == "autotune"
    chain = selector(objects, policy=OFF)
    decision = chain.decide(CALL, KERNEL)
    assert (decision.tier, decision.cfg) == ("seeds", Blocks(2))
    assert "jaxlib 0.1" in chain.on_event.last[1]["environment"]


# Unsigned entries.


@pytest.mark.parametrize("secret", ["", OTHER_SECRET], ids=["unsigned", "signed with another key"])
def test_an_unsigned_entry_is_raced_against_the_heuristic(key, secret, tmp_path):
    """Two candidates and no more; the winner is a tuning's, with its events."""
    chain = selector(there(key, Blocks(2), secret=secret), tmp_path)
    decision = chain.decide(CALL, KERNEL)
    assert (decision.cfg, decision.tier) == (Blocks(2), "autotune")
    assert chain.tuner.offered == [[Blocks(1), Blocks(2)]]
    assert chain.on_event.names == ["autotune_start", "autotune_finish"]
    assert chain.persistent.lookup(key).source == "autotune"


def test_an_unsigned_entry_that_does_not_win_changes_nothing(key):
    """The call is tuned as if the remote were not there."""
    chain = selector(there(key, Blocks(4), secret=""), tuner=TableTuner({1: 2.0, 2: 1.0, 4: 3.0}))
    decision = chain.decide(CALL, KERNEL)
    assert (decision.cfg, decision.tier) == (Blocks(2), "autotune")
    assert dict(decision.misses)["remote"].endswith("was not faster than the heuristic cfg when measured")


def test_an_unsigned_entry_is_a_miss_where_tuning_is_off(key, monkeypatch):
    """By policy or by setting: the heuristic cfg serves, never what was not measured here."""
    objects = there(key, Blocks(4), secret="")
    for policy in (OFF, AutotunePolicy(cache_miss_fallback="heuristics")):
        decision = selector(objects, policy=policy).decide(CALL, KERNEL)
        assert (decision.cfg, decision.tier) == (Blocks(1), "heuristics")
        assert "is not signed, and autotune is off" in dict(decision.misses)["remote"]
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    assert selector(objects).decide(CALL, KERNEL).tier == "heuristics"
    bare = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    with pytest.raises(NoConfigError, match="is not signed"):
        selector(objects, policy=bare).choose(CALL, KERNEL)


@pytest.mark.parametrize("cfg", [{"size": 999}, {"other": 1}, "text", None, [1, 2], {"size": "4"}], ids=ascii)
def test_an_unsigned_entry_that_is_no_candidate_is_never_run(key, cfg):
    """Another size, another shape, another type: a miss, and the call is tuned as usual."""
    chain = selector(there(key, cfg, secret=""))
    assert chain.decide(CALL, KERNEL).tier == "autotune"
    assert chain.tuner.offered == [[Blocks(1), Blocks(2), Blocks(4)]]


def test_an_unsigned_entry_whose_race_fails_is_left_alone(key):
    """A candidate that cannot run costs a try; the call goes on without it."""

    class Breaking(TableTuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            if len(list(candidates)) == 2:
                raise RuntimeError("no candidate ran")
            return super().autotune(make_fn, args, kwargs, candidates)

    chain = selector(there(key, Blocks(4), secret=""), tuner=Breaking())
    decision = chain.decide(CALL, KERNEL)
    assert decision.tier == "autotune"
    assert "measuring it failed" in dict(decision.misses)["remote"]


class Tripling(Doubling):
    """A kernel with a candidate that is wrong: with size 4 it computes something else."""

    op_id = "tripling"

    def run(self, x, *, cfg):
        return x * (3.0 if cfg.size == 4 else 2.0)


def test_an_unsigned_entry_with_a_wrong_result_is_never_used():
    """The tuner's check finds it, whatever time the entry claims; it is kept nowhere."""
    kernel = Tripling()
    inv = call_of(kernel)
    objects = there(Key(*key_of(kernel, inv)), Blocks(4), secret="")
    chain = selector(objects, tuner=Tuner(isolate=False))
    for _ in range(2):
        assert chain.decide(inv, kernel).cfg in (Blocks(1), Blocks(2))


# Place among the tiers.


def test_a_local_answer_asks_no_remote(key, tmp_path):
    """Override, overlay, memory and the user's store come first, and cost nothing more."""
    objects = there(key, Blocks(4))
    chain = selector(objects, tmp_path)
    chain.persistent.put(*key, Blocks(2))
    assert chain.decide(CALL, KERNEL).tier == "persistent"
    assert chain.decide(CALL, KERNEL).tier == "memory"
    assert chain.decide(call_of(KERNEL, cfg=Blocks(1)), KERNEL).tier == "override"
    assert objects.log == []


def test_the_remote_comes_before_packs(key, tmp_path, monkeypatch):
    """A team's own entries before those of others."""
    others = PersistentCache("others", tmp_path / "others.json")
    others.put(*key, Blocks(2))
    make_pack(tmp_path / "pack.json", others)
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", str(tmp_path / "pack.json"))
    assert selector(there(key, Blocks(4))).decide(CALL, KERNEL).tier == "remote"
    assert selector(MemoryObjects()).decide(CALL, KERNEL).tier == "packs"


def test_explain_names_the_remote(key):
    """Its answer with where it comes from; a race that would be run; why there is none."""
    found = explain(KERNEL, *CALL.args, selector=selector(there(key, Blocks(4))))
    assert (found.tier, found.cfg) == ("remote", Blocks(4))
    assert "from the remote memory://team" in found.answer
    planned = explain(KERNEL, *CALL.args, selector=selector(there(key, Blocks(4), secret="")))
    assert (planned.tier, planned.answer) == ("remote", "would be tuned: 2 candidates")
    assert dict(explain(KERNEL, *CALL.args, selector=selector(MemoryObjects())).misses)["remote"] == (
        "no entry in memory://team"
    )


def test_a_preview_changes_nothing(key, tmp_path):
    """Neither memory nor the user's store has the answer afterwards."""
    chain = selector(there(key, Blocks(4)), tmp_path)
    explain(KERNEL, *CALL.args, selector=chain)
    assert (chain.cache.size(), chain.persistent.keys()) == (0, [])


def test_of_processes_that_agree_one_asks_for_all(key):
    """What a process knows by itself does not include the remote; the process that decides asks it."""
    objects = there(key, Blocks(4))
    chain = selector(objects)
    request = ask(CALL, KERNEL, "forward")
    proposal = _Proposal(chain, request, chain._tiers(chain.policy))
    assert proposal.known() is None
    assert objects.log == []
    assert proposal.make().tier == "remote"


# Faults.


def test_a_dead_remote_leaves_the_tiers_behind_it(key):
    """One warning; the call is tuned, and the reason stands among the misses."""
    objects = MemoryObjects()

    def dead(verb, path):
        raise PermissionError("access denied")

    objects.before = dead
    chain = selector(objects)
    with remote_warnings() as said:
        decision = chain.decide(CALL, KERNEL)
        chain.decide(call_of(KERNEL, *CALL.args, scale=2.0), KERNEL)
    assert decision.tier == "autotune"
    assert "access denied" in dict(decision.misses)["remote"]
    assert len(said) == 1


# Writing.


def test_what_is_tuned_goes_to_the_remote_in_the_background(key, tmp_path):
    """Signed, with its figures; what came from the remote does not go back."""
    objects = MemoryObjects()
    opened = writing(objects)
    chain = selector(objects, tmp_path, remote=opened)
    assert chain.decide(CALL, KERNEL).tier == "autotune"
    assert opened.flush(60.0) == 0
    found = remote(objects).lookup(key)
    assert (found.cfg, found.source, found.trusted, found.objective) == ({"size": 2}, "autotune", True, "forward")
    fresh = selector(objects, remote=writing(objects))
    assert fresh.decide(CALL, KERNEL).tier == "remote"
    assert len(objects.entries()) == 1


def test_what_only_beat_the_heuristic_is_not_passed_on(key, tmp_path):
    """An unsigned entry that won here is not signed by this machine; a whole tuning would be."""
    objects = there(key, Blocks(2), secret="")
    opened = writing(objects)
    assert selector(objects, tmp_path, remote=opened).decide(CALL, KERNEL).tier == "autotune"
    assert opened.flush(60.0) == 0
    assert len(objects.entries()) == 1


def test_a_remote_for_reading_is_never_written(key):
    """A tuning stays local."""
    objects = MemoryObjects()
    assert selector(objects).decide(CALL, KERNEL).tier == "autotune"
    assert objects.verbs("write") == []


# Settings.


def test_the_default_executor_has_the_remote_of_the_settings(monkeypatch):
    """`EJKERNEL_OPS_REMOTE`, `_WRITE` and `_KEY`; without them it has none."""
    assert default_selector().remote is None
    from ejkernel.ops.execution.default import forget_default

    pytest.importorskip("fsspec", reason="needs the extra `remote`")
    forget_default()
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE", "memory://settings")
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE_KEY", "k" * 32)
    assert (default_selector().remote.url, default_selector().remote.write) == ("memory://settings", False)
    forget_default()
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE_WRITE", "on")
    assert default_selector().remote.write is True


@pytest.mark.parametrize(("name", "value"), [("EJKERNEL_OPS_REMOTE", "team"), ("EJKERNEL_OPS_REMOTE_KEY", "short")])
def test_a_setting_that_cannot_be_used_is_one_sentence_and_work_goes_on(monkeypatch, name, value):
    """No URL, or a key that can be guessed."""
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE", "memory://settings")
    monkeypatch.setenv(name, value)
    with pytest.warns(RemoteWarning, match="EJKERNEL_OPS_REMOTE is left out, and local work goes on"):
        assert default_selector().remote is None


def test_a_url_in_place_of_a_store_is_an_error_that_says_what_to_give():
    """`remote=` is a store."""
    with pytest.raises(SettingError, match="RemoteStore"):
        ConfigSelectorChain(ConfigCache(), remote="s3://team")
