"""The gated delta rule and its kin: step by step in float64, and every way with its gradients.

Covers `library/gated_delta_ways.py` and `library/recurrence.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, wide

from ejkernel.library import (
    GatedDeltaRule,
    GatedDeltaRuleConfig,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
)
from ejkernel.library.recurrence import decays, nearly_decays, unit_inverse
from ejkernel.ops import Invocation

WAYS = [GatedDeltaRuleConfig("chunked", 8), GatedDeltaRuleConfig("levels", 8), GatedDeltaRuleConfig("chunked", 32)]
LENGTHS = jnp.array([21, 10])


def arrays(kind, dtype="float32"):
    """Queries, keys, values, gates and a state, as the operation takes them."""
    batch, length, heads, size, out = 2, 21, 2, 8, 5
    q, k, v = (normal(batch, length, heads, width, seed=s) for s, width in enumerate((size, size, out)))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    gate = -jnp.abs(normal(batch, length, heads, *((size,) if kind == "rows" else ()), seed=3))
    gates = (gate, jax.nn.sigmoid(normal(batch, length, heads, seed=4))) if kind == "delta" else (gate,)
    return (*(x.astype(dtype) for x in (q, k, v)), *gates, normal(batch, heads, size, out, seed=5))


def exact(kind, q, k, v, g, *rest):
    """Token by token in float64."""
    q, k, v, g, *rest = (wide(x) for x in (q, k, v, g, *rest))
    state, out = rest[-1].copy(), np.zeros_like(v)
    for b in range(q.shape[0]):
        for t in range(int(LENGTHS[b])):
            for h in range(q.shape[2]):
                s = state[b, h] * np.exp(g[b, t, h] if kind != "rows" else g[b, t, h][:, None])
                error = (v[b, t, h] - s.T @ k[b, t, h]) * rest[0][b, t, h] if kind == "delta" else v[b, t, h]
                state[b, h] = s + np.outer(k[b, t, h], error)
                out[b, t, h] = state[b, h].T @ q[b, t, h]
    return out, state


def called(kind, cfg):
    """The operation as a function of its arrays."""
    operation = gated_delta_rule if kind == "delta" else gated_linear_attention
    return lambda *a: operation(*a[:-1], initial_state=a[-1], lengths=LENGTHS, cfg=cfg, executor=UNTUNED)


@pytest.mark.parametrize("kind", ["delta", "heads", "rows"])
def test_values_states_and_gradients_of_every_way_are_right(kind):
    """Lengths that chunks do not divide, with a state at the begin."""
    given = arrays(kind)
    right = exact(kind, *given)
    pulled = tuple(normal(*x.shape, seed=9 + at) for at, x in enumerate(right))

    def run(cfg):
        out, pull = jax.vjp(called(kind, cfg), *given)
        return out, pull(pulled)

    out, gradients = jax.jit(lambda: run(GatedDeltaRuleConfig("scan")))()
    for found, wanted in zip(out, right, strict=True):
        assert_near(found, wanted, "float32")
    for cfg in WAYS if kind == "delta" else WAYS[:2]:
        out, mine = jax.jit(lambda cfg=cfg: run(cfg))()
        for found, wanted in zip((*out, *mine), (*right, *gradients), strict=True):
            assert_near(found, wide(wanted), "float32", slack=3)


def test_narrow_inputs_are_as_near_as_step_by_step():
    """bfloat16 in and out, with a state in float32."""
    given = arrays("delta", "bfloat16")
    right = exact("delta", *given)
    for cfg in (GatedDeltaRuleConfig("scan"), WAYS[0]):
        out, state = called("delta", cfg)(*given)
        assert out.dtype == jnp.bfloat16
        assert state.dtype == jnp.float32
        assert_near(out, right[0], "bfloat16")
        assert_near(state, right[1], "bfloat16")


def test_what_is_beyond_a_sequence_counts_for_nothing():
    """Not even where it is no number; its output is zero."""
    given = [x.at[1, 10:].set(jnp.nan) for x in arrays("delta")[:5]]
    state = arrays("delta")[5]
    for cfg in (GatedDeltaRuleConfig("scan"), WAYS[1]):
        out, last = called("delta", cfg)(*given, state)
        assert not np.any(out[1, 10:])
        assert np.all(np.isfinite(out))
        assert_near(last, exact("delta", *arrays("delta"))[1], "float32")


def test_a_sequence_in_two_parts_is_the_sequence():
    """The state goes out of one call and into the next."""
    q, k, v, g, beta, state = arrays("delta")
    whole, last = gated_delta_rule(q, k, v, g, beta, initial_state=state, cfg=WAYS[0], executor=UNTUNED)
    first, between = gated_delta_rule(
        *(x[:, :9] for x in (q, k, v, g, beta)), initial_state=state, cfg=WAYS[0], executor=UNTUNED
    )
    second, end = gated_delta_rule(
        *(x[:, 9:] for x in (q, k, v, g, beta)), initial_state=between, cfg=WAYS[0], executor=UNTUNED
    )
    assert_near(jnp.concatenate([first, second], axis=1), wide(whole), "float32")
    assert_near(end, wide(last), "float32")


def test_strong_decay_does_not_overflow():
    """A quotient of two exponentials would."""
    q, k, v, g, state = arrays("rows")
    out, _ = gated_linear_attention(q, k, v, 0 * g - 200, initial_state=state, cfg=WAYS[0], executor=UNTUNED)
    right = jnp.einsum("bthk,bthk,bthv->bthv", q, k, v)
    assert_near(out[:, 1:], wide(right[:, 1:]), "float32")


@pytest.mark.one_leg(but_first=True)
@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["delta", "heads", "rows"])
@pytest.mark.parametrize("gate", [-1e4, -1e9, -np.inf])
def test_a_gate_that_forgets_everything_leaves_the_tokens_after_it_exact(kind, gate):
    """As between documents in one row: also in gradients, and with the state that goes out."""
    given = list(arrays(kind))
    given[3] = given[3].at[:, jnp.array([4, 9, 17])].set(gate)
    right = exact(kind, *given)

    def both(cfg):
        def total(*given):
            out = called(kind, cfg)(*given)
            return sum(map(jnp.sum, out)), out

        return jax.jit(jax.grad(total, tuple(range(4)), has_aux=True))(*given)

    gradients, _ = both(GatedDeltaRuleConfig("scan"))
    for cfg in WAYS[:2]:
        mine, out = both(cfg)
        for found, wanted in zip(out, right, strict=True):
            assert_near(found, wanted, "float32")
        for found, wanted in zip(mine, gradients, strict=True):
            assert_near(found, wide(wanted), "float32", slack=3)


def test_a_decay_of_zero_leaves_each_token_alone():
    """The least that there is: its logarithm is minus infinity."""
    q, k, v = arrays("heads")[:3]
    out, _ = linear_attention(q, k, v, decay=jnp.array([0.0, 1.0]), cfg=WAYS[0], executor=UNTUNED)
    alone = jnp.einsum("btk,btk,btv->btv", q[:, :, 0], k[:, :, 0], v[:, :, 0])
    assert_near(out[:, :, 0], wide(alone), "float32")
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0, 1e4])
def test_decays_of_narrow_numbers_are_near_however_strong_they_are(strength):
    """Differences of sums, which are large and nearly equal where decay was strong before."""
    gates = -jnp.abs(normal(2, 128, seed=1)) * strength
    gates = gates.at[:, 64:].multiply(1e-3)
    np.testing.assert_allclose(nearly_decays(gates), decays(gates), rtol=2e-3, atol=1e-30)


def test_equal_keys_make_a_system_that_is_solved_exactly():
    """Powers of its matrix would be as large as 10^18."""
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_allclose(jax.jit(unit_inverse)(lower) @ (lower + jnp.eye(64)), jnp.eye(64), atol=1e-6)


def test_linear_attention_has_one_decay_a_head():
    """And without one nothing decays."""
    q, k, v = arrays("heads")[:3]
    seen = jnp.tril(jnp.einsum("bihk,bjhk->bhij", q, k))
    out, _ = linear_attention(q, k, v, executor=UNTUNED)
    assert_near(out, wide(jnp.einsum("bhij,bjhv->bihv", seen, v)), "float32")
    decay = jnp.array([0.5, 0.9])
    place = jnp.arange(21)
    left = jnp.where(place[:, None] >= place, decay[:, None, None] ** (place[:, None] - place), 0)
    out, _ = linear_attention(q, k, v, decay=decay, executor=UNTUNED)
    assert_near(out, wide(jnp.einsum("bhij,bjhv->bihv", seen * left, v)), "float32")


def test_the_heuristic_cfg_can_run():
    """From one token to many."""
    for length in (1, 15, 16, 40, 4096):
        sizes = [(1, length, 2, 8)] * 3 + [(1, length, 2)] * 2 + [(1, 2, 8, 8)]
        inv = Invocation("x", tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes), {})
        for guess in (GatedDeltaRule().heuristic_cfg(inv), GatedDeltaRule().heuristic_cfg_gpu(inv)):
            assert guess.implementation == "scan" or guess.chunk


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": jnp.ones((1, 4, 2, 3))}, "q and k must have the same shape"),
        ({"v": jnp.ones((1, 5, 2, 8))}, "k and v differ in batch, length or heads"),
        ({"g": jnp.ones((1, 4))}, "g must have the shape"),
        ({"beta": jnp.ones((1, 4, 3))}, "beta has the shape"),
        ({"initial_state": jnp.ones((1, 2, 8, 7))}, "initial_state has the shape"),
        ({"lengths": jnp.array([5])}, "lengths must be from 0 to 4"),
    ],
)
def test_bad_arguments_are_named(change, words):
    """Before anything is measured."""
    given = {name: jnp.ones((1, 4, 2, 8)) for name in "qkv"} | {name: jnp.ones((1, 4, 2)) for name in ("g", "beta")}
    with pytest.raises(ValueError, match=words):
        gated_delta_rule(**(given | change))
