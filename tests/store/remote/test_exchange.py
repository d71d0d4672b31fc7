"""Push and pull: what changes and why, what is refused, and that a dry run changes nothing."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from fakes_remote import OTHER_SECRET, MemoryObjects, key_of_call, remote, writing

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store.layered import MemoryStore
from ejkernel.ops.store.remote import layout
from ejkernel.ops.store.remote.exchange import pull, push
from ejkernel.ops.store.remote.layout import dumped
from ejkernel.ops.store.store import StoredEntry

HERE = {"jaxlib": "0.12"}


def raw(cfg, *, when="2026-01-02", seconds=1.0, name="one"):
    """An entry as it lies in a store's file."""
    entry = StoredEntry(cfg, HERE, "autotune", "forward", when, "ejkernel-ops 0.1.0", {"seconds": seconds})
    return dumped(key_of_call(name), entry)


def local(**entries):
    """The entries of a local store."""
    return {key_of_call(name): entry for name, entry in entries.items()}


def everything(key, raw):
    """No filter."""
    return True


def told(changes):
    """Each change in short."""
    return [(change.what, change.key.call_key) for change in changes]


def test_a_push_brings_what_is_not_there():
    """Signed, with its origin; a second one finds the same cfg."""
    objects = MemoryObjects()
    mine = local(one=raw(1), two=raw(2))
    changes = push(mine, writing(objects), fits=everything)
    assert told(changes) == [("added", "one"), ("added", "two")]
    found = remote(objects).lookup(key_of_call("two"))
    assert (found.cfg, found.trusted, found.when, found.summary) == (2, True, "2026-01-02", {"seconds": 1.0})
    again = push(mine, writing(objects), fits=everything)
    assert told(again) == [("kept", "one"), ("kept", "two")]
    assert len(objects.entries()) == 2


def test_many_puts_at_once_write_the_mark_once():
    """A place may refuse a second object of one name."""

    class Meeting(MemoryObjects):
        """Two that look for the mark at once both see that there is none."""

        met = threading.Barrier(2)

        def names(self, folder):
            found = super().names(folder)
            if folder == "" and layout.MARK not in found:
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.met.wait(0.5)
            return found

    objects = Meeting()
    push(local(one=raw(1), two=raw(2), six=raw(6)), writing(objects), fits=everything)
    assert len(objects.entries()) == 3


def test_the_newer_or_the_faster_entry_wins_and_the_change_says_why():
    """By date, or by the time that was measured."""
    objects = MemoryObjects()
    push(local(one=raw(1)), writing(objects), fits=everything)
    (older,) = push(local(one=raw(2, when="2026-01-01")), writing(objects), fits=everything)
    assert (older.what, older.why) == ("kept", "the entry there is newer: 2026-01-02")
    (faster,) = push(
        local(one=raw(2, when="2026-01-01", seconds=0.5)), writing(objects), fits=everything, prefer="fastest"
    )
    assert (faster.what, faster.why) == ("replaced", "faster: 500 ms instead of 1 s")
    (newer,) = push(local(one=raw(3, when="2026-02-01")), writing(objects), fits=everything)
    assert (newer.what, newer.why) == ("replaced", "newer: 2026-02-01 after 2026-01-01")
    assert remote(objects).get(*key_of_call("one")) == 3


def test_filters_and_dry_runs():
    """What does not fit is not named; a dry run says the same and writes nothing."""
    objects = MemoryObjects()
    mine = local(one=raw(1), two=raw(2))
    changes = push(mine, writing(objects), fits=lambda key, raw: raw["cfg"] == 2, dry_run=True)
    assert told(changes) == [("added", "two")]
    assert objects.verbs("write") == []
    push(mine, writing(objects), fits=everything)
    into = MemoryStore()
    assert told(pull({}, into, remote(objects), fits=everything, dry_run=True)) == [("added", "one"), ("added", "two")]
    assert into.keys() == []


def test_a_push_signs_what_was_not_signed():
    """An unsigned entry of the same cfg is replaced by a signed one."""
    objects = MemoryObjects()
    push(local(one=raw(1)), writing(objects, key=""), fits=everything)
    (change,) = push(local(one=raw(1)), writing(objects), fits=everything)
    assert (change.what, change.why) == ("replaced", "the entry there is not signed")
    assert remote(objects).lookup(key_of_call("one")).trusted is True


def test_a_pull_takes_signed_entries():
    """They are the user's own from then on, with their origin."""
    objects, into = MemoryObjects(), MemoryStore()
    push(local(one=raw(1)), writing(objects), fits=everything)
    (change,) = pull({}, into, remote(objects), fits=everything)
    assert (change.what, change.why) == ("added", "not there yet")
    kept = into.lookup(key_of_call("one"))
    assert (kept.cfg, kept.trusted, kept.source) == (1, True, "autotune")


@pytest.mark.parametrize(
    ("writes", "reads", "why"),
    [
        ("", None, "not signed"),
        (OTHER_SECRET, None, "its signature is wrong"),
        (OTHER_SECRET, "", "signed, and no key is given here"),
    ],
)
def test_a_pull_refuses_what_is_not_signed_with_the_key(writes, reads, why):
    """In a local store it would be believed without a measurement."""
    objects, into = MemoryObjects(), MemoryStore()
    push(local(one=raw(1)), writing(objects, key=writes), fits=everything)
    (change,) = pull({}, into, remote(objects, **({} if reads is None else {"key": reads})), fits=everything)
    assert change.what == "refused"
    assert why in change.why
    assert into.keys() == []


def test_another_users_entry_is_not_signed():
    """A shared folder may hold entries of other users, which a signature would make believed."""
    objects = MemoryObjects()
    (change,) = push(local(one={**raw(1), "owner": os.getuid() + 1}), writing(objects), fits=everything)
    assert (change.what, change.why) == ("refused", "another user put it here; let that user push it")
    assert objects.entries() == []


def test_a_push_needs_a_store_for_writing():
    """As every write does."""
    with pytest.raises(StoreError, match="read-only"):
        push(local(one=raw(1)), remote(MemoryObjects()), fits=everything)
