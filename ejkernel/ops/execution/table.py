"""Compiled callables of the executor: a bounded table, the least recently used leave first.

An entry is one jitted function; JAX keeps its programs by shapes. Each program has the cfgs compiled into it that were
chosen while it was traced, and the entry remembers these choices by key and shapes. `core.invalidation` counts changes
of caches, stores and policies: that count is the epoch. An entry that was checked at the present epoch is right, and
short keys lead to such entries alone. In a later epoch there are two cases. A change that may concern every key (a
policy, `clear`, `refresh`) drops the entry. A change of single keys is compared with the remembered choices: only where
a key has another cfg than the program was traced with is the program wrong. Its shapes then get a fork, a new jitted
function that is traced afresh; the programs of all other shapes stay. A tuning that confirms a cfg compiles nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import _jax
from ..core import invalidation
from ..core.key import Key

# Each holds a traced function and its compiled programs, some MiB at most.
_MOST = 512


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes: which of an entry's programs a call uses."""
    return tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def tree_signature(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Structure, shapes and dtypes of trees of arrays."""
    leaves, tree = jax.tree_util.tree_flatten(tuple(parts))
    return (tree, *signature(leaves))


class NeedsValues(Exception):
    """JAX traces a call of the short way that cannot be measured by its shapes: the long way has its arrays at hand."""


@dataclass(frozen=True)
class Chosen:
    """One choice that was made while a program was traced: the cfg, the shapes of the call, and the epoch."""

    cfg: Any
    signature: tuple[Any, ...]
    epoch: int


class CompiledEntry:
    """One jitted function: the calls of one kernel with one set of static values, on one kind of device."""

    __slots__ = (
        "body",
        "count",
        "decisions",
        "epoch",
        "fn",
        "forks",
        "hot",
        "jitted",
        "kernel",
        "mutex",
        "signature_of",
    )

    def __init__(
        self,
        kernel: Any,
        body: Callable[..., Any],
        signature_of: Callable[[Sequence[Any]], tuple[Any, ...]] = signature,
    ) -> None:
        # Kept, since a kernel without comparable attributes is known by its address.
        self.kernel = kernel
        self.body = body
        self.signature_of = signature_of
        self.jitted = jax.jit(body, inline=True)
        # What a call runs: the jitted function itself, as long as that serves every shape.
        self.fn: Callable[..., Any] = self.jitted
        # Positional arrays of the calls that a short key leads here.
        self.count = -1
        # How far the changes of caches and policies were looked at.
        self.epoch = invalidation.epoch
        # Used through a short key since it was last looked at: those hits move nothing, being as cheap as can be.
        self.hot = False
        # By key and shapes: a kernel inside a kernel may be part of several of its programs.
        self.decisions: dict[tuple[Key, tuple[Any, ...]], Chosen] = {}
        self.mutex = threading.Lock()
        # By shapes, where a cfg changed, a function of their own: what other shapes compiled stays.
        self.forks: dict[tuple[Any, ...], Any] = {}

    def learn(self, key: Key, chosen: Chosen) -> None:
        """Remembers what a program was traced with."""
        with self.mutex:
            self.decisions[key, chosen.signature] = chosen

    def is_current(self) -> bool:
        """Do the choices that were made while tracing still hold? Those that do not are made again, alone."""
        now = invalidation.epoch
        if self.epoch == now:
            return True
        if invalidation.everything_since(self.epoch):
            return False
        with self.mutex:
            for (key, shapes), chosen in list(self.decisions.items()):
                if invalidation.differs(key, chosen.cfg, since=chosen.epoch):
                    self._fork(shapes)
            self.epoch = now
        return True

    def _fork(self, shapes: tuple[Any, ...]) -> None:
        for place in [place for place in self.decisions if place[1] == shapes]:
            del self.decisions[place]
        # What runs unjitted chooses at every call anyway.
        if self.fn is not self.body:
            body = self.body
            # A function of its own: JAX keeps programs by function.
            self.forks[shapes] = jax.jit(lambda *leaves: body(*leaves), inline=True)
            self.fn = self._by_shapes

    def _by_shapes(self, *leaves: Any) -> Any:
        return self.forks.get(self.signature_of(leaves), self.jitted)(*leaves)

    def forget_failures(self) -> None:
        """Follows a trace that raised: the same shapes may be traced yet, and are to be dispatched fast then."""
        for jitted in (self.jitted, *self.forks.values()):
            _jax.forget_failures(jitted)

    def run_unjitted(self) -> None:
        """Makes the kernel run as it is, unjitted, from now on."""
        self.fn = self.body


@dataclass(frozen=True)
class Traced:
    """The entry that is being traced, and the shapes it is traced for."""

    entry: CompiledEntry
    signature: tuple[Any, ...]


class _Tracing(threading.local):
    """The entries that this thread is tracing, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Traced] = []


_tracing = _Tracing()


@contextlib.contextmanager
def tracing(traced: Traced) -> Iterator[None]:
    """Counts an entry as being traced for a `with` block."""
    _tracing.stack.append(traced)
    try:
        yield
    finally:
        _tracing.stack.pop()


def entries_being_traced() -> tuple[Traced, ...]:
    """Every entry that is being traced around the current call, which becomes part of its program."""
    return tuple(_tracing.stack)


class CompiledTable:
    """Entries by key; the short keys that lead to one leave with it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, CompiledEntry] = OrderedDict()
        self._shorts: dict[Hashable, set[Hashable]] = {}
        # Of entries that were checked at the present epoch: a change empties it, so a warm call compares nothing.
        self.quick: dict[Hashable, CompiledEntry] = {}
        self._lock = threading.Lock()
        invalidation.tell(self)

    def find(self, key: Hashable) -> CompiledEntry | None:
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

    def add(self, key: Hashable, entry: CompiledEntry) -> CompiledEntry:
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

    def shorten(self, short: Hashable, key: Hashable, count: int) -> None:
        """Lets a short key lead to an entry at once; a kernel's second number of arrays gets a longer one."""
        with self._lock:
            entry = self._entries.get(key)
            # A change that came while the call ran: the next call checks the entry.
            if entry is None or entry.epoch != invalidation.epoch:
                return
            entry.count = count
            if self.quick.get(short, entry) is not entry:
                short = (short, count)
            self.quick[short] = entry
            self._shorts.setdefault(key, set()).add(short)

    def lengthen(self, short: Hashable) -> None:
        """Takes a short key out of use."""
        with self._lock:
            self.quick.pop(short, None)

    def forget(self) -> None:
        """Follows a change: every entry is checked before its short keys serve again."""
        with self._lock:
            self.quick.clear()

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
