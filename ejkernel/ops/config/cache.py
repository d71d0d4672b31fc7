"""Cfgs in memory: the cache of a process, and overlays that shadow it for a while.

A cfg is chosen while a function is traced, and JAX keeps the traced program under its jit key. A value that changes the
choice without being in that key would be compiled into a program that others reuse. So the value that selects is the
value in the key. `_in_force` is a user context of JAX: JAX adds its value to the key of every jitted function, and
`overlay_in_force` reads that very value. A function that the user jitted traces again inside an overlay, and reuses its
old program outside. JAX compares the value by identity: `_interned` gives equal overlays one `_Shadow`, so that they
share programs. A new value makes every function called under it compile once more and slows each later dispatch, so
only overlays, locks and requests to trace anew change it; `core.invalidation` tells the executor of changed policies
and caches. A `ContextVar` must not select: a thread with a copied context has its value, and JAX's key there does not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self
from weakref import WeakValueDictionary

import jax

from .. import _jax
from ..core import invalidation
from ..core.errors import ConfigTypeError, KeyPartError, ScopeError
from ..core.invocation import Cfg
from ..core.kernel import KernelNames
from ..core.key import Key
from ..core.record import Objective
from ..core.stable import stable_json, type_name
from ..store.lock_file import LockFile, read_lock


class CacheEntry(NamedTuple):
    """One cfg in memory and what is known about it."""

    cfg: Any
    # What it was tuned for, where that is known; a cfg put by hand has none.
    objective: Objective | None
    # The call behind the key in readable parts, where they are known.
    call: Mapping[str, str]


class ConfigCache(Generic[Cfg]):
    """The cfgs that this process knows, safe from any thread; an overlay in force shadows them."""

    def __init__(self) -> None:
        self._data: dict[Key, Cfg] = {}
        # What an entry was tuned for, where that is known; a cfg put by hand has none.
        self._objectives: dict[Key, Objective] = {}
        # The calls behind the keys in readable parts, where they are known.
        self._calls: dict[Key, Mapping[str, str]] = {}
        # The fingerprints of the kernels' code that they were tuned for.
        self._codes: dict[Key, str] = {}
        # The kernel classes that this cache has answered.
        self.kernel_names = KernelNames()
        self._generation = 0
        self._lock = threading.Lock()

    def get(self, dev: str, op_id: str, call_key: str) -> Cfg | None:
        """The cfg of a key, an overlay's first; None where there is none."""
        key = Key(dev, op_id, call_key)
        shadow = overlay_in_force()
        if key in shadow:
            found = shadow[key]
            return found.data if isinstance(found, Plain) else found  # type: ignore[no-any-return]
        return self._data.get(key)

    def put(self, dev: str, op_id: str, call_key: str, cfg: Cfg) -> None:
        """Keeps a cfg under its key."""
        self.keep_entry(Key(dev, op_id, call_key), cfg)

    def clear(self) -> None:
        """Forgets every cfg."""
        with self._lock:
            self._data.clear()
            self._objectives.clear()
            self._calls.clear()
            self._codes.clear()
            self.kernel_names = KernelNames()
            self._generation += 1
        invalidation.note_everything()

    def size(self) -> int:
        """The number of cfgs that are kept."""
        return len(self._data)

    def keys(self) -> list[tuple[str, str, str]]:
        """The keys that are kept, as `(device, op_id, call_key)`."""
        with self._lock:
            return list(self._data)

    @property
    def generation(self) -> int:
        """Moves with every clear, so that a selector that remembers a key can tell."""
        return self._generation

    def entry(self, key: Key) -> CacheEntry | None:
        """The entry of a key whatever overlays say, or None."""
        with self._lock:
            return self._entry(key) if key in self._data else None

    def entries(self) -> list[tuple[Key, CacheEntry]]:
        """Every key with its entry."""
        with self._lock:
            return [(Key(*key), self._entry(key)) for key in self._data]

    def _entry(self, key: Key) -> CacheEntry:
        return CacheEntry(self._data[key], self._objectives.get(key), self._calls.get(key, {}))

    def code(self, key: Key) -> str:
        """The fingerprint of the kernel's code that an entry was tuned for; empty where that is not known."""
        return self._codes.get(key, "")

    def keep_entry(
        self,
        key: Key,
        cfg: Cfg,
        *,
        objective: Objective | None = None,
        call: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        """Keeps a cfg with what it was tuned for, and the call in readable parts."""
        with self._lock:
            self._data[key] = cfg
            self._objectives.pop(key, None)
            self._codes[key] = code
            if objective is not None:
                self._objectives[key] = objective
            if call:
                self._calls[key] = call
        invalidation.note(key, cfg)


@dataclass(frozen=True)
class Plain:
    """A cfg of an overlay as a file had it: plain JSON, which its kernel rebuilds."""

    data: Any


class _Shadow:
    """One content of overlays: the value that selects is the very value in JAX's jit key."""

    __slots__ = ("__weakref__", "base", "lock_file", "mapping")

    def __init__(self, mapping: Mapping[Key, Any], base: object = None, lock_file: LockFile | None = None) -> None:
        self.mapping = mapping
        # The lock file in force behind the overlays: then nothing else answers.
        self.lock_file = lock_file
        # The global value it was made under, kept so that its address stays its own.
        self.base = base


# JAX asks that this is made once, before other threads use it: so when the module is imported.
_in_force = jax.make_user_context(default_value=None)
_shadows: WeakValueDictionary[Any, _Shadow] = WeakValueDictionary()
_shadows_lock = threading.Lock()

# For inspection, and for `current_scope` in a thread that runs in a copied context. It never selects.
_cache_overlay: ContextVar[tuple[Mapping[Key, Any], ...]] = ContextVar("ejkernel_cache_overlay", default=())


@dataclass
class _Block:
    """A `with` block that a thread is in."""

    owner: object
    context: Any
    merged: dict[Key, Any]
    lock_file: LockFile | None
    before: tuple[Mapping[Key, Any], ...]
    # Left already, but out of order: it ends with the block inside it.
    is_left: bool = False


class _Entered(threading.local):
    """The `with` blocks that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Block] = []
        # Owners of blocks that ended after they were left out of order: leaving those once more is no second error.
        self.ended: deque[object] = deque(maxlen=64)


_entered = _Entered()


def overlay_in_force() -> Mapping[Key, Any]:
    """The cfgs that the overlays of this thread answer with, by key; an inner overlay covers an outer one."""
    shadow = _in_force.value
    return {} if shadow is None else shadow.mapping


def lock_in_force() -> LockFile | None:
    """The lock that this thread is in."""
    shadow = _in_force.value
    return None if shadow is None else shadow.lock_file


def is_shadowed(key: Key) -> bool:
    """Does an overlay or a lock of this thread stand before the caches for this key?"""
    return lock_in_force() is not None or key in overlay_in_force()


class _Scope:
    """Puts layers of mappings in force for a `with` block of this thread."""

    def __init__(self, layers: tuple[Mapping[Key, Any], ...]) -> None:
        self._layers = layers

    def __enter__(self) -> Self:
        layers = _layers_in_force() + self._layers
        merged: dict[Key, Any] = {}
        lock_file = None
        for layer in layers:
            if isinstance(layer, LockFile):
                # It replaces what is around it, overlays too; those inside it stand before it.
                merged, lock_file = {}, layer
            else:
                merged.update(layer)
        context = self._context(merged, lock_file)
        context.__enter__()
        _entered.stack.append(_Block(self, context, merged, lock_file, _cache_overlay.get()))
        _cache_overlay.set(layers)
        return self

    def _context(self, merged: dict[Key, Any], lock_file: LockFile | None) -> Any:
        return _context_of(merged, lock_file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _entered.stack
        if self in _entered.ended and not any(block.owner is self for block in stack):
            _entered.ended.remove(self)
            return
        if not stack or stack[-1].owner is not self:
            for block in reversed(stack):
                if block.owner is self and not block.is_left:
                    block.is_left = True
                    break
            raise ScopeError(
                "an overlay was left in another order than it was entered, or in another thread; "
                "do not await or yield inside `with overlay_cache(...)`"
            )
        stack[-1].is_left = True
        while stack and stack[-1].is_left:
            block = stack.pop()
            if block.owner is not self:
                _entered.ended.append(block.owner)
            block.context.__exit__(None, None, None)
            _cache_overlay.set(block.before)


class overlay_cache(_Scope):
    """Answers these keys with these cfgs inside a `with` block of this thread; nests, and may be entered again."""

    def __init__(self, mapping: Mapping[tuple[str, str, str], Any]) -> None:
        for key in mapping:
            if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)):
                raise ConfigTypeError(f"an overlay's keys are (device, op_id, call_key), three strings; got {key!r}")
        self.mapping: Mapping[Key, Any] = {Key(*key): cfg for key, cfg in mapping.items()}
        super().__init__((self.mapping,))


class locked(_Scope):
    """Answers every call inside a `with` block of this thread from a lock file; one that is not in it is an error."""

    def __init__(self, path: str | os.PathLike[str] | LockFile) -> None:
        self.lock_file = path if isinstance(path, LockFile) else read_lock(path)
        super().__init__((self.lock_file,))


class traced_anew(_Scope):
    """Has every jitted function that is called inside a `with` block of this thread traced again, once a block."""

    def __init__(self) -> None:
        super().__init__(())

    def _context(self, merged: dict[Key, Any], lock_file: LockFile | None) -> Any:
        # A value of its own, never shared: no program compiled so far matches it.
        return _in_force(_Shadow(merged, _jax.global_value(_in_force), lock_file))


def refresh() -> None:
    """Has every jitted function, the user's own included, choose again at its next call; each compiles once more."""
    # A value of its own: JAX compares by identity, so no program compiled so far matches it.
    stack = _entered.stack
    for block in reversed(stack):
        block.context.__exit__(None, None, None)
    _jax.set_global_value(_in_force, _Shadow({}))
    # The overlays that this thread is in come back over the new value.
    for block in stack:
        block.context = _context_of(block.merged, block.lock_file)
        block.context.__enter__()
    invalidation.note_everything()


def current_scope() -> _Scope:
    """The overlays in force here, to be entered in another thread with `with`."""
    # A thread that got a copy of its parent's context opts in from inside.
    return _Scope(_layers_in_force() or _cache_overlay.get())


def _layers_in_force() -> tuple[Mapping[Key, Any], ...]:
    return tuple(layer for layer in (lock_in_force(), overlay_in_force()) if layer or isinstance(layer, LockFile))


def _context_of(merged: dict[Key, Any], lock_file: LockFile | None) -> Any:
    # An empty overlay changes nothing, so it must not make JAX trace anything again; a lock always does.
    return _in_force(_interned(merged, lock_file)) if merged or lock_file is not None else contextlib.nullcontext()


def _interned(mapping: dict[Key, Any], lock_file: LockFile | None) -> _Shadow:
    # Equal overlays share compiled programs, and JAX compares by identity.
    # The global value is part of it: after a refresh, programs made under this overlay before are old.
    base = _jax.global_value(_in_force)
    content = _content_of(mapping, base, lock_file)
    with _shadows_lock:
        shadow = _shadows.get(content)
        # A cfg that was changed since, such as a dict, is not what it was made for any more.
        if shadow is None or _content_of(shadow.mapping, base, lock_file) != content:
            shadow = _shadows[content] = _Shadow(mapping, base, lock_file)
        return shadow


def _content_of(mapping: Mapping[Key, Any], base: object, lock_file: LockFile | None) -> tuple[Any, ...]:
    # The path as well: messages name it.
    locked_by = None if lock_file is None else (lock_file.path, lock_file.digest)
    return (id(base), locked_by, *sorted((key, *_content(cfg)) for key, cfg in mapping.items()))


def _content(cfg: Any) -> tuple[str, str]:
    try:
        text = stable_json(cfg)
    except KeyPartError:
        text = ""
    # A cfg without a stable form, or with arrays (a key does not see their values), is the same only as itself; the
    # shadow keeps it alive, so its address stays its own.
    if not text or '["array",' in text:
        return "object", str(id(cfg))
    return type_name(type(cfg)), text
