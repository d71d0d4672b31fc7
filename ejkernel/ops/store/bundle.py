"""Lock files and packs, which travel between machines: sorted JSON, one sealed entry a line. No JAX here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core import codec
from ..core.errors import ConfigTypeError, MissingExtraError, RecordFormatError, StoreError
from ..core.key import Key
from . import files
from .remote import url_files
from .remote.objects import is_url
from .snapshot import Raw, is_entry, is_whole, line, read_key, seal, spell
from .store import StoredEntry

BundleKind = Literal["lock", "pack"]

FORMAT = 1
# Far above any real file; a larger one is not read at all.
LARGEST = 64 << 20


@dataclass(frozen=True)
class Bundle:
    """Content of a lock file or a pack: entries by key, and the description in its last line."""

    entries: Mapping[Key, StoredEntry]
    about: Mapping[str, Any]
    # The hash of every entry's content; equal bundles have equal ones.
    digest: str


def write(kind: BundleKind, entries: Mapping[Key, StoredEntry], about: Mapping[str, Any]) -> str:
    """The text of a file with these entries."""
    sealed = {spell(key): seal(spell(key), _dump(key, entry)) for key, entry in entries.items()}
    lines = [line(name, sealed[name]) for name in sorted(sealed)]
    # A lock has no sum of all its lines: two branches that change it must merge line by line.
    whole = {"entries": len(lines), "sha256": _digest(sealed)} if kind == "pack" else {}
    last = codec.dumps({"format": FORMAT, **about, **whole})
    return "\n".join(["{", *lines, f'"~{kind}": {last}', "}", ""])


def save(
    kind: BundleKind, path: str | os.PathLike[str], entries: Mapping[Key, StoredEntry], about: Mapping[str, Any]
) -> str:
    """Writes a lock file or a pack, over an older one of its kind and over nothing else; returns its path."""
    where = url_files.located(path)
    text = write(kind, entries, about)
    if is_url(where):
        _refuse_other(kind, where, url_files.read(where, LARGEST))
        url_files.write(where, text.encode())
        return where
    # A link of one's own stays: the file that it points to is replaced.
    target = files.resolved(where)
    _refuse_other(kind, where, files.read(target, LARGEST))
    files.make_folder(os.path.dirname(target))
    files.write(target, text.encode(), durable=False)
    return where


def _refuse_other(kind: BundleKind, where: str, there: files.Content | None) -> None:
    # A damaged file of its kind may be replaced as well; a store, a result or any other file may not.
    if there is not None and there.data.strip() and f'"~{kind}"'.encode() not in there.data:
        raise StoreError(f"{where} exists and is no {kind}; give another path, or remove it")


def read_in_haste(kind: BundleKind, path: str) -> Bundle:
    """Reads a file behind a URL for a program at work, which waits two seconds in all for such files."""
    return _read(kind, path, hasty=True)


def read(kind: BundleKind, path: str) -> Bundle:
    """Reads a lock file or a pack, on disk or at a URL; a RecordFormatError says what is wrong with it.

    People review and edit a lock, so a line of it may have no checksum; a pack is as it was made.
    """
    return _read(kind, path)


def _read(kind: BundleKind, path: str, *, hasty: bool = False) -> Bundle:
    edited = kind == "lock"
    try:
        # Installed files are often links.
        content = content_of(path, hasty=hasty)
    except (OSError, MissingExtraError) as error:
        raise RecordFormatError(
            f"the {kind} {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if content is None:
        raise RecordFormatError(f"the {kind} {path} does not exist")
    if not content.data:
        raise RecordFormatError(f"the {kind} {path} is empty")
    data = _parse(path, content.data)
    about = data.pop(f"~{kind}", None)
    if not isinstance(about, dict):
        other = next((name[1:] for name in data if name in ("~lock", "~pack", "~format")), None)
        what = {None: "some other JSON", "format": "a store's own file"}.get(other, f"a {other}")
        raise RecordFormatError(f"{path} is no {kind}, but {what}: its last line is not ~{kind}")
    if about.get("format") != FORMAT:
        raise RecordFormatError(
            f"{path} has format {str(about.get('format'))[:20]}, and this version reads format {FORMAT}; "
            f"use the version of ejkernel-ops that wrote it, or make the {kind} again"
        )
    for name, raw in data.items():
        _check_line(path, name, raw, edited=edited)
    if not edited and (about.get("entries") != len(data) or about.get("sha256") != _digest(data)):
        raise RecordFormatError(
            f"{path} does not fit its checksum: it was made with {str(about.get('entries'))[:20]} entries and holds "
            f"{len(data)}; make it again"
        )
    entries = {read_key(name): StoredEntry.of(raw, raw["cfg"], trusted=False) for name, raw in data.items()}
    return Bundle(entries, about, _digest(data))


def content_of(path: str, *, hasty: bool = False) -> files.Content | None:
    """Content of a file, or of the file behind a URL; None where there is none."""
    if is_url(path):
        return url_files.read(path, LARGEST, hasty=hasty)
    return files.read(files.resolved(path), LARGEST)


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        found = codec.loads(data)
    # A ValueError also for bytes that are no text.
    except ValueError as error:
        raise RecordFormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise RecordFormatError(f"{path} holds a {type(found).__name__}, not an object of entries")
    return found


def _check_line(path: str, name: str, raw: Any, *, edited: bool) -> None:
    if not is_entry(name, raw):
        raise RecordFormatError(f"{path}: {name[:80]!r} is no entry; one is 'device|op@vN|call': {{\"cfg\": ...}}")
    if not is_whole(name, raw) or not (edited or "sha256" in raw):
        hint = 'a line that you edit is yours without its "sha256"' if edited else "make it again"
        raise RecordFormatError(f"{path}: the entry {name} does not fit its checksum; {hint}")


def _dump(key: Key, entry: StoredEntry) -> dict[str, Any]:
    try:
        cfg = codec.encode(entry.cfg)
    except ConfigTypeError as error:
        raise ConfigTypeError(f"the cfg of {key} cannot be written as JSON: {error}") from error
    found = {
        "cfg": cfg,
        "call": dict(entry.call),
        "source": entry.source,
        "objective": entry.objective,
        "environment": dict(entry.environment),
        "when": entry.when,
        "by": entry.by,
        "summary": codec.encode(dict(entry.summary)),
    }
    return {name: value for name, value in found.items() if name == "cfg" or value}


def _digest(sealed: Mapping[str, Raw]) -> str:
    text = json.dumps([[name, sealed[name]] for name in sorted(sealed)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
