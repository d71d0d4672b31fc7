"""Programs that are written down for another process are equal bytes where they are equal.

Covers `tuning/worker/export.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fakes_mosaic import needs_mosaic

from ejkernel.library import RmsNorm, RmsNormConfig, Softmax, SoftmaxConfig
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import CotangentShapes, stage
from ejkernel.ops.tuning.worker.export import EXPORTED, export

ROWS = (jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16),)
KERNELS = {
    "rms_norm": (RmsNorm(), RmsNormConfig("mosaic", None, None, 4, None), (*ROWS, jax.ShapeDtypeStruct((1024,), "f4"))),
    "softmax": (Softmax(), SoftmaxConfig("mosaic", num_warps=4), ROWS),
}


def exported(name, depth=0):
    """The program of a Mosaic kernel, written down below so many calls more."""
    if depth:
        return exported(name, depth - 1)
    kernel, cfg, args = KERNELS[name]
    call = flatten_call(args, {})
    cotangents = CotangentShapes()
    run = lambda *args: kernel.run(*args, cfg=cfg)  # noqa: E731 - as a tuning makes it
    staged = stage(run, call, list(args), "forward", name=EXPORTED, cotangents=cotangents)
    return export(staged, "cuda", ())


@needs_mosaic
@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_a_mosaic_kernel_is_the_same_program_whatever_was_lowered_before(name):
    """JAX 0.11 numbers the kernels of a process in their text: no two processes would agree on any of them."""
    first = exported(name)
    # Another kernel of the process in between.
    exported("softmax" if name == "rms_norm" else "rms_norm")
    again = exported(name, depth=3)
    assert again.text == first.text
    assert again.data == first.data


@needs_mosaic
def test_other_kernels_are_other_programs():
    """What makes equal programs alike leaves different ones apart."""
    assert exported("rms_norm").text != exported("softmax").text


@pytest.mark.parametrize(
    ("target", "times"), [("__cudnn$fmhaSoftmax", 1), ("__cudnn$fmhaSoftmaxBackward", 1), ("__cub$x", 2)]
)
def test_attention_of_cudnn_is_exported_at_the_first_attempt(monkeypatch, target, times):
    """A call of the compiler's own that is not known by name is found by an attempt in vain."""
    attempts, real = [], jax.export.export
    monkeypatch.setattr(jax.export, "export", lambda *args, **how: (attempts.append(how), real(*args, **how))[1])
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    staged = stage(jax.ffi.ffi_call(target, x), flatten_call((x,), {}), [x], "forward", name=EXPORTED)

    assert target.encode() in export(staged, "cuda", ()).data
    assert len(attempts) == times
