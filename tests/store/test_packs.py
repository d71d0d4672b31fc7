"""Packs: entries that other users tuned, found, checked and looked up after the user's own store.

Covers `store/packing.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from fakes import Blocks, DictStore, Doubling, Listener, TableTuner, call_of, child, key_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    OpsError,
    PersistentCache,
    device_fingerprint,
    make_pack,
    merge_packs,
    verify_pack,
)
from ejkernel.ops.core.description import described
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store import packs
from ejkernel.ops.store.layered import MemoryStore
from ejkernel.ops.store.packs import Pack, PackWarning, read_pack
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()
CALL = call_of(KERNEL)
KEY = Key(*key_of(KERNEL, CALL))


@pytest.fixture(autouse=True)
def fresh():
    """No test sees another's packs."""
    packs.forget_packs()
    yield
    packs.forget_packs()


def entry(size=4, **fields):
    """An entry as a tuning on this machine leaves it."""
    known = StoredEntry(Blocks(size), environment(device_fingerprint()), "autotune", "forward")
    known = replace(known, when="2026-01-01T00:00:00+00:00", summary={"seconds": 1e-5}, call=described(CALL))
    return replace(known, **fields)


def store_of(entries):
    """A store with these entries."""
    store = MemoryStore()
    for key, found in entries.items():
        store.keep(key, found)
    return store


@pytest.fixture
def pack(tmp_path):
    """A pack with an entry for the call."""
    return make_pack(tmp_path / "packs" / "team.json", store_of({KEY: entry()}), name="team").path


def selector(monkeypatch, *paths, **settings):
    """A selector that looks into packs and would tune what no tier answers."""
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", ":".join(map(str, paths)))
    return ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), **settings)


# Looking up.


def test_a_pack_answers_what_the_users_own_store_does_not(pack, monkeypatch, tmp_path):
    """The event is a hit of what is persistent, and names the packs' tier and the pack; nothing is tuned or written."""
    own = PersistentCache("ops", tmp_path / "own.json", cfg_type=Blocks)
    chooser = selector(monkeypatch, pack, persistent=own, on_event=(listener := Listener()))
    assert chooser.choose(CALL, KERNEL) == Blocks(4)
    name, data = listener.last
    assert (name, data["level"], data["source"], data["pack"]) == ("cache_hit", "persistent", "packs", pack)
    assert own.keys() == []
    assert chooser.cache.keys() == [KEY]


def test_the_users_own_store_comes_first(pack, monkeypatch, tmp_path):
    """What the user tuned is never replaced by a pack."""
    own = PersistentCache("ops", tmp_path / "own.json", cfg_type=Blocks)
    own.put(*KEY, Blocks(1))
    chooser = selector(monkeypatch, pack, persistent=own, on_event=(listener := Listener()))
    assert chooser.choose(CALL, KERNEL) == Blocks(1)
    assert "pack" not in listener.last[1]


@pytest.mark.parametrize("persistent", [None, DictStore()], ids=["none", "the user's own"])
def test_any_selector_looks_into_packs(pack, monkeypatch, persistent):
    """Without a store, or with one of the user's own, packs answer as well."""
    assert selector(monkeypatch, pack, persistent=persistent).choose(CALL, KERNEL) == Blocks(4)


def test_a_fresh_pack_answers_behind_an_entry_of_another_environment(pack, monkeypatch, tmp_path):
    """An aged entry of the user's own does not hide what a pack knows."""
    own = PersistentCache("ops", tmp_path / "own.json", cfg_type=Blocks)
    own.keep(KEY, entry(1, environment={"jaxlib": "0.1.0"}))
    assert selector(monkeypatch, pack, persistent=own).choose(CALL, KERNEL) == Blocks(4)


def test_the_first_pack_that_answers_wins(tmp_path, monkeypatch):
    """Packs are asked in the order of the setting, and a folder stands for the files in it."""
    one = make_pack(tmp_path / "one.json", store_of({KEY: entry(1)})).path
    make_pack(tmp_path / "folder" / "two.json", store_of({KEY: entry(4)}))
    assert selector(monkeypatch, one, tmp_path / "folder").choose(CALL, KERNEL) == Blocks(1)
    assert selector(monkeypatch, tmp_path / "folder", one).choose(CALL, KERNEL) == Blocks(4)


def test_a_pack_in_the_users_own_folder_is_found_after_the_named_ones(pack, monkeypatch, tmp_path):
    """It lies beside the stores, where `ejkernel pack install` puts it, and is turned off with the others."""
    assert packs.pack_folder() == tmp_path / "cache" / "packs"
    make_pack(packs.pack_folder() / "own.json", store_of({KEY: entry(1)}))
    assert selector(monkeypatch).choose(CALL, KERNEL) == Blocks(1)
    assert selector(monkeypatch, pack).choose(CALL, KERNEL) == Blocks(4)
    assert selector(monkeypatch, "off").choose(CALL, KERNEL) == Blocks(2)


