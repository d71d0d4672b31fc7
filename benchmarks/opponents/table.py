"""The rows of the comparison: calls, small ones for machines without a GPU, and the limits of each operation."""

from __future__ import annotations

from dataclasses import dataclass

from cases import attention, layer_norm, linear_cross_entropy, matmul, ragged_dot, rms_norm, softmax
from cases.case import Case

from . import pages

# Two runs of one program differ by as much.
NOISE = 0.005
# Of every row: heuristic over tuned, without Pallas-Triton over with it.
HEURISTIC, WITHOUT_TRITON = 1.05, 1.05
# Groups of (almost) one size, and groups of which a few have most rows.
EVEN, SKEWED = 1e6, 0.5


@dataclass(frozen=True)
class Limits:
    """The most that our tuned time may be, over the best opponent's and over the floor; None: any."""

    over_opponent: float | None = None
    over_floor: float | None = None


@dataclass(frozen=True)
class Entry:
    """A case with its limits, and the ways of plain JAX that are ten times slower than others and cost seconds."""

    case: Case
    limits: Limits = Limits()
    hopeless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name by which `--only` knows the row."""
        return f"{self.case.op}: {self.case.name}"


def _attention(name: str, shape: tuple[int, int, int, int, int, int], backward: bool = False) -> Entry:
    made = attention.case(name + (", gradient" if backward else ""), "gpu", shape, backward=backward)
    return Entry(made, Limits(over_opponent=1.0), ("plain", "xla"))


def _ragged(name: str, shape: tuple[int, int, int, int], spread: float, backward: bool = False) -> Entry:
    kind = ", even" if spread == EVEN else ", skewed"
    made = ragged_dot.case(name + kind + (", gradient" if backward else ""), "gpu", shape, spread=spread)
    if not backward:
        return Entry(made, Limits(over_opponent=1.05), ("plain", "xla"))
    made = ragged_dot.case(made.name, "gpu", shape, spread=spread, backward=True)
    return Entry(made, Limits(over_floor=1.3), ("plain", "xla"))


def _loss(name: str, shape: tuple[int, int, int]) -> Entry:
    made = linear_cross_entropy.case(f"{name}, gradient", "gpu", shape, backward=True)
    return Entry(made, Limits(over_floor=1.2))


# The first of each operation say most, should the time end.
ENTRIES = [
    _attention("1x4096, 32 heads on 8 of 128", (1, 4096, 4096, 32, 8, 128)),
    _attention("2x4096, 16 heads on 8 of 256", (2, 4096, 4096, 16, 8, 256)),
    _attention("4x2048, 16 heads of 64", (4, 2048, 2048, 16, 16, 64)),
    _attention("1x4096, 32 heads on 8 of 128", (1, 4096, 4096, 32, 8, 128), backward=True),
    _attention("4x2048, 16 heads of 64", (4, 2048, 2048, 16, 16, 64), backward=True),
    _attention("2x4096, 16 heads on 8 of 256", (2, 4096, 4096, 16, 8, 256), backward=True),
    _attention("2x16384, 8 heads of 128", (2, 16384, 16384, 8, 8, 128)),
    _attention("1x16384, 8 heads of 64", (1, 16384, 16384, 8, 8, 64)),
    _attention("4x2048, 16 heads of 128", (4, 2048, 2048, 16, 16, 128)),
    _attention("1x16384, 8 heads of 128", (1, 16384, 16384, 8, 8, 128), backward=True),
    _attention("1x8192, 16 heads of 128", (1, 8192, 8192, 16, 16, 128), backward=True),
    _ragged("4096x4096 by 8 of 14336", (4096, 4096, 14336, 8), EVEN),
    _ragged("32768x2048 by 128 of 768", (32768, 2048, 768, 128), EVEN),
    _ragged("8192x4096 by 8 of 4096", (8192, 4096, 4096, 8), SKEWED),
    _ragged("8192x4096 by 8 of 4096", (8192, 4096, 4096, 8), EVEN, backward=True),
    _ragged("16384x2048 by 64 of 1408", (16384, 2048, 1408, 64), SKEWED, backward=True),
    _ragged("8192x4096 by 8 of 4096", (8192, 4096, 4096, 8), EVEN),
    _ragged("16384x2048 by 64 of 1408", (16384, 2048, 1408, 64), SKEWED),
    _ragged("32768x2048 by 128 of 768", (32768, 2048, 768, 128), EVEN, backward=True),
    *(
        Entry(rms_norm.case(rows, width, "gpu", backward=True), Limits(over_floor=1.25))
        for rows, width in ((8192, 7168), (4096, 4096), (16384, 8192))
    ),
    *(
        Entry(layer_norm.case(rows, width, "gpu", backward=True), Limits(over_floor=1.25))
        for rows, width in ((32768, 1024), (8192, 4096))
    ),
    *(
        Entry(softmax.case(rows, width, "gpu"), Limits(over_floor=1.6))
        for rows, width in ((2048, 50257), (4096, 32000), (8192, 2048))
    ),
    _loss("8192x768, 50257 words", (8192, 768, 50257)),
    _loss("4096x4096, 32000 words", (4096, 4096, 32000)),
    _loss("4096x3584, 152064 words", (4096, 3584, 152064)),
    # Without a limit in the issue: here to be seen.
    Entry(matmul.case("projection", "gpu", (2048, 4096, 4096))),
    Entry(matmul.case("down", "gpu", (8192, 14336, 4096))),
    Entry(attention.case("32x1 of 4096, 32 heads on 8 of 128, all", "gpu", (32, 1, 4096, 32, 8, 128), causal=False)),
    Entry(pages.case("64x4096, 32 heads on 8 of 128", "gpu", (64, 4096, 32, 8, 128, 64))),
]

SMALL = [
    Entry(attention.case("1x128, 2 heads of 64", "cpu", (1, 128, 128, 2, 2, 64)), Limits(over_opponent=1.0)),
    Entry(
        attention.case("1x128, 2 heads on 1 of 64, gradient", "cpu", (1, 128, 128, 2, 1, 64), backward=True),
        Limits(over_opponent=1.0),
    ),
    Entry(ragged_dot.case("128x64 by 4 of 64", "cpu", (128, 64, 64, 4)), Limits(over_opponent=1.05)),
    Entry(
        ragged_dot.case("128x64 by 4 of 64, gradient", "cpu", (128, 64, 64, 4), backward=True), Limits(over_floor=1.3)
    ),
    Entry(rms_norm.case(64, 256, "cpu", backward=True), Limits(over_floor=1.25)),
    Entry(layer_norm.case(64, 256, "cpu", backward=True), Limits(over_floor=1.25)),
    Entry(softmax.case(64, 1000, "cpu"), Limits(over_floor=1.6)),
    Entry(
        linear_cross_entropy.case("64x64, 512 words, gradient", "cpu", (64, 64, 512), backward=True),
        Limits(over_floor=1.2),
    ),
    Entry(matmul.case("square", "cpu", (128, 128, 128))),
    Entry(pages.case("2x64, 4 heads on 2 of 32", "cpu", (2, 64, 4, 2, 32, 16))),
]


def selected(only: list[str] | None, small: bool = False) -> list[Entry]:
    """Entries of these operations, or `operation: text` for those with the text in their names."""
    entries = SMALL if small else ENTRIES
    if not only:
        return entries

    def is_asked(entry: Entry) -> bool:
        for asked in only:
            op, _, text = asked.partition(":")
            if entry.case.op == op.strip() and text.strip() in entry.case.name:
                return True
        return False

    return [entry for entry in entries if is_asked(entry)]
