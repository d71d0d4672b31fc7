"""A fuzzer for the files that this package reads: real files, changed in bytes, in words and in structure."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# What breaks parsers: numbers out of range, constants that are no JSON, nesting, odd text, wrong types.
WORDS = [
    *(b"1e999", b"-1e999", b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0.5"),
    *(b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"]" * 50, b"\x00", b"\xff\xfe", b'"\\ud800"', b"\\u0000"),
    *(b'"sha256": "0000000000000000"', b'"seq": 99999999999999999999', b'"~format": 7', b"\n", b"\r", b",", b"}{"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1 << 70, 1.5, -0.0, 1e300, "", "x", "\u202e", "\x1b[2J", "../../etc/passwd", "\ud800"),
    *([], {}, [None], [[]], {"": None}, {"cfg": {}}, [1, "a", None], {"status": "ok"}),
]


def in_bytes(data: bytes, dice: random.Random) -> bytes:
    """Changes some bytes or words."""
    found = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        place = dice.randrange(len(found) + 1)
        kind = dice.randrange(6)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del found[place : place + dice.choice([1, 3, 20, 500])]
        elif kind == 2:
            found[place:place] = dice.choice(WORDS)
        elif kind == 3:
            found[place:place] = found[dice.randrange(len(found) + 1) :][:200]
        elif kind == 4:
            del found[place:]
        else:
            found[place : place + 3] = dice.choice(WORDS)
    return bytes(found)


def in_structure(value: Any, dice: random.Random) -> Any:
    """Changes one node or some of a JSON value."""
    found = copy.deepcopy(value)
    for _ in range(dice.choice([1, 1, 2, 4])):
        places = list(_places(found))
        if not places:
            return found
        holder, key = dice.choice(places)
        kind = dice.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[dice.choice(["x", "", "status", "seq", "cfg"])] = holder[key]
        elif kind == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == 3:
            other, name = dice.choice(places)
            # A later change may have taken it away.
            try:
                holder[key] = copy.deepcopy(other[name])
            except LookupError:
                continue
        else:
            holder[key] = copy.deepcopy(dice.choice(VALUES))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner):
        yield value, key
        yield from _places(item)


def inputs(
    seed: int, count: int, data: bytes, value: Any, written: Callable[[Any], bytes]
) -> Iterator[tuple[bytes, bool]]:
    """Changed files, and whether their checksums are right: as many in bytes as in structure."""
    dice = random.Random(seed)
    for number in range(count):
        if number % 2:
            yield in_bytes(data, dice), False
            continue
        try:
            yield written(in_structure(value, dice)), True
        # What cannot be written is no file.
        except (ValueError, TypeError, KeyError, AttributeError, UnicodeEncodeError):
            yield in_bytes(data, dice), False


def as_json(value: Any) -> bytes:
    """JSON, odd numbers and text included."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
