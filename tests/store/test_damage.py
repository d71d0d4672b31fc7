"""Damaged, merged, hostile and hand-written files: no exception, no wrong value, every other entry readable.

Covers `store/snapshot.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fakes_store import DEV, OP, entries, entry_files, keep, key, never_small, store, told, value, write_large
from thinning import AT_LENGTH

from ejkernel.ops.store import entry_log
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.snapshot import line, spell
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.one_leg

COUNT = 4


def filled(folder):
    cache = store(folder)
    for number in range(COUNT):
        keep(cache, f"call{number}", {"n": number})
    cache.fold()
    return folder / "ops.json"


def lines_of(data):
    """Where each entry's line starts and ends, without its line break."""
    found, start = [], 0
    for row in data.split(b"\n"):
        if row.startswith(b'"gpu|'):
            found.append((start, start + len(row)))
        start += len(row) + 1
    return found


def asides(path):
    return sorted(path.parent.glob("ops.json.damaged-*"))


def read_all(folder):
    """Every value that a fresh cache finds, and what it warned about."""
    with told() as said:
        cache = store(folder)
        found = [value(cache, f"call{number}") for number in range(COUNT)]
    return found, said


def check_one(path, data, untouched):
    """Reads a damaged snapshot; says whether it was told so."""
    for old in asides(path):
        old.unlink()
    path.write_bytes(data)
    found, said = read_all(path.parent)
    for number, cfg in enumerate(found):
        assert cfg == {"n": number} or (cfg is None and number not in untouched), (number, cfg)
    kept = sum(cfg is not None for cfg in found)
    assert len(said) <= 1
    if kept < COUNT and data:
        assert str(path) in said[0]
        assert f"{kept} entries of it were kept" in said[0]
        assert [aside.read_bytes() for aside in asides(path)] == [data]
        assert str(asides(path)[0]) in said[0]
    return bool(said)


def cuts(path, step):
    whole = path.read_bytes()
    rows = lines_of(whole)
    for cut in range(0, len(whole), step):
        # The comma at its end is no part of an entry.
        check_one(path, whole[:cut], {i for i, (_, end) in enumerate(rows) if end - 1 <= cut})
    return len(range(0, len(whole), step))


