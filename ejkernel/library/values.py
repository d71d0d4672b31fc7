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


# By the check: the latest two arrays that fitted together.
_pairs: dict[Any, tuple[weakref.ref[Any], weakref.ref[Any], Any]] = {}


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


def fit_together(one: Any, other: Any, wanted: Any, fits: Callable[[Any, Any, Any], bool]) -> bool:
    """Reads two arrays of integers that must fit each other; the latest pair is not read again."""
    known = _pairs.get(fits)
    if known is not None and known[0]() is one and known[1]() is other and known[2] == wanted:
        return True
    if not all(jnp.issubdtype(array.dtype, jnp.integer) for array in (one, other)):
        return False
    if not fits(np.asarray(one), np.asarray(other), wanted):
        return False
    _pairs[fits] = weakref.ref(one), weakref.ref(other), wanted
    return True


def _forget(place: int, gone: weakref.ref[Any]) -> None:
    # Another array may have the address by now.
    known = _checked.get(place)
    if known is not None and known[0] is gone:
        _checked.pop(place, None)
