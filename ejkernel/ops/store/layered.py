"""Stores in memory, read-only stores and layers of stores, each with the same small interface."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, final

from ..core import invalidation
from ..core.errors import SettingError, StoreError
from ..core.key import Key
from ..core.record import Record
from .store import KeepsRecords, Store, StoredEntry, peek


class ByKey:
    """`get` and `put` in terms of `lookup` and `keep`."""

    def lookup(self, key: Key) -> StoredEntry | None:
        raise NotImplementedError

    def keep(self, key: Key, entry: StoredEntry) -> None:
        raise NotImplementedError

    def get(self, device: str, op_id: str, call_key: str) -> Any:
        """The cfg of a key, or None."""
        entry = self.lookup(Key(device, op_id, call_key))
        return None if entry is None else entry.cfg

    def put(self, device: str, op_id: str, call_key: str, cfg: Any) -> None:
        """Keeps a cfg."""
        from ..core.device import environment

        self.keep(Key(device, op_id, call_key), StoredEntry(cfg, environment(device)))


@final
class MemoryStore(ByKey):
    """A store that ends with the process."""

    def __init__(self) -> None:
        self._entries: dict[Key, StoredEntry] = {}
        self._lock = threading.Lock()

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None."""
        return self._entries.get(Key(*key))

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry."""
        with self._lock:
            self._entries[Key(*key)] = entry
        invalidation.note(key, entry.cfg)

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key, sorted."""
        with self._lock:
            return sorted(self._entries)

    def __str__(self) -> str:
        """Name of the store in messages."""
        return "memory"


@final
@dataclass(frozen=True)
class ReadOnlyStore(ByKey):
    """A store that is looked at and never written."""

    inner: Store

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None."""
        return self.inner.lookup(key)

    def peek(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None, without changing the inner store."""
        return peek(self.inner, key)

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Refuses to write."""
        raise StoreError(f"{self.inner} is read-only here; put into a store of your own, or layer one over it")

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key, sorted."""
        return self.inner.keys()

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The record behind an entry, or None."""
        return self.inner.record(device, op_id, call_key) if isinstance(self.inner, KeepsRecords) else None

    def __str__(self) -> str:
        """Name of the store in messages."""
        return f"{self.inner} (read-only)"


@final
class LayeredStore(ByKey):
    """Stores over each other: the first hit wins and is promoted to the top, which alone is written."""

    def __init__(self, *layers: Store, promote: bool = True) -> None:
        if not layers:
            raise SettingError("LayeredStore needs at least one store: the user's own first, shared ones behind it")
        self.layers = layers
        self.promote = promote

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of the uppermost layer that has one."""
        for layer in self.layers:
            entry = layer.lookup(key)
            if entry is not None:
                # An entry of another user or a pack is checked at each use: promotion must not make it the user's own.
                promoted = self.promote and entry.trusted and not isinstance(self.layers[0], ReadOnlyStore)
                if layer is not self.layers[0] and promoted:
                    self.layers[0].keep(key, entry)
                return entry
        return None

    def peek(self, key: Key) -> StoredEntry | None:
        """The entry of the uppermost layer that has one, without promoting it."""
        return next((entry for layer in self.layers if (entry := peek(layer, key)) is not None), None)

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The record behind the uppermost layer's entry, or None."""
        for layer in self.layers:
            if layer.lookup(Key(device, op_id, call_key)) is not None:
                return layer.record(device, op_id, call_key) if isinstance(layer, KeepsRecords) else None
        return None

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry in the top layer."""
        self.layers[0].keep(key, entry)

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key of any layer, sorted."""
        return sorted({key for layer in self.layers for key in layer.keys()})

    def __str__(self) -> str:
        """Name of the store in messages."""
        return " over ".join(map(str, self.layers))
