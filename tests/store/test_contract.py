"""What every store promises: one suite over all of them, and what the wrappers add.

Covers `store/folder.py`, `store/layered.py` and `store/store.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes_remote import MemoryObjects, remote, writing
from fakes_store import DEV, OP, key, store, write_large

from ejkernel.ops.core.errors import SettingError, StoreError
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.folder import OperationStores
from ejkernel.ops.store.layered import LayeredStore, MemoryStore, ReadOnlyStore
from ejkernel.ops.store.remote.folding import compact_remote
from ejkernel.ops.store.store import Store, StoredEntry, as_store

WHOLE = StoredEntry(
    cfg={"block": 64},
    environment={"jax": "0.12.0", "jaxlib": "0.12.0"},
    source="autotune",
    objective="forward+backward",
    when="2026-01-01T00:00:00.000001+00:00",
    by="ejkernel-ops 0.1.0",
    summary={"seconds": 1.5e-5, "gain": [1.0, 0.9, 1.1], "candidates": 3},
    call={"args[0]": "float32[8,128]", "kwargs['scale']": "2.0"},
)
ODD = ["a|b", "||", "new\nline", "größe-形状", "100%", "%7C", "'", '"q"', "\\", "x" * 300, "", " ", "\u2028", "~format"]
VALUES = [0, 1.5, "text", True, [1, [2, 3]], {"block": 64, "none": None, "deep": {"a": [{}]}}, "größe\n\u2028", []]


@dataclass
class Doors:
    """Where a test puts, and where it reads: one store, or two with the same content."""

    to: Any
    of: Any


def small(tmp_path):
    cache = store(tmp_path)
    return Doors(cache, cache)


def large(tmp_path):
    write_large(tmp_path / "ops.json")
    return small(tmp_path)


def reopened(tmp_path):
    return Doors(store(tmp_path), store(tmp_path))


def large_reopened(tmp_path):
    write_large(tmp_path / "ops.json")
    return reopened(tmp_path)


def memory(tmp_path):
    kept = MemoryStore()
    return Doors(kept, kept)


def read_only(tmp_path):
    inner = store(tmp_path)
    return Doors(inner, ReadOnlyStore(inner))


def layered(*layers):
    top = LayeredStore(*layers)
    return Doors(top, top)


def one_layer(tmp_path):
    return layered(store(tmp_path))


def two_layers(tmp_path):
    return layered(store(tmp_path), MemoryStore())


def three_layers(tmp_path):
    return layered(MemoryStore(), store(tmp_path), ReadOnlyStore(MemoryStore()))


def from_the_lowest_layer(tmp_path):
    lowest = store(tmp_path / "lowest")
    return Doors(lowest, LayeredStore(store(tmp_path / "user"), MemoryStore(), ReadOnlyStore(lowest)))


def by_operation(tmp_path):
    return Doors(OperationStores(tmp_path), OperationStores(tmp_path))


def in_a_remote(tmp_path):
    kept = writing(MemoryObjects())
    return Doors(kept, kept)


def in_a_remote_of_another_machine(tmp_path):
    objects = MemoryObjects()
    return Doors(writing(objects), remote(objects))


class FoldedObjects(MemoryObjects):
    """A place that is folded after every put."""

    def write(self, path, data):
        super().write(path, data)
        if "/snapshot." not in path and path.startswith("entries/"):
            compact_remote(writing(self))


def in_a_folded_remote(tmp_path):
    objects = FoldedObjects()
    return Doors(writing(objects), remote(objects))


KINDS = [
    *(small, large, reopened, large_reopened, memory, read_only, by_operation),
    *(in_a_remote, in_a_remote_of_another_machine, in_a_folded_remote),
    *(one_layer, two_layers, three_layers, from_the_lowest_layer),
]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__.replace("_", " "))
def doors(request, tmp_path):
    """A store of each kind."""
    return request.param(tmp_path)


def test_every_store_has_the_interface(doors):
    """Each is a `Store`, and is used by the selector as it is."""
    assert isinstance(doors.of, Store)
    assert as_store(doors.of) is doors.of


def test_an_unknown_key_has_no_answer(doors):
    """`get` and `lookup` of a key that was never put are None."""
    assert doors.of.get(DEV, OP, "unknown") is None
    assert doors.of.lookup(key("unknown")) is None


def test_get_returns_what_was_put(doors):
    """A cfg comes back under its key, and under no other."""
    doors.to.put(DEV, OP, "one", {"block": 1})
    doors.to.put(DEV, OP, "two", {"block": 2})

    assert doors.of.get(DEV, OP, "one") == {"block": 1}
    assert doors.of.get(DEV, OP, "two") == {"block": 2}
    assert doors.of.get(DEV, OP, "three") is None


@pytest.mark.parametrize("cfg", VALUES, ids=ascii)
def test_values_come_back_equal(doors, cfg):
    """Whatever JSON can hold is equal after the trip, type included."""
    doors.to.put(DEV, OP, "one", cfg)
    found = doors.of.get(DEV, OP, "one")

    assert (found, type(found)) == (cfg, type(cfg))


def test_the_newest_put_wins(doors):
    """A key has the cfg that was put last."""
    for number in range(4):
        doors.to.put(DEV, OP, "one", number)

    assert doors.of.get(DEV, OP, "one") == 3
    assert [k for k in doors.of.keys() if k == key("one")] == [key("one")]


# In the lowest layer the promoted copy is the user's own from then on, and first hit wins.
@pytest.mark.parametrize("make", [make for make in KINDS if make is not from_the_lowest_layer])
def test_a_put_after_a_get_wins_too(tmp_path, make):
    """An answer that was given before does not stand in the way of a newer one."""
    doors = make(tmp_path)
    doors.to.put(DEV, OP, "one", "old")
    assert doors.of.get(DEV, OP, "one") == "old"
    doors.to.put(DEV, OP, "one", "new")

    assert doors.of.get(DEV, OP, "one") == "new"


def test_keys_lists_every_key_sorted(doors):
    """`keys()` has each key once, in order, as plain comparable tuples."""
    before = set(doors.of.keys())
    names = ["b", "a", "C", "0", "n 1"]
    for name in names:
        doors.to.put(DEV, OP, name, name)
    doors.to.put(DEV, OP, "a", "again")
    found = doors.of.keys()

    assert found == sorted(found)
    assert set(found) - before == {key(name) for name in names}
    assert len(found) == len(set(found))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_odd_keys_are_kept_apart(doors, place):
    """Bars, line breaks, percent signs, quotes, other scripts, 300 characters or none: each is a key of its own."""
    keys = [Key(*(odd if i == place else part for i, part in enumerate(key("call")))) for odd in ODD]
    for number, odd in enumerate(keys):
        doors.to.put(*odd, number)

    assert [doors.of.get(*odd) for odd in keys] == list(range(len(keys)))
    assert set(keys) <= set(doors.of.keys())


def test_parts_of_a_key_do_not_run_into_each_other(doors):
    """`a|b, c` and `a, b|c` are two keys."""
    keys = [("a|b", "c", "d"), ("a", "b|c", "d"), ("a", "b", "c|d"), ("a|b|c", "d", ""), ("", "a|b", "c|d")]
    for number, parts in enumerate(keys):
        doors.to.put(*parts, number)

    assert [doors.of.get(*parts) for parts in keys] == list(range(len(keys)))


def test_an_entry_keeps_all_that_is_known_about_it(doors):
    """Environment, source, objective, summary, time, writer and the call come back with the cfg."""
    doors.to.keep(key("one"), WHOLE)

    assert doors.of.lookup(key("one")) == WHOLE


def test_a_put_notes_its_environment(doors):
    """An entry put by hand says which versions it was put under, and that it was not measured."""
    doors.to.put(DEV, OP, "one", 1)
    entry = doors.of.lookup(key("one"))

    assert {"jax", "jaxlib"} <= set(entry.environment)
    assert (entry.source, entry.objective, entry.trusted) == ("hand", None, True)


def test_a_plain_tuple_is_a_key(doors):
    """`keep` and `lookup` take the tuples that `keys()` gives."""
    doors.to.keep((DEV, OP, "one"), WHOLE)

    assert doors.of.lookup((DEV, OP, "one")) == WHOLE


def test_puts_of_threads_are_all_kept(doors):
    """Four threads put at once; nothing is missing."""
    start = threading.Barrier(4)

    def work(who):
        start.wait()
        for number in range(5):
            doors.to.put(DEV, OP, f"{who}-{number}", number)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(doors.of.get(DEV, OP, f"{who}-{number}") == number for who in range(4) for number in range(5))


def test_a_store_has_a_name_for_messages(doors):
    """Its text says which store it is, not which object."""
    assert "object at" not in str(doors.of)


# What the file adds.


@pytest.mark.parametrize("make", [small, large], ids=["small", "large"])
def test_an_entry_says_when_and_by_what_it_was_put(tmp_path, make):
    """Where they were not given, time and version are filled in, and survive reopening."""
    doors = make(tmp_path)
    doors.to.put(DEV, OP, "one", 1)
    entry = store(tmp_path).lookup(key("one"))

    assert entry.when.endswith("+00:00")
    assert entry.by.startswith("ejkernel-ops ")


def test_a_large_store_still_has_its_old_entries(tmp_path):
    """What was in the file before is answered beside what is put now."""
    doors = large(tmp_path)
    doors.to.put(DEV, OP, "one", 1)

    assert doors.to.get(DEV, "filler@v1", f"{7:016x}") == {"n": 7}
    assert len(doors.to) == 401


# The wrappers.


def test_a_read_only_store_refuses_puts_and_names_the_store(tmp_path):
    """A put is an error that says which store and what to do; nothing is changed."""
    inner = store(tmp_path)
    with pytest.raises(StoreError, match=r"ops\.json is read-only here"):
        ReadOnlyStore(inner).put(DEV, OP, "one", 1)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_the_top_layer_is_written(count):
    """A put goes to the first store and to no other."""
    layers = [MemoryStore() for _ in range(count)]
    LayeredStore(*layers).put(DEV, OP, "one", 1)

    assert [layer.get(DEV, OP, "one") for layer in layers] == [1, *[None] * (count - 1)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_first_layer_that_knows_a_key_answers(place):
    """A hit above hides what lies below."""
    layers = [MemoryStore() for _ in range(3)]
    for number in range(place, 3):
        layers[number].put(DEV, OP, "one", number)

    assert LayeredStore(*layers).get(DEV, OP, "one") == place


@pytest.mark.parametrize("place", [1, 2])
def test_a_hit_below_is_promoted_to_the_top(place):
    """The whole entry is copied upwards, so that the next answer needs no lower layer."""
    layers = [MemoryStore() for _ in range(3)]
    layers[place].keep(key("one"), WHOLE)
    LayeredStore(*layers).lookup(key("one"))

    assert layers[0].lookup(key("one")) == WHOLE
    assert layers[1].lookup(key("one")) == (WHOLE if place == 1 else None)


def test_a_promoted_entry_survives_on_disk(tmp_path):
    """What came from a site's store is in the user's own for the next process."""
    site = MemoryStore()
    site.keep(key("one"), WHOLE)
    LayeredStore(store(tmp_path), site).get(*key("one"))

    assert store(tmp_path).lookup(key("one")) == WHOLE


def test_an_untrusted_entry_is_not_promoted():
    """What another user brought stays theirs, since a copy would pass for the user's own."""
    top, pack = MemoryStore(), MemoryStore()
    pack.keep(key("one"), replace(WHOLE, trusted=False))
    found = LayeredStore(top, pack).lookup(key("one"))

    assert (found.cfg, found.trusted) == (WHOLE.cfg, False)
    assert top.lookup(key("one")) is None


def test_nothing_is_promoted_into_a_read_only_top():
    """Layers that are all read-only still answer."""
    top, below = MemoryStore(), MemoryStore()
    below.keep(key("one"), WHOLE)

    assert LayeredStore(ReadOnlyStore(top), below).get(*key("one")) == WHOLE.cfg
    assert top.keys() == []


def test_keys_of_layers_are_those_of_all():
    """Each key once, whichever layers have it."""
    layers = [MemoryStore() for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.put(DEV, OP, "shared", number)
        layer.put(DEV, OP, f"own{number}", number)

    assert LayeredStore(*layers).keys() == [key(name) for name in ("own0", "own1", "own2", "shared")]


def test_layers_need_a_store():
    """No layer at all is an error that says what to give."""
    with pytest.raises(SettingError, match="at least one store"):
        LayeredStore()


def test_layers_are_named_from_the_top(tmp_path):
    """A message says which stores were asked, in order."""
    assert str(LayeredStore(MemoryStore(), ReadOnlyStore(MemoryStore()))) == "memory over memory (read-only)"
