"""The compiler's caches in a remote: files of a folder, each signed, since executables are code. No JAX here.

JAX keeps compiled programs in its compilation cache, and XLA the results of its own measurements in a folder below.
Both are plain files that are written once: they are pushed and pulled as they are, and only with a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass

from ...core.errors import SettingError
from .. import files
from .exchange import What
from .remote_store import RemoteStore, in_parallel
from .signing import Signer

FOLDER = "compiler"
# The compiled program of a large model takes some hundred megabytes.
_LARGEST = 1 << 30
_LARGEST_HEADER = 4096
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})")
# Part of a path that JAX and XLA make; nothing that leads out of the folder.
_PART = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")
_DEEPEST = 4
# Times of use, locks and half-written files are this machine's own.
_OWN = ("-atime", ".lock", ".lockfile", ".tmp")


@dataclass(frozen=True)
class FileChange:
    """One file of an exchange: what becomes of it, and why."""

    what: What
    path: str
    why: str
    way: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.way} {self.what:<8} {self.path}: {self.why}"


def push_files(folder: str, remote: RemoteStore, *, dry_run: bool = False) -> list[FileChange]:
    """Brings the files of the compiler's caches to a remote."""
    remote.refuse_unless_written()
    signer = _signer(remote)
    there = set(remote.objects.names(FOLDER))
    changes, wanted = [], []
    for path in local_files(folder):
        try:
            content = files.read(os.path.join(folder, path), _LARGEST)
        # No other machine would read it either.
        except files.TooLargeError:
            continue
        if content is None or not content.data:
            continue
        name = _object_name(path, content.data)
        if name in there:
            changes.append(FileChange("kept", path, "it is there", "push"))
            continue
        changes.append(FileChange("added", path, "not there yet", "push"))
        wanted.append((path, name))

    def write(pair: tuple[str, str]) -> None:
        content = files.read(os.path.join(folder, pair[0]), _LARGEST)
        # The compiler's cache may have removed it meanwhile.
        if content is not None and _object_name(pair[0], content.data) == pair[1]:
            remote.objects.write(f"{FOLDER}/{pair[1]}", _packed(pair[0], content.data, signer))

    if not dry_run:
        in_parallel(write, wanted)
    return changes


def pull_files(folder: str, remote: RemoteStore, *, dry_run: bool = False) -> list[FileChange]:
    """Brings the signed files of a remote into the folder of the compiler's caches; what is there stays."""
    signer = _signer(remote)
    here = {_hash(path.encode()): path for path in local_files(folder)}
    names = [name for name in remote.objects.names(FOLDER) if _NAME.fullmatch(name)]
    missing = [name for name in names if name[:32] not in here]
    changes = [FileChange("kept", here[name[:32]], "it is here", "pull") for name in names if name[:32] in here]

    def read(name: str) -> FileChange:
        data = remote.objects.read(f"{FOLDER}/{name}", _LARGEST + _LARGEST_HEADER)
        found = None if data is None else _unpacked(name, data, signer)
        if found is None:
            return FileChange("refused", name, "not signed with this key, or damaged", "pull")
        path, content = found
        if not dry_run:
            target = os.path.join(folder, path)
            files.make_folder(os.path.dirname(target))
            files.write(target, content, durable=False)
        return FileChange("added", path, "not here yet, and signed", "pull")

    return sorted([*changes, *in_parallel(read, missing)], key=lambda change: change.path)


def local_files(folder: str) -> list[str]:
    """The files of the compiler's caches below a folder, as relative paths; links are left out."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _PART.fullmatch(name)]
        for name in names:
            whole = os.path.join(place, name)
            path = os.path.relpath(whole, folder)
            if _is_safe(path) and not name.endswith(_OWN) and os.path.isfile(whole) and not os.path.islink(whole):
                found.append(path)
    return sorted(found)


def _signer(remote: RemoteStore) -> Signer:
    if remote.signer is None:
        raise SettingError(
            "the compiler's caches hold executables, which are exchanged only when they are signed; "
            "set EJKERNEL_OPS_REMOTE_KEY to the team's key, file:PATH or command:COMMAND"
        )
    return remote.signer


def _is_safe(path: str) -> bool:
    parts = path.split("/")
    return len(parts) <= _DEEPEST and all(_PART.fullmatch(part) for part in parts)


def _object_name(path: str, data: bytes) -> str:
    return f"{_hash(path.encode())}.{_hash(data)}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _header(path: str, data: bytes) -> dict[str, object]:
    return {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _signed_text(header: dict[str, object]) -> bytes:
    return json.dumps(["ejkernel compiler file", header], sort_keys=True).encode()


def _packed(path: str, data: bytes, signer: Signer) -> bytes:
    header = _header(path, data)
    return json.dumps({**header, "signature": signer.sign(_signed_text(header))}).encode() + b"\n" + data


def _unpacked(name: str, data: bytes, signer: Signer) -> tuple[str, bytes] | None:
    """Path and content of an object; None unless its signature covers both."""
    first, found, content = data.partition(b"\n")
    if not found or len(first) > _LARGEST_HEADER:
        return None
    try:
        said = json.loads(first)
    except (ValueError, RecursionError):
        return None
    path = said.get("path") if isinstance(said, dict) else None
    if not isinstance(path, str) or not isinstance(said.get("signature"), str):
        return None
    header = _header(path, content)
    whole = _is_safe(path) and _object_name(path, content) == name
    return (path, content) if whole and signer.verify(_signed_text(header), said["signature"]) else None
