"""The short key of a call: what a warm call is looked up by, made without hashing or comparing more than it must.

A short key has the class of the kernel (or the function of a planned call), the keywords, the kernel's attributes, the
policy overrides around and, where a process has devices of several kinds, the place. It never has shapes: JAX's own jit
key tells those apart. A call with a value that `==` and the type do not tell from all others has no short key.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from types import FunctionType, NoneType
from typing import Any

import jax
import numpy as np

from .. import _jax
from ..config import policy
from ..core.kernel import Kernel
from .arguments import RESERVED

ARRAY = _jax.ArrayImpl
# Static values that are their own key: cheap to hash, never equal across types once the type stands beside them.
PLAIN_KINDS = frozenset((int, bool, str, NoneType))
# Classes and functions are known by their identity.
_BY_IDENTITY = (type, FunctionType, enum.Enum, np.dtype, type(jax.jit(lambda: None)))

# The class of random keys, which JAX moves between versions: known once one was seen.
_KEYS: set[type] = set()

frames_in_force = policy.frames.get


def with_keywords(short: Any, leaves: Any, keywords: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The short key and the arrays of a call with its keywords added; None where one of them needs the long way."""
    for name, value in keywords.items():
        kind = type(value)
        if kind is ARRAY:
            short = (short, name)
            leaves = (*leaves, value)
        elif kind in PLAIN_KINDS:
            short = (short, name, kind, value)
        elif kind in _KEYS or _is_key(value):
            short = (short, name)
            leaves = (*leaves, value)
        else:
            mark = _mark(value)
            if mark is None:
                return None
            short = (short, name, kind, mark)
    return short, leaves


def with_positions(short: Any, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """The short key with a function's arguments by position; `short` has their number."""
    leaves: list[Any] = []
    for place, value in enumerate(args):
        kind = type(value)
        if kind is ARRAY:
            leaves.append(value)
        elif kind in PLAIN_KINDS:
            short = (short, place, kind, value)
        elif kind in _KEYS or _is_key(value):
            leaves.append(value)
        else:
            mark = _mark(value)
            if mark is None:
                return None
            short = (short, place, kind, mark)
    return short, leaves


def with_state(short: Any, state: Mapping[str, Any]) -> Any:
    """The short key with the kernel's attributes added; `is_short` was asked before the key was first kept."""
    for name, value in state.items():
        short = (short, name, value, type(value))
    return short


def is_short(value: Any) -> bool:
    """May this attribute of a kernel be part of a short key, which tells values by `==` and type alone?"""
    # 0.0 equals -0.0, NaN is not itself, and whatever has parts may hold either.
    if type(value) is float:
        return bool(value) and value == value
    return type(value) in PLAIN_KINDS or isinstance(value, _BY_IDENTITY)


def _mark(value: Any) -> Hashable | None:
    """The stand-in for a static keyword beside its type; None where there is no short one."""
    if type(value) is float:
        # 0.0 equals -0.0: they are told apart by their text.
        return value or repr(value) if value == value else None
    if type(value) is tuple:
        return value if all(type(item) is int for item in value) else None
    return value if isinstance(value, _BY_IDENTITY) else None


def of_tree(short: Any, flat: Sequence[Any], tree: Any, names: tuple[str, ...]) -> tuple[Any, Sequence[Any]] | None:
    """The short key of a call with trees of arrays, and the arrays; None where a leaf needs the long way."""
    # In few steps of Python for each leaf: there may be hundreds.
    others = [place for place, leaf in enumerate(flat) if type(leaf) is not ARRAY]
    if not others:
        return (short, tree, names), flat
    leaves = list(flat)
    static: list[Any] = []
    for place in reversed(others):
        leaf = flat[place]
        kind = type(leaf)
        if kind is np.ndarray or kind in _KEYS or _is_key(leaf):
            continue
        mark = leaf if kind in PLAIN_KINDS else _mark(leaf)
        if mark is None:
            return None
        static += (place, kind, mark)
        del leaves[place]
    return (short, tree, names, tuple(static)), leaves


def place_of(leaves: Sequence[Any]) -> Any:
    """The place where an eager call runs, for processes with more than one kind of device."""
    for leaf in leaves:
        if leaf._committed if type(leaf) is ARRAY else type(leaf) in _KEYS and leaf.committed:
            return leaf.sharding
    return _jax.setting("jax_default_device")


def _is_key(value: Any) -> bool:
    """Is this a random key, the one kind of array that has a class of its own?"""
    if type(value) is float or not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    _KEYS.add(type(value))
    return True


def placed(short: Any, leaves: Sequence[Any], several_kinds: bool | None) -> Any:
    """A short key with the policy overrides in force, and the place where that matters."""
    frames = frames_in_force()
    if frames:
        short = (short, frames)
    return (short, place_of(leaves)) if several_kinds else short


def group_key(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], several_kinds: bool | None
) -> Hashable | None:
    """The short key of all calls with such trees, whatever their structure; None where there is none."""
    # The place of a call is that of its first array, for which the trees would have to be taken apart.
    if several_kinds or not RESERVED.isdisjoint(kwargs):
        return None
    try:
        state = vars(kernel)
        short = placed(with_state((type(kernel), len(args), tuple(kwargs)), state), (), several_kinds)
        hash(short)
    # An attribute that cannot be hashed, or no kernel at all.
    except TypeError:
        return None
    return short if all(map(is_short, state.values())) else None


def tree_key(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], several_kinds: bool | None
) -> tuple[Hashable, Sequence[Any]] | None:
    """The short key of a call with trees of arrays, and the arrays; None where it has none."""
    if not RESERVED.isdisjoint(kwargs):
        return None
    try:
        flat, tree = jax.tree_util.tree_flatten((args, tuple(kwargs.values())))
        found = of_tree(type(kernel), flat, tree, tuple(kwargs))
        if found is None:
            return None
        short = placed(with_state(found[0], vars(kernel)), found[1], several_kinds)
        hash(short)
    # Keys that cannot be sorted, constant data that cannot be hashed, or no kernel: the long way says so.
    except (TypeError, ValueError):
        return None
    return short, found[1]


def short_key_of(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], several_kinds: bool | None
) -> tuple[Hashable, int] | None:
    """The short key of a call, and its number of arrays (-1: of trees); None where only the long way can serve it."""
    if not all(is_short(value) for value in vars(kernel).values()):
        return None
    # A cfg or a mesh is no argument of the kernel, whatever arrays it holds.
    if any(type(kwargs[name]) not in PLAIN_KINDS for name in RESERVED.intersection(kwargs)):
        return None
    if all(type(arg) is ARRAY for arg in args):
        marked = with_keywords(type(kernel), args, kwargs)
        if marked is not None:
            return placed(with_state(marked[0], vars(kernel)), marked[1], several_kinds), len(args)
    found = tree_key(kernel, args, kwargs, several_kinds)
    return None if found is None else (found[0], -1)
