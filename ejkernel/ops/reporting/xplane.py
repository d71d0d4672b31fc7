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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core import plain_file
from ..core.errors import RecordFormatError
from ..core.folder_walk import NotPlainError, resolved
from ..core.plain_file import TooLargeError
from ..execution.labels import extract_labels_from_hlo_text
from .graph_kernels import GraphKernels, Instruction, in_order

# Numbers of fields in XLA's xplane.proto and hlo.proto, which never change their meaning.
_PLANES, _PLANE_NAME, _EVENT_KINDS, _STAT_KINDS = 1, 2, 4, 5
_KIND_NAME, _KIND_STATS = 2, 5
_STAT_KIND, _STAT_BYTES = 1, 6
_MODULE, _COMPUTATIONS, _COMPUTATION_ID, _INSTRUCTIONS = 1, 3, 5, 2
_SCHEDULE, _SEQUENCES, _SEQUENCE_KEY, _SEQUENCE, _SEQUENCE_IDS = 7, 1, 1, 2, 1
_NAME, _OPCODE, _METADATA, _OP_NAME, _INSTRUCTION_ID, _CALLED = 1, 2, 7, 2, 35, 38
_HLO_PROTO = b"Hlo Proto"
# The largest file that JAX's reader takes.
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
    """A program in a trace: the names of its instructions, the labels of those that have one, and their order."""

    names: frozenset[str]
    labels: Mapping[str, str]
    graphs: GraphKernels = field(default_factory=lambda: GraphKernels(()), compare=False)


# Programs by their names, and by number among those of one name.
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
                ran = _programs_of(programs, [event for line in lines for event in line])
                for events in lines:
                    _add_line(_of_graphs(events, ran), platform, ran, found)
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
    # The launch of a CUDA graph that it was a part of: then `op` is the graph, and the kernel has a name of its own.
    graph: str = ""
    kernel: str = ""
    label: str = ""


def _events(line: Any) -> list[_Event]:
    wanted = ("hlo_op", "hlo_module", "program_id", "cuda_graph_id", "correlation_id")
    events = []
    for event in line.events:
        stats = {name: str(value) for name, value in event.stats if name in wanted}
        if "hlo_op" in stats or "hlo_module" in stats:
            graph = stats.get("correlation_id", "-") if "cuda_graph_id" in stats else ""
            about = (stats.get("hlo_op", event.name), stats.get("hlo_module", ""), str(stats.get("program_id")))
            events.append(_Event(event.start_ns, event.duration_ns, *about, graph, event.name))
    # The longer of two that begin at once is around the other.
    return sorted(events, key=lambda one: (one.start, -one.duration))


def _programs_of(programs: _Programs, events: Sequence[_Event]) -> dict[tuple[str, str], TracedProgram]:
    """Each program that ran, by its name and number.

    A program that JAX read from its compilation cache has another number in the times than in the trace's list of
    programs, and that number may be another program's. So of the programs with the name, the one that has most of the
    operations is taken.
    """
    ran: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        ran[event.module, event.number].add(event.kernel if event.graph else event.op)
    found: dict[tuple[str, str], TracedProgram] = {}
    for (module, number), ops in ran.items():
        some = programs.get(module, {})
        most = max((len(ops & one.names) for one in some.values()), default=0)
        fitting = {n: one for n, one in some.items() if len(ops & one.names) == most}
        # If several fit equally well, the program with this number counts, else the labels that all of them share.
        found[module, number] = fitting.get(number) or _agreed(list(fitting.values()))
    return found


def _of_graphs(events: Sequence[_Event], programs: Mapping[tuple[str, str], TracedProgram]) -> list[_Event]:
    """The events, with a label where a CUDA graph hides the operation."""
    launches: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        if event.graph:
            launches[event.module, event.number, event.op, event.graph].append(at)
    found = list(events)
    for (module, number, _, _), places in launches.items():
        labels = programs[module, number].graphs.labels([events[at].kernel for at in places])
        for at, label in zip(places, labels, strict=True):
            found[at] = events[at]._replace(op=events[at].kernel, label=label)
    return found


