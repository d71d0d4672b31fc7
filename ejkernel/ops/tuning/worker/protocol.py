"""Messages between a tuning and its worker: a JSON header, then raw bytes; nothing that runs when it is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np


@dataclass(frozen=True)
class Message:
    """A header, and the parts that came with it."""

    head: dict[str, Any]
    parts: list[bytes] = field(default_factory=list)

    @property
    def verb(self) -> str:
        """What it is about."""
        return str(self.head["verb"])


@final
class Sender:
    """Writes messages to a pipe, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Connection(descriptor, readable=False)
        self._mutex = threading.Lock()

    def send(self, verb: str, parts: Sequence[bytes] = (), **head: Any) -> None:
        """One message: a frame with the header, and one for each part."""
        text = json.dumps({**head, "verb": verb, "parts": len(parts)}).encode()
        with self._mutex:
            for frame in (text, *parts):
                self._pipe.send_bytes(frame)

    def close(self) -> None:
        """Tells the other side that no more comes."""
        self._pipe.close()


@final
class Receiver:
    """Reads messages from a pipe, in one thread."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Connection(descriptor, writable=False)

    def receive(self) -> Message | None:
        """The next message; None where the other side is gone."""
        try:
            head = json.loads(self._pipe.recv_bytes())
            return Message(head, [self._pipe.recv_bytes() for _ in range(head.pop("parts"))])
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Reads no more."""
        self._pipe.close()


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
