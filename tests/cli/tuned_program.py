"""A small program with kernels, for commands to be pointed at."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel, default_executor


class RowSum(Kernel[int, jax.Array]):
    """Sums rows, so many at a time."""

    op_id = "cli.row_sum"
    version = "1"

    def run(self, x, *, cfg):
        return jnp.sum(x.reshape(cfg, -1, x.shape[1]), axis=(0, 1))

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]


@jax.jit
def step(x):
    """Two calls of different shapes."""
    return default_executor()(RowSum(), x) + default_executor()(RowSum(), x[:4])


def program():
    """Runs."""
    print("the program speaks")
    float(step(jnp.ones((8, 16))).sum())


def pair():
    """Is traced."""
    return step, (jnp.ones((8, 16)),)


def many():
    """So many calls that there is time to stop."""
    for rows in range(2, 42, 2):
        default_executor()(RowSum(), jnp.ones((rows, 16)))


def without_kernels():
    """Nothing to tune."""
    return jnp.ones(3) + 1


def failing():
    """Does not work."""
    raise ValueError("no luck\nand more lines")


def wanting(x):
    """Cannot be called without arguments."""
    return x


NUMBER = 3