def flips(path, step):
    whole = path.read_bytes()
    rows = lines_of(whole)
    told = 0
    for bit in range(0, len(whole) * 8, step):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << (bit % 8)
        hit = {i for i, (start, end) in enumerate(rows) if start <= bit // 8 < end}
        told += check_one(path, bytes(data), set(range(COUNT)) - hit)
    assert told > 0
    return len(range(0, len(whole) * 8, step))


def test_a_snapshot_cut_anywhere_keeps_its_whole_lines(tmp_path):
    """Whatever is left of a file, every line that is whole answers, and the file is set aside and named."""
    assert cuts(filled(tmp_path), 5) > 100


def test_a_flipped_bit_costs_one_entry_at_most(tmp_path):
    """One wrong bit anywhere: the entries of all other lines are answered, and no value is wrong."""
    assert flips(filled(tmp_path), 13) > 300


@AT_LENGTH
def test_a_snapshot_cut_at_every_byte(tmp_path):
    """The same at every byte."""
    print(f"\nsnapshot cut at every byte: {cuts(filled(tmp_path), 1)} files, wrong values 0, other entries lost 0")


@AT_LENGTH
def test_a_snapshot_with_every_bit_flipped(tmp_path):
    """The same for every bit."""
    print(f"\nsnapshot with every bit flipped: {flips(filled(tmp_path), 1)} files, wrong values 0, others lost 0")


def with_entry_files(folder):
    cache = store(folder)
    for number in range(COUNT):
        keep(cache, f"call{number}", {"n": number})
    return entry_files(cache.path)


def check_entry(folder, path, data):
    """Reads a store one of whose entry files is damaged."""
    whole = path.read_bytes()
    path.write_bytes(data)
    found, said = read_all(folder)
    missing = [number for number, cfg in enumerate(found) if cfg is None]
    assert [cfg for cfg in found if cfg is not None] == [{"n": n} for n in range(COUNT) if n not in missing]
    assert len(missing) <= 1
    assert len(said) == len(missing)
    aside = path.with_name(path.name + ".damaged")
    if missing:
        assert str(path) in said[0]
        assert "every other entry is kept" in said[0]
        assert aside.read_bytes() == data
        aside.unlink()
    path.write_bytes(whole)
    return len(missing)


def every_entry_cut(folder, step):
    path = with_entry_files(folder)[1]
    whole = path.read_bytes()
    places = range(0, len(whole), step)
    # A cut that takes the comma only is none.
    assert sum(check_entry(folder, path, whole[:cut]) for cut in places) >= len(places) - 1
    return len(places)


def every_entry_bit(folder, step):
    path = with_entry_files(folder)[1]
    whole = path.read_bytes()
    places = range(0, len(whole) * 8, step)
    for bit in places:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << (bit % 8)
        check_entry(folder, path, bytes(data))
    return len(places)


def test_an_entry_file_cut_anywhere_is_set_aside(tmp_path, monkeypatch):
    """A cut entry is a miss with one warning; every other entry answers and the file stays, under another name."""
    never_small(monkeypatch)
    assert every_entry_cut(tmp_path, 3) > 50


def test_an_entry_file_with_a_flipped_bit_is_never_a_wrong_value(tmp_path, monkeypatch):
    """One wrong bit in an entry file gives the right value or none."""
    never_small(monkeypatch)
    assert every_entry_bit(tmp_path, 7) > 200


@AT_LENGTH
def test_an_entry_file_cut_at_every_byte_and_with_every_bit_flipped(tmp_path, monkeypatch):
    """The same at every place."""
    never_small(monkeypatch)
    for name in ("cuts", "bits"):
        (tmp_path / name).mkdir()
    cut, bits = every_entry_cut(tmp_path / "cuts", 1), every_entry_bit(tmp_path / "bits", 1)
    print(f"\nentry file: {cut} cuts, {bits} flipped bits, wrong values 0, other entries lost 0")


@pytest.mark.parametrize("cut", [0, 40, 400, 600])
def test_a_damaged_store_heals_at_the_next_put(tmp_path, cut):
    """A put writes a whole file with all that was kept; the next process is told nothing."""
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    before, _ = read_all(tmp_path)
    with told():
        keep(store(tmp_path), "new", 1)

    found, said = read_all(tmp_path)
    assert (found, said) == (before, [])
    assert len(entries(path)) == 1 + sum(cfg is not None for cfg in before)


def test_a_fold_heals_a_damaged_file_without_any_put(tmp_path):
    """What was kept is written whole, and the damaged file stays beside it."""
    path = filled(tmp_path)
    damaged = path.read_bytes()[:-3]
    path.write_bytes(damaged)
    with pytest.warns(StoreWarning, match="4 entries of it were kept"):
        assert store(tmp_path).fold()

    assert len(entries(path)) == COUNT
    assert [aside.read_bytes() for aside in asides(path)] == [damaged]


def test_an_older_entry_answers_where_the_newer_is_damaged(tmp_path, monkeypatch):
    """A damaged entry file uncovers what was put before it."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", "older")
    cache.fold()
    keep(cache, "one", "newer")
    (path,) = entry_files(cache.path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(StoreWarning, match="is damaged"):
        assert value(store(tmp_path), "one") == "older"


def test_a_damaged_entry_file_does_not_stop_a_fold(tmp_path, monkeypatch):
    """Everything else is folded; the damaged file stays under its new name."""
    never_small(monkeypatch)
    damaged = with_entry_files(tmp_path)[2]
    damaged.write_bytes(b"\x00" * 100)
    cache = store(tmp_path)
    with pytest.warns(StoreWarning, match="is damaged") as caught:
        assert cache.fold()

    assert len(caught) == 1
    assert len(entries(cache.path)) == COUNT - 1
    assert damaged.with_name(damaged.name + ".damaged").exists()


def test_a_damaged_line_of_a_large_file_is_found_when_it_is_asked_for(tmp_path):
    """Opening reads no entry; the one that is damaged is a miss, and then the whole file is checked and set aside."""
    path = tmp_path / "ops.json"
    write_large(path)
    damaged = path.read_bytes().replace(b'{"n": 123}', b'{"n": 999}')
    path.write_bytes(damaged)
    cache = store(tmp_path)
    assert cache.get(DEV, "filler@v1", f"{122:016x}") == {"n": 122}
    with told() as said:
        assert cache.get(DEV, "filler@v1", f"{123:016x}") is None
        assert cache.get(DEV, "filler@v1", f"{123:016x}") is None
    assert cache.get(DEV, "filler@v1", f"{124:016x}") == {"n": 124}

    assert len(said) == 1
    assert "399 entries of it were kept" in said[0]
    assert [aside.read_bytes() for aside in asides(path)] == [damaged]
    cache.put(DEV, "filler@v1", f"{123:016x}", "again")
    cache.fold()
    assert len(entries(path)) == 400


def test_a_damaged_file_in_a_folder_that_cannot_be_written_stays(tmp_path, monkeypatch):
    """Without a copy beside it a damaged file is never replaced; its whole lines answer all the same."""
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-60])
    before = path.read_bytes()
    real = entry_log.files.write

    def refusing(target, data, *, durable):
        if ".damaged-" in target:
            raise PermissionError(13, "Permission denied", target)
        real(target, data, durable=durable)

    monkeypatch.setattr(entry_log.files, "write", refusing)
    cache = store(tmp_path)
    with pytest.warns(StoreWarning) as caught:
        keep(cache, "new", 1)

    assert "stays where it is" in str(caught[0].message)
    assert path.read_bytes() == before
    assert value(store_quietly(tmp_path), "new") == value(cache, "new") == 1


def store_quietly(folder):
    cache = store(folder)
    with told():
        cache.keys()
    return cache


# Merges.


def two_branches(tmp_path):
    """One store as two people went on with it."""
    base = tmp_path / "base"
    keep(store(base), "both", "base")
    for who in ("ours", "theirs"):
        shutil.copytree(base, tmp_path / who)
        cache = store(tmp_path / who)
        keep(cache, who, who)
        keep(cache, "both", who)
    return [(tmp_path / who / "ops.json").read_text(encoding="utf-8") for who in ("ours", "theirs")]


def test_conflict_markers_cost_no_entry(tmp_path):
    """A file that git left with a conflict gives both sides' entries, the newest where both have the key."""
    ours, theirs = (text.split("\n") for text in two_branches(tmp_path))
    conflict = ["<<<<<<< HEAD", *ours[1:-3], "=======", *theirs[1:-3], ">>>>>>> theirs"]
    path = tmp_path / "merged" / "ops.json"
    path.parent.mkdir()
    path.write_text("\n".join(["{", *conflict, *ours[-3:]]), encoding="utf-8")
    cache = store(path.parent)
    with pytest.warns(StoreWarning, match="3 entries of it were kept"):
        found = [value(cache, name) for name in ("ours", "theirs", "both")]

    # Both had seen the base; then the clock decides.
    assert found == ["ours", "theirs", "theirs"]


def test_lines_that_a_merge_doubled_are_one_entry(tmp_path):
    """Two lines of one key, as a merge without a conflict leaves them: the newest wins, without a warning."""
    ours, theirs = (text.split("\n") for text in two_branches(tmp_path))
    for order in (ours[1:-3] + theirs[1:-3], theirs[1:-3] + ours[1:-3]):
        path = tmp_path / "merged" / "ops.json"
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        path.write_text("\n".join(["{", *order, *ours[-3:]]), encoding="utf-8")
        cache = store(path.parent)

        assert [value(cache, name) for name in ("ours", "theirs", "both")] == ["ours", "theirs", "theirs"]
        assert len(cache) == 3


def test_a_merge_of_different_lines_is_a_plain_file(tmp_path):
    """Entries are whole lines that end in a comma, so two branches merge line by line and nothing is damaged."""
    ours, theirs = (text.split("\n") for text in two_branches(tmp_path))
    union = sorted({*ours[1:-3], *theirs[1:-3]})
    assert all(row.endswith("},") for row in union)
    assert ours[-3:] == theirs[-3:]


def test_a_damaged_double_does_not_hide_the_whole_line(tmp_path):
    """A line whose key was damaged into another's does not replace that one."""
    path = filled(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('|call3": ', '|call2": '), encoding="utf-8")
    found, said = read_all(tmp_path)

    assert found[:3] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert found[3] is None
    assert len(said) <= 1


# Hostile files.


def hostile(tmp_path, raw):
    """A file with one whole entry and, after it, one as a person wrote it."""
    path = tmp_path / "ops.json"
    good = spell(key("good"))
    rows = ["{", line(good, {"cfg": "good"}), f'"{DEV}|{OP}|bad": {raw},', '"~format": 1', "}", ""]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    "raw",
    [
        '{"cfg": NaN}',
        '{"cfg": Infinity}',
        '{"cfg": [-Infinity]}',
        '{"cfg": 1, "cfg": 2}',
        '{"cfg": {"a": 1, "a": 2}}',
        f'{{"cfg": {DEEP}}}',
        f'{{"cfg": {"[" * 90 + "]" * 90}}}',
        '{"cfg": ' + "[" * 50000 + "}",
        '{"no cfg": 1}',
        "[1, 2]",
        "7",
        '{"cfg": "' + "x" * (1 << 20) + '"}',
    ],
    ids=lambda raw: raw[:24],
)
def test_a_hostile_entry_is_passed_over(tmp_path, raw):
    """NaN, doubled keys, deep nesting, too much of it: a miss, a warning, and the entry beside it is answered."""
    path = hostile(tmp_path, raw)
    data = path.read_bytes()
    cache = store(tmp_path)
    with told() as said:
        assert value(cache, "bad") is None
        assert value(cache, "good") == "good"

    assert len(said) == 1
    assert str(path) in said[0]
    assert [aside.read_bytes() for aside in asides(path)] == [data]
    with told():
        keep(store(tmp_path), "new", 1)
    assert value(store(tmp_path), "good") == "good"


