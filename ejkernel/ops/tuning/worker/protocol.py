"""Messages between a tuning and its worker: a JSON header, then raw bytes; nothing that runs when it is read.

But executables, which JAX writes as pickles: they come from processes of the same tuning.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np

# A message has a few parts; records and arrays are far below it.
_MOST_PARTS = 1 << 20
# The longest frame that a worker sends: the record of a tuning.
LONGEST_ANSWER = 256 << 20


class GarbageError(Exception):
    """Bytes on a pipe that are no message."""


@dataclass(frozen=True)
class Message:
    """A header, and the parts that came with it."""

    head: dict[str, Any]
    parts: list[bytes] = field(default_factory=list)

    @property
    def verb(self) -> str:
        """The kind of message."""
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

    def __init__(self, descriptor: int, longest: int | None = None) -> None:
        self._pipe = Connection(descriptor, writable=False)
        # Bytes of one frame; None: any number, where the other side is trusted.
        self._longest = longest

    def receive(self) -> Message | None:
        """The next message; None where the other side is gone, a `GarbageError` for what is no message."""
        try:
            head = json.loads(self._frame())
            parts = head.pop("parts")
            if not isinstance(head.get("verb"), str) or not 0 <= parts <= _MOST_PARTS:
                raise ValueError(str(head)[:80])
            return Message(head, [self._frame() for _ in range(parts)])
        except (EOFError, ConnectionError):
            return None
        except OSError as error:
            # As Connection says that a frame is longer than it may be; all else is the end of the pipe.
            if "length" not in str(error):
                return None
            raise GarbageError(f"what came over its pipe is no message: {error}") from error
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise GarbageError(f"what came over its pipe is no message: {type(error).__name__}") from error

    def _frame(self) -> bytes:
        return self._pipe.recv_bytes(self._longest)

    def close(self) -> None:
        """Reads no more."""
        self._pipe.close()


def pack(
    values: Sequence[Any], *, drawn: Sequence[int] = (), seed: int = 0, group: str = "inputs"
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Arrays as what a header says of them, and the bytes of those that are not `drawn`, together, from a seed."""
    about, parts = [], []
    for i, value in enumerate(values):
        kind = value if hasattr(value, "dtype") else np.asarray(value)
        one: dict[str, Any] = {"dtype": kind.dtype.name, "shape": list(kind.shape)}
        if i in drawn:
            one |= {"seed": seed, "group": group}
        else:
            parts.append(np.asarray(value).tobytes())
        about.append(one)
    return about, parts


def unpack(about: Sequence[dict[str, Any]], parts: Sequence[bytes]) -> list[Any]:
    """The arrays again, as far as their bytes were sent; None for the others."""
    left = iter(parts)
    return [
        None if "seed" in one else np.frombuffer(next(left), dtype=np.dtype(one["dtype"])).reshape(one["shape"])
        for one in about
    ]
