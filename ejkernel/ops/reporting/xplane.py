"""A trace of `jax.profiler`, read: the seconds of each operation, and the scope that it stands in.

A trace has the programs that ran, in XLA's own format, beside the times. Names of operations lead from a time to the
instruction, and the instruction has the scope in which JAX made it, with our labels in it. JAX's reader gives the
times; the programs it does not give, so the few fields that are needed are read here by their numbers.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core import plain_file
from ..core.errors import RecordFormatError
from ..core.folder_walk import NotPlainError, resolved
from ..core.plain_file import TooLargeError
from ..execution.labels import extract_labels_from_hlo_text

# Numbers of fields in XLA's xplane.proto and hlo.proto, which never change their meaning.
_PLANES, _PLANE_NAME, _EVENT_KINDS, _STAT_KINDS = 1, 2, 4, 5
_KIND_NAME, _KIND_STATS = 2, 5
_STAT_KIND, _STAT_BYTES = 1, 6
_MODULE, _COMPUTATIONS, _COMPUTATION_ID, _INSTRUCTIONS = 1, 3, 5, 2
_NAME, _METADATA, _OP_NAME, _CALLED = 1, 7, 2, 38
_HLO_PROTO = b"Hlo Proto"
# JAX's reader takes no more.
_LARGEST = 2 << 30


@dataclass(frozen=True)
class Operation:
    """One operation of a program: how long it ran by itself, how often, and the label around it, or none."""

    seconds: float
    runs: int
    label: str
    program: str
    platform: str


@dataclass(frozen=True)
class TracedProgram:
    """A program in a trace: the names of its instructions, and the labels of those that have one."""

    names: frozenset[str]
    labels: Mapping[str, str]


# By the name of a program, and the number behind it.
_Programs = Mapping[str, Mapping[str, TracedProgram]]


def operations(path: str | os.PathLike[str]) -> list[Operation]:
    """The operations of the programs in a trace, by name and program."""
    import jax

    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for file in trace_files(path):
        try:
            content = plain_file.read(resolved(file), _LARGEST)
            text = b"" if content is None else content.data
            programs = _programs(memoryview(text))
            data = jax.profiler.ProfileData.from_serialized_xspace(text)
        # Cut off in the middle, or something else altogether, such as a pipe or a file of many gigabytes.
        except (RuntimeError, ValueError, IndexError, NotPlainError, TooLargeError) as error:
            raise RecordFormatError(f"{file} is no trace of jax.profiler that can be read: {error}") from error
        with warnings.catch_warnings():
            # Types of JAX's reader have no module, of which Python 3.13 warns where they are first used; a warning that
            # is turned into an error would end the process there.
            warnings.simplefilter("ignore", DeprecationWarning)
            for plane in data.planes:
                platform = _platform(plane.name)
                lines = [
                    _events(line)
                    for line in (plane.lines if platform else ())
                    if platform == "cpu" or line.name.startswith(("Stream", "XLA Ops"))
                ]
                labels = _labels_of(programs, [event for line in lines for event in line])
                for events in lines:
                    _add_line(events, platform, labels, found)
    return [
        Operation(sum(times), len(times), label, program, platform)
        for (_, label, program, platform), times in found.items()
    ]


def trace_files(path: str | os.PathLike[str]) -> list[str]:
    """The files of the latest trace at a path: a folder that `jax.profiler.trace` wrote into, or one file."""
    place = Path(path).expanduser()
    if place.is_file():
        return [str(place)]
    found = glob.glob(os.path.join(glob.escape(str(place)), "**", "*.xplane.pb"), recursive=True)
    if not found:
        there = "no trace in" if place.is_dir() else "nothing at"
        raise RecordFormatError(
            f"there is {there} {path}; give the folder of `with jax.profiler.trace(folder):`, or an .xplane.pb file"
        )
    latest = max(os.path.dirname(file) for file in found)
    return sorted(file for file in found if os.path.dirname(file) == latest)


def _platform(plane: str) -> str:
    kinds = {"/device:GPU": "gpu", "/device:TPU": "tpu", "/host:CPU": "cpu"}
    return next((kind for start, kind in kinds.items() if plane.startswith(start)), "")


class _Event(NamedTuple):
    """An operation that ran once."""

    start: float
    duration: float
    op: str
    module: str
    number: str


def _events(line: Any) -> list[_Event]:
    events = []
    for event in line.events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "hlo_module", "program_id")}
        if "hlo_op" in stats or "hlo_module" in stats:
            op, module = str(stats.get("hlo_op", event.name)), str(stats.get("hlo_module", ""))
            events.append(_Event(event.start_ns, event.duration_ns, op, module, str(stats.get("program_id"))))
    # The longer of two that begin at once is around the other.
    return sorted(events, key=lambda one: (one.start, -one.duration))


def _labels_of(programs: _Programs, events: Sequence[_Event]) -> dict[tuple[str, str], Mapping[str, str]]:
    """The labels of each program that ran, by its name and number.

    A program that JAX read from its compilation cache has another number in the times than in the trace's list of
    programs, and that may be another one's. So of those with the name it is the one that has most of the operations.
    """
    ran: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        ran[event.module, event.number].add(event.op)
    found: dict[tuple[str, str], Mapping[str, str]] = {}
    for (module, number), ops in ran.items():
        some = programs.get(module, {})
        most = max((len(ops & one.names) for one in some.values()), default=0)
        fitting = {n: one.labels for n, one in some.items() if len(ops & one.names) == most}
        # Of several alike, that of the number; else what all of them say.
        found[module, number] = fitting.get(number) or _agreed(list(fitting.values()))
    return found


def _agreed(labels: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first = labels[0] if labels else {}
    return {name: label for name, label in first.items() if all(other.get(name) == label for other in labels)}


def _add_line(
    events: Sequence[_Event],
    platform: str,
    programs: Mapping[tuple[str, str], Mapping[str, str]],
    found: dict[tuple[str, str, str, str], list[float]],
) -> None:
    """Adds the time of each operation of a thread or stream, without that of the operations inside it."""
    around: list[tuple[float, list[float], str]] = []
    for event in events:
        while around and around[-1][0] <= event.start:
            around.pop()
        label = programs[event.module, event.number].get(event.op) or (around[-1][2] if around else "")
        times = found[event.op, label, event.module, platform]
        times.append(event.duration * 1e-9)
        if around:
            around[-1][1][-1] -= event.duration * 1e-9
        around.append((event.start + event.duration, times, label))


def _programs(data: memoryview) -> dict[str, dict[str, TracedProgram]]:
    """The programs of a trace."""
    found: dict[str, dict[str, TracedProgram]] = defaultdict(dict)
    for number, plane in _fields(data):
        if number != _PLANES or not isinstance(plane, memoryview):
            continue
        parts = list(_fields(plane))
        if not any(n == _PLANE_NAME and bytes(v) == b"/host:metadata" for n, v in parts if isinstance(v, memoryview)):
            continue
        kinds = {}
        for kind in _sub(parts, _STAT_KINDS):
            named = dict(_fields(kind))
            kinds[named.get(1)] = bytes(dict(_fields(named[2])).get(_KIND_NAME, b""))
        for kind in _sub(parts, _EVENT_KINDS):
            about = list(_fields(dict(_fields(kind))[2]))
            name = next((bytes(v).decode("utf-8", "replace") for v in _sub(about, _KIND_NAME)), "")
            module, _, own = name.removesuffix(")").rpartition("(")
            for stat in map(dict, map(_fields, _sub(about, _KIND_STATS))):
                if kinds.get(stat.get(_STAT_KIND)) == _HLO_PROTO and _STAT_BYTES in stat:
                    found[module][own] = _of_program(stat[_STAT_BYTES])
    return found


def _of_program(proto: memoryview) -> TracedProgram:
    computations: dict[Any, list[tuple[str, str, list[Any]]]] = {}
    for module in _sub(list(_fields(proto)), _MODULE):
        for computation in _sub(list(_fields(module)), _COMPUTATIONS):
            parts = list(_fields(computation))
            number = next((v for n, v in parts if n == _COMPUTATION_ID), None)
            computations[number] = [_instruction(one) for one in _sub(parts, _INSTRUCTIONS)]
    own = {name: label for some in computations.values() for name, label, _ in some if label}
    for some in computations.values():
        for name, label, called in some:
            inner = Counter(found for number in called for _, found, _ in computations.get(number, ()) if found)
            # A fusion without a scope of its own has that of most of what is in it.
            if not label and inner:
                own[name] = inner.most_common(1)[0][0]
    return TracedProgram(frozenset(name for some in computations.values() for name, _, _ in some), own)


def _instruction(data: memoryview) -> tuple[str, str, list[Any]]:
    name, label = "", ""
    called: list[Any] = []
    for number, value in _fields(data):
        if number == _NAME and isinstance(value, memoryview):
            name = bytes(value).decode("utf-8", "replace")
        elif number == _METADATA and isinstance(value, memoryview):
            scope = b"".join(bytes(v) for v in _sub(list(_fields(value)), _OP_NAME)).decode("utf-8", "replace")
            # A kernel inside a kernel: the inner one.
            label = next(reversed(extract_labels_from_hlo_text(scope)), "")
        elif number == _CALLED:
            called += _numbers(value) if isinstance(value, memoryview) else [value]
    return name, label, called


def _sub(parts: list[tuple[int, Any]], number: int) -> Iterator[memoryview]:
    return (value for n, value in parts if n == number and isinstance(value, memoryview))


def _numbers(data: memoryview) -> list[int]:
    found, place = [], 0
    while place < len(data):
        value, place = _number(data, place)
        found.append(value)
    return found


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message; texts and messages as bytes."""
    place = 0
    while place < len(data):
        head, place = _number(data, place)
        number, kind = head >> 3, head & 7
        if kind == 0:
            value, place = _number(data, place)
            yield number, value
            continue
        size, place = (8, place) if kind == 1 else (4, place) if kind == 5 else _number(data, place)
        if kind not in (1, 2, 5) or place + size > len(data):
            raise ValueError("a field goes beyond its end")
        yield number, data[place : place + size]
        place += size


def _number(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