@pytest.mark.parametrize("raw", ['{"cfg": NaN}', '{"cfg": 1, "cfg": 2}', f'{{"cfg": {DEEP}}}', '{"cfg": "x" * 9}'])
def test_a_hostile_entry_file_is_set_aside(tmp_path, monkeypatch, raw):
    """The same in a file of its own."""
    never_small(monkeypatch)
    path = with_entry_files(tmp_path)[0]
    name = path.read_text(encoding="utf-8").partition('": ')[0]
    path.write_text(f'{name}": {raw},', encoding="utf-8")
    found, said = read_all(tmp_path)

    assert sum(cfg is None for cfg in found) == 1
    assert len(said) == 1


def test_an_oversized_entry_file_is_not_read(tmp_path, monkeypatch):
    """A file beyond the bound is set aside by its size alone."""
    never_small(monkeypatch)
    path = with_entry_files(tmp_path)[0]
    path.write_bytes(path.read_bytes() + b" " * (1 << 20))
    found, said = read_all(tmp_path)

    assert sum(cfg is None for cfg in found) == 1
    assert len(said) == 1


@pytest.mark.parametrize("cfg", ["x" * (1 << 20), ["形" * 400_000]], ids=["long", "wide"])
def test_a_cfg_that_could_not_be_read_back_is_refused(tmp_path, cfg):
    """What is beyond the bounds of an entry is a TypeError at the put; memory and disk stay as they were."""
    cache = store(tmp_path)
    keep(cache, "one", "old")
    before = Path(cache.path).read_bytes()
    with pytest.raises(TypeError):
        keep(cache, "one", cfg)

    assert value(cache, "one") == "old"
    assert Path(cache.path).read_bytes() == before
    keep(cache, "two", 2)
    assert value(store(tmp_path), "two") == 2


