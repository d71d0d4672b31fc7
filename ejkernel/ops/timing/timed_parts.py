"""Parts of a program that a GPU's compiler times to find their fastest form: products, and much else without a kernel.

Programs with the same products beside their kernels, and as many, gain about the same by that, whatever their kernels.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass

from ..core.stable import short_hash

# By the beginning of their names in a program's text.
_PRODUCTS = ("stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot")
_FUSED = ("stablehlo.reduce(", "stablehlo.transpose")
# Kernels of Pallas and of cuDNN in the text of a program for a GPU, each by the beginning of its call's name.
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call", "__cudnn$")
# Names of values, which differ between programs, and where a line came from.
_VALUES = re.compile(r"%[\w#:]+|loc\([^)]*\)")
_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.$]+)")
_CALL = re.compile(r"(?<!custom_)call @([\w.$]+)")
_DOT = re.compile(
    r"stablehlo\.dot_general .*?(?:batching_dims = \[(?P<batch>[\d, ]*)\] x [^:]*?)?"
    r"contracting_dims = \[(?P<inner>[\d, ]*)\]"
    r".*: \(tensor<(?P<left>[\dx]+)x(?P<dtype>\w+)>, tensor<[\dx]+x(?P<other>\w+)>\) -> tensor<(?P<out>[\dx]+)x\w+>"
)
# A product is large with so many rows, columns and addends at least, and so many operations.
_WIDE, _LARGE = 512, 1e10
_NARROW = {"bf16", "f16"}
# Of a program with large products the others are so small a share of all operations.
_REST = 0.05
_NUMBER = re.compile(r"stablehlo\.constant dense<(\d+)> : tensor<u?i\d+>")


def timed_parts(text: str) -> str:
    """A name for what a GPU's compiler times in a program of this text; empty where that is nothing.

    It is the same for programs with the same products beside kernels. A program without a kernel has one of its own:
    there the compiler times whatever it fuses.
    """
    if not has_kernel(text):
        return short_hash(text) if any(name in text for name in (*_PRODUCTS, *_FUSED)) else ""
    products = _products(text)
    # How often a loop runs stands in its condition, as a number that it counts to.
    loops = sorted(_NUMBER.findall(text)) if "stablehlo.while" in text else []
    return short_hash(f"{sorted(products.items())} {loops}") if products else ""


def has_large_products(text: str) -> bool:
    """Are nearly all operations of a program's products those of large ones, of 16-bit numbers?"""
    large = others = 0.0
    for line, times in _products(text).items():
        product = _read(line)
        if product is None:
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
    left, out = (_numbers(found[name], "x") for name in ("left", "out"))
    batch, depth = (math.prod(left[place] for place in _numbers(found[name] or "", ",")) for name in ("batch", "inner"))
    rows = max(math.prod(left) // max(batch * depth, 1), 1)
    columns = math.prod(out) // max(batch * rows, 1)
    return Product(batch, rows, columns, depth, frozenset((found["dtype"], found["other"])))


def _numbers(text: str, between: str) -> list[int]:
    return [int(part) for part in text.split(between) if part.strip()]


def _products(text: str) -> Counter[str]:
    """The lines of products without their values' names, each with the number of times that calls lead to it."""
    lines: dict[str, list[str]] = {}
    calls: dict[str, Counter[str]] = {}
    name = ""
    for line in text.splitlines():
        begun = _FUNCTION.search(line)
        name = begun[1] if begun else name
        if any(product in line for product in _PRODUCTS):
            lines.setdefault(name, []).append(_VALUES.sub("", line).strip())
        calls.setdefault(name, Counter()).update(_CALL.findall(line))

    @functools.cache
    def inside(name: str) -> Counter[str]:
        found = Counter(lines.get(name, ()))
        for called, times in calls.get(name, Counter()).items():
            for line, count in inside(called).items():
                found[line] += times * count
        return found

    return inside("main" if "main" in calls else "")


def has_kernel(text: str) -> bool:
    """Does a program of this text call a kernel that the compiler takes as it is?"""
    return any(f"custom_call @{name}" in text for name in _KERNELS)
