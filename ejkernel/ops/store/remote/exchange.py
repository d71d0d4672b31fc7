"""Bringing entries from a local store to a remote and back: what changes, and why. No JAX here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core import formatting
from ...core.key import Key
from ..maintenance import Prefer
from ..snapshot import Raw
from ..store import Store, StoredEntry
from .layout import folder_of
from .remote_store import RemoteStore, in_parallel

What = Literal["added", "replaced", "kept", "refused"]


@dataclass(frozen=True)
class EntryChange:
    """One entry of an exchange: what becomes of it, and why."""

    what: What
    key: Key
    why: str
    # `push` or `pull`.
    way: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.way} {self.what:<8} {self.key}: {self.why}"


Entries = Mapping[Key, Raw]
Fits = Callable[[Key, Raw], bool]


def push(
    local: Entries, remote: RemoteStore, *, fits: Fits, prefer: Prefer = "newest", dry_run: bool = False
) -> list[EntryChange]:
    """Brings local entries to a remote, signed where it has a key."""
    remote.refuse_unless_written()
    fitting = {key: raw for key, raw in local.items() if fits(key, raw)}
    there = remote_entries(remote, {folder_of(key) for key in fitting})
    changes, wanted = [], []
    for key, raw in sorted(fitting.items(), key=lambda pair: pair[0]):
        other = there.get(key)
        what, why = _judged(raw, None if other is None else other[0], prefer)
        if other is not None and not other[1] and remote.signer is not None:
            what, why = "replaced", "the entry there is not signed"
        if what != "kept" and raw.get("owner", os.getuid()) != os.getuid():
            what, why = "refused", "another user put it here; let that user push it"
        changes.append(EntryChange(what, key, why, "push"))
        if what in ("added", "replaced"):
            wanted.append((key, raw))
    if not dry_run:
        in_parallel(lambda pair: remote.put_raw(pair[0], _plain(pair[1])), wanted)
    return changes


def pull(
    local: Entries, into: Store, remote: RemoteStore, *, fits: Fits, prefer: Prefer = "newest", dry_run: bool = False
) -> list[EntryChange]:
    """Brings the signed entries of a remote into a local store; an unsigned one would be believed there."""
    changes = []
    for key, (raw, trusted) in sorted(remote_entries(remote).items(), key=lambda pair: pair[0]):
        if not fits(key, raw):
            continue
        what, why = _judged(raw, local.get(key), prefer)
        if what != "kept" and not trusted:
            what, why = "refused", _unsigned(raw, remote)
        changes.append(EntryChange(what, key, why, "pull"))
        if what in ("added", "replaced") and not dry_run:
            into.keep(key, StoredEntry.of(raw, raw["cfg"], trusted=True))
    return changes


def remote_entries(remote: RemoteStore, folders: Iterable[str] | None = None) -> dict[Key, tuple[Raw, bool]]:
    """The entries of a remote, or of some of its folders, and whether each is signed."""
    remote.forget()
    found: dict[Key, tuple[Raw, bool]] = {}
    for folder in remote.folders() if folders is None else folders:
        found.update({key: (raw, trusted) for key, raw, trusted in remote.entries(folder)})
    return found


def _unsigned(raw: Raw, remote: RemoteStore) -> str:
    if "signature" not in raw:
        return "not signed: push it again with a key, or let a program with this remote measure it"
    return "signed, and no key is given here" if remote.signer is None else "its signature is wrong"


def _judged(new: Raw, old: Raw | None, prefer: Prefer) -> tuple[What, str]:
    if old is None:
        return "added", "not there yet"
    if all(new.get(name) == old.get(name) for name in ("cfg", "environment", "objective")):
        return "kept", "the same cfg is there"
    if prefer == "fastest":
        mine, theirs = _seconds(new), _seconds(old)
        if mine < theirs:
            return "replaced", f"faster: {formatting.seconds(mine)} instead of {formatting.seconds(theirs)}"
        return "kept", "the entry there is not slower"
    mine_at, theirs_at = str(new.get("when", "")), str(old.get("when", ""))
    if mine_at > theirs_at:
        return "replaced", f"newer: {mine_at or 'no date'} after {theirs_at or 'no date'}"
    return "kept", f"the entry there is newer: {theirs_at or 'no date'}"


def _seconds(raw: Raw) -> float:
    summary = raw.get("summary")
    seconds = summary.get("seconds") if isinstance(summary, dict) else None
    return float(seconds) if isinstance(seconds, (int, float)) else float("inf")


def _plain(raw: Raw) -> dict[str, Any]:
    # Count, writer, owner and checksum belong to the store that it comes from.
    return {name: value for name, value in raw.items() if name not in ("seq", "writer", "owner", "sha256", "signature")}
