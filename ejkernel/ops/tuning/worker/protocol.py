"""Messages between a tuning and its worker: a JSON header, then raw bytes; nothing that runs when it is read."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

# Lengths of the header and of everything behind it.
_LENGTHS = struct.Struct(">IQ")


@dataclass(frozen=True)
class Message:
    """A header, and the parts that came with it."""

    head: dict[str, Any]
    parts: list[bytes] = field(default_factory=list)

    @property
    def verb(self) -> str:
        """What it is about."""
        return str(self.head["verb"])


class Sender:
    """Writes messages, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, verb: str, parts: Sequence[bytes] = (), **head: Any) -> None:
        """One message."""
        text = json.dumps({**head, "verb": verb, "parts": [len(part) for part in parts]}).encode()
        with self._lock:
            self._stream.write(_LENGTHS.pack(len(text), sum(map(len, parts))))
            self._stream.write(text)
            for part in parts:
                self._stream.write(part)
            self._stream.flush()


def receive(stream: BinaryIO) -> Message | None:
    """The next message; None where the other side is gone."""
    start = _exactly(stream, _LENGTHS.size)
    if start is None:
        return None
    length, rest = _LENGTHS.unpack(start)
    text, body = _exactly(stream, length), _exactly(stream, rest)
    if text is None or body is None:
        return None
    head = json.loads(text)
    parts, at = [], 0
    for size in head.pop("parts"):
        parts.append(body[at : at + size])
        at += size
    return Message(head, parts)


def _exactly(stream: BinaryIO, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        part = stream.read(count - len(found))
        if not part:
            return None
        found += part
    return bytes(found)


def pack(values: Sequence[Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Arrays as what a header says of them, and their bytes."""
    arrays = [np.asarray(value) for value in values]
    return [{"dtype": a.dtype.name, "shape": list(a.shape)} for a in arrays], [a.tobytes() for a in arrays]


def unpack(about: Sequence[dict[str, Any]], parts: Sequence[bytes]) -> list[Any]:
    """The arrays again."""
    return [
        np.frombuffer(part, dtype=np.dtype(one["dtype"])).reshape(one["shape"])
        for one, part in zip(about, parts, strict=True)
    ]
