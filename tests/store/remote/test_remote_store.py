"""A remote store: trust, order, limits, and what a wrong or hostile place can do.

Covers `store/remote/layout.py`, `store/remote/objects.py`, `store/remote/setting.py` and `store/remote/writer.py`.
"""

from __future__ import annotations

import json
import threading

import pytest
from fakes_remote import (
    OTHER_SECRET,
    URL,
    MemoryObjects,
    key_of_call,
    patient,
    remote,
    remote_warnings,
    writing,
)

from ejkernel.ops.core.errors import ConfigTypeError, MissingExtraError, SettingError, StoreError
from ejkernel.ops.store.remote import layout
from ejkernel.ops.store.remote.objects import is_url, shown
from ejkernel.ops.store.remote.remote_store import RemoteStore, RemoteWarning
from ejkernel.ops.store.snapshot import key_hash, line, seal, spell
from ejkernel.ops.store.store import StoredEntry

KEY = key_of_call("one")
FOLDER = layout.folder_of(KEY)


def put(objects, cfg, *, at=KEY, **more):
    """One entry, as a writer of the team or another one puts it."""
    writing(objects, **more).keep(at, StoredEntry(cfg, {"jaxlib": "0.12"}))


def planted(objects, cfg, *, seq=1, **fields):
    """An entry that a hostile writer made by hand: whole, with any count and any signature."""
    name = spell(KEY)
    raw = seal(name, {"cfg": cfg, "when": "2099-01-01", "seq": seq, "writer": "f" * 16, **fields})
    objects.data[f"{FOLDER}/{key_hash(name)}.{seq}.{'f' * 16}.json"] = line(name, raw).encode()


# Trust.


def test_a_signed_entry_is_trusted():
    """With the same key on both sides."""
    objects = MemoryObjects()
    put(objects, 1)
    assert remote(objects).lookup(KEY).trusted is True


@pytest.mark.parametrize(("writes", "reads"), [("", ""), ("", None), (OTHER_SECRET, None), (None, "")])
def test_an_entry_without_a_right_signature_is_not_trusted(writes, reads):
    """Unsigned, signed with another key, or read without one."""
    objects = MemoryObjects()
    put(objects, 1, **({} if writes is None else {"key": writes}))
    found = remote(objects, **({} if reads is None else {"key": reads})).lookup(KEY)
    assert (found.cfg, found.trusted) == (1, False)


def test_a_signed_entry_comes_before_any_other():
    """Whatever count and time a hostile entry claims, in an object of its own or in a snapshot."""
    objects = MemoryObjects()
    put(objects, "right")
    for seq in (5, *range(10**9, 10**9 + 20), 10**12 - 1, 10**12, 10**14):
        planted(objects, "wrong", seq=seq, signature="hmac-sha256:" + "0" * 64)
    found = remote(objects).lookup(KEY)
    assert (found.cfg, found.trusted) == ("right", True)
    put(objects, "newer")
    assert remote(objects).lookup(KEY).cfg == "newer"


def test_a_signed_entry_of_another_call_is_not_trusted_here():
    """An entry that was moved to another name, or whose key was changed, is not what was signed."""
    objects = MemoryObjects()
    put(objects, 1, at=key_of_call("other"))
    (path,) = objects.entries()
    name = spell(KEY)
    raw = json.loads("{" + objects.data[path].decode().rstrip(",") + "}")[spell(key_of_call("other"))]
    objects.data = {f"{FOLDER}/{key_hash(name)}.1.{'0' * 16}.json": line(name, seal(name, raw)).encode()}
    assert remote(objects).lookup(KEY).trusted is False
    objects.data = {f"{FOLDER}/{key_hash(name)}.1.{'0' * 16}.json": line(spell(key_of_call("other")), raw).encode()}
    assert remote(objects).lookup(KEY) is None


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b'"a|b|c": 1,', b"[" * 100_000, b'"a|b|c": {"cfg": NaN},', b"x" * (1 << 21)],
    ids=lambda text: repr(text[:12]),
)
def test_an_object_that_no_writer_made_is_passed_over(text):
    """Empty, cut, no text, too deep or too large: as if it were not there, and the others count."""
    objects = MemoryObjects()
    objects.data[f"{FOLDER}/{key_hash(spell(KEY))}.9.{'0' * 16}.json"] = text
    assert remote(objects).lookup(KEY) is None
    put(objects, "right")
    assert remote(objects).lookup(KEY).cfg == "right"


def test_many_hostile_entries_of_one_key_cost_a_few_reads():
    """Their number does not matter."""
    objects = MemoryObjects()
    for number in range(1000):
        planted(objects, "wrong", seq=1000 + number)
    store = remote(objects)
    assert store.lookup(KEY).trusted is False
    assert len(objects.verbs("read")) < 12


