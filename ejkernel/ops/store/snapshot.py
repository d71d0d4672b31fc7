"""The snapshot, a store's file: a sorted JSON object with one entry a line, readable line by line when damaged."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # as old as json, and as public as it gets
from typing import Any
from urllib.parse import quote, unquote

from ..core import codec
from ..core.codec import is_shallow
from ..core.key import Key
from .files import LARGEST_ENTRY
from .lines import DEEPEST, LARGEST_SEQ, Raw, SortedLines, has_count, hashed, is_whole, seal, spelled, whole_entries

__all__ = ["LARGEST_SEQ", "Raw", "Snapshot", "is_whole", "key_hash", "line", "order", "parse", "read", "seal", "spell"]

FORMAT = 1
# A longer line is not searched for entries, even if line breaks between some of them are damaged.
_LONGEST_LINE = 4 * LARGEST_ENTRY
# Up to this size a file is written at once: a copy costs less than a few writes.
_COPIED = 1 << 20
# Sorts behind every key, so that each entry's line ends in a comma and lines merge without a conflict at the end.
_LAST = "~format"


def spell(key: Key) -> str:
    """A key as one string; `|` stays free for the device, which has one of its own."""
    return f"{key.device}|{quote(key.op_id, safe=' @:', errors='surrogatepass')}|" + quote(
        key.call_key, safe=" @:", errors="surrogatepass"
    )


def read_key(text: str) -> Key:
    """The key that `spell` wrote."""
    device, op_id, call_key = text.rsplit("|", 2)
    # A store has few devices and operations, and may have a million keys.
    device, op_id = sys.intern(device), sys.intern(op_id)
    if "%" not in op_id and "%" not in call_key:
        return Key(device, op_id, call_key)
    try:
        return Key(device, unquote(op_id, errors="surrogatepass"), unquote(call_key, errors="surrogatepass"))
    # A hand or another program wrote it: no writer of ours makes such bytes.
    except UnicodeDecodeError:
        return Key(device, op_id, call_key)


def key_hash(name: str) -> str:
    """A spelled key as a file name: the text of a key never becomes a path."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def order(raw: Raw) -> tuple[int, str, str]:
    """Later entries of a key compare greater: first by how many of its puts the writer had seen, then by clock."""
    seq = raw.get("seq", 0)
    return (int(seq) if has_count(raw) else 0, str(raw.get("when", "")), str(raw.get("writer", "")))


def line(name: str, raw: Raw) -> str:
    """An entry as its line of the file."""
    return f"{_dumps(name)}: {_dumps(raw)},"


def _dumps(value: Any) -> str:
    # What a line of text can't hold is escaped: lone surrogates, and the separators that str.splitlines knows.
    return codec.dumps(value).translate(_ESCAPES).encode("utf-8", "backslashreplace").decode("utf-8")


_ESCAPES = {code: f"\\u{code:04x}" for code in (0x7F, 0x85, 0x2028, 0x2029)}


def parse(text: str) -> tuple[str, Raw] | None:
    """One line, or None where it is not an entry."""
    if len(text) > LARGEST_ENTRY:
        return None
    try:
        data = codec.loads("{" + text.strip().removesuffix(",") + "}")
    except ValueError:
        return None
    if len(data) != 1:
        return None
    (name, raw), *_ = data.items()
    return (name, raw) if is_entry(name, raw) else None


def is_entry(name: Any, raw: Any) -> bool:
    """Does this look like a key and its entry?"""
    fits = isinstance(name, str) and name.count("|") >= 2 and isinstance(raw, dict) and "cfg" in raw
    return fits and is_shallow(raw, DEEPEST)


def owned(name: str, raw: Raw, owner: int) -> Raw:
    """Marks an entry with the user that owns its file, so that a fold by another user does not make it that user's."""
    marked = {field: value for field, value in raw.items() if field != "sha256"} | {"owner": owner}
    return seal(name, marked) if "sha256" in raw else marked


