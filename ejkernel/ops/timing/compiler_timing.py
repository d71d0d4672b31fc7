"""Parts of a program that a GPU's compiler times to find their fastest form: products, and much else without a kernel.

Programs with the same products, in the same number, gain about the same from this timing, whatever their kernels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.stable import short_hash

# By the beginning of their names in a program's text.
_PRODUCTS = ("stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot")
_FUSED = ("stablehlo.reduce(", "stablehlo.transpose")
# Kernels of Pallas and of cuDNN in the text of a program for a GPU, each by the beginning of its call's name.
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call", "__cudnn$")
# Names of values, which differ between programs, and where a line came from.
_VALUES = re.compile(r"%[\w#:]+|loc\([^)]*\)")
# A name such as `<lambda>` stands in quotation marks.
_NAME = r"@(\"[^\"]*\"|[\w.$-]+)"
_FUNCTION = re.compile(rf"func\.func (?:public |private )?{_NAME}")
_CALL = re.compile(rf"(?:(?<!custom_)call|decomposition =) {_NAME}")
_CONSTANT = re.compile(r"(%[\w#]+) = stablehlo\.constant dense<(\d+)> : tensor<u?i\d+>")
_WHILE = re.compile(r"stablehlo\.while\((.*?)\) :")
_COMPARE = re.compile(r"stablehlo\.compare +(\w+), (%[\w#]+), (%[\w#]+)")
_ADD = re.compile(r"stablehlo\.add (%[\w#]+), (%[\w#]+) ")
# Prefix of a product in a loop that runs an unknown number of times.
_UNKNOWN = "in a loop: "
_DOT = re.compile(
    r"stablehlo\.dot_general .*?(?:batching_dims = \[(?P<batch>[\d, ]*)\] x [^:]*?)?"
    r"contracting_dims = \[(?P<inner>[\d, ]*)\]"
    r".*: \(tensor<(?P<left>[\dx]+)x(?P<dtype>\w+)>, tensor<[\dx]+x(?P<other>\w+)>\)"
    r" -> tensor<(?:(?P<out>[\dx]+)x)?\w+>"
)
# A product is large with so many rows, columns and addends at least, and so many operations.
_WIDE, _LARGE = 512, 1e10
_NARROW = {"bf16", "f16"}
# Beside large products small ones make no difference with at most this share of their operations.
_REST = 0.05


def compiler_timing(text: str) -> str:
    """A name for what a GPU's compiler times in a program of this text; empty where that is nothing.

    It is the same for programs with the same products beside kernels. A program without a kernel has one of its own:
    there the compiler times whatever it fuses.
    """
    has_products = any(name in text for name in _PRODUCTS)
    if not has_kernel(text):
        return short_hash(text) if has_products or any(name in text for name in _FUSED) else ""
    products = _products(text)
    if not products:
        # A product that was not reached from `main` counts all the same.
        return short_hash(text) if has_products else ""
    return short_hash(str(sorted(products.items())))


def has_large_products(text: str) -> bool:
    """Are nearly all operations of a program's products those of large ones, of 16-bit numbers?"""
    large = others = 0.0
    for line, times in _products(text).items():
        product = _read(line)
        if product is None or (line.startswith(_UNKNOWN) and not product.is_large):
            return False
        if product.is_large:
            large += times * product.operations
        else:
            others += times * product.operations
    return large > 0 and others <= _REST * large


@dataclass(frozen=True)
class Product:
    """The sizes of a product: a batch of matrices with so many rows, columns and addends."""

    batch: int
    rows: int
    columns: int
    depth: int
    dtypes: frozenset[str]

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.columns * self.depth

    @property
    def is_large(self) -> bool:
        """Does it keep a whole GPU busy, with 16-bit numbers?"""
        return (
            min(self.rows, self.columns, self.depth) >= _WIDE and self.operations >= _LARGE and self.dtypes <= _NARROW
        )


