"""Does an entry fit its checksum? One entry, or many at once, which takes a third of the time. No JAX here."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from .files import LARGEST_ENTRY

Raw = Mapping[str, Any]

# Counts of puts stay far below: an entry of ours that claims more is damaged, and one written by hand counts as 0. A
# writer that sees one as large as this sets it aside, since nothing could be counted after it.
LARGEST_SEQ = 10**12
# Deeper than any entry that we write, since a cfg has at most 64 levels; far below Python's own limit.
DEEPEST = 80

# As json.dumps makes one for every call; what was parsed or encoded before does not contain itself.
_SORTED = json.JSONEncoder(sort_keys=True, check_circular=False)
# So many lines are parsed at once, unless they are long: more make it no quicker, and hold memory.
_LINES, _LETTERS = 256, 1 << 18
# Stands between lines that are parsed at once. No author of a file can know it, so no line can pretend to hold two.
_BETWEEN = secrets.token_hex(8)
_KEYS = [f"{_BETWEEN}{number}" for number in range(_LINES)]
_GAPS = [f'"{key}":0,' for key in _KEYS]


def has_count(raw: Raw) -> bool:
    """Is the number of an entry a count of puts? One without a number was written by hand."""
    seq = raw.get("seq", 0)
    return isinstance(seq, int) and not isinstance(seq, bool) and 0 <= seq <= LARGEST_SEQ


def seal(name: str, raw: Raw) -> dict[str, Any]:
    """The entry with the checksum of its key and content."""
    return {**raw, "sha256": hashed(spelled(name, raw))}


def is_whole(name: str, raw: Raw) -> bool:
    """Is this what was written? An entry without a checksum was written by hand, and is taken as it is."""
    return "sha256" not in raw or (has_count(raw) and raw["sha256"] == hashed(spelled(name, raw)))


def spelled(name: str, raw: Raw) -> str:
    """The text that a checksum is made of: the key and the content without the checksum, in one order."""
    return _SORTED.encode([name, {field: value for field, value in raw.items() if field != "sha256"}])


def hashed(text: str) -> str:
    """The checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def whole_entries(
    pairs: Iterable[tuple[str, str]], alone: Callable[[str, str], Raw | None], *, are_checked: bool = False
) -> Iterator[tuple[str, Raw]]:
    """The entries of lines, by their keys, that fit their checksums; `alone` judges a line that needs more care.

    Lines that `are_checked` are known to fit, and are parsed alone.
    """
    for names, lines in _blocks(pairs):
        raws = _parsed(names, lines)
        found = raws if are_checked else _fitting(names, raws)
        for name, text, raw in zip(names, lines, found, strict=True):
            entry = alone(name, text) if raw is None else raw
            if entry is not None:
                yield name, entry


def _blocks(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    lines: list[str] = []
    letters = 0
    for name, text in pairs:
        names.append(name)
        lines.append(text)
        letters += len(text)
        if len(lines) == _LINES or letters > _LETTERS:
            yield names, lines
            names, lines, letters = [], [], 0
    if lines:
        yield names, lines


def _parsed(names: list[str], lines: list[str]) -> list[dict[str, Any] | None]:
    """The entry of each line that looks like one of ours; None where it has to be looked at alone."""
    if max(map(len, lines)) > LARGEST_ENTRY:
        return [None] * len(lines)
    try:
        data = json.loads("{" + "".join(chain.from_iterable(zip(lines, _GAPS, strict=False)))[:-1] + "}")
    except (ValueError, RecursionError):
        return [None] * len(lines)
    # Each line is one key and its entry, and ends where its text ends.
    if list(data) != list(chain.from_iterable(zip(names, _KEYS, strict=False))):
        return [None] * len(lines)
    return [_if_ours(data[name], text) for name, text in zip(names, lines, strict=True)]


def _if_ours(raw: Any, text: str) -> dict[str, Any] | None:
    few = text.count("{") + text.count("[") <= DEEPEST
    is_ours = few and isinstance(raw, dict) and "cfg" in raw and raw.get("sha256") is not None and has_count(raw)
    return raw if is_ours else None


def _fitting(names: list[str], raws: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Those of the entries that fit their checksums; None for the others."""
    told = [None if raw is None else raw.pop("sha256") for raw in raws]
    shown = [0 if raw is None else [name, raw] for name, raw in zip(names, raws, strict=True)]
    text = _SORTED.encode(list(chain.from_iterable((each, _BETWEEN) for each in shown)))
    # As Python spells numbers that JSON does not have.
    if "Infinity" in text or "NaN" in text:
        return [None] * len(raws)
    found = []
    for raw, sha, spelling in zip(raws, told, text[1:].split(f', "{_BETWEEN}"')[:-1], strict=True):
        fits = raw is not None and sha == hashed(spelling.removeprefix(", "))
        found.append({**raw, "sha256": sha} if raw is not None and fits else None)
    return found
