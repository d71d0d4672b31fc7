"""The interface of a store, and one entry of it. No JAX here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final, get_args, runtime_checkable

from ..core.key import Key
from ..core.record import Objective, Record

# A guess, which was never measured, is in lock files alone.
Source = Literal["autotune", "imported", "hand", "guess"]


@dataclass(frozen=True)
class StoredEntry:
    """A cfg and the facts about its origin."""

    cfg: Any
    # Empty: unknown, as in a line that was written by hand.
    environment: Mapping[str, str] = field(default_factory=dict)
    source: Source = "hand"
    objective: Objective | None = None
    when: str = ""
    by: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    # The call in readable parts, so that a miss can be explained; empty: not known.
    call: Mapping[str, str] = field(default_factory=dict)
    # The whole record, on its way into a store; a store gives it back on request only.
    record: Record | None = None
    # False for an entry of another user or a pack: checked against the kernel's candidates before it runs.
    trusted: bool = True
    # False for an entry that another user put where several users write: a candidate to measure, never an answer.
    answers: bool = True

    @staticmethod
    def of(raw: Mapping[str, Any], cfg: Any, *, trusted: bool, answers: bool = True) -> StoredEntry:
        """The entry in a line of a file that any user may have edited: a malformed field counts as unknown."""
        return StoredEntry(
            cfg,
            environment=_strings(raw.get("environment")),
            source=raw["source"] if raw.get("source") in get_args(Source) else "hand",
            objective=raw["objective"] if raw.get("objective") in get_args(Objective) else None,
            when=str(raw.get("when", "")),
            by=str(raw.get("by", "")),
            summary=raw["summary"] if isinstance(raw.get("summary"), dict) else {},
            call=_strings(raw.get("call")),
            trusted=trusted,
            answers=answers,
        )


def _strings(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


class Mapped(Protocol):
    """The least that a store of the user's own must have."""

    def get(self, device: str, op_id: str, call_key: str) -> Any:
        """The cfg of a key, or None."""

    def put(self, device: str, op_id: str, call_key: str, cfg: Any) -> None:
        """Keeps a cfg."""


@runtime_checkable
class Store(Protocol):
    """A store that keeps the origin of its cfgs."""

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None."""

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry."""

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key, sorted."""


@runtime_checkable
class KeepsRecords(Protocol):
    """A store that has the whole record of a tuning beside the cfg."""

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The record behind an entry, or None."""


@runtime_checkable
class Peekable(Protocol):
    """A store with a `lookup` that changes something, such as one that promotes an entry to its top layer."""

    def peek(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None; nothing changes."""


def peek(store: Store, key: Key) -> StoredEntry | None:
    """The entry of a key, or None, without changing the store."""
    return store.peek(key) if isinstance(store, Peekable) else store.lookup(key)


@final
@dataclass(frozen=True, slots=True)
class PlainStore:
    """A store of the user's own, behind the same interface: its answers are believed."""

    inner: Mapped

    def lookup(self, key: Key) -> StoredEntry | None:
        """The cfg of the user's store, as it is."""
        cfg = self.inner.get(*key)
        return None if cfg is None else StoredEntry(cfg, environment={"believed": "yes"})

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps the cfg alone."""
        self.inner.put(*key, entry.cfg)

    def keys(self) -> list[tuple[str, str, str]]:
        """Gives no key: a store of the user's own cannot list them."""
        return []

    def __str__(self) -> str:
        """Name of the store in messages."""
        return type(self.inner).__qualname__


def as_store(persistent: Any) -> Store:
    """The interface that the tiers use, over anything with `get` and `put`."""
    return persistent if isinstance(persistent, Store) else PlainStore(persistent)
