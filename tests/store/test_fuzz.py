"""Every file format under a fuzzer: no crash, no hang, no wrong answer, and no more memory than the file is worth."""

from __future__ import annotations

import json
import resource
import signal
import zlib
from pathlib import Path

import pytest
from fakes_store import entry_files, keep, key, never_small, store, told, value
from fuzzing import as_json, inputs

from ejkernel.cli.entries import rows_of
from ejkernel.ops import AutotuningResult, Entry
from ejkernel.ops.core.errors import OpsError
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Finding, Record, Trial
from ejkernel.ops.execution.recording import read_file
from ejkernel.ops.store import bundle
from ejkernel.ops.store.lock_file import read_lock
from ejkernel.ops.store.snapshot import Snapshot, line, parse, seal
from ejkernel.ops.store.store import StoredEntry
from ejkernel.ops.tuning.journal.file import Journal, cfg_id
from ejkernel.ops.tuning.journal.resume import Remembered

pytestmark = pytest.mark.one_leg

CFG = {"block": [1, 2], "name": "x", "deep": {"a": {"b": None}}}
RECORD = Record(
    key={"device": "cpu|x", "op_id": "k@v0", "call_key": "1"},
    kernel="k",
    environment={"jax": "0.12"},
    trials=(
        Trial(CFG, "ok", "", 0.5, (1.0, 2.0, 1.5), None, 0.1, Finding("whole", 0.5)),
        Trial({"b": 2}, "wrong", "off"),
    ),
    winner=0,
    heuristic=0,
    gain=(1.0, 0.9, 1.1),
    tied=(0,),
)


