"""Packs: read-only files with entries that other users tuned; found by path or entry point, read when needed."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, final

from ..core.errors import RecordFormatError, StoreError
from ..core.key import Key
from ..settings import default_folder
from . import bundle, files
from .remote.objects import is_url
from .remote.url_files import located
from .store import StoredEntry

# An entry point of this group names a package; each JSON file in it is a pack.
GROUP = "ejkernel.packs"


class PackWarning(UserWarning):
    """A pack that cannot be used; nothing else is affected."""


@final
class Pack:
    """One pack file, read when it is first asked; a damaged one is named once and holds no entry."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = located(path)
        self._bundle: bundle.Bundle | None = None
        self._lock = threading.Lock()

    @property
    def entries(self) -> Mapping[Key, StoredEntry]:
        """The entries by key."""
        return self._read().entries

    @property
    def about(self) -> Mapping[str, Any]:
        """The pack's own description: its name, its date and the version that made it."""
        return self._read().about

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key, or None; never trusted, since another user tuned it."""
        return self.entries.get(Key(*key))

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Refuses to write."""
        raise StoreError(f"{self} is read-only; put into a store of your own")

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key, sorted."""
        return sorted(self.entries)

    def __str__(self) -> str:
        """Name of the pack in messages."""
        return f"pack {self.path}"

    def _read(self) -> bundle.Bundle:
        with self._lock:
            if self._bundle is None:
                try:
                    self._bundle = (bundle.read_in_haste if is_url(self.path) else bundle.read)("pack", self.path)
                except RecordFormatError as error:
                    self._bundle = bundle.Bundle({}, {}, "")
                    _warn(f"{error}. This pack is left out; nothing else is affected")
            return self._bundle


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Reads a pack now; damage is an error."""
    pack = Pack(path)
    pack._bundle = bundle.read("pack", pack.path)
    return pack


def found_packs(paths: Sequence[str]) -> list[Pack]:
    """The packs at these paths (files or folders), in the user's own folder and in installed packages; each once."""
    named = [file for path in paths for file in _files_at(located(path))]
    return [_pack(path) for path in dict.fromkeys([*named, *_own(str(pack_folder())), *_installed()])]


def pack_folder() -> Path:
    """The folder that `ejkernel pack install` writes to, beside the user's stores."""
    return default_folder() / "packs"


@functools.cache
def _pack(path: str) -> Pack:
    # One object for the process, so that a file is read, and its damage reported, once.
    return Pack(path)


@functools.cache
def _files_at(path: str) -> tuple[str, ...]:
    if not os.path.isdir(path):
        return (path,)
    names = sorted(name for name in files.names(path) if name.endswith(".json"))
    if not names:
        _warn(f"{path} holds no pack: no .json file lies there. Correct EJKERNEL_OPS_PACKS; nothing else is affected")
    return tuple(os.path.join(path, name) for name in names)


@functools.cache
def _own(folder: str) -> tuple[str, ...]:
    return tuple(os.path.join(folder, name) for name in sorted(files.names(folder)) if name.endswith(".json"))


@functools.cache
def _installed() -> tuple[str, ...]:
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    return tuple(path for point in points for path in _files_of(point))


def _files_of(point: metadata.EntryPoint) -> tuple[str, ...]:
    try:
        # Finds the package without running it; of a dotted name the packages around it are imported.
        spec = importlib.util.find_spec(point.module)
    # Any exception of a package's import is named with the package, and stops nothing else.
    except Exception as error:
        _warn(f"the packs of entry point {point.name} = {point.value} are left out: {type(error).__name__}: {error}")
        return ()
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = tuple(
        os.path.join(folder, name)
        for folder in folders
        for name in sorted(files.names(folder))
        if name.endswith(".json")
    )
    if not found:
        _warn(
            f"the entry point {point.name} = {point.value} of group {GROUP} brings no pack: its value must be a "
            "package with .json files in it"
        )
    return found


def forget_packs() -> None:
    """Forgets the packs: the next use searches and reads them again."""
    for table in (_pack, _files_at, _own, _installed):
        table.cache_clear()


def _warn(message: str) -> None:
    warnings.warn(message, PackWarning, stacklevel=3)
