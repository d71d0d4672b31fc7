"""Values that were checked before: an array of JAX never changes, so one look at it is enough."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

# By the array's address: what it was checked for, and by which check. An array that is gone takes its line with it.
_checked: dict[int, tuple[weakref.ref[Any], Any, Any]] = {}
# By the check: the latest of them.
_latest: dict[Any, tuple[weakref.ref[Any], Any, Any]] = {}


# By the check: the latest arrays that fitted together.
_together: dict[Any, tuple[tuple[weakref.ref[Any], ...], Any]] = {}


def were_checked(
    array: Any, wanted: Any, fits: Callable[[np.ndarray[Any, Any], Any], bool], kind: Any = jnp.integer
) -> bool:
    """Are these integers known to fit? They are read where they were not looked at before for what is wanted.

    False also for what is not an array of this kind: the function that checks everything has the words for it.
    """
    # Most programs use one array again and again, and newer versions of Python take long to say an address.
    known = _latest.get(fits)
    if known is not None and known[0]() is array and known[1] == wanted:
        return True
    place = id(array)
    known = _checked.get(place)
    if known is None or known[0]() is not array or known[1] != wanted or known[2] is not fits:
        if not jnp.issubdtype(array.dtype, kind) or not fits(np.asarray(array), wanted):
            return False
        known = _checked[place] = (weakref.ref(array, lambda gone: _forget(place, gone)), wanted, fits)
    _latest[fits] = known
    return True


def were_checked_together(arrays: tuple[Any, ...], wanted: Any, fits: Callable[[Any, Any], bool]) -> bool:
    """The same of arrays of integers that must fit each other; the latest of them are not read again."""
    known = _together.get(fits)
    if known is not None and known[1] == wanted and _are(known[0], arrays):
        return True
    if not all(jnp.issubdtype(array.dtype, jnp.integer) for array in arrays):
        return False
    if not fits(tuple(map(np.asarray, arrays)), wanted):
        return False
    _together[fits] = (tuple(map(weakref.ref, arrays)), wanted)
    return True


def _are(known: tuple[weakref.ref[Any], ...], arrays: tuple[Any, ...]) -> bool:
    return len(known) == len(arrays) and all(ref() is array for ref, array in zip(known, arrays, strict=True))


def _forget(place: int, gone: weakref.ref[Any]) -> None:
    # Another array may have the address by now.
    known = _checked.get(place)
    if known is not None and known[0] is gone:
        _checked.pop(place, None)
