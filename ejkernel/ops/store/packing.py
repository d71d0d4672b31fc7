"""Makes packs from a store by device and operation, merges packs, and checks them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .._version import __version__
from ..core.errors import ConfigTypeError, RecordFormatError, SettingError
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.request import ask, revived, vetted
from . import bundle
from .layered import MemoryStore
from .maintenance import Merged, Prefer, merge
from .packs import Pack, read_pack
from .persistent import PersistentCache
from .remote.url_files import located
from .store import Store, StoredEntry

KernelCall = tuple[Kernel[Any, Any], Invocation[Any, Any]]


def make_pack(
    path: str | os.PathLike[str],
    store: Store | str | os.PathLike[str],
    *,
    name: str = "",
    device: str | None = None,
    ops: Sequence[str] | None = None,
) -> Pack:
    """Writes the entries of a store, or of a store's file, to a pack: those of a device and of these operations.

    An operation is named with or without its version, and `*` stands for anything: `matmul`, `matmul@v2`, `library.*`.
    """
    source = _opened(store)
    if isinstance(ops, str):
        raise SettingError(f"ops={ops!r} is one name; give a sequence of them, such as [{ops!r}]")
    entries = {}
    for key in map(Key._make, source.keys()):
        names = key.op_id, key.op_id.partition("@v")[0]
        fits = ops is None or any(fnmatch.fnmatchcase(name, wanted) for wanted in ops for name in names)
        entry = source.lookup(key) if fits and device in (None, key.device) else None
        if entry is not None:
            entries[key] = entry
    if not entries:
        held = sorted({f"{op_id} on {where}" for where, op_id, _ in source.keys()})[:6]
        raise SettingError(
            f"no entry of {source} fits device={device!r}, ops={ops!r}; it holds {', '.join(held) or 'nothing'}"
        )
    return _written(path, entries, name)


def merge_packs(
    path: str | os.PathLike[str], *packs: str | os.PathLike[str], name: str = "", prefer: Prefer = "newest"
) -> Merged:
    """Writes one pack of several; where two differ on a call the newer or the faster entry wins, else the first."""
    if not packs:
        raise SettingError("merge_packs needs packs to merge: merge_packs(path, first, second, ...)")
    into = MemoryStore()
    done = [merge(into, read_pack(pack), prefer) for pack in packs]
    found = {key: into.lookup(key) for key in map(Key._make, into.keys())}
    _written(path, {key: entry for key, entry in found.items() if entry is not None}, name)
    conflicts = dict.fromkeys(key for merged in done for key in merged.conflicts)
    return Merged(sum(m.added for m in done), sum(m.replaced for m in done), tuple(conflicts))


def _opened(store: Any) -> Store:
    if isinstance(store, Store):
        return store
    if not os.path.isfile(store):
        raise SettingError(f"{os.fspath(store)} is not a file; give a store, or the path of a store's JSON file")
    return PersistentCache[Any]("", store, on_fault="raise")


def _written(path: str | os.PathLike[str], entries: Mapping[Key, StoredEntry], name: str) -> Pack:
    about = {
        "name": name or os.path.splitext(os.path.basename(path))[0],
        "by": f"ejkernel-ops {__version__}",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return read_pack(bundle.save("pack", path, entries, about))


@dataclass(frozen=True)
class PackReport:
    """Findings on a pack: its number of entries, its damage, and the cfgs that their kernels refuse."""

    path: str
    entries: int
    # Format or checksum; empty where the file is as it was made.
    damage: str = ""
    # Entries with a cfg that would not run here: not the kernel's type, or none of its candidates.
    refused: tuple[str, ...] = ()
    # Entries that were compared with their kernel's candidates.
    checked: int = 0

    @property
    def is_sound(self) -> bool:
        """Is nothing wrong with it, as far as was checked?"""
        return not self.damage and not self.refused


def verify_pack(path: str | os.PathLike[str], calls: Iterable[KernelCall] = ()) -> PackReport:
    """Checks format and checksums and, for the entries of these calls, that their kernels would accept the cfg.

    `calls` are pairs of a kernel and an invocation, such as a recorded call. Nothing is run, and nothing changed.
    """
    where = located(path)
    try:
        pack = read_pack(where)
    except RecordFormatError as error:
        return PackReport(where, 0, damage=str(error))
    checked, refused = 0, []
    for kernel, inv in calls:
        request = ask(inv, kernel, "forward")
        entry = pack.lookup(request.key)
        if entry is None:
            continue
        checked += 1
        try:
            fits = vetted(request, revived(request, entry.cfg))
            reason = "" if fits else "not among the kernel's candidates"
        except ConfigTypeError as error:
            reason = str(error)
        if reason:
            refused.append(f"{request.key}: {entry.cfg!r}: {reason}")
    return PackReport(where, len(pack.entries), refused=tuple(refused), checked=checked)
