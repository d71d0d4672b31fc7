"""Folding a remote: the entries of each operation and device merged into one snapshot object. No JAX here.

No lock and no conditional write is needed. A fold writes a snapshot under a name of its own, reads it back, and removes
only objects that it had read and that the snapshot holds. Two folds at once leave two snapshots, and readers merge all
that they list: neither can remove the other's, since each was written after the other one had listed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ...core.errors import StoreError
from ..snapshot import Raw, Snapshot, line, order, read
from . import layout
from .remote_store import RemoteStore, in_parallel


@dataclass(frozen=True)
class Folded:
    """Outcome of a fold of one folder: its entries now, the objects that went, and those that cannot be read."""

    folder: str
    entries: int
    removed: int
    damaged: int


def compact_remote(store: RemoteStore) -> list[Folded]:
    """Folds every folder of a remote; returns what became of each."""
    store.refuse_unless_written()
    return [_fold(store, folder) for folder in store.folders()]


def _fold(store: RemoteStore, folder: str) -> Folded:
    found = layout.Listing.of(store.objects.names(folder))
    names = [name for chain in found.entries.values() for name in chain]
    snapshots = _snapshots(store, folder, found.snapshots)
    objects = dict(zip(names, in_parallel(lambda name: _object(store, folder, name), names), strict=True))
    rows = [(name, row) for name, row in objects.items() if row is not None]
    best = _merged(store, [row for _, snapshot in snapshots for row in snapshot.entries()] + [row for _, row in rows])
    damaged = len(names) - len(rows) + sum(bool(snapshot.damage) for _, snapshot in snapshots)
    if not rows and len(snapshots) < 2:
        return Folded(folder, len(best), 0, damaged)
    merged = Snapshot({name: line(name, raw) for name, raw in best.items()})
    own = f"snapshot.{secrets.token_hex(16)}.json"
    store.objects.write(f"{folder}/{own}", merged.text().encode())
    there = store.objects.read(f"{folder}/{own}", layout.LARGEST_SNAPSHOT)
    held = Snapshot() if there is None else read(there)
    if held.lines != merged.lines:
        raise StoreError(
            f"{store}: the snapshot {folder}/{own} does not read back as it was written; nothing is removed"
        )
    gone = [name for name, _ in rows]
    # One that is damaged may hold more than could be read of it.
    gone += [name for name, snapshot in snapshots if not snapshot.damage]
    in_parallel(lambda name: store.objects.remove(f"{folder}/{name}"), gone)
    store.forget()
    return Folded(folder, len(best), len(gone), damaged)


def _snapshots(store: RemoteStore, folder: str, names: list[str]) -> list[tuple[str, Snapshot]]:
    found = [(name, store.objects.read(f"{folder}/{name}", layout.LARGEST_SNAPSHOT)) for name in names]
    # Another fold that removed one has written its entries elsewhere.
    return [(name, read(data)) for name, data in found if data is not None]


def _object(store: RemoteStore, folder: str, name: str) -> tuple[str, Raw] | None:
    data = store.objects.read(f"{folder}/{name}", layout.LARGEST_OBJECT)
    return None if data is None else layout.opened(name, data)


def _merged(store: RemoteStore, rows: list[tuple[str, Raw]]) -> dict[str, Raw]:
    if store.signer is None and any("signature" in raw for _, raw in rows):
        raise StoreError(
            f"{store} has signed entries, and without the key a fold cannot tell them from forged ones; "
            "set EJKERNEL_OPS_REMOTE_KEY"
        )
    best: dict[str, tuple[bool, Raw]] = {}
    for name, raw in rows:
        new = store.is_trusted(name, raw), raw
        old = best.get(name)
        if old is None or (new[0], order(raw)) > (old[0], order(old[1])):
            best[name] = new
    return {name: raw for name, (_, raw) in best.items()}
