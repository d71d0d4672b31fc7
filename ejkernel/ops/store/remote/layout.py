"""Names of the objects in a remote: one folder for each operation and device, one object for each put. No JAX here.

ejkernel-remote.json                                        the mark of a remote
entries/<operation>/<device>/<key>.<seq>.<writer>.json      one entry, never changed
entries/<operation>/<device>/snapshot.<writer>.json         what a fold merged, one entry a line
compiler/<kind>/<name>                                      files of the compiler's caches
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..._version import __version__
from ...core import codec
from ...core.errors import ConfigTypeError
from ...core.key import Key
from ..entry_files import ENTRY_NAME
from ..files import LARGEST_ENTRY
from ..snapshot import LARGEST_SEQ, Raw, is_whole, key_hash, line, parse, seal, spell
from ..store import StoredEntry
from .signing import Signer, signed

ENTRIES = "entries"
MARK = "ejkernel-remote.json"
FORMAT = 1
# A snapshot of 100,000 entries has some 60 MB.
LARGEST_SNAPSHOT = 256 << 20

LARGEST_OBJECT = LARGEST_ENTRY

# Puts of one key that honest writers may have seen; a count beyond it is passed over by the next put.
SANE_SEQ = 10**9

SNAPSHOT_NAME = re.compile(r"snapshot\.([0-9a-f]{32})\.json")


def folder_of(key: Key) -> str:
    """The folder of a key's operation and device."""
    return f"{ENTRIES}/{_slug(key.op_id)}/{_slug(key.device)}"


def _slug(text: str) -> str:
    # Readable as far as any file system and bucket takes it; the hash tells two apart that read alike.
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:60].strip("._") or "_"
    return f"{plain}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


@dataclass
class Listing:
    """The objects of one folder by key, the newest of a key first."""

    entries: dict[str, list[str]] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)

    @staticmethod
    def of(names: Iterable[str]) -> Listing:
        """Sorts the names of a folder; a name that no writer makes is passed over."""
        found = Listing()
        for name in names:
            match = ENTRY_NAME.fullmatch(name)
            if match and sequence(name) <= LARGEST_SEQ:
                found.entries.setdefault(match[1], []).append(name)
            elif SNAPSHOT_NAME.fullmatch(name):
                found.snapshots.append(name)
        for chain in found.entries.values():
            chain.sort(key=_newest_first)
        found.snapshots.sort()
        return found

    def add(self, name: str) -> None:
        """Adds an entry that was just written."""
        chain = self.entries.get(name[:24], [])
        # A new list: another thread may be going through the old one.
        self.entries[name[:24]] = sorted([*chain, name], key=_newest_first)

    def discard(self, name: str) -> None:
        """Takes an entry back that could not be written."""
        self.entries[name[:24]] = [other for other in self.entries.get(name[:24], ()) if other != name]


def _newest_first(name: str) -> tuple[bool, int]:
    # A count that no honest writer reaches comes last: it must not keep the others from being read.
    return sequence(name) >= SANE_SEQ, -sequence(name)


def sequence(name: str) -> int:
    """The count in the name of an entry."""
    return int(name.split(".")[1])


def made(key: Key, raw: Raw, seq: int, writer: str, signer: Signer | None) -> tuple[str, bytes]:
    """Name and content of the object of a put."""
    name = spell(key)
    sealed = seal(name, signed(name, {**raw, "seq": seq, "writer": writer}, signer))
    return f"{key_hash(name)}.{seq}.{writer}.json", line(name, sealed).encode()


def opened(name: str, data: bytes) -> tuple[str, Raw] | None:
    """The spelled key and the entry of an object; None where it is not what a writer wrote under this name."""
    parsed = parse(data.decode("utf-8", "replace")) if len(data) <= LARGEST_ENTRY else None
    if parsed is None or "sha256" not in parsed[1] or not is_whole(*parsed) or key_hash(parsed[0]) != name[:24]:
        return None
    return parsed


def dumped(key: Key, entry: StoredEntry) -> dict[str, Any]:
    """An entry as JSON; a ConfigTypeError where it has none, or is too large."""
    from datetime import UTC, datetime

    for part in key:
        if not isinstance(part, str):
            raise ConfigTypeError(f"a key is three strings, (device, op_id, call_key); got {tuple(key)!r}")
    raw = {
        "cfg": codec.encode(entry.cfg),
        "source": entry.source,
        "objective": entry.objective,
        "when": entry.when or datetime.now(UTC).isoformat(timespec="microseconds"),
        "by": entry.by or f"ejkernel-ops {__version__}",
        "environment": dict(entry.environment),
        "summary": codec.encode(dict(entry.summary)),
        **({"call": dict(entry.call)} if entry.call else {}),
    }
    try:
        size = len(line(spell(key), raw).encode())
    except (TypeError, ValueError) as error:
        raise ConfigTypeError(f"{codec.describe(entry.cfg)} cannot be written as JSON: {error}") from error
    # A little is left for the count, the writer, the signature and the checksum.
    if size > LARGEST_ENTRY - 4096:
        raise ConfigTypeError(
            f"{codec.describe(entry.cfg)} takes {size:,} bytes with its key, and an entry may have "
            f"{LARGEST_ENTRY - 4096:,}; keep what is large elsewhere and its name in the cfg"
        )
    return raw
