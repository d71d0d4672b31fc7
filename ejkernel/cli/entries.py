"""Entries of stores, row by row; reading them changes nothing. No JAX here."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..ops.core.errors import RecordFormatError
from ..ops.core.key import Key
from ..ops.core.record import Record
from ..ops.settings import default_folder
from ..ops.store import files
from ..ops.store.entry_files import entry_in, entry_names
from ..ops.store.entry_log import EntryLog
from ..ops.store.folder import OperationStores
from ..ops.store.persistent import PersistentCache
from ..ops.store.snapshot import Raw, Snapshot, order, read, read_key
from .errors import CommandError
from .parsing import Parser
from .screen import say

# The mark at the end of a store's file.
_FORMAT = b'"~format"'
# Another process may fold between two reads.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One entry, as far as a list shows it."""

    key: Key
    raw: Raw
    path: str

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures of the tuning; empty where there was none."""
        found = self.raw.get("summary")
        return found if isinstance(found, dict) else {}

    @property
    def seconds(self) -> float | None:
        """Seconds of one call."""
        return _number(self.summary.get("seconds"))

    @property
    def gain(self) -> float | None:
        """Gain over the heuristic cfg: its time over that of the tuned one."""
        gain = self.summary.get("gain")
        return _number(gain[0]) if isinstance(gain, list) and gain else None

    @property
    def when(self) -> datetime | None:
        """Time of the put; None where it is unknown, as in a line written by hand."""
        try:
            moment = datetime.fromisoformat(str(self.raw.get("when")))
        except ValueError:
            return None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON values, for scripts."""
        known = ("cfg", "source", "objective", "when", "by", "environment", "summary", "call")
        return {**self.key._asdict(), **{name: self.raw.get(name) for name in known}, "path": self.path}


def add_store(parser: Parser) -> None:
    """Adds the option that names a store or a folder of stores."""
    parser.add_argument("--store", metavar="PATH", help="a folder of stores or one store's file; else the cache folder")


def store_paths(store: str | None) -> list[str]:
    """The store files at a path, or in the cache folder; an error where a path was given and nothing is there."""
    place = Path(store).expanduser() if store else default_folder()
    if place.is_dir():
        names = os.listdir(place)
        # A store that was never folded is a folder of entries alone.
        unfolded = {str(place / name.removesuffix(".d")) for name in names if name.endswith(".json.d")}
        plain = {str(place / name) for name in names if name.endswith(".json") and (place / name).is_file()}
        return sorted(unfolded | {path for path in plain if not why_no_store(path)})
    if place.is_file() or Path(f"{place}.d").is_dir():
        why = why_no_store(str(place))
        if why:
            raise CommandError(f"{store} is no store: {why}; give a folder of stores, or a store's .json file")
        return [str(place)]
    if store:
        raise CommandError(f"there is no store at {store}; give a folder of stores, or a store's .json file")
    return []


def why_no_store(path: str) -> str:
    """The kind of a JSON file that is no store; empty for a store, a damaged or an empty one included.

    A recording or a pack that lies beside stores must not be folded as if it were one.
    """
    content = files.read(files.resolved(path))
    if content is None or os.path.isdir(f"{path}.d") or _FORMAT in content.data[-64:] or not content.data.strip():
        return ""
    for kind in ("lock", "pack"):
        if f'"~{kind}"'.encode() in content.data:
            return f"it is a {kind}"
    return "" if _FORMAT in content.data or read(content.data).lines else "it holds no entry"


def note_if_nothing(paths: Iterable[str], store: str | None) -> None:
    """Says why a list is empty where nothing was ever kept."""
    if not list(paths):
        say(f"nothing is kept in {store or default_folder()} yet; run `ejkernel demo`, or a program that tunes")


def rows_of(path: str) -> Iterator[EntryRow]:
    """Every entry of a store that is whole; what is damaged, or newer than this version, is named and left alone."""
    real = files.resolved(path)
    for _ in range(_TRIES):
        # The folder before the snapshot: an entry that a fold takes from the folder is in the snapshot by then.
        pending = entry_names(real)
        content = files.read(real)
        snapshot = Snapshot() if content is None else read(content.data)
        contents = [_entry_data(os.path.join(f"{real}.d", name)) for name in pending]
        if all(data is not None for data in contents):
            break
    found = dict(snapshot.entries())
    damaged = len(snapshot.lines) - len(found)
    for name, data in zip(pending, contents, strict=True):
        parsed = None if data is None else entry_in(name, data)
        if parsed is None:
            # One that a fold moved meanwhile is in the snapshot.
            damaged += data is not None
        elif parsed[0] not in found or order(parsed[1]) > order(found[parsed[0]]):
            found[parsed[0]] = parsed[1]
    if snapshot.damage or damaged:
        why = snapshot.damage or f"{damaged} of its entries do not fit their checksum"
        say(f"ejkernel: warning: {path} is damaged ({why}); `ejkernel cache verify` names it, the rest is listed")
    if snapshot.newer:
        say(f"ejkernel: warning: {path} can be read in part: {snapshot.newer}; install the newer ejkernel-ops")
    yield from (EntryRow(read_key(name), raw, path) for name, raw in found.items())


def _entry_data(path: str) -> bytes | None:
    try:
        content = files.read(path, files.LARGEST_ENTRY)
    # Counted as damage.
    except (files.NotPlainError, files.TooLargeError):
        return b""
    return None if content is None else content.data


def record_of(row: EntryRow) -> Record | None:
    """The full record of the tuning behind an entry, or None; one that cannot be read is named."""
    path = EntryLog(files.resolved(row.path)).record_path(row.key, row.raw)
    try:
        content = files.read(path, files.LARGEST_RECORD)
        return None if content is None else Record.loads(content.data.decode("utf-8", "replace"))
    except (RecordFormatError, files.NotPlainError, files.TooLargeError) as error:
        say(f"ejkernel: warning: the record in {path} cannot be read: {error}")
        return None


def why_newer(path: str) -> str:
    """Reason why this version cannot write a store; empty where it can."""
    content = files.read(files.resolved(path))
    return "" if content is None else read(content.data).newer


def selected(paths: Iterable[str], fits: Callable[[EntryRow], bool]) -> list[EntryRow]:
    """The entries of some stores that fit, sorted by operation, device and call."""
    # No row is garbage, and the collector's search for garbage takes a sixth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        rows = [row for path in paths for row in rows_of(path) if fits(row)]
    finally:
        if collects:
            gc.enable()
    return sorted(rows, key=lambda row: (row.key.op_id, row.key.device, row.key.call_key))


def opened(path: str) -> PersistentCache[Any]:
    """Opens a store that a command changes; one that cannot be written is an error."""
    _refuse_newer(path)
    return PersistentCache[Any]("", path, on_fault="raise")


def _refuse_newer(path: str) -> None:
    newer = why_newer(path)
    if newer:
        raise CommandError(f"{path} is left as it is: {newer}; install the newer ejkernel-ops")


def target(store: str | None) -> OperationStores | PersistentCache[Any]:
    """The store that entries are merged into: a folder with a file for each operation, or one file."""
    if store and store.endswith(".json"):
        return opened(store)
    return OperationStores(store, on_fault="raise")


def refuse_newer(into: OperationStores | PersistentCache[Any], operations: Iterable[str]) -> None:
    """Raises where this version cannot write the target's files of these operations."""
    if isinstance(into, OperationStores):
        for path in sorted({into.of(operation).path for operation in operations}):
            # Other faults of a path are reported by the store that is written there.
            if os.path.isfile(path):
                _refuse_newer(path)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