def test_a_cfg_that_is_no_candidate_does_not_run(tmp_path, monkeypatch):
    """What a pack brings is checked against the kernel's candidates; else it is as if it were not there."""
    bad = make_pack(tmp_path / "bad.json", store_of({KEY: entry(7)})).path
    chooser = selector(monkeypatch, bad)
    decision = chooser.decide(CALL, KERNEL)
    assert (decision.cfg, decision.tier) == (Blocks(2), "autotune")
    assert "not among the kernel's candidates" in dict(decision.misses)["packs"]


def test_a_cfg_of_another_type_does_not_run(tmp_path, monkeypatch):
    """An entry that the kernel cannot read is a miss with its reason."""
    bad = make_pack(tmp_path / "bad.json", store_of({KEY: replace(entry(), cfg={"width": 3})})).path
    decision = selector(monkeypatch, bad).decide(CALL, KERNEL)
    assert decision.tier == "autotune"
    assert "does not fit the kernel" in dict(decision.misses)["packs"]


def test_an_entry_of_another_environment_is_a_seed(tmp_path, monkeypatch):
    """Where tuning is allowed it is measured with the rest; else it is used, and the event says from where."""
    old = make_pack(tmp_path / "old.json", store_of({KEY: entry(4, environment={"jaxlib": "0.1.0"})})).path
    tuning = selector(monkeypatch, old)
    assert tuning.decide(CALL, KERNEL).tier == "autotune"
    assert Blocks(4) in tuning.tuner.offered[0]
    quiet = selector(monkeypatch, old, policy=AutotunePolicy(allow_autotune=False), on_event=(listener := Listener()))
    assert quiet.choose(CALL, KERNEL) == Blocks(4)
    assert listener.last[1]["pack"] == old
    assert "0.1.0" in listener.last[1]["environment"]


def test_packs_can_be_turned_off(pack, monkeypatch, tmp_path):
    """`EJKERNEL_OPS_PACKS=off` leaves out every pack, and no entry point is looked for."""
    monkeypatch.setattr(packs.metadata, "entry_points", lambda **_: pytest.fail("looked for entry points"))
    assert selector(monkeypatch, "off").choose(CALL, KERNEL) == Blocks(2)


def test_a_pack_is_read_when_it_is_needed_and_once(pack, monkeypatch):
    """Not when a selector is made, not for a call that is answered before, and one time for all selectors."""
    reads = []
    read = packs.bundle.read
    monkeypatch.setattr(packs.bundle, "read", lambda *what: reads.append(what) or read(*what))
    first, second = selector(monkeypatch, pack), selector(monkeypatch, pack)
    first.choose(call_of(KERNEL, cfg=Blocks(1)), KERNEL)
    assert reads == []
    first.choose(CALL, KERNEL)
    second.choose(CALL, KERNEL)
    assert len(reads) == 1


def test_a_pack_is_read_only(pack):
    """Nothing can be put into it."""
    with pytest.raises(OSError, match="read-only"):
        Pack(pack).keep(KEY, entry())


# Damage.


def _other_line(text):
    """The text with its entry replaced by one that is whole, of another pack."""
    key = KEY._replace(call_key="another")
    other = packs.bundle.write("pack", {key: entry(1)}, {}).splitlines()[1]
    first, _, *rest = text.splitlines()
    return "\n".join([first, other, *rest])