def test_names_in_a_listing_never_become_paths():
    """What is read is named after the key, whatever the place lists."""
    objects = MemoryObjects()
    put(objects, 1)
    objects.listed = lambda folder, names: [*names, "../../etc/passwd", "..", "/etc/passwd", "", "\0", "x" * 5000]
    assert remote(objects).lookup(KEY).cfg == 1
    assert not [path for path in objects.verbs("read") if "etc" in path or ".." in path]


# Reading.


def test_one_listing_serves_all_calls_of_an_operation():
    """A second missing call asks nothing; another operation lists its own folder."""
    objects = MemoryObjects()
    store = remote(objects, fresh_seconds=300.0)
    put(objects, 1)
    objects.log.clear()
    for name in ("one", "two", "three", "two"):
        store.lookup(key_of_call(name))
    assert objects.verbs("names") == [FOLDER]
    assert len(objects.verbs("read")) == 1
    store.lookup(key_of_call("one", op_id="norm@v1"))
    assert len(objects.verbs("names")) == 2


def test_processes_of_a_machine_share_a_listing():
    """A second store of this user finds the first one's listing, until something is written there."""
    objects = MemoryObjects()
    put(objects, 1)
    remote(objects, fresh_seconds=300.0).lookup(KEY)
    objects.log.clear()
    assert remote(objects, fresh_seconds=300.0).lookup(KEY).cfg == 1
    assert objects.verbs("names") == []
    put(objects, 2, fresh_seconds=300.0)
    assert remote(objects, fresh_seconds=300.0).lookup(KEY).cfg == 2


def test_an_entry_that_was_folded_since_the_listing_is_found():
    """The object that is gone sends the reader to a new listing."""
    from ejkernel.ops.store.remote.folding import compact_remote

    objects = MemoryObjects()
    put(objects, 1)
    store = remote(objects, fresh_seconds=300.0)
    store.lookup(key_of_call("missing"))
    compact_remote(writing(objects))
    assert store.lookup(KEY).cfg == 1


def test_a_listing_of_the_past_gives_an_older_entry_or_none():
    """A place that shows what was there before costs time; nothing else."""
    objects = MemoryObjects()
    put(objects, 1)
    before = list(objects.data)
    put(objects, 2)
    objects.listed = lambda folder, names: [n for n in names if any(p.endswith(n) for p in before) or not folder]
    assert remote(objects).lookup(KEY).cfg == 1
    objects.listed = lambda folder, names: []
    with remote_warnings() as said:
        assert remote(objects).lookup(KEY) is None
    assert said == []


# Limits.


def test_a_dead_remote_is_named_once_and_answers_none():
    """The calls behind the first ones wait for nothing."""
    objects, said = MemoryObjects(), []
    objects.before = lambda verb, path: threading.Event().wait(30)
    store = remote(objects, patience=patient(said, seconds=0.2))
    assert [store.lookup(key_of_call(number)) for number in range(20)] == [None] * 20
    assert len(said) == 1
    assert len(objects.log) == 1
    assert "did not answer" in store.reason


def test_a_remote_that_refuses_is_left_out_after_a_few_tries():
    """Each failure is one miss, and three are enough."""
    objects = MemoryObjects()

    def refuse(verb, path):
        raise ConnectionRefusedError("connection refused")

    objects.before = refuse
    store = remote(objects)
    with remote_warnings() as said:
        assert [store.lookup(key_of_call(number)) for number in range(20)] == [None] * 20
    assert len(objects.log) == 3
    assert any("left out for a while" in text and "refused" in text for text in said)


def test_a_place_that_holds_something_else_is_said_in_one_sentence():
    """Files without the mark of a remote; an empty place is none of that."""
    objects = MemoryObjects()
    objects.data["index.html"] = b"<html>"
    with remote_warnings() as said:
        assert remote(objects).lookup(KEY) is None
    assert len(said) == 1
    assert "holds something else" in said[0]
    with remote_warnings() as said:
        assert remote(MemoryObjects()).lookup(KEY) is None
    assert said == []


def test_a_bucket_that_does_not_exist_is_said_in_one_sentence():
    """As the driver says it."""
    objects = MemoryObjects()
    objects.unusable = "there is no bucket team"
    store = remote(objects)
    with remote_warnings() as said:
        assert [store.lookup(key_of_call(number)) for number in range(3)] == [None] * 3
    assert len(said) == 1
    assert "there is no bucket team" in said[0]


def test_a_remote_of_a_newer_version_is_left_alone():
    """Neither read nor written."""
    objects = MemoryObjects()
    objects.data[layout.MARK] = b'{"format": 9}'
    with remote_warnings() as said:
        assert remote(objects).lookup(KEY) is None
    assert "newer version" in said[0]
    with pytest.raises(StoreError, match="newer version"):
        put(objects, 1)