def test_a_number_that_python_does_not_print_changes_nothing(tmp_path):
    """A put of a number with thousands of digits is an error, and every later put works."""
    cache = store(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        keep(cache, "one", {"n": 10**5000})
    keep(cache, "two", 2)

    assert (value(cache, "one"), value(store(tmp_path), "two")) == (None, 2)


def test_an_environment_that_is_not_json_is_refused(tmp_path):
    """Nothing of an entry that cannot be written stays in memory."""
    cache = store(tmp_path)
    with pytest.raises(TypeError):
        cache.keep(key("one"), StoredEntry(1, environment={"jax": object()}))

    assert value(cache, "one") is None
    keep(cache, "two", 2)
    assert cache.status == "read-write"


def test_the_largest_cfg_that_is_taken_comes_back(tmp_path):
    """An entry just within its bounds is read by the next process."""
    cfg = "x" * ((1 << 20) - 4000)
    keep(store(tmp_path), "one", cfg)

    assert value(store(tmp_path), "one") == cfg


def test_a_deep_cfg_that_is_taken_comes_back(tmp_path):
    """The deepest cfg that a put accepts is not too deep for a get."""
    cache = store(tmp_path)
    cfg, depth = 0, 0
    while True:
        try:
            keep(cache, f"depth{depth}", cfg)
        except TypeError:
            break
        cfg, depth = [cfg], depth + 1

    assert depth > 10
    fresh = store(tmp_path)
    assert all(value(fresh, f"depth{i}") is not None for i in range(depth))


@pytest.mark.parametrize("number", ["2", "10", "999999999999", "9" * 5000, "²", "1e9", "-1", "null", '"x"'])
def test_any_format_number_is_survived(tmp_path, number):
    """Whatever stands as the format, a get is an answer or a miss."""
    path = filled(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"~format": 1', f'"~format": {number}'), encoding="utf-8")
    found, said = read_all(tmp_path)

    assert found == [{"n": n} for n in range(COUNT)]
    assert len(said) <= 1


# Newer formats.


def newer(tmp_path):
    path = filled(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"~format": 1', '"~format": 2'), encoding="utf-8")
    return path


def test_a_newer_format_is_read_only_and_said_once(tmp_path):
    """What can be read is answered, nothing is written, and one warning says why."""
    path = newer(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    cache = store(tmp_path)
    with told() as said:
        assert value(cache, "call0") == {"n": 0}
        assert (cache.status, "format 2" in cache.reason) == ("read-only", True)
        data = path.read_bytes()
        keep(cache, "mine", 1)
        keep(cache, "call0", "mine")
        cache.fold()
        cache.close()
        assert (value(cache, "mine"), value(cache, "call0")) == (1, "mine")

    assert len(said) == 1
    assert "format 2" in said[0]
    assert cache.status == "read-only"
    assert path.read_bytes() == data
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_newer_format_that_is_gone_again_is_no_reason_any_more(tmp_path):
    """What had to wait is written once the file is one that this version may write."""
    path = newer(tmp_path)
    cache = store(tmp_path)
    with pytest.warns(StoreWarning, match="format 2"):
        keep(cache, "mine", 1)
    path.write_text(path.read_text(encoding="utf-8").replace('"~format": 2', '"~format": 1'), encoding="utf-8")
    keep(cache, "later", 2)

    assert cache.status == "read-write"
    assert [value(store(tmp_path), name) for name in ("mine", "later", "call0")] == [1, 2, {"n": 0}]


# Files that people write.


def by_hand(tmp_path, data, **how):
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(data, **how), encoding="utf-8")
    return store(tmp_path)


@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"indent": 0}, {"separators": (",", ":")}], ids=str)
def test_a_hand_written_file_is_read(tmp_path, how):
    """Only a key and a cfg, pretty-printed or not, without checksum, count, date or format."""
    cache = by_hand(tmp_path, {f"{DEV}|{OP}|one": {"cfg": {"block": 1}}, f"{DEV}|{OP}|two": {"cfg": 2}}, **how)
    found = cache.lookup(key("one"))

    assert (found.cfg, found.source, found.environment, found.when) == ({"block": 1}, "hand", {}, "")
    assert value(cache, "two") == 2
    assert len(cache) == 2


