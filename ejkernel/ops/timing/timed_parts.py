"""Parts of a program that a GPU's compiler times to find their fastest form: products, and much else without a kernel.

Programs with the same products beside their kernels gain the same by that, whatever their kernels are.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from ..core.stable import short_hash

# By the beginning of their names in a program's text.
_PRODUCTS = ("stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot")
_FUSED = ("stablehlo.reduce(", "stablehlo.transpose")
# Kernels of Pallas and of cuDNN in the text of a program for a GPU, each by the beginning of its call's name.
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call", "__cudnn$")
# Names of values, which differ between programs, and where a line came from.
_VALUES = re.compile(r"%[\w#:]+|loc\([^)]*\)")
_DOT = re.compile(
    r"stablehlo\.dot_general .*?(?:batching_dims = \[(?P<batch>[\d, ]*)\] x [^:]*?)?"
    r"contracting_dims = \[(?P<inner>[\d, ]*)\]"
    r".*: \(tensor<(?P<left>[\dx]+)x(?P<dtype>\w+)>, tensor<[\dx]+x(?P<other>\w+)>\) -> tensor<(?P<out>[\dx]+)x\w+>"
)
# A product is large with so many rows, columns and addends at least, and so many operations.
_WIDE, _OPERATIONS = 512, 1e10
_NARROW = ("bf16", "f16")


def timed_parts(text: str) -> str:
    """A name for what a GPU's compiler times in a program of this text; empty where that is nothing.

    It is the same for programs with the same products beside kernels. A program without a kernel has one of its own:
    there the compiler times whatever it fuses.
    """
    if not has_kernel(text):
        return short_hash(text) if any(name in text for name in (*_PRODUCTS, *_FUSED)) else ""
    products = sorted(_VALUES.sub("", line).strip() for line in _lines(text))
    return short_hash("\n".join(products)) if products else ""


def has_kernel(text: str) -> bool:
    """Does a program of this text call a kernel that the compiler takes as it is?"""
    return any(f"custom_call @{name}" in text for name in _KERNELS)


def has_large_products_alone(text: str) -> bool:
    """Is each product of a program of this text large, and of 16-bit numbers? False where there is none."""
    found = [_product(line) for line in _lines(text)]
    return bool(found) and all(product is not None and product.is_large for product in found)


@dataclass(frozen=True)
class Product:
    """The sizes of a product: a batch of matrices with so many rows, columns and addends."""

    batch: int
    rows: int
    columns: int
    depth: int
    dtypes: tuple[str, str]

    @property
    def is_large(self) -> bool:
        """Does it keep a whole GPU busy, with 16-bit numbers?"""
        is_wide = min(self.rows, self.columns, self.depth) >= _WIDE
        operations = 2.0 * self.batch * self.rows * self.columns * self.depth
        return is_wide and operations >= _OPERATIONS and all(name in _NARROW for name in self.dtypes)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(name in line for name in _PRODUCTS)]


@functools.lru_cache(maxsize=256)
def _product(line: str) -> Product | None:
    found = _DOT.search(line)
    if found is None:
        return None
    left, out = (_numbers(found[name], "x") for name in ("left", "out"))
    places = [_numbers(found[name] or "", ",") for name in ("batch", "inner")]
    batch, depth = (math.prod(left[place] for place in some) for some in places)
    rows = math.prod(left) // (batch * depth)
    return Product(batch, rows, math.prod(out) // (batch * rows), depth, (found["dtype"], found["other"]))


def _numbers(text: str, between: str) -> list[int]:
    return [int(part) for part in text.split(between) if part.strip()]