@pytest.mark.parametrize("mark", [b"[" * 100_000, b'{"format": 1e999}', b'{"format": {}}', b"\xff"], ids=len)
def test_a_remote_with_a_mark_that_no_writer_makes_is_left_alone(mark):
    """One warning says so; neither the look-up nor the put ends in anything else."""
    objects = MemoryObjects()
    objects.data[layout.MARK] = mark
    with remote_warnings() as said:
        assert remote(objects).lookup(KEY) is None
    assert "cannot be read" in said[0]
    with pytest.raises(StoreError, match="cannot be read"):
        put(objects, 1)


# Writing.


def test_a_remote_is_read_only_unless_told():
    """A put says how to write."""
    with pytest.raises(StoreError, match="EJKERNEL_OPS_REMOTE_WRITE"):
        remote(MemoryObjects()).put(*KEY, 1)
    with pytest.raises(StoreError, match="read-only"):
        remote(MemoryObjects()).keep_later(KEY, StoredEntry(1))


def test_a_failed_write_is_the_writers_error_and_leaves_nothing():
    """A full place: the put raises, and the store does not believe that it has the entry."""
    objects = MemoryObjects()
    store = writing(objects)
    store.put(*KEY, 1)

    def full(verb, path):
        if verb == "write":
            raise OSError("no space left")

    objects.before = full
    with pytest.raises(OSError, match="no space"):
        store.put(*KEY, 2)
    objects.before = lambda verb, path: None
    assert store.get(*KEY) == 1


def test_a_cfg_without_json_or_too_large_is_an_error_of_the_put():
    """Nothing is written."""
    objects = MemoryObjects()
    for cfg in (object(), "x" * (1 << 20)):
        with pytest.raises(ConfigTypeError):
            put(objects, cfg)
    assert objects.entries() == []


def test_writes_in_the_background_arrive():
    """`keep_later` returns at once; `flush` waits for them."""
    objects, gate = MemoryObjects(), threading.Event()
    store = writing(objects)
    objects.before = lambda verb, path: gate.wait(60)
    for number in range(5):
        store.keep_later(key_of_call(number), StoredEntry(number))
    assert store.flush(0.0) == 5
    gate.set()
    assert store.flush(60.0) == 0
    assert [store.get(*key_of_call(number)) for number in range(5)] == list(range(5))


def test_what_the_remote_has_already_is_not_written_again():
    """A thousand machines that measured the same cfg leave one entry; a signed one replaces an unsigned one."""
    objects = MemoryObjects()
    for _ in range(3):
        store = writing(objects, key="")
        store.keep_later(KEY, StoredEntry(1, {"jaxlib": "0.12"}))
        assert store.flush(60.0) == 0
    assert len(objects.entries()) == 1
    store = writing(objects)
    store.keep_later(KEY, StoredEntry(1, {"jaxlib": "0.12"}))
    assert store.flush(60.0) == 0
    assert len(objects.entries()) == 2


def test_a_place_that_takes_no_writes_is_named_once():
    """The program goes on, and the message says how the entries get there later."""
    objects = MemoryObjects()
    store = writing(objects)

    def forbid(verb, path):
        if verb == "write":
            raise PermissionError("access denied")

    objects.before = forbid
    with remote_warnings() as said:
        for number in range(4):
            store.keep_later(key_of_call(number), StoredEntry(number))
            store.flush(60.0)
    assert len(said) == 1
    assert "ejkernel cache push" in said[0]


# URLs.


@pytest.mark.parametrize("url", ["team", "/srv/ejkernel", "C:/cache", "", "://x"])
def test_a_text_that_is_no_url_says_what_one_is(url):
    """Before anything is asked."""
    assert not is_url(url)
    with pytest.raises(SettingError, match="is no URL"):
        RemoteStore(url)


def test_a_missing_driver_is_named_with_its_package(monkeypatch):
    """One sentence at the start and no error; a command gets the error."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ocifs" else name)
    with pytest.warns(RemoteWarning, match="pip install 'ocifs'"):
        store = RemoteStore("oci://bucket/folder")
    assert store.lookup(KEY) is None
    with pytest.raises(MissingExtraError, match="pip install 'ocifs'"):
        RemoteStore("oci://bucket/folder", on_fault="raise")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    """It is the first thing that a user lacks."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ejkernel-ops\[remote\]'"):
        RemoteStore("file:///team", on_fault="raise")


def test_messages_do_not_show_passwords():
    """A URL is shown without its password and its query."""
    assert shown("https://me:secret@host:8443/a/b?token=x") == "https://me@host:8443/a/b"
    assert shown(URL) == URL


def test_an_unknown_setting_is_an_error():
    """`on_fault` has two values."""
    with pytest.raises(SettingError, match="use 'warn' or 'raise'"):
        remote(MemoryObjects(), on_fault="ignore")
