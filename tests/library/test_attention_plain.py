"""Few queries and keys that lengths hide: no way of plain JAX copies keys, and gradients are those of copies."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull, selects
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.library import Attention, AttentionConfig, attention
from ejkernel.ops import Invocation

WAYS = [
    AttentionConfig("xla"),
    AttentionConfig("sliced", block_q=2),
    AttentionConfig("chunked", block_q=2, block_k=6),
]
KEYS = 20
LENGTHS = jnp.array([7, KEYS], jnp.int32)


def inputs(hidden, queries=3):
    """Queries, and keys and values that hold this beyond their lengths."""
    q, k, v = normal(2, queries, 4, 8), *(normal(2, KEYS, 2, 8, seed=seed) for seed in (1, 2))
    beyond = (jnp.arange(KEYS)[None] >= LENGTHS[:, None])[..., None, None]
    return q, *(jnp.where(beyond, hidden, x) for x in (k, v))


def attend(cfg, lengths=LENGTHS):
    """The call with lengths."""
    return lambda q, k, v: attention(q, k, v, key_value_lengths=lengths, cfg=cfg, executor=UNTUNED)


def copies(cfg, queries):
    """Selects of the size of the keys in the forward program."""
    run = partial(Attention().run, scale=0.5, cfg=cfg)
    program = jax.make_jaxpr(lambda *args: run(*args, key_value_lengths=LENGTHS))(*inputs(0.0, queries)).jaxpr
    return selects(program, inputs(0.0)[1].size)


@pytest.mark.parametrize("cfg", WAYS, ids=lambda cfg: cfg.implementation)
def test_few_queries_copy_values_alone(cfg):
    """Keys that are hidden are left as they are; with many queries a copy costs next to nothing, and is made."""
    assert [copies(cfg, queries) for queries in (3, 16)] == [1, 2]


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("cfg", WAYS, ids=lambda cfg: cfg.implementation)
def test_results_and_both_modes_of_differentiation_do_not_see_what_is_hidden(cfg):
    """NaN beyond the lengths changes nothing: not the result, not gradients, not the derivative along the queries."""
    clean, dirty = inputs(0.0), inputs(jnp.nan)
    q, plain = clean[0], attend(AttentionConfig("sliced"))
    assert_near(attend(cfg)(*dirty), plain(*clean), "float32")
    for found, wanted in zip(pull(attend(cfg), dirty, q), pull(plain, clean, q), strict=True):
        assert_near(found, wanted, "float32")

    @partial(jax.jit, static_argnums=0)
    def along(fn, k, v):
        return jax.jvp(lambda q: fn(q, k, v), (q,), (q,))[1]

    assert_near(along(attend(cfg), *dirty[1:]), along(plain, *clean[1:]), "float32", slack=4)


def test_a_gradient_of_a_gradient_does_not_see_what_is_hidden():
    """The rule of few queries has derivatives of its own."""
    q, k, v = inputs(jnp.nan)

    def total(q):
        return jnp.sum(jnp.sin(attend(WAYS[0])(q, k, v)))

    assert np.all(np.isfinite(jax.jit(jax.jacfwd(jax.grad(total)))(q)))


def test_few_queries_are_mapped_and_sharded():
    """A vmap over sequences and their lengths, and shards of them with the checks on."""
    clean, dirty = inputs(0.0), inputs(jnp.nan)
    wanted = attend(AttentionConfig("sliced"))(*clean)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))

    def one(q, k, v, length):
        return attend(WAYS[0], length[None])(q[None], k[None], v[None])[0]

    def part(q, k, v, lengths):
        return attend(WAYS[0], lengths)(q, k, v)

    assert_near(jax.jit(jax.vmap(one))(*dirty, LENGTHS), wanted, "float32")
    sharded = jax.shard_map(part, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
    assert_near(jax.jit(sharded)(*dirty, LENGTHS), wanted, "float32")


def test_a_derivative_along_some_arrays_has_no_products_for_the_others():
    """The gradient of queries alone needs two products more than the result has, and none along keys or values."""
    q, k, v = inputs(0.0)

    def products(fn):
        return str(jax.make_jaxpr(fn)(q)).count("dot_general")

    run = partial(Attention().run, k=k, v=v, key_value_lengths=LENGTHS, scale=0.5, cfg=AttentionConfig("xla"))
    assert products(run) == 2
    assert products(jax.grad(lambda q: jnp.sum(run(q)))) == 4


def test_on_a_cpu_the_guess_for_hidden_keys_is_a_block():
    """Up to 64 queries `sliced` takes less time than XLA's own where lengths or a mask hide keys; else XLA's own."""
    kernel, (q, k, v) = Attention(), inputs(0.0)

    def guess(*others):
        return kernel.heuristic_cfg_cpu(Invocation("x", (q, k, v, *others), {"scale": 0.5})).implementation

    assert guess(None, None, None, LENGTHS) == "sliced"
    assert guess(jnp.ones((1, 1, 1, KEYS), bool)) == "sliced"
    assert guess() == guess(None, None, LENGTHS) == "xla"
