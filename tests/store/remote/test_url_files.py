"""Locks and packs behind URLs: read within a bound, by their hash where the URL has one."""

from __future__ import annotations

import hashlib

import pytest
from fakes_remote import key_of_call

pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")

from ejkernel.ops.core.errors import RecordFormatError, SettingError, StoreError
from ejkernel.ops.store.layered import MemoryStore
from ejkernel.ops.store.lock_file import read_lock, write_lock
from ejkernel.ops.store.packing import make_pack, verify_pack
from ejkernel.ops.store.packs import PackWarning, forget_packs, found_packs, read_pack
from ejkernel.ops.store.store import StoredEntry

KEY = key_of_call("one")


@pytest.fixture
def url(tmp_path):
    """The URL of a pack that was written there."""
    store = MemoryStore()
    store.keep(KEY, StoredEntry({"block": 64}, {"jaxlib": "0.12"}, "autotune"))
    place = f"file://{tmp_path}/team/pack.json"
    assert make_pack(place, store).path == place
    return place


def test_a_pack_is_written_to_a_url_and_read_from_it(url, tmp_path):
    """As a file would be, checks included."""
    assert read_pack(url).lookup(KEY).cfg == {"block": 64}
    assert verify_pack(url).is_sound
    (tmp_path / "team" / "pack.json").write_text("{}")
    assert not verify_pack(url).is_sound


def test_packs_at_urls_are_found_by_the_setting(url):
    """Beside paths; never trusted, and named by their URL."""
    forget_packs()
    (pack,) = found_packs([url])
    assert (pack.lookup(KEY).trusted, str(pack)) == (False, f"pack {url}")


def test_a_pack_that_cannot_be_read_is_named_and_left_out(tmp_path):
    """One warning; nothing else is affected."""
    forget_packs()
    (pack,) = found_packs([f"file://{tmp_path}/missing.json"])
    with pytest.warns(PackWarning, match=r"missing\.json does not exist"):
        assert pack.lookup(KEY) is None


def test_a_lock_may_be_a_url(tmp_path):
    """Written, read, and an error where it is not there."""
    place = f"file://{tmp_path}/step.lock.json"
    write_lock(place, {KEY: StoredEntry({"block": 8})})
    assert read_lock(place)[KEY] == {"block": 8}
    with pytest.raises(RecordFormatError, match="does not exist"):
        read_lock(f"file://{tmp_path}/other.json")


def test_a_hash_behind_the_url_takes_that_very_text(url, tmp_path):
    """A file that was changed since is refused; what stands behind # must be a hash."""
    right = hashlib.sha256((tmp_path / "team" / "pack.json").read_bytes()).hexdigest()
    assert len(read_pack(f"{url}#sha256={right}").keys()) == 1
    with pytest.raises(RecordFormatError, match="another text"):
        read_pack(f"{url}#sha256={'0' * 64}")
    with pytest.raises(SettingError, match="64 hex digits"):
        read_pack(f"{url}#latest")


def test_a_file_of_another_kind_is_not_written_over(url):
    """A pack does not replace a lock at the same URL."""
    with pytest.raises(StoreError, match="is no lock"):
        write_lock(url, {KEY: StoredEntry(1)})


def test_a_driver_that_is_missing_is_named():
    """A lock at such a URL is an error, and a pack a warning."""
    with pytest.raises(RecordFormatError, match="pip install 'ocifs'"):
        read_lock("oci://bucket/step.lock.json")
    forget_packs()
    (pack,) = found_packs(["oci://bucket/pack.json"])
    with pytest.warns(PackWarning, match="pip install 'ocifs'"):
        assert pack.keys() == []
