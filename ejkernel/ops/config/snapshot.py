"""The text of a store file: a JSON object, sorted, one entry a line, readable line by line when it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from ..core import codec
from ..core.errors import RecordFormatError
from ..core.key import Key
from ..core.record import FORMAT

# Sorts behind every key, so that each entry's line ends in a comma and lines merge without a conflict at the end.
_LAST = "~format"


@dataclass(frozen=True)
class Content:
    """The entries of a file, as JSON, and what was wrong with it."""

    entries: Mapping[Key, Mapping[str, Any]]
    damage: str = ""


def spell(key: Key) -> str:
    """A key as one string; `|` stays free for the device, which has one of its own."""
    return f"{key.device}|{quote(key.op_id, safe=' @:')}|{quote(key.call_key, safe=' @:')}"


def read_key(text: str) -> Key:
    """The key that `spell` wrote."""
    device, op_id, call_key = text.rsplit("|", 2)
    return Key(device, unquote(op_id), unquote(call_key))


def write(entries: Mapping[Key, Mapping[str, Any]]) -> str:
    """The whole file."""
    lines = sorted(f"{codec.dumps(spell(key))}: {codec.dumps(entry)}," for key, entry in entries.items())
    return "\n".join(["{", *lines, f'"{_LAST}": {FORMAT}', "}", ""])


def read(text: str) -> Content:
    """The entries of a file; a damaged one gives every line that is still whole."""
    if not text.strip():
        return Content({}, "the file is empty" if text else "")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    # RecursionError: brackets by the thousand, which no writer of ours makes.
    except (ValueError, RecursionError) as error:
        return _salvage(text, str(error))
    if not isinstance(data, dict):
        return Content({}, f"it holds a {type(data).__name__}, not an object")
    found = data.pop(_LAST, FORMAT)
    if found != FORMAT:
        raise RecordFormatError(f"the file has format {found!r}; this version reads format {FORMAT}")
    entries: dict[Key, Mapping[str, Any]] = {}
    bad = 0
    for name, entry in data.items():
        bad += not _add(entries, name, entry)
    return Content(entries, f"{bad} entries are not entries" if bad else "")


def _salvage(text: str, reason: str) -> Content:
    entries: dict[Key, Mapping[str, Any]] = {}
    for line in text.splitlines():
        try:
            data = json.loads("{" + line.strip().rstrip(",") + "}", object_pairs_hook=_unique, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        for name, entry in data.items():
            _add(entries, name, entry)
    return Content(entries, reason)


def _add(entries: dict[Key, Mapping[str, Any]], name: str, entry: Any) -> bool:
    if name.count("|") < 2 or not isinstance(entry, dict) or "cfg" not in entry:
        return False
    entries[read_key(name)] = entry
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return data


def _refuse(constant: str) -> Callable[..., Any]:
    raise ValueError(f"{constant} is not JSON")
