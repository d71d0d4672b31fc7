"""A tuning as a value that can travel: one text with some calls of a kernel, and the text that comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._version import __version__
from ...core import codec
from ...core.errors import RecordFormatError
from ...core.key import Key
from ...core.record import Objective

TASK = "ejkernel.ops tuning task"
REPLY = "ejkernel.ops tuning reply"
# Moves with every change of what either text holds.
PROTOCOL = 1


@dataclass(frozen=True)
class AskedCall:
    """One call to be tuned: its key, its signature, and what the tuning covers."""

    key: Key
    # As a recording has it: the kernel by its import path, shapes and static values.
    signature: Mapping[str, Any]
    objective: Objective = "forward"
    # The fingerprint of the kernel's code; empty where its version says enough.
    code: str = ""
    seconds: float | None = None
    repetitions: int = 1
    # Cfgs of similar calls, as JSON.
    seeds: Sequence[Any] = ()
    # The calls that this kernel makes, as (op_id, call_key, cfg).
    inside: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True)
class Task:
    """Calls for one worker, and what it must be like."""

    device: str
    calls: tuple[AskedCall, ...]
    # The plain settings of the tuner.
    tuner: Mapping[str, Any] = field(default_factory=dict)
    # The release of jaxlib that entries are kept for; empty: any.
    jaxlib: str = ""
    # Seconds that a worker waits before it refuses: meanwhile another one may take the next task.
    pause: float = 0.0
    version: str = __version__

    def dumps(self) -> str:
        """The task as text."""
        calls = [{**vars(call), "key": list(call.key)} for call in self.calls]
        return _text(TASK, {**vars(self), "calls": calls})

    @staticmethod
    def loads(text: Any) -> Task:
        """The task behind a text; a `RecordFormatError` says what it is instead."""
        data = _read(text, TASK)
        try:
            calls = [AskedCall(**{**call, "key": Key(*call["key"])}) for call in data.pop("calls")]
            return Task(**data, calls=tuple(calls))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordFormatError(f"the task is damaged: {error!r}") from error


@dataclass(frozen=True)
class TaskOutcome:
    """The end of one call: a record, or the reason why there is none."""

    key: Key
    record: Mapping[str, Any] | None = None
    # The record of a tuning in which every candidate failed.
    failed: Mapping[str, Any] | None = None
    why: str = ""
    # Not this worker: another one may be able to.
    refused: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Reply:
    """A worker's answer to a task."""

    worker: str
    outcomes: tuple[TaskOutcome, ...]
    device: str = ""
    seconds: float = 0.0

    def dumps(self) -> str:
        """The reply as text."""
        outcomes = [{**vars(one), "key": list(one.key)} for one in self.outcomes]
        return _text(REPLY, {**vars(self), "outcomes": outcomes})

    @staticmethod
    def loads(text: Any) -> Reply:
        """The reply behind a text; a `RecordFormatError` says what it is instead."""
        data = _read(text, REPLY)
        try:
            outcomes = [TaskOutcome(**{**one, "key": Key(*one["key"])}) for one in data.pop("outcomes")]
            return Reply(**data, outcomes=tuple(outcomes))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordFormatError(f"the reply is damaged: {error!r}") from error


def asked_by(text: Any) -> tuple[list[Key], str, Any]:
    """The keys of a task, its release and its protocol, whatever release wrote it."""
    try:
        data = codec.loads(text)
        keys = [Key(*map(str, call["key"])) for call in data["calls"]]
        return keys, str(data["version"]), data["protocol"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordFormatError(f"this is no task: {error!r}") from error


def _text(kind: str, data: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, "protocol": PROTOCOL, **data}, allow_nan=False)


def _read(text: Any, kind: str) -> dict[str, Any]:
    try:
        data = codec.loads(text)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordFormatError(f"{str(text)[:80]!r} is no {kind.partition(' ')[2]}") from error
    if not isinstance(data, dict) or data.pop("kind", None) != kind or data.pop("protocol", None) != PROTOCOL:
        raise RecordFormatError(f"{str(text)[:80]!r} is no {kind.partition(' ')[2]} of this release")
    return data
