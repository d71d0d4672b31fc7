"""`ejkernel cache`: lists, filters, checks and changes of real stores.

Covers `cli/cache.py`, `cli/changing.py`, `cli/entries.py` and `cli/filters.py`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from fakes_cli import DEVICE, raw, write_store

from ejkernel.ops import PersistentCache
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store.store import StoredEntry

RECENT = (datetime.now(UTC) - timedelta(hours=2)).isoformat()


@pytest.fixture
def stores(folder):
    """Two operations, two devices, ages and gains."""
    matmul = {
        ("matmul@v1", "aaaa000000000000"): raw(gain=1.0),
        ("matmul@v2", "bbbb000000000000"): raw(gain=2.0, when=RECENT),
        ("cpu|AMD avx512", "matmul@v2", "cccc000000000000"): raw(gain=3.0),
    }
    write_store(folder / "matmul.json", matmul)
    write_store(folder / "norm.json", {("norm@v1", "dddd000000000000"): raw(gain=1.2, when=RECENT)})
    return folder


def calls(done):
    """The first letter of each call that was listed."""
    return "".join(sorted(row["call_key"][0] for row in done.data))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "abcd"),
        (("--op", "matmul"), "abc"),
        (("--op", "matmul@v2"), "bc"),
        (("--op", "n*"), "d"),
        (("--device", "h200"), "abd"),
        (("--older-than", "1d"), "ac"),
        (("--newer-than", "1d"), "bd"),
        (("--min-gain", "1.2"), "bcd"),
        (("--max-gain", "1.2"), "ad"),
        (("--op", "matmul", "--device", "cpu", "--min-gain", "2.5"), "c"),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_filters_choose_entries(shell, stores, words, expected):
    """By operation, device, age and gain, all of them together."""
    assert calls(shell("cache", "list", "--json", *words)) == expected


def test_a_list_has_a_line_for_each_entry(shell, stores):
    """With cfg, time, gain, age and source; how many there are is not part of the output."""
    done = shell("cache", "list", "--op", "norm")
    header, row = done.out.splitlines()
    assert header.split() == ["operation", "call", "device", "cfg", "time", "gain", "age", "source"]
    assert row.split()[0] == "norm@v1"
    assert "10 us" in row
    assert "1.20x" in row
    assert "2h" in row
    assert done.err == "1 entry in 2 stores\n"


def test_what_was_put_and_not_folded_is_listed(shell, folder):
    """A list is what a program would find."""
    path = folder / "matmul.json"
    write_store(path, {("matmul@v1", f"{i:016x}"): raw() for i in range(300)})
    cache = PersistentCache("", path)
    cache.put(DEVICE, "matmul@v1", "new", 5)
    assert any((folder / "matmul.json.d").glob("*.json")), "the entry is in a file of its own"
    assert {row["call_key"]: row["cfg"] for row in shell("cache", "list", "--json").data}["new"] == 5


@pytest.mark.one_leg
def test_ten_thousand_entries_are_listed(shell, folder):
    """Each of them once."""
    write_store(folder / "matmul.json", {("matmul@v1", f"{i:016x}"): raw() for i in range(10_000)})
    done = shell("cache", "list")
    assert len(set(done.out.splitlines())) == 10_001
    assert "10,000 entries" in done.err


def test_an_entry_is_shown_with_its_record(shell, folder):
    """By the beginning of its key; every candidate has a line."""
    trials = (Trial("slow", samples_s=(2.0,)), Trial("fast", samples_s=(1.0,)), Trial("bad", "wrong", "off by one"))
    record = Record(trials=trials, winner=1, heuristic=0, gain=(2.0, 1.9, 2.1), clock="wall", stop="finished")
    entry = StoredEntry("fast", {"jax": "0.10"}, "autotune", "forward", summary=record.summary(), record=record)
    PersistentCache("", folder / "op.json").keep(Key(DEVICE, "op@v1", "0123456789abcdef"), entry)

    done = shell("cache", "show", "0123")
    assert done.out.startswith(f"op@v1 (call 0123456789abcdef) on {DEVICE}\n")
    assert "runner-up" not in done.out
    assert "off by one" in done.out
    (data,) = shell("cache", "show", "0123", "--json").data
    assert [trial["cfg"] for trial in data["record"]["trials"]] == ["slow", "fast", "bad"]

    unknown = shell("cache", "show", "ffff")
    assert unknown.status == 3
    assert "begins with ffff" in unknown.err


def test_an_empty_cache_is_no_error(shell, folder):
    """The list says how to fill it, and JSON is an empty list."""
    done = shell("cache", "list")
    assert done.status == 0
    assert f"nothing is kept in {folder} yet; run `ejkernel demo`" in done.err
    assert shell("cache", "list", "--json").data == []


@pytest.mark.parametrize(
    "words", [("list",), ("verify",), ("compact",), ("prune", "--op", "x"), ("merge",)], ids=" ".join
)
def test_a_store_that_does_not_exist_is_one_sentence(shell, words):
    """With what to give instead; and nothing is made there."""
    place = ("nowhere",) if words[0] == "merge" else ("--store", "nowhere")
    done = shell("cache", *words, *place)
    assert done.status == 3
    assert done.err == ("ejkernel: there is no store at nowhere; give a folder of stores, or a store's .json file\n")


def test_damage_is_found_named_and_set_aside(shell, stores):
    """verify changes nothing and has status 1; a list has all the other entries; compact sets the damage aside."""
    path = stores / "matmul.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"block": 64', '"block": 65', 1), encoding="utf-8")

    checked = shell("cache", "verify")
    assert checked.status == 1
    assert "damaged" in checked.out
    assert "the line of" in checked.out
    assert "ejkernel cache compact" in checked.err
    assert not list(stores.glob("*.damaged-*"))
    assert calls(shell("cache", "list", "--json")) == "abd"

    assert shell("cache", "compact").status == 0
    assert list(stores.glob("matmul.json.damaged-*"))
    assert shell("cache", "verify").status == 0


def test_a_list_changes_nothing(shell, stores):
    """Not even where something is damaged."""
    path = stores / "matmul.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"block": 64', '"block": 65', 1), encoding="utf-8")
    before = sorted(str(p) for p in stores.rglob("*"))
    done = shell("cache", "list")
    assert f"{path} is damaged" in done.err
    assert shell("cache", "show", "aaaa").status == 0
    assert sorted(str(p) for p in stores.rglob("*")) == before


def test_files_of_other_kinds_are_left_alone(shell, tmp_path):
    """A recording, a result, a lock or a pack beside stores is not folded as if it were one."""
    write_store(tmp_path / "op.json", {("op@v1", "aaaa"): raw()})
    others = {
        "recorded.json": '{"kind": "ejkernel.ops recorded calls", "version": 1, "calls": []}',
        "list.json": "[1]",
        "pack.json": (tmp_path / "op.json").read_text().replace('"~format": 1', '"~pack": {"format": 1}'),
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    assert shell("cache", "compact", "--store", ".").out == "op.json: up to date\n"
    assert shell("cache", "verify", "--store", ".").out.count("\n") == 1
    assert {name: (tmp_path / name).read_text() for name in others} == others
    done = shell("cache", "list", "--store", "pack.json")
    assert done.status == 3
    assert "pack.json is no store: it is a pack" in done.err
    assert "it holds no entry" in shell("cache", "compact", "--store", "list.json").err


def test_a_line_written_by_hand_is_listed(shell, folder):
    """It has no checksum, no date and no gain, so it fits no filter by those; one that is no JSON is left out."""
    folder.mkdir()
    lines = [f'"{DEVICE}|op@v1|mine": {{"cfg": 7}},', f'"{DEVICE}|op@v1|bad": {{"cfg": NaN}},', '"~format": 1']
    (folder / "op.json").write_text("\n".join(["{", *lines, "}"]))
    done = shell("cache", "list", "--json")
    assert [(row["call_key"], row["cfg"]) for row in done.data] == [("mine", 7)]
    assert "is damaged" in done.err
    for words in (("--older-than", "0s"), ("--newer-than", "1y"), ("--min-gain", "0"), ("--max-gain", "9")):
        assert shell("cache", "list", "--json", *words).data == []


def test_a_file_cut_short_is_still_a_store(shell, stores):
    """What is whole of it is listed."""
    path = stores / "matmul.json"
    path.write_text(path.read_text(encoding="utf-8")[:-200], encoding="utf-8")
    done = shell("cache", "list", "--json", "--store", str(path))
    assert len(done.data) == 2
    assert "is damaged" in done.err


def test_a_sound_store_verifies(shell, stores):
    """With its entries counted."""
    done = shell("cache", "verify", "--json")
    assert done.status == 0
    assert [row["entries"] for row in done.data] == [3, 1]


def test_a_store_of_a_newer_format_is_read_and_never_written(shell, folder):
    """One sentence says which user can write it."""
    path = write_store(folder / "op.json", {("op@v1", "aaaa"): raw()}, form=9)
    before = path.read_bytes()
    done = shell("cache", "list")
    assert done.status == 0
    assert "aaaa" in done.out
    assert "format 9" in done.err
    assert "install the newer ejkernel-ops" in done.err
    assert shell("cache", "verify").status == 1
    for words in (("prune", "--op", "op"), ("compact",)):
        refused = shell("cache", *words)
        assert (words, refused.status) == (words, 3)
        assert "format 9" in refused.err
        assert refused.err.endswith("install the newer ejkernel-ops\n")
        assert str(path) in refused.err.splitlines()[-1]
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", [(), ("--store", "theirs"), ("--store", "theirs/op.json")], ids=str)
@pytest.mark.parametrize(
    "words", [("cache", "import", "mine.json"), ("cache", "merge", "mine.json"), ("pack", "create", "p")]
)
def test_nothing_is_brought_into_or_packed_from_a_store_of_a_newer_format(shell, folder, tmp_path, words, where):
    """It says what prune and compact say."""
    write_store(tmp_path / "mine.json", {("op@v1", "bbbb"): raw()})
    path = write_store((tmp_path / "theirs" if where else folder) / "op.json", {("op@v1", "aaaa"): raw()}, form=9)
    before = path.read_bytes()
    refused = shell(*words, *where)
    assert refused.status == 3
    last = refused.err.splitlines()[-1]
    assert "op.json is left as it is: " in last
    assert "format 9" in last
    assert last.endswith("install the newer ejkernel-ops")
    assert path.read_bytes() == before


def test_a_newer_store_of_another_operation_is_in_nobodys_way(shell, folder, tmp_path):
    """Each operation has a file of its own."""
    write_store(tmp_path / "mine.json", {("norm@v1", "bbbb"): raw()})
    write_store(folder / "op.json", {("op@v1", "aaaa"): raw()}, form=9)
    assert shell("cache", "import", "mine.json", "--json").data["added"] == 1


def test_prune_removes_what_fits_and_nothing_else(shell, stores):
    """A dry run removes nothing; without a filter nothing is removed at all."""
    assert shell("cache", "prune").status == 2
    assert shell("cache", "prune", "--max-gain", "1.1", "--dry-run").out.endswith("1 entry would go\n")
    assert calls(shell("cache", "list", "--json")) == "abcd"
    assert shell("cache", "prune", "--max-gain", "1.1").out.endswith("1 entry removed\n")
    assert [row["call_key"][0] for row in shell("cache", "prune", "--device", "cpu", "--json").data] == ["c"]
    assert calls(shell("cache", "list", "--json")) == "bd"


def test_an_export_is_a_store_that_can_be_imported(shell, stores, tmp_path):
    """Filtered; into a folder with a file for each operation; what is there already stays unless it is older."""
    done = shell("cache", "export", "out.json", "--min-gain", "1.2")
    assert "3 entries written" in done.out
    assert len(json.loads((tmp_path / "out.json").read_text())) == 4
    refused = shell("cache", "export", "out.json")
    assert refused.status == 3
    assert "out.json exists" in refused.err

    into = shell("cache", "import", "out.json", "--store", "other", "--json")
    assert into.data == {"added": 3, "replaced": 0, "conflicts": []}
    assert sorted(path.name for path in (tmp_path / "other").glob("*.json")) == ["matmul.json", "norm.json"]
    assert calls(shell("cache", "list", "--json", "--store", "other")) == "bcd"
    missing = shell("cache", "import", "nothing.json")
    assert missing.status == 3
    assert "nothing.json is no file" in missing.err


def test_a_merge_says_on_what_both_sides_differed(shell, stores, tmp_path):
    """And lets the newer or the faster one win."""
    faster = raw(seconds=1e-6, cfg={"block": 8}, when="2020-01-01T00:00:00+00:00")
    write_store(tmp_path / "theirs" / "norm.json", {("norm@v1", "dddd000000000000"): faster})
    assert shell("cache", "merge", "theirs", "--json").data["replaced"] == 0
    done = shell("cache", "merge", "theirs", "--prefer", "fastest")
    assert "both had norm@v1" in done.out
    assert "0 added, 1 replaced" in done.out
    assert shell("cache", "list", "--op", "norm", "--json").data[0]["cfg"] == {"block": 8}


def test_a_merge_into_what_cannot_be_written_is_an_error(shell, stores, tmp_path):
    """Nothing is said to be added that is not there."""
    (tmp_path / "plain").write_text("")
    done = shell("cache", "merge", str(stores), "--store", "plain/inside")
    assert done.status == 3
    assert "cannot be" in done.err
    assert done.out == ""


def test_the_path_is_a_line_for_scripts(shell, folder):
    """Of the folder, or of an operation's file."""
    assert shell("cache", "path").out == f"{folder}\n"
    assert shell("cache", "path", "--op", "matmul").out == f"{folder / 'matmul.json'}\n"


def test_show_takes_an_operation(shell, tmp_path):
    """With or without its version, or a pattern; a wrong name says what is looked for."""
    write_store(tmp_path / "ops.json", {("library.matmul@v1", "aa"): raw(), ("softmax@v2", "bb"): raw()})
    for name in ("library.matmul", "matmul", "matmul@v1", "library.mat*", "aa"):
        done = shell("cache", "show", name, "--store", str(tmp_path))
        assert (done.status, "library.matmul@v1 (call aa)" in done.out, "softmax" in done.out) == (0, True, False)
    wrong = shell("cache", "show", "conv", "--store", str(tmp_path))
    assert "no entry is of such an operation, or has a call key that begins with conv" in wrong.err