def _agreed(alike: Sequence[TracedProgram]) -> TracedProgram:
    if len(alike) == 1:
        return alike[0]
    first = alike[0].labels if alike else {}
    labels = {name: label for name, label in first.items() if all(one.labels.get(name) == label for one in alike)}
    return TracedProgram(frozenset(), labels)


def _add_line(
    events: Sequence[_Event],
    platform: str,
    programs: Mapping[tuple[str, str], TracedProgram],
    found: dict[tuple[str, str, str, str], list[float]],
) -> None:
    """Adds the time of each operation of a thread or stream, without that of the operations inside it."""
    around: list[tuple[float, list[float], str]] = []
    for event in events:
        # Kernels of a GPU stand beside each other, also where one begins before the other has ended.
        while around and (around[-1][0] <= event.start or platform == "gpu"):
            around.pop()
        own = event.label if event.graph else programs[event.module, event.number].labels.get(event.op)
        label = own or (around[-1][2] if around else "")
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
    computations: dict[Any, list[_Instruction]] = {}
    orders: dict[Any, list[int]] = {}
    for module in _sub(list(_fields(proto)), _MODULE):
        parts = list(_fields(module))
        for computation in _sub(parts, _COMPUTATIONS):
            inner = list(_fields(computation))
            number = next((v for n, v in inner if n == _COMPUTATION_ID), None)
            computations[number] = [_instruction(one) for one in _sub(inner, _INSTRUCTIONS)]
        for schedule in _sub(parts, _SCHEDULE):
            for sequence in _sub(list(_fields(schedule)), _SEQUENCES):
                pair = dict(_fields(sequence))
                orders[pair.get(_SEQUENCE_KEY)] = list(_ids(pair.get(_SEQUENCE, memoryview(b""))))
    own = {one.name: one.label for some in computations.values() for one in some if one.label}
    for some in computations.values():
        for one in some:
            inner_labels = Counter(
                found.label for number in one.called for found in computations.get(number, ()) if found.label
            )
            # A fusion without a scope of its own has that of most of what is in it.
            if not one.label and inner_labels:
                own[one.name] = inner_labels.most_common(1)[0][0]
    ordered = [
        in_order(
            {one.number: Instruction(one.name, one.opcode, own.get(one.name, ""), one.data) for one in some},
            orders.get(number, ()),
        )
        # What is in a fusion is no kernel of its own.
        for number, some in computations.items()
        if number in orders or not orders
    ]
    names = {one.name for some in computations.values() for one in some}
    kernels = {one.kernel for some in ordered for one in some}
    return TracedProgram(frozenset(names | kernels), own, GraphKernels(ordered))


class _Instruction(NamedTuple):
    """An instruction as it is listed."""

    number: int
    name: str
    opcode: str
    label: str
    called: list[Any]
    data: memoryview


def _instruction(data: memoryview) -> _Instruction:
    name = opcode = label = ""
    own = -1
    called: list[Any] = []
    for number, value in _fields(data):
        if number == _INSTRUCTION_ID:
            own = value
        elif number == _CALLED:
            called += _numbers(value) if isinstance(value, memoryview) else [value]
        elif not isinstance(value, memoryview):
            continue
        elif number == _NAME:
            name = bytes(value).decode("utf-8", "replace")
        elif number == _OPCODE:
            opcode = bytes(value).decode("utf-8", "replace")
        elif number == _METADATA:
            scope = b"".join(bytes(v) for v in _sub(list(_fields(value)), _OP_NAME)).decode("utf-8", "replace")
            # A kernel inside a kernel: the inner one.
            label = next(reversed(extract_labels_from_hlo_text(scope)), "")
    return _Instruction(own, name, opcode, label, called, data)


def _ids(sequence: Any) -> Iterator[int]:
    for number, value in _fields(sequence) if isinstance(sequence, memoryview) else ():
        if number == _SEQUENCE_IDS:
            yield from _numbers(value) if isinstance(value, memoryview) else [value]


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
