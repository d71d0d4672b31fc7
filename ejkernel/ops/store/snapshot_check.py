"""Checks every line of a snapshot without holding all of it: a million entries take some megabytes. No JAX here."""

from __future__ import annotations

from collections.abc import Iterator

from . import files
from .entry_files import is_as_folded
from .lines import SortedLines
from .snapshot import Snapshot, read

# So much without the end of a line is not ours.
_LONGEST = 64 << 20


# The number of whole entries, what is damaged, and the identity of a file of which each line was checked.
CheckedSnapshot = tuple[int, list[str], tuple[int, ...] | None]


def check_snapshot(path: str, names: set[str]) -> CheckedSnapshot:
    """Checks every line; takes the keys of whole entries out of `names`."""
    identity = files.identity(path)
    if identity is None:
        return 0, [], None
    try:
        is_known = is_as_folded(path, identity, files.parts(path))
        found = _check_lines(path, names, is_known=is_known)
    except FileNotFoundError:
        return 0, [], None
    # A file that is not as we write it is read as a whole, which knows more forms and every kind of damage. One that
    # was replaced meanwhile was checked in parts of two files.
    if found is None or files.identity(path) != identity:
        return _check_whole(path, names)
    names.difference_update(found[1])
    return found[0], [], identity


def _check_lines(path: str, names: set[str], *, is_known: bool) -> tuple[int, set[str]] | None:
    """The number of entries, and those of the keys that are among them; None where one is damaged or looks unusual."""
    good = 0
    there: set[str] = set()
    for lines in _sorted_parts(path):
        if lines is None:
            return None
        good += len(lines)
        if is_known:
            there.update(name for name in (lines if names else ()) if name in names)
            continue
        whole = 0
        for name, _ in Snapshot(lines).entries():
            whole += 1
            if name in names:
                there.add(name)
        if whole < len(lines):
            return None
    return good, there


def _sorted_parts(path: str) -> Iterator[SortedLines | None]:
    """The lines of a file as we write it, some megabytes at a time; None, and no more, where it is another file."""
    head, rest, last = b"", b"", b""
    for part in files.parts(path):
        rest += part
        # The format's number is in the last of these letters, and is left for the end.
        end = rest.rfind(b"\n", 0, max(0, len(rest) - 64)) + 1
        begin = 0 if head else 2
        if end > begin and (head or rest.startswith(b"{\n")):
            lines = SortedLines.of(rest, begin, end, after=last)
            yield lines
            if lines is None:
                return
            head, rest, last = b"{\n", rest[end:], lines.last
        elif len(rest) > _LONGEST:
            yield None
            return
    ending = read(head + rest).lines
    yield ending if isinstance(ending, SortedLines) and (not len(ending) or ending.first > last) else None


def _check_whole(path: str, names: set[str]) -> CheckedSnapshot:
    content = files.read(path)
    if content is None:
        return 0, [], None
    snapshot = read(content.data)
    damaged = [snapshot.damage] if snapshot.damage else []
    whole = {name for name, _ in snapshot.entries()}
    damaged += [f"the line of {name}" for name in snapshot.lines if name not in whole]
    names.difference_update(whole)
    return len(whole), damaged, None
