"""Kernels of CUDA graphs in a trace, and the instructions that they come from.

XLA runs most of a program for an NVIDIA GPU as CUDA graphs, and a trace then has the graph's name in place of an
instruction's. What is left of a kernel is its own name and its place. A fusion's kernel is called like the fusion. A
kernel of Triton or Mosaic stands by its name in the instruction that calls it. Kernels of cuBLAS and cuDNN, copies, and
kernels that XLA uses for several equal fusions have neither: they are told by what runs before and behind them in the
program's order. Where that does not decide, a kernel has no label.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

# Instructions that are no work.
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"})
_COPIES = frozenset({"copy", "copy-start", "copy-done", "dynamic-slice", "dynamic-update-slice", "slice"})


class Instruction(NamedTuple):
    """An instruction that runs, with the label around it."""

    name: str
    opcode: str
    label: str
    # As XLA wrote it: calls of kernels have the kernel's name in it.
    data: bytes | memoryview

    @property
    def kernel(self) -> str:
        """The name that a fusion's kernel has."""
        return re.sub(r"\W", "_", self.name)


@final
class GraphKernels:
    """The instructions of a program in the order in which they run, a list a computation."""

    def __init__(self, computations: Sequence[Sequence[Instruction]]) -> None:
        self._computations = [[one for one in some if one.opcode not in FREE] for some in computations]
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, steps in enumerate(self._computations):
            for place, one in enumerate(steps):
                self._places.setdefault(one.kernel, []).append((number, place))
        # What calls of kernels say; read once, where a kernel has no fusion's name.
        self._said: list[tuple[tuple[int, int], bytes]] | None = None

    def labels(self, kernels: Sequence[str]) -> list[str]:
        """Labels of the kernels of one launch of a graph, in the order in which they began; empty: none, or unknown."""
        found = [self._found(kernel) for kernel in kernels]
        counts: dict[int, int] = {}
        for places in found:
            for computation, _ in places:
                counts[computation] = counts.get(computation, 0) + 1
        if not counts:
            return [""] * len(kernels)
        # A graph is a stretch of one computation.
        chosen = max(counts, key=lambda number: (counts[number], -number))
        steps = self._computations[chosen]
        named = [next((place for number, place in places if number == chosen), None) for places in found]
        anchors = _rising(named)
        taken = {named[at] for at in anchors}
        labels = ["" if place is None else steps[place].label for place in named]
        for events, first, last in _gaps(anchors, named, len(kernels), len(steps)):
            free = [steps[place] for place in range(first, last) if place not in taken]
            self._fill(labels, kernels, events, free, at_start=first == 0, at_end=last == len(steps))
        return labels

    def _fill(
        self,
        labels: list[str],
        kernels: Sequence[str],
        events: Sequence[int],
        free: Sequence[Instruction],
        *,
        at_start: bool,
        at_end: bool,
    ) -> None:
        """Labels kernels that stand between two that are known, from the instructions between those."""
        # Before the first and behind the last known one there may be other graphs.
        if at_start and len(free) > len(events):
            free = free[-len(events) :]
        elif at_end and len(free) > len(events):
            free = free[: len(events)]
        copies = [at for at in events if _is_copy(kernels[at])]
        works = [at for at in events if not _is_copy(kernels[at])]
        for some, those in (
            (copies, [one for one in free if one.opcode in _COPIES]),
            (works, [one for one in free if one.opcode not in _COPIES]),
        ):
            said = {one.label for one in those}
            for number, at in enumerate(some):
                if len(said) == 1:
                    [labels[at]] = said
                elif len(some) == len(those):
                    labels[at] = those[number].label

    def _found(self, kernel: str) -> list[tuple[int, int]]:
        """The instructions that a kernel's name stands for."""
        known = self._places.get(kernel)
        if known is None:
            wanted = kernel.encode()
            known = self._places[kernel] = [place for place, text in self._calls() if wanted in text]
        return known

    def _calls(self) -> list[tuple[tuple[int, int], bytes]]:
        if self._said is None:
            self._said = [
                ((number, place), bytes(one.data))
                for number, steps in enumerate(self._computations)
                for place, one in enumerate(steps)
                if one.opcode == "custom-call"
            ]
        return self._said


def _is_copy(kernel: str) -> bool:
    return kernel.lower().startswith(("memcpy", "memset"))


def _rising(named: Sequence[int | None]) -> list[int]:
    """The longest list of events with rising places: their names are right, whatever runs twice or out of order."""
    ends: list[int] = []
    tails: list[int] = []
    before: dict[int, int | None] = {}
    for at, place in enumerate(named):
        if place is None:
            continue
        length = bisect_left(ends, place)
        before[at] = tails[length - 1] if length else None
        ends[length : length + 1] = [place]
        tails[length : length + 1] = [at]
    chain: list[int] = []
    at_last = tails[-1] if tails else None
    while at_last is not None:
        chain.append(at_last)
        at_last = before[at_last]
    return chain[::-1]


def _gaps(
    anchors: Sequence[int], named: Sequence[int | None], events: int, steps: int
) -> Iterator[tuple[list[int], int, int]]:
    """Events between two known ones, and the stretch of instructions between those."""
    edges = [-1, *anchors, events]
    places = [-1, *(named[at] or 0 for at in anchors), steps]
    for at in range(len(edges) - 1):
        between = list(range(edges[at] + 1, edges[at + 1]))
        if between:
            yield between, places[at] + 1, places[at + 1]


def in_order(instructions: Mapping[int, Instruction], sequence: Sequence[int]) -> list[Instruction]:
    """Instructions by the program's schedule; as they are listed where it has none."""
    return [instructions[number] for number in sequence if number in instructions] or list(instructions.values())
