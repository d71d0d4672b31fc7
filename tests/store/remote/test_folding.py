"""Folding a remote: what is merged, what is removed, and folds at the same time."""

from __future__ import annotations

from contextlib import suppress

import pytest
from fakes_remote import MemoryObjects, key_of_call, remote, writing

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store.remote.folding import compact_remote
from ejkernel.ops.store.store import StoredEntry


def filled(count=5, **more):
    """A remote with so many entries, each put twice."""
    objects = MemoryObjects()
    store = writing(objects, **more)
    for cfg in ("old", "new"):
        for number in range(count):
            store.keep(key_of_call(number), StoredEntry([cfg, number]))
    return objects


def found(objects, count=5, **more):
    """The cfgs that a reader finds."""
    store = remote(objects, **more)
    return [store.get(*key_of_call(number)) for number in range(count)]


NEW = [["new", number] for number in range(5)]


def test_a_fold_leaves_one_object_with_the_newest_entries():
    """Readers find the same, trusted as before, with one listing and one read."""
    objects = filled()
    (folded,) = compact_remote(writing(objects))
    assert (folded.entries, folded.removed, folded.damaged) == (5, 10, 0)
    assert objects.entries() == []
    objects.log.clear()
    assert found(objects) == NEW
    assert remote(objects).lookup(key_of_call(0)).trusted is True


def test_a_second_fold_has_nothing_to_do():
    """The snapshot stays as it is."""
    objects = filled()
    compact_remote(writing(objects))
    before = dict(objects.data)
    compact_remote(writing(objects))
    assert objects.data == before


def test_puts_after_a_fold_win_and_are_folded_too():
    """The count goes on where the snapshot stands."""
    objects = filled()
    compact_remote(writing(objects))
    writing(objects).keep(key_of_call(0), StoredEntry("newest"))
    assert found(objects)[0] == "newest"
    (folded,) = compact_remote(writing(objects))
    assert found(objects) == ["newest", *NEW[1:]]
    assert folded.removed == 2


def test_two_folds_at_once_lose_nothing():
    """One lists, the other folds everything, the first goes on: whatever the order, all entries are found."""
    for verb, count in [("names", 3), ("read", 1), ("read", 10), ("write", 1), ("remove", 1), ("remove", 4)]:
        objects = filled()
        seen = []

        def meanwhile(asked, path, verb=verb, count=count, objects=objects, seen=seen):
            seen.append(asked)
            if seen.count(verb) == count:
                objects.before = lambda verb, path: None
                compact_remote(writing(objects))

        objects.before = meanwhile
        compact_remote(writing(objects))
        assert found(objects) == NEW, (verb, count)


def test_a_put_during_a_fold_is_kept():
    """At every request of a fold."""
    for number in range(1, 30):
        objects, count = filled(2), 0

        def meanwhile(verb, path, number=number, objects=objects):
            nonlocal count
            count += 1
            if count == number:
                objects.before = lambda verb, path: None
                writing(objects).keep(key_of_call(0), StoredEntry("put meanwhile"))

        objects.before = meanwhile
        compact_remote(writing(objects))
        objects.before = lambda verb, path: None
        if count >= number:
            assert found(objects, 2) == ["put meanwhile", ["new", 1]], number


class Died(Exception):
    """The end of a process, as a fake place can bring it about."""


def test_a_fold_that_dies_loses_nothing():
    """At every request: what was there is found, and the next fold cleans up."""
    for number in range(1, 40):
        objects, count = filled(3), 0

        def die(verb, path, number=number):
            nonlocal count
            count += 1
            if count >= number:
                raise Died

        objects.before = die
        with suppress(Died):
            compact_remote(writing(objects))
        objects.before = lambda verb, path: None
        assert found(objects, 3) == NEW[:3], number
        compact_remote(writing(objects))
        assert (found(objects, 3), objects.entries()) == (NEW[:3], [])


def test_a_snapshot_that_does_not_read_back_removes_nothing():
    """A place that loses what it is given."""
    objects = filled()
    objects.on_the_way = lambda path, data: data[:100] if "snapshot" in path else data
    with pytest.raises(StoreError, match="nothing is removed"):
        compact_remote(writing(objects))
    objects.on_the_way = lambda path, data: data
    assert found(objects) == NEW


def test_damaged_objects_stay_where_they_are():
    """They are counted, and nothing else is touched."""
    objects = filled()
    path = objects.entries()[0]
    objects.data[path] = b"damaged"
    (folded,) = compact_remote(writing(objects))
    assert folded.damaged == 1
    assert objects.entries() == [path]
    assert found(objects)[1:] == NEW[1:]


def test_signed_entries_are_folded_with_the_key_alone():
    """Without it a forged entry could take the place of a right one; without a key unsigned ones are folded."""
    with pytest.raises(StoreError, match="EJKERNEL_OPS_REMOTE_KEY"):
        compact_remote(writing(filled(), key=""))
    objects = filled(key="")
    compact_remote(writing(objects, key=""))
    assert found(objects) == NEW


def test_a_forged_entry_does_not_outlive_a_fold():
    """With the key the signed entry is kept, whatever the forged one counts."""
    objects = filled()
    forged = writing(objects, key="")
    for _ in range(3):
        forged.keep(key_of_call(0), StoredEntry("forged"))
    compact_remote(writing(objects))
    assert found(objects) == NEW


def test_a_fold_needs_a_store_for_writing():
    """As every write does."""
    with pytest.raises(StoreError, match="read-only"):
        compact_remote(remote(filled()))
