"""Compiled callables of the executor: a bounded table, the least recently used leave first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..core import changes
from ..core.key import Key

# Each holds a traced function and its compiled programs, some MiB at most.
_MOST = 512


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes: which of an entry's programs a call uses."""
    return tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


@dataclass(frozen=True)
class Chosen:
    """What was chosen while a program was traced, and for calls of which shapes."""

    cfg: Any
    signature: tuple[Any, ...]


class Entry:
    """One jitted function: the calls of one kernel with one set of static values, on one kind of device."""

    __slots__ = ("decisions", "epoch", "fn", "forks", "hot", "kernel", "unjitted")

    def __init__(self, kernel: Any, body: Callable[..., Any]) -> None:
        # Kept, since a kernel without comparable attributes is known by its address.
        self.kernel = kernel
        self.unjitted = body
        self.fn: Callable[..., Any] = jax.jit(body, inline=True)
        # How far the changes of caches and policies were looked at.
        self.epoch = changes.epoch
        # Used through a short key since it was last looked at: those hits move nothing, being as cheap as can be.
        self.hot = False
        self.decisions: dict[Key, Chosen] = {}
        # Functions of their own for shapes whose cfg changed: what other shapes compiled stays.
        self.forks: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def is_current(self) -> bool:
        """Do the choices that were made while tracing still hold? Those that do not are made again, alone."""
        now = changes.epoch
        if self.epoch == now:
            return True
        if changes.everything_since(self.epoch):
            return False
        for key, chosen in list(self.decisions.items()):
            if changes.differs(key, chosen.cfg, since=self.epoch):
                body = self.unjitted
                # A function of its own: JAX keeps programs by function.
                self.forks[chosen.signature] = jax.jit(lambda *leaves, body=body: body(*leaves), inline=True)
                del self.decisions[key]
        self.epoch = now
        return True


@dataclass(frozen=True)
class Traced:
    """The entry that is being traced, and the shapes it is traced for."""

    entry: Entry
    signature: tuple[Any, ...]


class Table:
    """Entries by key; the short keys that lead to one leave with it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._shorts: dict[Hashable, set[Hashable]] = {}
        self.quick: dict[Hashable, Entry] = {}
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Entry | None:
        """The entry of a key if what it was built on still holds."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        if entry.is_current():
            return entry
        self.drop(key)
        return None

    def add(self, key: Hashable, entry: Entry) -> Entry:
        """Keeps an entry, unless another thread was faster: then that one."""
        with self._lock:
            kept = self._entries.setdefault(key, entry)
            while len(self._entries) > _MOST:
                oldest = next(iter(self._entries))
                if self._entries[oldest].hot:
                    self._entries[oldest].hot = False
                    self._entries.move_to_end(oldest)
                else:
                    self._forget(oldest)
            return kept

    def shorten(self, short: Hashable, key: Hashable) -> None:
        """Lets a short key lead to an entry at once."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self.quick[short] = entry
                self._shorts.setdefault(key, set()).add(short)

    def drop(self, key: Hashable) -> None:
        """Forgets an entry."""
        with self._lock:
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)
        for short in self._shorts.pop(key, ()):
            self.quick.pop(short, None)

    def __len__(self) -> int:
        return len(self._entries)
