"""A file of the calls that were seen, for tuning in another process; many processes may write one file."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from .. import _jax
from ..core import codec
from ..core.errors import KeyPartError, RecordFormatError, SignatureError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, kernel_path, key_builder_of, versioned
from ..core.key import Key
from ..core.plain_file import lock_at
from ..core.record import Objective
from ..core.trace_context import TraceContext
from ..store import files
from . import signatures

KIND = "ejkernel.ops recorded calls"
VERSION = 1

BOTH: Objective = "forward+backward"

# The longest wait for the file's lock, which another process holds for milliseconds while it writes.
_WAIT_SECONDS = 30.0


class RecordingWarning(UserWarning):
    """A call that is not recorded, or a recorded one that cannot be tuned."""


class Recording:
    """Adds calls to a file, each key once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: set[tuple[Key, Objective | None]] = set()
        self._said: set[str] = set()
        self._broken = False
        self._lock = threading.Lock()

    def add(
        self,
        key: Key,
        kernel: Kernel[Any, Any],
        inv: Invocation[Any, Any],
        trace_context: TraceContext,
        objective: Objective | None = None,
    ) -> None:
        """Writes a call and what it is tuned for, where that is known, or says once why it cannot be written."""
        with self._lock:
            if (key, objective) in self._seen or self._broken:
                return
            self._seen.add((key, objective))
            try:
                signature = signatures.written(kernel, inv, trace_context)
                check_round_trip(signature, key)
                signature |= {} if objective is None else {"objective": objective}
            except SignatureError as error:
                self._say(f"a call of kernel {versioned(kernel)} ({kernel_path(kernel)}) is not recorded: {error}")
                return
            try:
                _merge(self.path, {key: signature})
            # ValueError: something else lies there, and it is not ours to replace.
            except (OSError, ValueError) as error:
                self._broken = True
                self._say(f"no calls are recorded in {self.path}: {type(error).__name__}: {error}")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, RecordingWarning, stacklevel=2)


def check_round_trip(signature: Mapping[str, Any], key: Key) -> None:
    """Raises unless the signature reads back as the same call: else its tuning would answer another one."""
    # The caller may be tracing a program: rebuilding the call must not become a part of that trace.
    with _jax.clean_room():
        read_back = json.loads(json.dumps(signature))
        kernel, inv, trace_context = signatures.rebuilt(read_back, key.device.partition("|")[0])
        with trace_context.entered():
            found = call_key_of(kernel, inv)
    if found != key.call_key:
        raise SignatureError(f"read back it has another key, {found} instead of {key.call_key}")


def call_key_of(kernel: Any, inv: Invocation[Any, Any]) -> str:
    """The key that the kernel makes of a call, or a `SignatureError`."""
    try:
        return inv.make_key(key_builder_of(kernel))
    except KeyPartError as error:
        raise SignatureError(str(error)) from error


def _merge(path: str, fresh: Mapping[Key, Mapping[str, Any]]) -> None:
    path = files.resolved(path)
    files.make_folder(os.path.dirname(path))
    with lock_at(f"{path}.lock", timeout=_WAIT_SECONDS):
        known = read_file(path)
        # A call that one program needs forward and backward stays so: that tuning serves the forward pass as well.
        kept = {key: {"objective": BOTH} for key in fresh if known.get(key, {}).get("objective") == BOTH}
        calls = {**known, **{key: {**call, **kept.get(key, {})} for key, call in fresh.items()}}
        head = f'"kind": {json.dumps(KIND)},\n"version": {VERSION},\n"calls": [\n'
        lines = ",\n".join(json.dumps({**key._asdict(), **calls[key]}, allow_nan=False) for key in sorted(calls))
        files.write(path, ("{" + head + lines + "\n]}\n").encode(), durable=False)


class ForeignFileError(RecordFormatError):
    """A recording that is not this user's or root's, or that its group or others may write."""


def read_file(path: str, *, only_own: bool = False) -> dict[Key, dict[str, Any]]:
    """The calls of a file by key, none where there is no file; `only_own`: a `ForeignFileError` for one of others."""
    content = files.read(files.resolved(path), files.LARGEST_RECORD)
    if content is None or not content.data:
        return {}
    # The very bytes that are used: a second look at the path may find another file there.
    if only_own and content.author not in (os.getuid(), 0):
        raise ForeignFileError(f"{path} is not a file that you alone may write")
    try:
        data = codec.loads(content.data)
        known = isinstance(data, dict) and data.get("kind") == KIND
    except ValueError:
        known = False
    if not known:
        raise RecordFormatError(f"{path} is no file of recorded calls; name another file, or remove this one")
    if data.get("version") != VERSION:
        raise RecordFormatError(
            f"{path} has version {str(data.get('version'))[:20]} of recorded calls, and this release reads version "
            f"{VERSION}"
        )
    try:
        calls = {Key(*(call.pop(name) for name in Key._fields)): call for call in data["calls"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordFormatError(f"{path} is damaged: {error!r}") from error
    if not all(isinstance(part, str) for key in calls for part in key):
        raise RecordFormatError(f"{path} is damaged: a key is three strings")
    return calls