@pytest.fixture(autouse=True)
def alarm():
    """A hang is an error."""

    def late(*about):
        raise TimeoutError("hangs")

    old = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def fuzz(count, data, whole, written, check):
    """Feeds changed files to a check; the memory of this process may grow by some files' worth."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = 0
    for changed, is_sealed in inputs(len(data), count, data, whole, written):
        signal.alarm(20)
        try:
            check(changed, is_sealed)
        except OpsError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {changed[:2000]!r}") from error
        seen += 1
    signal.alarm(0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"\n{seen} inputs, memory grew by {grown >> 10} MiB")
    assert seen == count
    assert grown < 200 << 10


# One check for each format: its name, the bytes of a real file, its value, how a value is written, and the reader.


def sealed_lines(entries):
    lines = {}
    for name, raw in entries.items():
        content = {field: one for field, one in raw.items() if field != "sha256"}
        lines[name] = line(name, seal(name, content))
    return Snapshot(lines).text().encode("utf-8", "surrogatepass")


def fuzz_store(place, count):
    cache = store(place)
    for number in range(3):
        keep(cache, f"call{number}", {**CFG, "n": number})
    cache.fold()
    path = Path(cache.path)
    whole = {name: raw for name, raw in json.loads(path.read_text()).items() if isinstance(raw, dict)}

    def check(data, is_sealed):
        for left in place.iterdir():
            if left.is_file():
                left.unlink()
        path.write_bytes(data)
        with told():
            fresh = store(place)
            for number in range(3):
                found = value(fresh, f"call{number}")
                # A line that says what it does behind a right checksum is what its author meant.
                assert is_sealed or found in (None, {**CFG, "n": number}) or b'"sha256"' not in data, found
            for one in fresh.keys():
                fresh.lookup(Key(*one))
            for row in rows_of(str(path)):
                json.dumps(row.as_dict())
                assert row.seconds is None or row.seconds >= 0 or row.seconds < 0
                str(row.when), str(row.gain)

    fuzz(count, path.read_bytes(), whole, sealed_lines, check)


def fuzz_entry(place, count):
    with pytest.MonkeyPatch.context() as patched:
        never_small(patched)
        cache = store(place)
        keep(cache, "one", CFG)
        (path,) = entry_files(cache.path)
        name, raw = parse(path.read_text())

        def written(pair):
            other, content = pair
            content = {field: one for field, one in content.items() if field != "sha256"}
            return line(other, seal(other, content)).encode("utf-8", "surrogatepass")

        def check(data, is_sealed):
            for left in path.parent.iterdir():
                if left.is_file() and left.name != "changes":
                    left.unlink()
            path.write_bytes(data)
            with told():
                fresh = store(place)
                found = fresh.lookup(key("one"))
                assert is_sealed or found is None or found.cfg == CFG or b'"sha256"' not in data, found
                for one in fresh.keys():
                    fresh.lookup(Key(*one))

        fuzz(count, path.read_bytes(), [name, dict(raw)], written, check)


def fuzz_record(place, count):
    def check(data, is_sealed):
        found = Record.loads(data.decode("utf-8", "replace"))
        found.table()
        json.dumps(found.summary(), allow_nan=False)
        found.dumps()

    fuzz(count, RECORD.dumps().encode(), RECORD.as_json(), as_json, check)


def fuzz_journal(place, count):
    path = place / "journal.jsonl"
    with Journal(path) as journal:
        journal.begin("identity", [CFG, "b"], fresh=True)
        journal.trying(CFG, "compile", "program")
        journal.came_back(CFG, "compile")
        journal.failed(Trial("b", "wrong", "off"), "program b")
        journal.lost(Trial("c", "crash", "gone"), "program c")
        journal.dropped("d", "program d", seconds=1.0, ratio=2.0, clock="wall")
        journal.trying("e", "race")
    lines = [json.loads(row.split(b" ", 1)[1]) for row in path.read_bytes().splitlines() if b" " in row]

    def written(lines):
        rows = [as_json(row) for row in lines]
        return b"".join(b"%08x %s\n" % (zlib.crc32(row), row) for row in rows)

    def check(data, is_sealed):
        path.write_bytes(data)
        with Journal(path) as opened:
            known = Remembered(opened.history, frozenset(opened.history.dropped))
            for cfg in (CFG, "b", "c", "d", "e"):
                for found in (known.barred(cfg), known.known(cfg, "program d"), known.known(cfg, "program b")):
                    assert found is None or found.status != "ok"
                known.suspected(cfg)
            assert all(seconds >= 0 for seconds in known.seconds([CFG, "b", "c", "d"]).values())
            # A crash that the journal does not tell of is made up.
            assert is_sealed or set(opened.history.lost) <= {cfg_id("c")}

    fuzz(count, path.read_bytes(), lines, written, check)


def bundled(kind, place):
    entries = {
        Key("cpu|x", "k@v0", f"{number}"): StoredEntry(
            {**CFG, "n": number}, {"jax": "1"}, "autotune", "forward", call={"argument 0": "f32[8]"}
        )
        for number in range(3)
    }
    return bundle.write(kind, entries, {"name": "site"})


def fuzz_bundle(kind):
    def run(place, count):
        path = place / "file.json"
        text = bundled(kind, place)

        def written(whole):
            about = whole.pop(f"~{kind}")
            rows = {}
            for name, raw in whole.items():
                rows[name] = seal(name, {field: one for field, one in raw.items() if field != "sha256"})
            if kind == "pack":
                about = {**about, "entries": len(rows), "sha256": bundle._digest(rows)}
            return as_json({**rows, f"~{kind}": about})

        def check(data, is_sealed):
            path.write_bytes(data)
            found = bundle.read(kind, str(path))
            for one, entry in found.entries.items():
                plain = {**CFG, "n": int(one.call_key)} if one.call_key in "012" and one.call_key else None
                edited = kind == "lock" and b'"sha256"' not in data
                assert is_sealed or edited or entry.cfg == plain or kind == "lock", entry.cfg
            if kind == "lock":
                lock = read_lock(path)
                lock.why_not(Key("cpu|x", "k@v0", "9"), {"argument 0": "f32[16]"})
                list(lock.items())

        fuzz(count, text.encode(), json.loads(text), written, check)

    return run


def fuzz_result(place, count):
    path = place / "result.json"
    result = AutotuningResult("cpu|x", (Entry("k@v0", "1", CFG, RECORD, "autotune", "", 2), Entry("k@v0", "2", 3)))
    result.dump(path)

    def check(data, is_sealed):
        path.write_bytes(data)
        found = AutotuningResult.load(path)
        found.table()
        found.as_overlay()

    fuzz(count, path.read_bytes(), json.loads(path.read_text()), as_json, check)


def fuzz_recording(place, count):
    path = place / "recorded.json"
    calls = [
        {"device": "cpu|x", "op_id": "k@v0", "call_key": str(number), "kernel": "m:K", "args": [{"shape": [1]}]}
        for number in range(3)
    ]
    whole = {"kind": "ejkernel.ops recorded calls", "version": 1, "calls": calls}

    def check(data, is_sealed):
        path.write_bytes(data)
        sorted(read_file(str(path)))

    fuzz(count, as_json(whole), whole, as_json, check)


FORMATS = {
    "store": fuzz_store,
    "entry": fuzz_entry,
    "record": fuzz_record,
    "journal": fuzz_journal,
    "pack": fuzz_bundle("pack"),
    "lock": fuzz_bundle("lock"),
    "result": fuzz_result,
    "recording": fuzz_recording,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_damage_and_nothing_else(tmp_path, name):
    """Every one gives an answer, a miss or an error of ours that names the file."""
    FORMATS[name](tmp_path, 150)


@pytest.mark.slow(at_length=True)
@pytest.mark.parametrize("name", FORMATS)
def test_a_hundred_thousand_changed_files_are_damage_and_nothing_else(tmp_path, name):
    """The same at length: 104,000 files of eight formats."""
    FORMATS[name](tmp_path, 13_000)
