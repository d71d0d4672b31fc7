"""Cfgs on disk: readable, shared by processes, never lost once acknowledged."""

from __future__ import annotations

import builtins
import contextlib
import enum
import errno
import json
import os
import signal
import stat
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pydantic
import pytest
from fakes import child

from ejkernel.ops import PersistentCache
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.store import StoredEntry

DEV, OP = "gpu|NVIDIA H200", "matmul@v2"
KEY = (DEV, OP, "9f3c52e01b7ad844")


@dataclass(frozen=True)
class Inner:
    warps: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pair: tuple[int, float]
    many: tuple[Inner, ...] = ()
    name: str | None = None
    options: dict[str, int] = field(default_factory=dict)


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class WithEnum:
    mode: Mode


class Tiles(NamedTuple):
    m: int
    n: int


class Model(pydantic.BaseModel):
    block: int
    inner: tuple[int, int] = (1, 2)
    nested: dict[str, list[int]] = {}


class Dumped:
    """Not a pydantic model: only the `model_dump` that the contract names."""

    def model_dump(self):
        return {"block": 7}


OUTER = Outer(Inner(4, (64, 32)), (1, 2.5), (Inner(1, ()), Inner(2, (3,))), "x", {"a": 1})


# The one stands for a byte that is no text, the other for nothing at all.
SURROGATES = [chr(0xDC80), chr(0xD800)]


def store(tmp_path, **more):
    return PersistentCache("ops", tmp_path / "ops.json", **more)


def put_all(cache, **cfgs):
    for name, cfg in cfgs.items():
        cache.put(DEV, OP, name, cfg)


def get_all(cache, *names):
    return [cache.get(DEV, OP, name) for name in names]


