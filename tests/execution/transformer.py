"""A small transformer's training step: three kernels, three layers in a scan, forward, backward, update, 4 shards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from fakes_execution import mesh_of
from jax.sharding import PartitionSpec as P

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner

LAYERS, BATCH, TOKENS, WIDTH = 3, 4, 8, 16


@dataclass(frozen=True)
class Parts:
    """Into how many parts the work is cut."""

    count: int


class Cut(Kernel[Parts, jax.Array]):
    """A kernel that cuts its work."""

    counts = (1, 2)

    def heuristic_cfg(self, inv):
        return Parts(self.counts[0])

    def candidate_cfgs(self, inv):
        return [Parts(count) for count in self.counts]


class Matmul(Cut):
    """A product, so many columns at a time."""

    op_id = "step.matmul"
    version = "1"

    def run(self, a, b, *, cfg):
        return jnp.concatenate([a @ part for part in jnp.split(b, cfg.count, axis=1)], axis=-1)


class RmsNorm(Cut):
    """A norm with a gradient of its own."""

    op_id = "step.rms_norm"

    def run(self, x, w, *, cfg, eps=1e-6):
        rows = jnp.split(x, cfg.count, axis=0)
        return jnp.concatenate([r * jax.lax.rsqrt((r * r).mean(-1, keepdims=True) + eps) for r in rows]) * w

    def fwd_with_residuals(self, x, w, *, cfg, eps=1e-6):
        return self.run(x, w, cfg=cfg, eps=eps), (x, w)

    def vjp(self, residuals, y, dy, x, w, *, cfg, eps=1e-6):
        x, w = residuals
        scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
        g = dy * w
        dx = scale * g - x * scale**3 * (g * x).mean(-1, keepdims=True)
        return dx, (dy * x * scale).sum(0)


class Attention(Cut):
    """Softmax attention of one sequence, so many queries at a time."""

    op_id = "step.attention"

    def run(self, q, k, v, *, cfg):
        parts = [jax.nn.softmax(part @ k.T / q.shape[-1] ** 0.5) @ v for part in jnp.split(q, cfg.count)]
        return jnp.concatenate(parts)


def make_selector(store=None, **settings):
    """A selector that measures as little as it may."""
    return ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1), persistent=store, **settings)


def make_step(selector):
    """One step of gradient descent, jitted and sharded over four devices by the batch."""
    run = Executor(selector)

    def layer(x, w):
        h = run(RmsNorm(), x.reshape(-1, WIDTH), w["norm"]).reshape(x.shape)
        q = run(Matmul(), h.reshape(-1, WIDTH), w["in"]).reshape(x.shape)
        a = jax.vmap(lambda row: run(Attention(), row, row, row))(q)
        return x + run(Matmul(), a.reshape(-1, WIDTH), w["out"]).reshape(x.shape), None

    def loss(params, x):
        y, _ = jax.lax.scan(layer, x, params["layers"])
        logits = run(Matmul(), y.reshape(-1, WIDTH), params["head"])
        return (logits**2).mean()

    def shard(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        grads = jax.lax.pmean(grads, "i")
        return jax.lax.pmean(value, "i"), jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    mapped = jax.shard_map(shard, mesh=mesh_of(4), in_specs=(P(), P("i")), out_specs=(P(), P()), check_vma=False)
    return jax.jit(mapped)


def example():
    """Parameters and a batch."""
    keys = jax.random.split(jax.random.key(0), 5)
    square = (LAYERS, WIDTH, WIDTH)
    layers = {
        "norm": jnp.ones((LAYERS, WIDTH)),
        "in": jax.random.normal(keys[0], square) / 4,
        "out": jax.random.normal(keys[1], square) / 4,
    }
    params = {"layers": layers, "head": jax.random.normal(keys[2], (WIDTH, 2 * WIDTH)) / 4}
    return params, jax.random.normal(keys[3], (BATCH, TOKENS, WIDTH))


def text_of(step):
    """The step's lowered program, as short text."""
    return hashlib.sha256(step.lower(*example()).as_text().encode()).hexdigest()
