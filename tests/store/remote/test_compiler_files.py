"""The compiler's caches in a remote: signed files alone, and no path that leads out of the folder."""

from __future__ import annotations

import json
import os

import pytest
from fakes_remote import OTHER_SECRET, MemoryObjects, remote, writing

from ejkernel.ops.core.errors import SettingError
from ejkernel.ops.store.remote import compiler_files
from ejkernel.ops.store.remote.compiler_files import local_files, pull_files, push_files

FILES = {"jit_step-0a1b-cache": b"\x00program\n\xff", "xla_gpu_per_fusion_autotune_cache_dir/9f.textproto": b"results"}


@pytest.fixture
def filled(tmp_path):
    """A folder as JAX and XLA fill it, with what is this machine's own beside it."""
    folder = tmp_path / "jax"
    others = {"jit_step-0a1b-atime": b"1", ".lockfile": b"", "x.tmp": b"half"}
    for name, data in {**FILES, **others}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "linked-cache").symlink_to("/etc/hostname")
    return folder


def content(folder):
    """The files of a folder."""
    return {path: (folder / path).read_bytes() for path in local_files(str(folder))}


def test_files_go_there_and_come_back_as_they_were(filled, tmp_path):
    """Times of use, locks, half files and links stay behind; a second exchange changes nothing."""
    objects, other = MemoryObjects(), tmp_path / "other"
    pushed = push_files(str(filled), writing(objects))
    assert [(change.what, change.path) for change in pushed] == [("added", path) for path in sorted(FILES)]
    pulled = pull_files(str(other), remote(objects))
    assert [change.what for change in pulled] == ["added", "added"]
    assert content(other) == FILES
    assert {change.what for change in pull_files(str(other), remote(objects))} == {"kept"}
    assert {change.what for change in push_files(str(other), writing(objects))} == {"kept"}


def test_nothing_is_exchanged_without_a_key(filled, tmp_path):
    """Executables are code: the error says which setting to use."""
    for exchange in (push_files, pull_files):
        with pytest.raises(SettingError, match="EJKERNEL_OPS_REMOTE_KEY"):
            exchange(str(filled), writing(MemoryObjects(), key=""))


def test_a_file_with_a_wrong_signature_is_refused(filled, tmp_path):
    """Signed with another key, changed by a byte, cut, or with another path: nothing is written."""
    objects = MemoryObjects()
    push_files(str(filled), writing(objects, key=OTHER_SECRET))
    assert {change.what for change in pull_files(str(tmp_path / "a"), remote(objects))} == {"refused"}
    objects = MemoryObjects()
    push_files(str(filled), writing(objects))
    whole = dict(objects.data)
    for number, change in enumerate(
        [
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            lambda data: data[:-3],
            lambda data: data.replace(b"jit_step", b"jit_evil").replace(b"9f.", b"8f."),
            lambda data: b"",
            lambda data: b"{}\n" + data,
            lambda data: b"[" * 3000 + b"\n",
        ]
    ):
        objects.data = {path: change(data) for path, data in whole.items()}
        folder = tmp_path / f"b{number}"
        assert {found.what for found in pull_files(str(folder), remote(objects))} == {"refused"}
        assert not folder.exists()


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", ".ssh/keys", "a/b/c/d/e", "", "a//b", "a\0b"])
def test_a_path_that_leads_elsewhere_is_refused_even_when_signed(tmp_path, path):
    """A signature does not change that."""
    objects = MemoryObjects()
    store = writing(objects)
    data = compiler_files._packed(path, b"code", store.signer)
    objects.data[f"compiler/{compiler_files._object_name(path, b'code')}"] = data
    folder = tmp_path / "jax"
    folder.mkdir()
    assert [found.what for found in pull_files(str(folder), store)] == ["refused"]
    assert list(folder.iterdir()) == []
    assert os.listdir(tmp_path) == ["jax"]


def test_a_file_that_is_here_stays(filled, tmp_path):
    """What this machine compiled is not replaced, whatever the remote has under its name."""
    objects = MemoryObjects()
    push_files(str(filled), writing(objects))
    (filled / "jit_step-0a1b-cache").write_bytes(b"mine")
    assert {found.what for found in pull_files(str(filled), remote(objects))} == {"kept"}
    assert (filled / "jit_step-0a1b-cache").read_bytes() == b"mine"


def test_the_header_names_path_hash_and_size(filled):
    """So that a person can see what lies there."""
    objects = MemoryObjects()
    push_files(str(filled), writing(objects))
    heads = [json.loads(data.split(b"\n", 1)[0]) for path, data in objects.data.items() if path.startswith("compiler/")]
    assert {head["path"]: head["size"] for head in heads} == {path: len(data) for path, data in FILES.items()}