def _read(line: str) -> Product | None:
    found = _DOT.search(line)
    if found is None:
        return None
    # A scalar has no sizes.
    left, out = (_numbers(found[name] or "", "x") for name in ("left", "out"))
    batch, depth = (math.prod(left[place] for place in _numbers(found[name] or "", ",")) for name in ("batch", "inner"))
    rows = max(math.prod(left) // max(batch * depth, 1), 1)
    columns = math.prod(out) // max(batch * rows, 1)
    return Product(batch, rows, columns, depth, frozenset((found["dtype"], found["other"])))


def _numbers(text: str, between: str) -> list[int]:
    return [int(part) for part in text.split(between) if part.strip()]


@dataclass
class _Function:
    """A function of a program: its products and its calls, with the number of times that one call of it leads to each.

    What is in a loop that ends by a condition counts once, and is marked.
    """

    products: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, bool]] = field(default_factory=Counter)


def _products(text: str) -> Counter[str]:
    """The lines of products without their values' names, each with the number of times that it runs."""
    functions = _functions(text)
    known: dict[str, Counter[str]] = {}

    def inside(name: str) -> Counter[str]:
        if name in known:
            return known[name]
        # Programs have no recursion; this entry ends it where the text was misread.
        known[name] = Counter()
        function = functions.get(name, _Function())
        found = Counter(function.products)
        for (called, is_known), times in function.calls.items():
            for line, count in inside(called).items():
                mark = "" if is_known or line.startswith(_UNKNOWN) else _UNKNOWN
                found[mark + line] += times * count
        known[name] = found
        return found

    return inside("main" if "main" in functions else "")


def _functions(text: str) -> dict[str, _Function]:
    found: dict[str, _Function] = {}
    function = found.setdefault("", _Function())
    constants: dict[str, int] = {}
    # Loops around a line, from the outermost one: the indentation of its regions, and how often they run, 0: unknown.
    loops: list[tuple[int, int]] = []
    lines = text.splitlines()
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        begun = _FUNCTION.search(line)
        if begun:
            function, constants, loops = found.setdefault(begun[1], _Function()), {}, []
            continue
        # Behind it there may be whole kernels.
        content = line.strip().partition("backend_config")[0]
        if content == "cond {":
            loops.append((indent, _runs(lines, place, indent, constants)))
        elif loops and indent == loops[-1][0] and content.startswith("}") and not content.startswith("} do"):
            loops.pop()
        _note_constant(content, constants)
        times, is_known = math.prod(max(count, 1) for _, count in loops), all(count for _, count in loops)
        if any(product in content for product in _PRODUCTS):
            function.products[("" if is_known else _UNKNOWN) + _VALUES.sub("", content)] += times
        if "call" in content or "decomposition" in content:
            for called in _CALL.findall(content):
                function.calls[called, is_known] += times
    return found


def _note_constant(content: str, constants: dict[str, int]) -> None:
    constant = _CONSTANT.search(content)
    if constant:
        constants[constant[1]] = int(constant[2])


def _runs(lines: Sequence[str], place: int, indent: int, before: Mapping[str, int]) -> int:
    """Runs of the loop with a condition at this place; 0 where it does not count from 0 on by ones."""
    header, constants = _WHILE.search(lines[place - 1]), dict(before)
    starts = dict(pair.split(" = ") for pair in header[1].split(", ")) if header else {}
    compared, counter, end = 0, "", 0
    is_condition, steps = True, 0
    for line in lines[place + 1 :]:
        content = line.strip()
        if len(line) - len(line.lstrip()) == indent and content.startswith("}"):
            if not content.startswith("} do"):
                break
            is_condition = False
        _note_constant(content, constants)
        condition = _COMPARE.search(content) if is_condition else None
        if condition:
            compared += 1
            counter, end = condition[2], constants.get(condition[3], 0) if condition[1] == "LT" else 0
        step = None if is_condition else _ADD.search(content)
        if step and counter == step[1] and constants.get(step[2]) == 1:
            steps += 1
    counts = compared == 1 and steps == 1 and before.get(starts.get(counter, "")) == 0
    return end if counts else 0


def has_kernel(text: str) -> bool:
    """Does a program of this text call a kernel that the compiler takes as it is?"""
    return any(f"custom_call @{name}" in text for name in _KERNELS)