DAMAGE = {
    "a changed entry": lambda text: text.replace('"size": 4', '"size": 2'),
    "a removed entry": lambda text: "\n".join(line for line in text.splitlines() if "doubling@v3" not in line),
    "an entry without a checksum": lambda text: text.replace('"sha256": "', '"what": "', 1),
    "another pack's entry": _other_line,
    "a changed sum": lambda text: text.replace('"entries": 1', '"entries": 2'),
    "cut off": lambda text: text[:100],
    "a newer format": lambda text: text.replace('"format": 1', '"format": 2'),
    "a lock": lambda text: text.replace('"~pack"', '"~lock"'),
    "missing": None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_pack_is_named_once_and_left_out(pack, kind, monkeypatch, tmp_path):
    """One warning with its path; every other pack, store and call is as it was."""
    good = make_pack(tmp_path / "good.json", store_of({KEY: entry(4)})).path
    file = Path(pack)
    file.unlink() if DAMAGE[kind] is None else file.write_text(DAMAGE[kind](file.read_text()))
    chooser = selector(monkeypatch, pack, good)
    with pytest.warns(PackWarning, match=r"team\.json") as caught:
        assert chooser.choose(CALL, KERNEL) == Blocks(4)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selector(monkeypatch, pack, good).choose(CALL, KERNEL) == Blocks(4)
        assert selector(monkeypatch, pack, good).choose(call_of(KERNEL, jnp.ones(3)), KERNEL) == Blocks(2)


def test_a_folder_without_packs_is_named(tmp_path, monkeypatch):
    """A setting that leads nowhere is told once."""
    with pytest.warns(PackWarning, match="holds no pack"):
        assert selector(monkeypatch, tmp_path).choose(CALL, KERNEL) == Blocks(2)


def test_an_entry_point_that_cannot_be_followed_is_named(monkeypatch):
    """A package that is not there, or brings no pack, is one warning and nothing else."""
    point = packs.metadata.EntryPoint("broken", "no_such_package_anywhere", packs.GROUP)
    monkeypatch.setattr(packs.metadata, "entry_points", lambda **_: [point])
    with pytest.warns(PackWarning, match="broken = no_such_package_anywhere"):
        assert selector(monkeypatch).choose(CALL, KERNEL) == Blocks(2)


# Making.


def test_a_pack_is_made_of_a_devices_entries_of_some_operations(tmp_path):
    """Device and operation, with or without its version, choose; the rest stays out."""
    other = KEY._replace(device="gpu|NVIDIA H200")
    store = store_of({KEY: entry(), other: entry(), KEY._replace(op_id="tripling@v1"): entry()})
    assert read_pack(make_pack(tmp_path / "a.json", store).path).keys() == sorted(store.keys())
    assert make_pack(tmp_path / "b.json", store, device=KEY.device, ops=["doubling"]).keys() == [KEY]
    assert make_pack(tmp_path / "c.json", store, ops=["doubling@v3"]).keys() == sorted([KEY, other])


def test_an_entry_keeps_its_provenance(pack):
    """Environment, source, objective, time, figures and the call come along; no user trusts it."""
    found = Pack(pack).lookup(KEY)
    assert found == replace(entry(), cfg={"size": 4}, trusted=False)


def test_a_pack_says_what_it_is(pack):
    """Its last line has its name, when and by which version it was made, and a checksum of all of it."""
    about = json.loads(Path(pack).read_text())["~pack"]
    assert about["name"] == "team"
    assert about["by"].startswith("ejkernel-ops ")
    assert {"format", "made", "entries", "sha256"} <= set(about)


def test_a_pack_is_made_of_a_stores_file(tmp_path):
    """The path of a store's JSON file does as well."""
    own = PersistentCache("ops", tmp_path / "own.json", cfg_type=Blocks)
    own.put(*KEY, Blocks(4))
    assert make_pack(tmp_path / "pack.json", own.path).lookup(KEY).cfg == {"size": 4}


def test_a_pack_is_not_written_over_its_own_store(tmp_path):
    """A path that is taken by something else is an error, and nothing is lost; an older pack is replaced."""
    own = PersistentCache("ops", tmp_path / "own.json", cfg_type=Blocks)
    own.put(*KEY, Blocks(4))
    with pytest.raises(OSError, match=r"own\.json exists and is no pack"):
        make_pack(own.path, own)
    assert PersistentCache("ops", own.path, cfg_type=Blocks).get(*KEY) == Blocks(4)
    for _ in range(2):
        make_pack(tmp_path / "pack.json", own)


def test_a_pack_of_nothing_is_an_error_that_says_what_there_is(tmp_path):
    """No file is written."""
    with pytest.raises(ValueError, match=r"device='tpu\|v5'.*it holds doubling@v3 on cpu") as caught:
        make_pack(tmp_path / "pack.json", store_of({KEY: entry()}), device="tpu|v5")
    assert not (tmp_path / "pack.json").exists()
    assert isinstance(caught.value, OpsError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: make_pack(path, store_of({KEY: entry()}), ops="doubling"), "one name"),
        (lambda path: make_pack(path, path.parent / "none.json"), "is not a file"),
        (lambda path: merge_packs(path), "needs packs"),
        (lambda path: merge_packs(path, path.parent / "none.json"), "does not exist"),
    ],
    ids=["one name", "no store", "no packs", "a pack that is missing"],
)
def test_what_no_pack_can_be_made_of_is_an_error(make, message, tmp_path):
    """The message says what to give."""
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "pack.json")


# Merging.


def test_packs_are_merged_by_key_and_the_newer_entry_wins(tmp_path):
    """Conflicts are counted and named; what only one has is there."""
    alone = KEY._replace(call_key="alone")
    make_pack(tmp_path / "old.json", store_of({KEY: entry(1), alone: entry(2)}))
    make_pack(tmp_path / "new.json", store_of({KEY: entry(4, when="2026-06-01T00:00:00+00:00")}))
    done = merge_packs(tmp_path / "all.json", tmp_path / "old.json", tmp_path / "new.json")
    merged = read_pack(tmp_path / "all.json")
    assert (done.added, done.replaced, done.conflicts) == (2, 1, (KEY,))
    assert (merged.lookup(KEY).cfg, merged.lookup(alone).cfg) == ({"size": 4}, {"size": 2})
    assert merged.lookup(KEY).call == {"args[0]": "float32[8]"}


