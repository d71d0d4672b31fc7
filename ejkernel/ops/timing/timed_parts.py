"""Parts of a program that a GPU's compiler times to find their fastest form: products, and much else without a kernel.

Programs with the same products beside their kernels, and as many, gain about the same by that, whatever their kernels.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

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