@pytest.mark.parametrize("how", [{}, {"indent": 2}], ids=["one line", "pretty"])
def test_a_put_beside_hand_written_entries_keeps_them(tmp_path, how):
    """The file becomes one entry a line, and what was written by hand is still in it."""
    cache = by_hand(tmp_path, {f"{DEV}|{OP}|one": {"cfg": 1, "note": "mine"}}, **how)
    keep(cache, "two", 2)

    assert [value(store(tmp_path), name) for name in ("one", "two")] == [1, 2]
    assert entries(cache.path)[f"{DEV}|{OP}|one"] == {"cfg": 1, "note": "mine"}


@pytest.mark.parametrize("how", [{}, {"indent": 2}], ids=["one line", "pretty"])
@pytest.mark.parametrize("name", ["64x128,f32", "a/b", "größe", "50%", "(1, 2)"])
def test_a_key_may_be_written_in_clear(tmp_path, name, how):
    """A key builder's string is found as a person would write it, though the file would spell it otherwise."""
    cache = by_hand(tmp_path, {f"{DEV}|{OP}|{name}": {"cfg": 1}, "~format": 1}, **how)
    assert value(cache, name) == 1
    keep(cache, name, 2)

    assert value(store(tmp_path), name) == 2
    assert len(store(tmp_path)) == 1


