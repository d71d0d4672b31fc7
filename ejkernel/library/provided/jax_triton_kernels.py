"""The kernels of `jax_triton.py`, in Triton's language; imported where they are first run, since Triton is large."""

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit  # type: ignore[untyped-decorator]
def softmax_rows(x_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """`exp(x - top) / norm` of one row."""
    begin = tl.program_id(0).to(tl.int64) * width
    here = tl.arange(0, block)
    values = tl.load(x_ptr + begin + here, mask=here < width, other=-float("inf")).to(tl.float32)
    top = tl.max(values, axis=0)
    # A row of minus infinities is NaN, as JAX has it.
    powers = tl.exp(values - top)
    tl.store(out_ptr + begin + here, powers / tl.sum(powers, axis=0), mask=here < width)


@triton.jit  # type: ignore[untyped-decorator]
def rms_rows(x_ptr, weight_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x * weight / sqrt(mean of squares)` of one row."""
    begin = tl.program_id(0).to(tl.int64) * width
    here = tl.arange(0, block)
    values = tl.load(x_ptr + begin + here, mask=here < width, other=0.0).to(tl.float32)
    over = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    weight = tl.load(weight_ptr + here, mask=here < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + begin + here, values * over * weight, mask=here < width)


@triton.jit  # type: ignore[untyped-decorator]
def layer_rows(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr
):
    """`(x - mean) * weight / deviation + bias` of one row."""
    begin = tl.program_id(0).to(tl.int64) * width
    here = tl.arange(0, block)
    values = tl.load(x_ptr + begin + here, mask=here < width, other=0.0).to(tl.float32)
    off = tl.where(here < width, values - tl.sum(values, axis=0) / width, 0.0)
    over = tl.rsqrt(tl.sum(off * off, axis=0) / width + eps)
    weight = tl.load(weight_ptr + here, mask=here < width, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + here, mask=here < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + begin + here, off * over * weight + bias, mask=here < width)
