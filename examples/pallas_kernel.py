"""An existing Pallas kernel, wrapped: its block sizes are chosen by measuring, its gradient is your own."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.ops import Kernel, check, default_executor


def gated(x, gate, *, rows):
    """`silu(gate) * x`, so many rows at a time: stands for any kernel that you have already."""

    def kernel(x_ref, gate_ref, out_ref):
        g = gate_ref[...].astype(jnp.float32)
        out_ref[...] = (x_ref[...] * g / (1 + jnp.exp(-g))).astype(out_ref.dtype)

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    interpret = jax.default_backend() == "cpu"  # so that this runs without a GPU
    call = pl.pallas_call(
        kernel, out, grid=(x.shape[0] // rows,), in_specs=[block] * 2, out_specs=block, interpret=interpret
    )
    return call(x, gate)


class Gated(Kernel[int, jax.Array]):
    """The cfg is the number of rows of a block."""

    op_id = "example.gated"
    version = "1"

    def run(self, x, gate, *, cfg):
        return gated(x, gate, rows=cfg)

    def heuristic_cfg(self, inv):
        return 16

    def candidate_cfgs(self, inv):
        return [8, 16, 64, 256]

    def valid_cfg(self, inv, cfg):
        rows = inv.args[0].shape[0]
        return rows % cfg == 0 or f"{cfg} rows do not divide {rows}"

    def reference(self, x, gate):
        return (x * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)

    # A Pallas kernel has no gradient by itself. Here JAX derives one from the plain computation.
    def fwd_with_residuals(self, x, gate, *, cfg):
        return gated(x, gate, rows=cfg), ()

    def vjp(self, residuals, y, dy, x, gate, *, cfg):
        return jax.vjp(self.reference, x, gate)[1](dy)


if __name__ == "__main__":
    x, gate = (jax.random.normal(jax.random.key(seed), (512, 128)) for seed in (0, 1))
    for trial in check(Gated(), x, gate):  # for your tests: every candidate, values and gradients
        print(f"{trial.cfg:>4} rows: {trial.status}")
    executor = default_executor()
    y = executor(Gated(), x, gate)
    dx = jax.jit(jax.grad(lambda x: executor(Gated(), x, gate).sum()))(x)
    print(f"chosen: {executor.choose_config(Gated(), x, gate)} rows; result {y.shape}, gradient {dx.shape}")