def entries(path):
    """What `json.load` finds, without what describes the file itself."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    assert isinstance(found, dict)
    return {key: value for key, value in found.items() if isinstance(value, dict)}


# Where the file is.


def test_path_is_a_str(tmp_path):
    """`path` is a plain string, whatever it was given as."""
    cache = PersistentCache("ops", tmp_path / "ops.json")

    assert cache.path == str(tmp_path / "ops.json")
    assert type(cache.path) is str


def test_any_path_like_works(tmp_path):
    """An object with `__fspath__` is a path, first or second argument."""

    class Place:
        def __fspath__(self):
            return str(tmp_path / "place.json")

    assert PersistentCache("ops", Place()).path == PersistentCache(Place()).path == str(tmp_path / "place.json")


def test_the_default_folder_comes_from_the_environment(tmp_path, monkeypatch):
    """Without a path the file is `<opname>.json` in `$EJKERNEL_PERSISTENT_CACHE_DIR`."""
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "mine"))

    assert PersistentCache("matmul").path == str(tmp_path / "mine" / "matmul.json")


def test_the_environment_is_read_when_the_cache_is_made(tmp_path, monkeypatch):
    """A later change of the variable moves new caches and no old one."""
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "one"))
    first = PersistentCache("matmul")
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "two"))
    second = PersistentCache("matmul")
    first.put(*KEY, 1)
    second.put(*KEY, 2)

    assert [Path(c.path).parent.name for c in (first, second)] == ["one", "two"]
    assert (tmp_path / "one" / "matmul.json").exists()


@pytest.mark.skipif(os.name != "posix" or os.uname().sysname != "Linux", reason="the convention of Linux")
def test_without_the_variable_the_platforms_convention_decides(tmp_path, monkeypatch):
    """On Linux that is `$XDG_CACHE_HOME`, else `~/.cache`."""
    monkeypatch.delenv("EJKERNEL_PERSISTENT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    xdg = PersistentCache("matmul").path
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = PersistentCache("matmul").path

    assert Path(xdg).is_relative_to(tmp_path / "xdg")
    assert Path(home).is_relative_to(tmp_path / "home" / ".cache")
    assert Path(xdg).name == Path(home).name == "matmul.json"


@pytest.mark.parametrize("name", ["ops.json", "sub/ops", "sub/ops.json", "/absolute/ops.cache"])
def test_an_opname_that_is_a_path_is_the_path(name, tmp_path, monkeypatch):
    """With a separator or `.json` at its end the name is the file."""
    monkeypatch.chdir(tmp_path)

    assert PersistentCache(name).path == os.path.abspath(name)


def test_the_documented_short_form_works(tmp_path):
    """`PersistentCache(path, loader, dumper)` reads its two callables as written."""
    cache = PersistentCache(str(tmp_path / "ops.json"), Inner_from, Inner_to)
    cache.put(*KEY, Inner(4, (1, 2)))

    assert (cache.loader, cache.dumper) == (Inner_from, Inner_to)
    assert PersistentCache(str(tmp_path / "ops.json"), Inner_from, Inner_to).get(*KEY) == Inner(4, (1, 2))


def test_the_short_form_takes_its_dumper_by_keyword_too(tmp_path):
    """`PersistentCache(path, loader, dumper=dumper)` keeps the dumper."""
    cache = PersistentCache(str(tmp_path / "ops.json"), Inner_from, dumper=Inner_to)

    assert (cache.path, cache.loader, cache.dumper) == (str(tmp_path / "ops.json"), Inner_from, Inner_to)


def Inner_from(data):
    return Inner(data[0], tuple(data[1]))


def Inner_to(cfg):
    return [cfg.warps, list(cfg.shape)]


@pytest.mark.parametrize("name", ["..", ".", "", "a\0b"])
def test_a_plain_opname_never_leaves_its_directory(name):
    """A name that means a folder, or nothing, is an error that says what to give."""
    with pytest.raises(ValueError, match="name"):
        PersistentCache(name)


@pytest.mark.parametrize("name", ["..matmul", "~root", "a b", "%2e%2e", "..\\up"])
def test_an_odd_plain_opname_stays_in_its_directory(name, tmp_path, monkeypatch):
    """Whatever a name without a separator is made of, its file is in the cache folder."""
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "folder"))
    cache = PersistentCache(name)
    cache.put(*KEY, 1)

    assert Path(cache.path).resolve().parent == tmp_path / "folder"
    assert Path(cache.path).is_file()


def test_a_directory_at_the_path_is_a_clear_error(tmp_path):
    """A folder where the file should be is refused when the cache is made."""
    with pytest.raises(OSError, match="directory"):
        PersistentCache("ops", tmp_path)


def test_a_dangling_link_at_the_path_is_a_clear_error(tmp_path):
    """A link to nothing is refused when the cache is made, and stays as it is."""
    link = tmp_path / "ops.json"
    link.symlink_to(tmp_path / "nowhere.json")
    with pytest.raises(OSError, match="link"):
        PersistentCache("ops", link)

    assert link.is_symlink()


def test_a_link_to_a_store_stays_a_link(tmp_path):
    """A put through a link to a file reaches that file."""
    (tmp_path / "real").mkdir()
    real = PersistentCache("ops", tmp_path / "real" / "ops.json")
    real.put(DEV, OP, "one", 1)
    link = tmp_path / "ops.json"
    link.symlink_to(real.path)
    PersistentCache("ops", link).put(DEV, OP, "two", 2)

    assert link.is_symlink()
    assert PersistentCache("ops", real.path).get(DEV, OP, "two") == 2


def test_arguments_are_attributes(tmp_path):
    """`loader`, `dumper` and `cfg_type` are kept under their names."""
    cache = PersistentCache("ops", tmp_path / "ops.json", Inner_from, Inner_to, Inner)

    assert (cache.loader, cache.dumper, cache.cfg_type) == (Inner_from, Inner_to, Inner)


def test_making_a_cache_writes_nothing(tmp_path):
    """A folder appears with the first put, not before."""
    cache = PersistentCache("ops", tmp_path / "deep" / "ops.json")
    assert cache.get(*KEY) is None
    assert list(tmp_path.iterdir()) == []
    cache.put(*KEY, 1)

    assert (tmp_path / "deep" / "ops.json").is_file()


# The file.


def test_the_file_is_a_sorted_json_object_with_one_entry_a_line(tmp_path):
    """`json.load` reads it, its keys are in order, and each entry has a line of its own."""
    cache = store(tmp_path)
    names = ["b", "a", "n 1", "n", "c", "A", "0"]
    for name in names:
        cache.put(DEV, OP, name, {"block": name})
    found = list(entries(cache.path))
    lines = Path(cache.path).read_text(encoding="utf-8").split("\n")

    assert len(found) == len(names)
    assert found == sorted(found)
    for name in found:
        assert sum(json.dumps(name) + ":" in line for line in lines) == 1


def test_the_order_of_the_entries_does_not_depend_on_the_order_of_the_puts(tmp_path):
    """Two stores with the same keys have them in the same order, however they were put."""
    for folder, names in (("one", "abc"), ("two", "cab")):
        cache = PersistentCache("ops", tmp_path / folder / "ops.json")
        for name in names:
            cache.put(DEV, OP, name, name)
    found = [list(entries(tmp_path / folder / "ops.json")) for folder in ("one", "two")]

    assert found[0] == found[1]


def test_an_entry_shows_its_key_and_cfg_in_clear(tmp_path):
    """A person that opens the file finds device, operation, call and cfg."""
    cache = store(tmp_path)
    cache.put(DEV, OP, "abc123", {"block": 4711})
    text = Path(cache.path).read_text(encoding="utf-8")

    assert all(part in text for part in (DEV, OP, "abc123", '"block"', "4711"))


def test_the_file_can_be_loaded_at_any_moment(tmp_path):
    """While another process puts and puts, `json.load` never fails and never sees fewer entries."""
    code = (
        "import sys; from ejkernel.ops import PersistentCache\n"
        "cache = PersistentCache(sys.argv[1])\n"
        "for i in range(60): cache.put('dev', 'op', str(i), {'n': i, 'pad': 'x' * 1500})\n"
        "print('done', flush=True)\n"
    )
    path = tmp_path / "ops.json"
    sizes = [0]
    with child(code, str(path)) as writer:
        while writer.poll() is None:
            if path.exists():
                sizes.append(len(entries(path)))
        assert writer.wait() == 0

    assert sizes == sorted(sizes)
    assert len(entries(path)) == 60


@pytest.mark.parametrize(
    "text", ["tab\tand\nnewline", "\x7f\x85\u2028\u2029", "emoji \U0001f600", *SURROGATES], ids=ascii
)
def test_odd_text_in_a_cfg_comes_back_or_is_refused(tmp_path, text):
    """Any string in a cfg keeps the file JSON: it comes back equal, or it is a TypeError that changes nothing."""
    cache = store(tmp_path)
    cache.put(DEV, OP, "before", 1)
    try:
        cache.put(*KEY, {"text": text})
        kept = True
    except TypeError:
        kept = False
    cache.put(DEV, OP, "after", 2)

    fresh = store(tmp_path)
    assert len(entries(cache.path)) == 2 + kept
    assert fresh.get(*KEY) == ({"text": text} if kept else None)
    assert (fresh.get(DEV, OP, "before"), fresh.get(DEV, OP, "after")) == (1, 2)


ODD_PARTS = [
    "a|b",
    "||",
    "new\nline",
    "größe-形状",
    "100%",
    "%7C",
    "x" * 300,
    "",
    "a b",
    '"q"',
    "\\",
    "~format",
    "\u2028",
]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_odd_keys_are_kept_apart(tmp_path, place):
    """Whatever characters a part of a key has, every entry comes back under its own key, also to another cache."""
    cache = store(tmp_path)
    keys = [tuple(odd if i == place else part for i, part in enumerate(KEY)) for odd in ODD_PARTS]
    for number, key in enumerate(keys):
        cache.put(*key, number)
    fresh = store(tmp_path)

    assert [fresh.get(*key) for key in keys] == list(range(len(keys)))
    assert len(entries(cache.path)) == len(keys)


def test_parts_of_a_key_do_not_run_into_each_other(tmp_path):
    """`a|b, c` and `a, b|c` are two keys."""
    cache = store(tmp_path)
    keys = [("a|b", "c", "d"), ("a", "b|c", "d"), ("a", "b", "c|d"), ("a|b|c", "d", ""), ("", "a|b", "c|d")]
    for number, key in enumerate(keys):
        cache.put(*key, number)

    assert [store(tmp_path).get(*key) for key in keys] == list(range(len(keys)))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("odd", SURROGATES, ids=ascii)
def test_a_key_that_is_no_text_does_no_harm(tmp_path, place, odd):
    """A lone surrogate in a key comes back or is refused; later puts work and the file stays JSON."""
    cache = store(tmp_path)
    key = tuple(odd if i == place else part for i, part in enumerate(KEY))
    try:
        cache.put(*key, 1)
        kept = 1
    except (TypeError, ValueError):
        kept = 0
    cache.put(*KEY, 2)

    assert store(tmp_path).get(*KEY) == 2
    assert len(entries(cache.path)) == 1 + kept


# Writing and reading.


def test_a_plain_value_comes_back_as_json(tmp_path):
    """Without anything that rebuilds it, a cfg is what JSON makes of it."""
    cache = store(tmp_path)
    cache.put(*KEY, {"block": 64, "pair": [1, 2.5], "flag": True, "none": None})

    assert store(tmp_path).get(*KEY) == {"block": 64, "pair": [1, 2.5], "flag": True, "none": None}


def test_get_gives_this_process_what_the_next_will_get(tmp_path):
    """Before and after a restart `get` answers the same."""
    cache = store(tmp_path)
    cache.put(*KEY, (1, 2))

    assert cache.get(*KEY) == store(tmp_path).get(*KEY) == [1, 2]


def test_a_dataclass_is_written_by_its_fields(tmp_path):
    """Without a `cfg_type` the fields come back as a dict."""
    store(tmp_path).put(*KEY, Inner(4, (1, 2)))

    assert store(tmp_path).get(*KEY) == {"warps": 4, "shape": [1, 2]}


def test_a_dumper_comes_before_the_fields(tmp_path):
    """A dumper decides what is written even where the cfg is a dataclass."""
    store(tmp_path, dumper=lambda cfg: {"w": cfg.warps}).put(*KEY, Inner(4, ()))

    assert store(tmp_path).get(*KEY) == {"w": 4}


def test_model_dump_is_used(tmp_path):
    """A cfg with `model_dump()` is written as what that returns."""
    store(tmp_path).put(*KEY, Dumped())

    assert store(tmp_path).get(*KEY) == {"block": 7}


def test_a_loader_comes_before_the_type(tmp_path):
    """A loader decides what is read even where a `cfg_type` is given."""
    store(tmp_path).put(*KEY, Inner(4, ()))

    assert store(tmp_path, loader=lambda data: data["warps"], cfg_type=Inner).get(*KEY) == 4


@pytest.mark.parametrize(
    "cfg",
    [
        OUTER,
        Inner(1, ()),
        Model(block=3, nested={"a": [1, 2]}),
        WithEnum(Mode.SAFE),
        Tiles(1, 2),
        {"a": 1},
        7,
        "text",
    ],
    ids=lambda cfg: type(cfg).__name__,
)
def test_cfg_type_brings_an_equal_cfg_back(tmp_path, cfg):
    """Nested dataclasses, tuples, named tuples, enums and pydantic models are equal after the trip."""
    store(tmp_path, cfg_type=type(cfg)).put(*KEY, cfg)
    found = store(tmp_path, cfg_type=type(cfg)).get(*KEY)

    assert (type(found), found) == (type(cfg), cfg)


class Opaque:
    def __repr__(self):
        return "<the opaque config>"


@pytest.mark.parametrize(
    "cfg", [Opaque(), {"inner": Opaque()}, [float("nan")], [float("inf")], {1: 2}, {"s": {1, 2}}, b"bytes"]
)
def test_a_cfg_that_is_not_json_is_a_type_error_that_changes_nothing(tmp_path, cfg):
    """The error names the config; memory and disk stay as they were."""
    cache = store(tmp_path)
    cache.put(*KEY, "old")
    before = Path(cache.path).read_bytes()
    with pytest.raises(TypeError) as caught:
        cache.put(*KEY, cfg)

    assert repr(cfg) in str(caught.value)
    assert cache.get(*KEY) == "old"
    assert Path(cache.path).read_bytes() == before


def test_what_a_dumper_makes_must_be_json(tmp_path):
    """A dumper that returns something else is the same error, with nothing changed."""
    cache = store(tmp_path, dumper=lambda cfg: cfg)
    with pytest.raises(TypeError):
        cache.put(*KEY, Opaque())

    assert cache.get(*KEY) is None
    assert not Path(cache.path).exists()


def test_a_cfg_that_its_type_cannot_rebuild_changes_nothing(tmp_path):
    """What would not come back is refused before anything is kept."""
    cache = store(tmp_path, cfg_type=Inner)
    with pytest.raises(TypeError):
        cache.put(*KEY, {"other": 1})

    assert cache.get(*KEY) is None
    assert not Path(cache.path).exists()


def test_a_loader_that_fails_at_a_put_changes_nothing(tmp_path):
    """A put whose loader raises leaves memory and disk as they were."""

    def loader(data):
        raise ValueError("cannot read this")

    cache = store(tmp_path, loader=loader)
    with pytest.raises(ValueError, match="cannot read this"):
        cache.put(*KEY, 1)

    assert cache.get(*KEY) is None
    assert not Path(cache.path).exists()


def test_an_entry_that_does_not_fit_its_type_is_passed_over_with_a_warning(tmp_path):
    """An old entry of another shape is a miss that names file and entry, once; it stays in the file."""
    store(tmp_path).put(*KEY, {"other": 1})
    cache = store(tmp_path, cfg_type=Inner)
    with pytest.warns(StoreWarning, match="ops.json") as caught:
        found = [cache.get(*KEY), cache.get(*KEY)]
    cache.put(DEV, OP, "new", Inner(1, ()))

    assert (found, len(caught)) == ([None, None], 1)
    assert len(entries(cache.path)) == 2


def test_a_key_must_be_three_strings(tmp_path):
    """Another key is a TypeError that changes nothing."""
    cache = store(tmp_path)
    with pytest.raises(TypeError):
        cache.put(DEV, OP, 7, "cfg")

    assert not Path(cache.path).exists()


def test_a_later_put_replaces_the_earlier(tmp_path):
    """One key has one cfg, the newest."""
    cache = store(tmp_path)
    cache.put(*KEY, 1)
    cache.put(*KEY, 2)

    assert (cache.get(*KEY), store(tmp_path).get(*KEY), len(entries(cache.path))) == (2, 2, 1)


def test_a_cfg_changed_by_the_caller_does_not_change_the_entry(tmp_path):
    """What was put is kept as it was at that moment."""
    cache = store(tmp_path)
    cfg = {"block": 1}
    cache.put(*KEY, cfg)
    cfg["block"] = 2
    cache.put(DEV, OP, "other", 0)

    assert (cache.get(*KEY), store(tmp_path).get(*KEY)) == ({"block": 1}, {"block": 1})


def test_get_returns_what_was_put_in_another_environment(tmp_path):
    """The store does not judge where an entry comes from; the selector does."""
    store(tmp_path).keep(Key(*KEY), StoredEntry(1, {"jaxlib": "0.1.7", "platform": "another"}, "autotune"))

    assert store(tmp_path).get(*KEY) == 1


# Other processes and threads.


def test_a_put_of_another_cache_is_seen(tmp_path):
    """A key that is not in memory yet is looked for in the file as it is now."""
    mine, other = store(tmp_path), store(tmp_path)
    assert mine.get(*KEY) is None
    other.put(*KEY, 1)

    assert mine.get(*KEY) == 1


def test_puts_of_two_caches_do_not_erase_each_other(tmp_path):
    """Each put adds to what is in the file now, not to what was there at the start."""
    mine, other = store(tmp_path), store(tmp_path)
    for number in range(5):
        mine.put(DEV, OP, f"mine{number}", number)
        other.put(DEV, OP, f"other{number}", number)

    assert len(entries(mine.path)) == 10


def test_threads_of_one_cache_lose_nothing(tmp_path):
    """Puts from eight threads at once are all in the file."""
    cache = store(tmp_path)
    start = threading.Barrier(8)

    def work(number):
        start.wait()
        for turn in range(10):
            cache.put(DEV, OP, f"{number}-{turn}", turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(entries(cache.path)) == 80


WRITER = """
import sys
from ejkernel.ops import PersistentCache
cache = PersistentCache(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    cache.put("dev", "op", f"{sys.argv[2]}-{i}", {"n": i})
    print(i if cache.status == "read-write" else "not kept", flush=True)
"""


def test_two_processes_lose_nothing(tmp_path):
    """A hundred puts of two processes at once are all there."""
    path = str(tmp_path / "ops.json")
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(child(WRITER, path, name, "50")) for name in "ab"]
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        answers = [writer.stdout.read().split() for writer in writers]

    assert answers == [[str(i) for i in range(50)]] * 2
    assert len(entries(path)) == 100


@pytest.mark.parametrize("acknowledged", [1, 7, 30])
def test_nothing_acknowledged_is_lost_to_a_kill(tmp_path, acknowledged):
    """A process killed while putting leaves a file that loads and holds every put that had returned."""
    path = str(tmp_path / "ops.json")
    store(tmp_path).put(DEV, OP, "before", 1)
    with child(WRITER, path, "k", "100000") as writer:
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        for _ in range(acknowledged):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        seen = acknowledged + len(writer.stdout.read().split("\n")) - 1
    fresh = store(tmp_path)
    fresh.put(DEV, OP, "after", 2)

    assert [fresh.get("dev", "op", f"k-{i}") for i in range(seen)] == [{"n": i} for i in range(seen)]
    assert (fresh.get(DEV, OP, "before"), store(tmp_path).get(DEV, OP, "after")) == (1, 2)


# Damage.


def filled(tmp_path, text="plain"):
    cache = store(tmp_path)
    for number in range(5):
        cache.put(DEV, OP, f"call{number}", {"n": number, "text": text})
    return Path(cache.path)


def test_a_truncated_file_keeps_its_whole_entries(tmp_path):
    """A file cut in the middle of its last entry still answers for the others, with one warning."""
    path = filled(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.index("call4") + 20], encoding="utf-8")
    cache = store(tmp_path)
    with pytest.warns(StoreWarning, match="ops.json") as caught:
        found = [cache.get(DEV, OP, f"call{n}") is not None for n in range(5)]

    assert found == [True, True, True, True, False]
    assert len(caught) == 1


def test_a_damaged_line_costs_one_entry(tmp_path):
    """Rubbish in one line leaves every other entry readable."""
    path = filled(tmp_path)
    lines = path.read_text(encoding="utf-8").split("\n")
    broken = next(i for i, line in enumerate(lines) if "call2" in line)
    lines[broken] = lines[broken][:30] + "\0\0\0 rubbish"
    path.write_text("\n".join(lines), encoding="utf-8")
    cache = store(tmp_path)
    with pytest.warns(StoreWarning):
        found = [cache.get(DEV, OP, f"call{n}") is not None for n in range(5)]

    assert found == [True, True, False, True, True]


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\x1c\x0b\x0c\r"], ids=ascii)
def test_a_rescue_reads_lines_as_the_file_has_them(tmp_path, text):
    """A character inside a string that some call a line break does not cost its entry."""
    path = filled(tmp_path, text)
    path.write_text(path.read_text(encoding="utf-8") + "rubbish", encoding="utf-8")
    cache = store(tmp_path)
    with pytest.warns(StoreWarning):
        assert cache.get(DEV, OP, "call3") == {"n": 3, "text": text}


def test_a_damaged_file_is_set_aside(tmp_path):
    """The file as it was stays beside the store under the name that the warning gives; the store heals."""
    path = filled(tmp_path)
    damaged = path.read_text(encoding="utf-8")[:-40]
    path.write_text(damaged, encoding="utf-8")
    cache = store(tmp_path)
    with pytest.warns(StoreWarning) as caught:
        cache.put(DEV, OP, "new", 1)
    others = [p for p in tmp_path.iterdir() if p != path and p.is_file() and not p.name.endswith(".lock")]

    assert [p.read_text(encoding="utf-8") for p in others] == [damaged]
    assert str(others[0]) in str(caught[0].message)
    assert len(caught) == 1
    assert len(entries(path)) >= 5
    assert store(tmp_path).get(DEV, OP, "new") == 1


@pytest.mark.parametrize(
    "content", [b"", b"   \n", b"[1, 2]", b"null", b"\xff\xfe\x00", b"{", b'{"a": 1}', b"[" * 9999]
)
def test_a_file_that_is_no_store_does_not_stop_a_put(tmp_path, content):
    """Whatever the file holds, a put works and what was there is not thrown away."""
    path = tmp_path / "ops.json"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        store(tmp_path).put(*KEY, 1)
    kept = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p != path]

    assert store(tmp_path).get(*KEY) == 1
    assert not content or content in kept


def test_the_entries_of_a_rescued_file_can_be_put_again(tmp_path):
    """After a rescue the file loads, and another cache reads it without a warning."""
    path = filled(tmp_path)
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    with pytest.warns(StoreWarning):
        store(tmp_path).put(DEV, OP, "new", 1)

    assert store(tmp_path).get(DEV, OP, "call0") is not None


# A place that cannot be written or read.


def closed(monkeypatch, code):
    """A disk that can be read and takes nothing."""
    real = os.open

    def failing(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **kwargs)

    def refusing(path, *args, **kwargs):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", failing)
    for name in ("rename", "replace", "link", "mkdir"):
        monkeypatch.setattr(os, name, refusing)


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    """A store below a plain file serves this process from memory; the warning names path and setting."""
    (tmp_path / "file").write_text("in the way")
    cache = PersistentCache("ops", tmp_path / "file" / "ops.json")
    with pytest.warns(StoreWarning) as caught:
        found = put_all(cache, one=1, two=2), get_all(cache, "one", "two", "three")

    assert found[1] == [1, 2, None]
    assert len(caught) == 1
    assert cache.path in str(caught[0].message)
    assert "EJKERNEL_PERSISTENT_CACHE_DIR" in str(caught[0].message)
    assert cache.status == "memory-only"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch, code):
    """On a full or closed disk what was acknowledged stays, and the new cfg serves this process."""
    cache = store(tmp_path)
    cache.put(DEV, OP, "old", 1)
    before = Path(cache.path).read_bytes()
    with monkeypatch.context() as patched:
        closed(patched, code)
        with pytest.warns(StoreWarning) as caught:
            cache.put(DEV, OP, "new", 2)

    assert len(caught) == 1
    assert os.strerror(code) in str(caught[0].message)
    assert cache.status in ("memory-only", "read-only")
    assert get_all(cache, "old", "new") == [1, 2]
    assert Path(cache.path).read_bytes() == before
    assert [p.name for p in tmp_path.rglob("*.tmp")] == []


def test_a_store_recovers_when_its_disk_does(tmp_path, monkeypatch):
    """The next put that works writes what could not be written, and the status says so."""
    cache = store(tmp_path)
    with monkeypatch.context() as patched:
        closed(patched, errno.ENOSPC)
        with pytest.warns(StoreWarning):
            cache.put(DEV, OP, "while full", 1)
    cache.put(DEV, OP, "later", 2)

    assert cache.status == "read-write"
    assert (store(tmp_path).get(DEV, OP, "while full"), store(tmp_path).get(DEV, OP, "later")) == (1, 2)


def test_a_disk_that_fills_while_writing_is_the_same(tmp_path, monkeypatch):
    """A file that cannot be written to its end leaves the store as it was, and no half of it behind."""
    cache = store(tmp_path)
    cache.put(DEV, OP, "old", 1)

    def failing(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", failing)
        with pytest.warns(StoreWarning):
            cache.put(DEV, OP, "new", 2)

    assert get_all(cache, "old", "new") == [1, 2]
    assert get_all(store(tmp_path), "old", "new") == [1, None]
    assert [p.name for p in tmp_path.rglob("*.tmp")] == []


def unreadable(monkeypatch, path):
    """A file that another user keeps to himself; root would read it whatever its mode."""

    def refuses(real):
        def refusing(file, *args, **kwargs):
            if isinstance(file, (str, os.PathLike)) and os.path.basename(file) == path.name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(file, *args, **kwargs)

        return refusing

    monkeypatch.setattr(os, "open", refuses(os.open))
    monkeypatch.setattr(builtins, "open", refuses(builtins.open))


def test_an_unreadable_file_is_never_replaced(tmp_path, monkeypatch):
    """A file that this user may not read is another's: a put leaves it, warns once and serves from memory."""
    store(tmp_path).put(DEV, OP, "theirs", 1)
    path = tmp_path / "ops.json"
    before = path.read_bytes()
    cache = store(tmp_path)
    with monkeypatch.context() as patched:
        unreadable(patched, path)
        with pytest.warns(StoreWarning) as caught:
            found = put_all(cache, mine=2, too=3), get_all(cache, "mine", "too")
    status = cache.status
    assert found[1] == [2, 3]
    assert path.read_bytes() == before
    assert (status, len(caught)) == ("memory-only", 1)
    cache.put(DEV, OP, "later", 4)

    fresh = store(tmp_path)
    assert [fresh.get(DEV, OP, name) for name in ("theirs", "mine", "too", "later")] == [1, 2, 3, 4]


def newer(path):
    store(path.parent).put(DEV, OP, "theirs", 1)
    text = path.read_text(encoding="utf-8")
    assert text.count('format": 1') == 1
    path.write_text(text.replace('format": 1', 'format": 2'), encoding="utf-8")
    return path.read_bytes()


def test_a_file_of_a_newer_format_is_never_replaced(tmp_path):
    """An older version leaves a newer file as it is, warns once and serves its own puts from memory."""
    before = newer(tmp_path / "ops.json")
    cache = store(tmp_path)
    with pytest.warns(StoreWarning, match="format") as caught:
        found = put_all(cache, mine=2, too=3), get_all(cache, "mine", "unknown")

    assert (tmp_path / "ops.json").read_bytes() == before
    assert (cache.status, found[1], len(caught)) == ("read-only", [2, None], 1)


def test_a_newer_file_that_appears_later_is_not_replaced_either(tmp_path):
    """A cache that already wrote notices that a newer version took over."""
    cache = store(tmp_path)
    cache.put(DEV, OP, "first", 0)
    before = newer(tmp_path / "ops.json")
    with pytest.warns(StoreWarning, match="format"):
        cache.put(DEV, OP, "mine", 2)

    assert (tmp_path / "ops.json").read_bytes() == before
    assert cache.get(DEV, OP, "first") == 0


def test_status_is_read_write_when_all_is_well(tmp_path):
    """After a put that reached the disk the status says so."""
    cache = store(tmp_path)
    cache.put(*KEY, 1)

    assert cache.status == "read-write"


@pytest.mark.parametrize("durable", [True, False])
def test_durable_syncs_before_it_acknowledges(tmp_path, monkeypatch, durable):
    """With `durable=True` a file is synced before it takes its name; without, nothing waits for the disk."""
    acts = []

    def told(name, real):
        return lambda *args, **kwargs: (acts.append(name), real(*args, **kwargs))[1]

    for name, act in (("fsync", "sync"), ("rename", "name"), ("replace", "name")):
        monkeypatch.setattr(os, name, told(act, getattr(os, name)))
    store(tmp_path, durable=durable).put(*KEY, 1)

    assert acts[0] == ("sync" if durable else "name")
    assert ("sync" in acts) == durable


# Permissions.


@pytest.fixture
def umask():
    """Sets a umask for one test."""
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644)])
def test_a_new_file_honours_the_umask_but_for_writing(tmp_path, umask, mask, mode):
    """The store's file has the permissions that any new file has, and only its owner may write it."""
    umask(mask)
    cache = store(tmp_path)
    cache.put(*KEY, 1)

    assert stat.S_IMODE(os.stat(cache.path).st_mode) == mode


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077], ids=oct)
def test_in_a_groups_folder_the_group_may_write_what_putting_needs_and_no_entry(tmp_path, umask, mask):
    """Folders, counter and lock are for the whole group, whatever the umask; entries are their author's alone."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2775)
    umask(mask)
    store(tmp_path / "group").put(*KEY, 1)
    modes = {p.name: p.stat().st_mode for p in (tmp_path / "group").rglob("*")}

    assert {name for name, mode in modes.items() if mode & stat.S_IWGRP} == {
        "ops.json.d",
        "folded",
        "changes",
        "fold.lock",
    }
    assert modes["ops.json.d"] & stat.S_ISGID


def test_existing_permissions_are_kept(tmp_path, umask):
    """A put does not change the mode that a user gave the file."""
    cache = store(tmp_path)
    cache.put(*KEY, 1)
    os.chmod(cache.path, 0o640)
    cache.put(*KEY, 2)

    assert stat.S_IMODE(os.stat(cache.path).st_mode) == 0o640
