"""Values that were checked before: an array of JAX never changes, so one look at it is enough."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

# By the array's address: what it was checked for, and by which check. An array that is gone takes its line with it.
_checked: dict[int, tuple[weakref.ref[Any], Any, Any]] = {}


def were_checked(array: Any, wanted: Any, fits: Callable[[np.ndarray[Any, Any], Any], bool]) -> bool:
    """Are these integers known to fit? They are read where they were not looked at before for what is wanted.

    False also for what is not an array of integers: the function that checks everything has the words for it.
    """
    place = id(array)
    known = _checked.get(place)
    if known is not None and known[1] == wanted and known[2] is fits and known[0]() is array:
        return True
    if not jnp.issubdtype(array.dtype, jnp.integer) or not fits(np.asarray(array), wanted):
        return False
    _checked[place] = (weakref.ref(array, lambda gone: _forget(place, gone)), wanted, fits)
    return True


def _forget(place: int, gone: weakref.ref[Any]) -> None:
    # Another array may have the address by now.
    known = _checked.get(place)
    if known is not None and known[0] is gone:
        _checked.pop(place, None)
