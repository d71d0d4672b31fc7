"""One folder for all operations: a store that keeps each operation's cfgs in a file of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, final
from urllib.parse import quote, unquote

from ..core import formatting
from ..core.key import Key
from ..core.record import Record
from ..core.shown import Shown
from ..settings import default_folder
from .faults import OnFault
from .layered import ByKey
from .persistent import PersistentCache
from .store import StoredEntry


@final
class OperationStores(Shown, ByKey):
    """The cfgs of any number of operations: `<folder>/<operation>.json`, opened when first asked for."""

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, durable: bool = False, on_fault: OnFault = "warn"
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.durable = durable
        self.on_fault = on_fault
        self._stores: dict[str, PersistentCache[Any]] = {}
        self._lock = threading.Lock()

    def of(self, op_id: str) -> PersistentCache[Any]:
        """The store of one operation, whatever its version."""
        name = op_id.partition("@")[0]
        with self._lock:
            if name not in self._stores:
                # No cfg_type: a kernel knows its own, and the tiers rebuild what a store gives back as plain JSON.
                path = self.folder / _file_name(name)
                self._stores[name] = PersistentCache(name, path, durable=self.durable, on_fault=self.on_fault)
            return self._stores[name]

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None."""
        return self.of(Key(*key).op_id).lookup(key)

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry."""
        self.of(Key(*key).op_id).keep(key, entry)

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The full record of the tuning behind an entry, or None."""
        return self.of(op_id).record(device, op_id, call_key)

    def operations(self) -> list[str]:
        """The operations that have a file here, sorted."""
        return sorted(unquote(path.name.removesuffix(".json")) for path in self.folder.glob("*.json") if path.is_file())

    @property
    def reason(self) -> str:
        """Reason why a put was not written; empty where all were."""
        with self._lock:
            return next((store.reason for store in self._stores.values() if store.reason), "")

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key of every operation, sorted."""
        with self._lock:
            known = list(self._stores)
        return sorted({key for name in {*known, *self.operations()} for key in self.of(name).keys()})

    def in_short(self) -> str:
        """The path, as messages name the store."""
        return formatting.at_home(str(self))

    def __str__(self) -> str:
        """The folder, as messages name the store."""
        return str(self.folder)


def _file_name(operation: str) -> str:
    """File name of an operation; quoted and cut, since an edited key may hold any text of any length."""
    plain = quote(operation, safe="")
    # File systems take 255 bytes, and files beside this one have longer names.
    if len(plain) <= 150:
        return f"{plain}.json"
    # Imports JAX, which listing a folder does without.
    from ..core.stable import short_hash

    return f"{plain[:130]}-{short_hash(operation)}.json"