@dataclass
class Snapshot:
    """The lines of a file by key; a line is parsed when it is asked for."""

    lines: MutableMapping[str, str] = field(default_factory=dict)
    damage: str = ""
    # Why the file must not be replaced: a newer version wrote it. Lines that still fit their checksum can be read.
    newer: str = ""

    def find(self, name: str) -> Raw | None:
        """The entry of a spelled key; None where there is none, or where its line is damaged."""
        text = self.lines.get(name)
        return None if text is None else _whole(name, text)

    def entries(self, *, are_checked: bool = False) -> Iterator[tuple[str, Raw]]:
        """Every entry that is whole, with its spelled key: several times as fast as finding them one by one."""
        pairs = self.lines.pairs() if isinstance(self.lines, SortedLines) else iter(self.lines.items())
        yield from whole_entries(pairs, _whole, are_checked=are_checked)

    def copy(self) -> Snapshot:
        """A copy of its own, which may be changed."""
        return Snapshot(self.lines.copy() if isinstance(self.lines, (dict, SortedLines)) else dict(self.lines))

    def text(self) -> str:
        """The whole file."""
        return b"".join(self.pieces()).decode()

    def pieces(self) -> list[bytes | memoryview]:
        """The whole file as bytes; those of a large one are where they lie already."""
        last = f'"{_LAST}": {FORMAT}\n}}\n'.encode()
        if isinstance(self.lines, SortedLines):
            found = [b"{\n", *self.lines.parts(), last]
            return [b"".join(found)] if sum(map(len, found)) <= _COPIED else found
        ordered = [self.lines[name] for name in sorted(self.lines)]
        return ["\n".join(["{", *ordered, ""]).encode() + last]


def _whole(name: str, text_line: str) -> Raw | None:
    # A line that fits its checksum is as we wrote it, and needs none of the care that an edited line needs.
    if len(text_line) <= LARGEST_ENTRY:
        try:
            raw = json.loads("{" + text_line.removesuffix(",") + "}").get(name)
            few = text_line.count("{") + text_line.count("[") <= DEEPEST
            if isinstance(raw, dict) and "sha256" in raw and has_count(raw) and (few or is_shallow(raw, DEEPEST)):
                text = spelled(name, raw)
                # As Python spells numbers that JSON does not have.
                odd = "Infinity" in text or "NaN" in text
                if not odd and raw["sha256"] == hashed(text) and "cfg" in raw:
                    return raw
        except (ValueError, RecursionError):
            pass
    found = parse(text_line)
    return found[1] if found and found[0] == name and is_whole(name, found[1]) else None


def read(data: bytes) -> Snapshot:
    """The entries of a file; a damaged one gives every line that is still whole."""
    sorted_lines = _as_we_write(data)
    if sorted_lines is not None:
        return sorted_lines
    text = data.decode("utf-8", "replace")
    if not text.strip():
        return Snapshot(damage="the file is empty" if data else "")
    quick = _by_lines(text)
    if quick is not None:
        return quick
    # No writer and no hand makes such a line: what is whole around it is taken.
    if len(text) > LARGEST_ENTRY and max(map(len, text.split("\n"))) > _LONGEST_LINE:
        return _salvage(text, "a line of it is longer than any entry")
    return _by_json(text)


def _as_we_write(data: bytes) -> Snapshot | None:
    """A file as we write it, its entries neither parsed nor copied; None for any other."""
    mark = f'"{_LAST}": '.encode()
    place = data.rfind(b"\n" + mark, max(0, len(data) - 64))
    if not data.startswith(b"{\n") or place < 0:
        return None
    last, _, rest = data[place + 1 :].partition(b"\n")
    lines = SortedLines.of(data, 2, place + 1) if rest == b"}\n" and last[len(mark) :].isdigit() else None
    return None if lines is None else Snapshot(lines, "", _newer(last.decode()))


def read_thoroughly(data: bytes) -> Snapshot:
    """The entries of a file with every line checked; damaged lines are left out."""
    found = read(data)
    bad = len(found.lines) - sum(1 for _ in found.entries())
    if not bad:
        return found
    return _salvage(data.decode("utf-8", "replace"), found.damage or _mismatch(bad))


