"""Kernels that another process traces."""

from __future__ import annotations

import os
import signal

import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel

# Another value in one process than in the other makes another program.
FACTOR = 2.0


class Doubling(Kernel):
    """Twice its argument, in as many ways as there are cfgs."""

    op_id = "traced.doubling"

    def run(self, x, *, cfg):
        if cfg == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if cfg == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg == "raises":
            raise ValueError("not so")
        if cfg == "pair":
            return x * FACTOR, x
        if cfg == "same":
            cfg = "b"
        return x * FACTOR + sum(0.0 * x for _ in range(ord(cfg[0]) - ord("a")))

    def heuristic_cfg(self, inv):
        return "a"

    def candidate_cfgs(self, inv):
        return ["a", "b", "c"]


class Outer(Doubling):
    """Calls another kernel, for which a selector chooses."""

    op_id = "traced.outer"

    def run(self, x, *, cfg):
        inner = Executor(ConfigSelectorChain(ConfigCache()))
        return inner(Doubling(), x) + sum(0.0 * x for _ in range(ord(cfg) - ord("a")))


class Training(Doubling):
    """Has gradients, and an integer among its outputs."""

    op_id = "traced.training"

    def run(self, x, *, cfg):
        return super().run(x, cfg=cfg), jnp.argmax(x)