def test_the_faster_entry_wins_where_that_is_asked(tmp_path):
    """`prefer="fastest"` goes by the winner's time."""
    fast = entry(1, summary={"seconds": 1e-6})
    make_pack(tmp_path / "fast.json", store_of({KEY: fast}))
    make_pack(tmp_path / "new.json", store_of({KEY: entry(4, when="2026-06-01T00:00:00+00:00")}))
    merge_packs(tmp_path / "all.json", tmp_path / "fast.json", tmp_path / "new.json", prefer="fastest")
    assert read_pack(tmp_path / "all.json").lookup(KEY).cfg == {"size": 1}


# Verifying.


def test_a_sound_pack_is_sound(pack):
    """Format and checksums hold, and the call's kernel would accept its cfg."""
    report = verify_pack(pack, [(KERNEL, CALL), (KERNEL, call_of(KERNEL, jnp.ones(3)))])
    assert (report.entries, report.checked, report.is_sound) == (1, 1, True)


@pytest.mark.parametrize("kind", DAMAGE)
def test_verifying_says_what_is_damaged(pack, kind):
    """No warning and no exception: the report has the reason."""
    file = Path(pack)
    file.unlink() if DAMAGE[kind] is None else file.write_text(DAMAGE[kind](file.read_text()))
    report = verify_pack(pack)
    assert not report.is_sound
    assert "team.json" in report.damage


def test_verifying_says_which_entries_would_not_run(tmp_path):
    """A cfg that is no candidate, or of another type, is named with its reason."""
    store = store_of({KEY: entry(7)})
    report = verify_pack(make_pack(tmp_path / "a.json", store).path, [(KERNEL, CALL)])
    assert "not among the kernel's candidates" in report.refused[0]
    store = store_of({KEY: replace(entry(), cfg={"width": 3})})
    report = verify_pack(make_pack(tmp_path / "b.json", store).path, [(KERNEL, CALL)])
    assert "width" in report.refused[0]
    assert not report.is_sound


# Installed.


def wheel(folder: Path, pack: str) -> Path:
    """A small wheel with a pack in it, as any build tool makes one."""
    target = folder / "team_packs-1.0-py3-none-any.whl"
    about = "team_packs-1.0.dist-info"
    content = {
        "team_packs/__init__.py": "raise ImportError('a pack is data: nobody runs this')\n",
        "team_packs/here.json": Path(pack).read_text(),
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: team-packs\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[ejkernel.packs]\nteam = team_packs\n",
    }
    content[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in content) + f"{about}/RECORD,,\n"
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return target


USE = """
import sys
sys.path.insert(0, sys.argv[1])
import ejkernel.ops
from fakes import Doubling, Listener, TableTuner, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain
listener = Listener()
chooser = ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), on_event=listener)
cfg = chooser.choose(call_of(Doubling()), Doubling())
print(cfg.size, listener.names, listener.last[1].get("pack"), "team_packs" in sys.modules)
"""


def test_a_pack_in_an_installed_wheel_is_found_and_used(pack, tmp_path):
    """A package that was installed answers calls by its entry point alone; its code is not run."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    quiet = ["--disable-pip-version-check", "--root-user-action=ignore"]
    subprocess.run([*install, *quiet, str(wheel(tmp_path, pack))], check=True, timeout=300)
    with child(USE, str(site)) as process:
        out, _ = process.communicate(timeout=300)
    assert out.strip() == f"4 ['cache_hit'] {site / 'team_packs' / 'here.json'} False"


def test_a_pattern_names_operations(tmp_path):
    """`*` stands for anything, with or without the version; one that fits nothing says what there is."""
    store = PersistentCache("ops", tmp_path / "ops.json")
    for op in ("library.matmul@v1", "library.softmax@v2", "mine@v1"):
        store.put("cpu|x", op, "k", {"block": 1})
    for pattern, ops in (
        ("library.*", {"library.matmul@v1", "library.softmax@v2"}),
        ("*@v1", {"library.matmul@v1", "mine@v1"}),
    ):
        made = make_pack(tmp_path / "pack.json", store, ops=[pattern])
        assert {key.op_id for key in made.entries} == ops
    with pytest.raises(ValueError, match=r"fits .*'conv\*'.*it holds library\.matmul@v1 on cpu\|x"):
        make_pack(tmp_path / "none.json", store, ops=["conv*"])