def _by_lines(text: str) -> Snapshot | None:
    """A file as we write it, without parsing its entries; None for any other."""
    rows = text.rstrip("\n").split("\n")
    if len(rows) < 3 or rows[0] != "{" or rows[-1] != "}" or not rows[-2].startswith(f'"{_LAST}": '):
        return None
    newer = _newer(rows[-2])
    lines: dict[str, str] = {}
    bad = 0
    for text_line in rows[1:-2]:
        if not text_line.startswith('"') or not text_line.endswith("},"):
            return None
        try:
            name, end = scanstring(text_line, 1)
        except ValueError:
            return None
        if text_line[end : end + 3] != ": {" or name.count("|") < 2:
            return None
        if '"sha256": ' in text_line:
            bad += not _put(lines, name, text_line)
        else:
            found = parse(text_line)
            if found is None:
                return None
            _put_parsed(lines, *found)
    return Snapshot(lines, _mismatch(bad) if bad else "", newer)


def _mismatch(bad: int) -> str:
    return f'{bad} of its lines do not fit their checksum; a line that you edit is yours without its "sha256"'


def _newer(text_line: str) -> str:
    found = text_line.partition(": ")[2].strip().rstrip(",").lstrip("0")
    # Not int(): a number of thousands of digits is an error there.
    is_newer = found.isascii() and found.isdigit() and (len(found), found) > (len(str(FORMAT)), str(FORMAT))
    return (
        f"it has format {found[:9]}, and this version reads format {FORMAT}: a newer one wrote it" if is_newer else ""
    )


def _put(lines: MutableMapping[str, str], name: str, text_line: str) -> bool:
    """Adds a line; False where it is one of two for a key and either is damaged."""
    if name not in lines:
        lines[name] = text_line
        return True
    # A merge in git can leave two lines of one key: the later entry wins, as everywhere; a damaged line never does.
    old, new = Snapshot(lines).find(name), Snapshot({name: text_line}).find(name)
    if new is not None and (old is None or order(new) >= order(old)):
        lines[name] = text_line
    return old is not None and new is not None


def _put_parsed(lines: dict[str, str], name: str, raw: Raw) -> None:
    # A line that was written by hand has no %2C for a comma.
    name = name if "sha256" in raw else spell(read_key(name))
    _put(lines, name, line(name, raw))


def _by_json(text: str) -> Snapshot:
    """Reads any other JSON that holds entries; a text that is no JSON is searched line by line."""
    try:
        data = codec.loads(text)
    except ValueError as error:
        return _salvage(text, str(error))
    if not isinstance(data, dict):
        return Snapshot(damage=f"it holds a {type(data).__name__}, not an object")
    newer = _newer(f": {data.pop(_LAST, FORMAT)}")
    entries = {name: raw for name, raw in data.items() if is_entry(name, raw)}
    lines: dict[str, str] = {}
    for name, raw in entries.items():
        _put_parsed(lines, name, raw)
    bad = len(data) - len(entries)
    return Snapshot(lines, f"{bad} of its items are no entries" if bad else "", newer)


# The end of a line of ours, also where the line break behind it is damaged.
_END = re.compile(r'(?<="sha256": "[0-9a-f]{16}"\},)[^"]*')


def _salvage(text: str, reason: str) -> Snapshot:
    lines: dict[str, str] = {}
    newer = ""
    rows = (row for row in text.splitlines() if len(row) <= _LONGEST_LINE)
    for text_line in itertools.chain.from_iterable(map(_END.split, rows)):
        if text_line.startswith(f'"{_LAST}": '):
            newer = newer or _newer(text_line)
        # A line starts with its key, whatever stands before that.
        found = parse(text_line[max(text_line.find('"'), 0) :])
        if found is not None and is_whole(*found):
            _put_parsed(lines, *found)
    return Snapshot(lines, reason, newer)
