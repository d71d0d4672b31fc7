"""A result as JSON: one object, one entry a line; no class is named in it, and nothing of it is evaluated."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..core import codec
from ..core.errors import ConfigTypeError, RecordFormatError
from ..core.key import Key
from ..core.record import Record
from ..store import files
from .confirm import Confirmation

if TYPE_CHECKING:
    from .results import AutotuningResult, Entry

KIND = "ejkernel.ops autotuning result"
# Results hold records, which hold every sample.
LARGEST = 256 << 20
VERSION = 1


@runtime_checkable
class _Writes(Protocol):
    def write(self, text: Any, /) -> Any: ...


@runtime_checkable
class _Reads(Protocol):
    def read(self) -> Any: ...


_TIMES = ("before_s", "after_s", "gain", "rounds")
_TEXTS = ("op_id_v", "call_key", "source", "note", "device")


def written(result: AutotuningResult) -> str:
    """The text of a result."""
    head = {
        "kind": KIND,
        "version": VERSION,
        "device": result.device,
        "interrupted": result.interrupted,
        "notes": list(result.notes),
        **({"workers": list(result.workers)} if result.workers else {}),
        **({} if result.confirmation is None else {"confirmation": _confirmation_json(result.confirmation)}),
    }
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = ",\n".join(_line(entry) for entry in result.entries)
    return "{" + ",\n".join([*fields, f'"entries": [\n{lines}\n]']) + "}\n"


def _line(entry: Entry) -> str:
    data = {name: getattr(entry, name) for name in _TEXTS}
    record = None if entry.record is None else entry.record.as_json()
    # Earlier releases know the tiers that guess by their names, and so does the reader where this is missing.
    data |= {} if entry.guessed is None else {"guessed": entry.guessed}
    data |= {"count": entry.count, "cfg": codec.encode(entry.cfg), "record": record}
    return json.dumps(data, allow_nan=False)


def parsed(text: str, cfg_types: Mapping[str, Any], device: str | None) -> AutotuningResult:
    """The result behind a text."""
    from .results import AutotuningResult

    try:
        data = codec.loads(text)
    except ValueError as error:
        raise RecordFormatError(f"this is no autotuning result: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RecordFormatError("this is no autotuning result: give a file that AutotuningResult.dump wrote")
    if data.get("version") != VERSION:
        raise RecordFormatError(
            f"the result has version {str(data.get('version'))[:20]}, and this release reads version {VERSION}; "
            "tune again, or read it with the release that wrote it"
        )
    try:
        if device is not None and data["device"] != device:
            raise RecordFormatError(f"the result is for {data['device']!r}, and {device!r} was asked for; tune there")
        _check(data, {"device": str, "interrupted": bool, "notes": list, "entries": list})
        entries = tuple(_entry(item, cfg_types) for item in data["entries"])
        notes, confirmed = tuple(map(str, data["notes"])), data.get("confirmation")
        confirmation = None if confirmed is None else _confirmation(confirmed)
        # Results without a pool, and those of an earlier version, have no workers.
        workers = tuple(map(str, data.get("workers", ())))
        return AutotuningResult(data["device"], entries, data["interrupted"], notes, confirmation, workers)
    except (KeyError, TypeError, AttributeError) as error:
        # A cfg that does not fit the type that was given for it is not the file's fault.
        if isinstance(error, ConfigTypeError):
            raise
        raise RecordFormatError(f"the result is damaged: {error!r}") from error


def _entry(data: Mapping[str, Any], cfg_types: Mapping[str, Any]) -> Entry:
    from .results import Entry

    _check(data, {**dict.fromkeys(_TEXTS, str), "count": int})
    op_id = data["op_id_v"]
    kind = cfg_types.get(op_id, cfg_types.get(op_id.partition("@")[0]))
    load: Callable[[Any], Any] = (lambda cfg: cfg) if kind is None else (lambda cfg: codec.decode(kind, cfg))
    record = None if data["record"] is None else Record.from_json(data["record"], load)
    texts = {name: data[name] for name in _TEXTS}
    guessed = data.get("guessed")
    if guessed is not None:
        _check(data, {"guessed": bool})
    how: dict[str, Any] = {"count": data["count"], "guessed": guessed, "is_plain": kind is None}
    return Entry(**texts, cfg=load(data["cfg"]), record=record, **how)


def _confirmation_json(found: Confirmation) -> dict[str, Any]:
    # NaN is not JSON.
    times = {} if math.isnan(found.before_s) else {name: getattr(found, name) for name in _TIMES}
    return {**times, "taken_back": [list(key) for key in found.taken_back], "note": found.note}


def _confirmation(data: Mapping[str, Any]) -> Confirmation:
    times: dict[str, Any] = {
        name: tuple(data[name]) if name == "gain" else data[name] for name in _TIMES if name in data
    }
    return Confirmation(**times, taken_back=tuple(Key(*key) for key in data["taken_back"]), note=str(data["note"]))


def _check(data: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise RecordFormatError(f"the result is damaged: {name} is {codec.describe(data[name])}")


def put(target: Any, text: str) -> None:
    """Writes a text into an open file, or whole under a path: a reader sees the old file or the new one."""
    if not isinstance(target, (str, os.PathLike)):
        if not isinstance(target, _Writes):
            raise ConfigTypeError(f"{target!r} is neither a path nor a file with a method write()")
        target.write(text.encode() if isinstance(target, (io.RawIOBase, io.BufferedIOBase)) else text)
    elif os.path.exists(target) and not os.path.isfile(target):
        # A device or a pipe is written into, never replaced; a pipe that no process reads is an error, not a wait.
        descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        os.set_blocking(descriptor, True)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        # A link of one's own was made on purpose: the file that it points to is replaced, the link stays.
        files.write(files.resolved(os.fspath(target)), text.encode(), durable=False)


def taken(source: Any) -> str:
    """The text of an open file, or under a path."""
    if isinstance(source, (str, os.PathLike)):
        content = files.read(files.resolved(os.fspath(source)), LARGEST)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(source))
        try:
            return content.data.decode()
        except UnicodeDecodeError as error:
            raise RecordFormatError(f"{os.fspath(source)} is no autotuning result: {error}") from error
    if not isinstance(source, _Reads):
        raise ConfigTypeError(f"{source!r} is neither a path nor a file with a method read()")
    text = source.read()
    return text.decode() if isinstance(text, bytes) else str(text)
