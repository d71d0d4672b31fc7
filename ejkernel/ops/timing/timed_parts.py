"""Parts of a program that a GPU's compiler times to find their fastest form: products, and much else without a kernel.

Programs with the same products beside their kernels gain the same by that, whatever their kernels are.
"""

from __future__ import annotations

import re

from ..core.stable import short_hash

# By the beginning of their names in a program's text.
_PRODUCTS = ("stablehlo.dot", "stablehlo.convolution", "chlo.ragged_dot")
_FUSED = ("stablehlo.reduce(", "stablehlo.transpose")
# Kernels of Pallas and of cuDNN in the text of a program for a GPU, each by the beginning of its call's name.
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call", "__cudnn$")
# Names of values, which differ between programs, and where a line came from.
_VALUES = re.compile(r"%[\w#:]+|loc\([^)]*\)")


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


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(name in line for name in _PRODUCTS)]
