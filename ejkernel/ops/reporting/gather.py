"""Calls of a page: one form for results, records, stores and files of them. No JAX here."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import codec
from ..core.description import described_in
from ..core.errors import ConfigTypeError, RecordFormatError, SettingError
from ..core.key import Key
from ..core.record import Record
from ..core.standing import Verdict, verdict, verdict_of_gain
from ..store import files
from ..store.store import KeepsRecords, Store, peek
from .summary import TuningSummary, summary_of, summary_of_entry

if TYPE_CHECKING:
    from ..programs.results import AutotuningResult


@dataclass(frozen=True)
class CallFacts:
    """Everything that a page says of one call."""

    key: Key
    cfg: Any
    call: Mapping[str, str] = field(default_factory=dict)
    record: Record | None = None
    figures: TuningSummary | None = None
    # The tier or the origin that the cfg is from.
    source: str = ""
    note: str = ""
    # Runs in one run of the program; None where no program is known.
    count: int | None = None
    when: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds of one run with this cfg."""
        return None if self.figures is None else self.figures.seconds

    @property
    def worth(self) -> float:
        """Seconds in one run of the program; the costliest call comes first."""
        return (self.seconds or 0.0) * (self.count or 1)

    # Asked for by several parts of a page.
    @functools.cached_property
    def verdict(self) -> Verdict:
        """The outcome of its tuning."""
        if self.record is not None:
            return verdict(self.record)
        if self.figures is not None and self.figures.gain is not None:
            return verdict_of_gain(self.figures.gain)
        return Verdict("unmeasured", self.note or "not measured: no record of a tuning was kept")


@dataclass(frozen=True)
class Subject:
    """The calls of a page, and what is known about all of them."""

    title: str
    calls: tuple[CallFacts, ...]
    notes: tuple[str, ...] = ()
    # The program before and after, in a sentence.
    confirmation: str = ""
    # A program's shares are known: its calls are counted.
    is_program: bool = False


def subject_of(source: Any, title: str = "") -> Subject:
    """The subject behind a result, a record, records, a store, or the path of any of them."""
    if isinstance(source, (str, os.PathLike)):
        return _of_path(Path(source).expanduser(), title)
    if isinstance(source, Subject):
        return source
    if isinstance(source, Record):
        return Subject(title or source.key.get("op_id") or "one tuning", (of_record(source),))
    if isinstance(source, Store):
        return _of_store(source, title)
    if _is_result(source):
        return _of_result(source, title)
    if isinstance(source, Sequence) and source and all(isinstance(item, Record) for item in source):
        return Subject(title or f"{len(source)} tunings", tuple(map(of_record, source)))
    raise SettingError(
        f"a page is made of an AutotuningResult, a Record, a store or the path of one, not of {codec.describe(source)}"
    )


def _is_result(source: Any) -> bool:
    # A result imports JAX, which a page of a store does without.
    return hasattr(source, "entries") and hasattr(source, "by_key") and hasattr(source, "confirmation")


def of_record(record: Record) -> CallFacts:
    """The facts of one tuning."""
    key = Key(*(str(record.key.get(name, "")) for name in Key._fields))
    call = described_in(record)
    return CallFacts(key, record.cfg, call, record, summary_of(record), "autotune", environment=record.environment)


def _of_result(result: AutotuningResult, title: str) -> Subject:
    calls = []
    for key, entry in result.by_key().items():
        record = entry.record
        figures = None if record is None else summary_of(record)
        call = {} if record is None else described_in(record)
        known = {} if record is None else record.environment
        calls.append(
            CallFacts(
                *(key, entry.cfg, call, record, figures, entry.source or "hand", entry.note, entry.count),
                environment=known,
            )
        )
    stopped = ("interrupted before every call had its turn",) if result.interrupted else ()
    confirmed = "" if result.confirmation is None else str(result.confirmation)
    return Subject(title or "a tuned program", _sorted(calls), (*stopped, *result.notes), confirmed, is_program=True)


def _of_store(store: Store, title: str) -> Subject:
    calls, notes = [], []
    for key in map(Key._make, store.keys()):
        entry = peek(store, key)
        if entry is None:
            continue
        record = None
        if isinstance(store, KeepsRecords):
            try:
                record = store.record(*key)
            # A record of another version, or a damaged one, costs the page its samples alone.
            except (RecordFormatError, ConfigTypeError) as error:
                notes.append(f"{key}: its record cannot be read: {error}")
        figures = summary_of_entry(entry.summary) if record is None else summary_of(record)
        calls.append(
            CallFacts(
                *(key, entry.cfg, entry.call, record, figures, entry.source),
                when=entry.when,
                environment=entry.environment,
                where=str(store),
            )
        )
    return Subject(title or f"the store {store}", _sorted(calls), tuple(notes))


def _of_path(path: Path, title: str) -> Subject:
    # Imported where they are needed: each of them imports the others' rooms.
    from ..store.folder import OperationStores
    from ..store.packs import read_pack
    from ..store.persistent import PersistentCache

    if path.is_dir():
        return _of_store(OperationStores(path), title)
    if not path.exists() and not Path(f"{path}.d").is_dir():
        raise SettingError(f"there is nothing at {path}; give a result of `ejkernel tune -o`, a record, or a store")
    kind = _kind(path)
    if kind == "result":
        from ..programs.results import AutotuningResult

        return _of_result(AutotuningResult.load(path), title)
    if kind == "record":
        return subject_of(Record.loads(_content(path).decode()), title)
    if kind == "pack":
        return _of_store(read_pack(path), title)
    if kind == "store":
        return _of_store(PersistentCache("", path), title)
    raise RecordFormatError(
        f"{path} is no result of a tuning, no record and no store; `ejkernel tune -o` writes results"
    )


def _content(path: Path) -> bytes:
    try:
        content = files.read(files.resolved(str(path)))
    except (files.NotPlainError, files.TooLargeError) as error:
        raise RecordFormatError(f"{path} is not read: {error.strerror}") from error
    return b"" if content is None else content.data


def _kind(path: Path) -> str:
    if not path.is_file():
        return "store"
    content = _content(path)
    try:
        data = json.loads(content)
    # Not JSON as a whole: a store may be damaged in part, anything else is not ours.
    except (ValueError, RecursionError):
        return "store" if Path(f"{path}.d").is_dir() or b'"~format"' in content[-64:] else ""
    if not isinstance(data, dict):
        return ""
    if "autotuning result" in str(data.get("kind", "")):
        return "result"
    if "trials" in data and "format" in data:
        return "record"
    if "~pack" in data or "~lock" in data:
        return "pack" if "~pack" in data else ""
    return "store" if "~format" in data or Path(f"{path}.d").is_dir() or not data else ""


def _sorted(calls: Iterable[CallFacts]) -> tuple[CallFacts, ...]:
    return tuple(sorted(calls, key=lambda one: (-one.worth, one.key)))