def test_an_edited_line_without_its_checksum_is_believed(tmp_path):
    """A user that removes `sha256` has made the entry theirs."""
    path = filled(tmp_path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    raw = whole[spell(key("call1"))]
    raw["cfg"] = {"n": "edited"}
    del raw["sha256"]
    path.write_text(json.dumps(whole, indent=1), encoding="utf-8")

    assert value(store(tmp_path), "call1") == {"n": "edited"}


def test_an_edited_line_with_its_checksum_is_passed_over_and_says_what_to_do(tmp_path):
    """An edit that left `sha256` is a miss; the warning names the way, and the edit is in the file set aside."""
    path = filled(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('{"n": 1}', '{"n": 7}'), encoding="utf-8")
    found, said = read_all(tmp_path)

    assert found == [{"n": 0}, None, {"n": 2}, {"n": 3}]
    assert len(said) == 1
    assert '"sha256"' in said[0]
    assert '{"n": 7}' in asides(path)[0].read_text(encoding="utf-8")


def test_an_edit_wins_over_an_entry_file_that_a_cut_short_fold_left(tmp_path, monkeypatch):
    """The same put lies in the file and in the folder; the line, which was edited by hand, is the answer."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", "put")
    (left,) = entry_files(cache.path)
    data = left.read_bytes()
    cache.fold()
    left.write_bytes(data)
    path = Path(cache.path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    raw = whole[spell(key("one"))]
    raw["cfg"] = "edited"
    del raw["sha256"]
    path.write_text(json.dumps(whole, indent=2), encoding="utf-8")

    assert value(store(tmp_path), "one") == "edited"
    assert store(tmp_path).fold()
    assert value(store(tmp_path), "one") == "edited"


def test_a_loader_that_does_not_know_an_entry_is_a_miss(tmp_path):
    """An old entry of another shape is passed over with a warning, not an exception of the user's loader."""
    keep(store(tmp_path), "one", {"other": 1})
    cache = store(tmp_path, loader=lambda data: data["block"])
    with pytest.warns(StoreWarning, match="does not fit"):
        assert value(cache, "one") is None
