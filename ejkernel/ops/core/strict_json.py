"""JSON as the standard has it, for files that any user may have written: what is odd is a `ValueError`. No JAX here."""

from __future__ import annotations

import json
import math
from typing import Any

# Deeper than any file that we write; far below Python's own limit.
DEEPEST = 100


def loads(text: str | bytes) -> Any:
    """The value of a text; NaN, Infinity, 1e999, a key that stands twice and deep nesting are a `ValueError`."""
    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    # Brackets by the thousand, which no writer of ours makes.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_shallow(found, DEEPEST):
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object; a key that stands twice is an error."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return data


def refuse(constant: str) -> Any:
    """Refuses NaN and Infinity, which Python reads although they are no JSON."""
    raise ValueError(f"{constant} is not JSON")


def finite(text: str) -> float:
    """A number; one that is too large for a float, such as 1e999, is an error and not infinity."""
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:20]} is too large for a number")
    return found


def is_shallow(value: Any, levels: int) -> bool:
    """Is this nested in no more than so many levels?"""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inner if isinstance(item, (dict, list)))
