"""Pallas-Triton kernels with real search spaces, as subjects for the GPU benchmarks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.ops import Kernel


@dataclass(frozen=True)
class Tiles:
    """Blocks and launch parameters of a matrix kernel."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Rows:
    """Rows and launch parameters of a kernel that works row by row."""

    rows: int
    warps: int


def call(kernel, out, grid, in_specs, out_specs, warps, stages, interpret):
    """`pallas_call` for Triton."""
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )


class Subject(Kernel[Any, jax.Array]):
    """A kernel of the benchmark; `interpret` runs it on a CPU, for its tests."""

    interpret = False


class Matmul(Subject):
    """Products of matrices, of a batch of them where there is one."""

    op_id = "bench.matmul"
    cfg_type = Tiles

    def run(self, a, b, *, cfg):
        if a.ndim == 2:
            return self.run(a[None], b[None], cfg=cfg)[0]
        groups, m, k = a.shape
        n = b.shape[2]

        def kernel(a_ref, b_ref, o_ref):
            def step(i, total):
                part = pl.ds(i * cfg.k, cfg.k)
                return total + jnp.dot(a_ref[:, part], b_ref[part, :], preferred_element_type=jnp.float32)

            total = jax.lax.fori_loop(0, k // cfg.k, step, jnp.zeros((cfg.m, cfg.n), jnp.float32))
            o_ref[...] = total.astype(o_ref.dtype)

        return call(
            kernel,
            jax.ShapeDtypeStruct((groups, m, n), a.dtype),
            (groups, m // cfg.m, n // cfg.n),
            [
                pl.BlockSpec((None, cfg.m, k), lambda g, i, j: (g, i, 0)),
                pl.BlockSpec((None, k, cfg.n), lambda g, i, j: (g, 0, j)),
            ],
            pl.BlockSpec((None, cfg.m, cfg.n), lambda g, i, j: (g, i, j)),
            cfg.warps,
            cfg.stages,
            self.interpret,
        )(a, b)

    def heuristic_cfg(self, inv):
        return Tiles(128, 128, 32, 4, 2)

    def candidate_cfgs(self, inv):
        sizes = itertools.product((64, 128, 256), (64, 128, 256), (32, 64), (4, 8), (2, 4))
        return [Tiles(*size) for size in sizes]


def row_kernel(compute):
    """A kernel that holds whole rows."""

    def kernel(x_ref, o_ref):
        o_ref[...] = compute(x_ref[...].astype(jnp.float32)).astype(o_ref.dtype)

    return kernel


class RowKernel(Subject):
    """A kernel that computes some rows at a time."""

    cfg_type = Rows
    compute: Any = None

    def run(self, x, *, cfg):
        spec = pl.BlockSpec((cfg.rows, x.shape[1]), lambda i: (i, 0))
        grid = (x.shape[0] // cfg.rows,)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        kernel = row_kernel(type(self).compute)
        return call(kernel, out, grid, [spec], spec, cfg.warps, 1, self.interpret)(x)

    def heuristic_cfg(self, inv):
        return Rows(4, 4)

    def candidate_cfgs(self, inv):
        return [Rows(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8, 16)]


class RmsNorm(RowKernel):
    """Rows over their root mean square."""

    op_id = "bench.rms_norm"
    compute = staticmethod(lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))


class Softmax(RowKernel):
    """Rows as probabilities."""

    op_id = "bench.softmax"
    compute = staticmethod(lambda x: (e := jnp.exp(x - jnp.max(x, -1, keepdims=True))) / jnp.sum(e, -1, keepdims=True))


class RowSum(Subject):
    """The sum of each row."""

    op_id = "bench.row_sum"
    cfg_type = Rows

    def run(self, x, *, cfg):
        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.sum(x_ref[...].astype(jnp.float32), -1)

        return call(
            kernel,
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
            (x.shape[0] // cfg.rows,),
            [pl.BlockSpec((cfg.rows, x.shape[1]), lambda i: (i, 0))],
            pl.BlockSpec((cfg.rows,), lambda i: (i,)),
            cfg.warps,
            1,
            self.interpret,
        )(x)

    heuristic_cfg = RowKernel.heuristic_cfg
    candidate_cfgs = RowKernel.candidate_cfgs


class Attention(Subject):
    """Attention of every query to every key, with a running softmax."""

    op_id = "bench.attention"
    cfg_type = Tiles

    def run(self, q, k, v, *, cfg):
        heads, queries, depth = q.shape
        keys = k.shape[1]
        scale = depth**-0.5

        def kernel(q_ref, k_ref, v_ref, o_ref):
            query = q_ref[...]

            def step(i, state):
                total, top, norm = state
                part = pl.ds(i * cfg.n, cfg.n)
                score = jnp.dot(query, k_ref[part, :].T, preferred_element_type=jnp.float32) * scale
                new = jnp.maximum(top, jnp.max(score, -1))
                weight = jnp.exp(score - new[:, None])
                old = jnp.exp(top - new)
                total = total * old[:, None] + jnp.dot(
                    weight.astype(v_ref.dtype), v_ref[part, :], preferred_element_type=jnp.float32
                )
                return total, new, norm * old + jnp.sum(weight, -1)

            start = (
                jnp.zeros((cfg.m, depth), jnp.float32),
                jnp.full((cfg.m,), -jnp.inf, jnp.float32),
                jnp.zeros((cfg.m,), jnp.float32),
            )
            total, _, norm = jax.lax.fori_loop(0, keys // cfg.n, step, start)
            o_ref[...] = (total / norm[:, None]).astype(o_ref.dtype)

        whole = pl.BlockSpec((None, keys, depth), lambda h, i: (h, 0, 0))
        block = pl.BlockSpec((None, cfg.m, depth), lambda h, i: (h, i, 0))
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        grid = (heads, queries // cfg.m)
        return call(kernel, out, grid, [block, whole, whole], block, cfg.warps, cfg.stages, self.interpret)(q, k, v)

    def heuristic_cfg(self, inv):
        return Tiles(64, 64, 0, 4, 2)

    def candidate_cfgs(self, inv):
        sizes = itertools.product((32, 64, 128), (32, 64, 128), (0,), (4, 8), (1, 2, 3))
        return [Tiles(*size) for size in sizes]


def arrays(*shapes, dtype=jnp.bfloat16):
    """Random arrays."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


SUBJECTS = {
    "matmul 1024^3": (Matmul, functools.partial(arrays, (1024, 1024), (1024, 1024))),
    "matmul 4096^3": (Matmul, functools.partial(arrays, (4096, 4096), (4096, 4096))),
    "rms_norm 4096x4096": (RmsNorm, functools.partial(arrays, (4096, 4096))),
    "rms_norm 1024x2048": (RmsNorm, functools.partial(arrays, (1024, 2048))),
    "softmax 8192x2048": (Softmax, functools.partial(arrays, (8192, 2048))),
    "row_sum 1024x8192": (RowSum, functools.partial(arrays, (1024, 8192))),
    "attention 64x1024x64": (Attention, functools.partial(arrays, *[(64, 1024, 64)] * 3)),
    "grouped matmul 8x1024^3": (Matmul, functools.partial(arrays, (8, 1024, 1024), (8, 1024, 1024))),
}
