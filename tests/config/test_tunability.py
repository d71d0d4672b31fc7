"""What may be measured: calls in traces, of symbolic shapes, too large, or with values that count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Blocks, call_of, key_of
from fakes_config import NO_TUNING, heuristic_reason, world

from ejkernel.ops import Kernel, Tuner
from ejkernel.ops.config import tunability


class Logged(Kernel):
    """Says what it was really run on, first argument first; the cfg makes no difference."""

    op_id = "logged"

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def run(self, x, *more, cfg):
        def note(values):
            self.seen.append(np.asarray(values))
            return np.float32(2)

        return x * jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), x).astype(x.dtype)

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return [Blocks(1), Blocks(2)]


class Exemplary(Logged):
    """A kernel that knows which integers are harmless."""

    op_id = "exemplary"

    def example_inputs(self, inv, rng):
        return tuple(np.full(a.shape, 7, a.dtype) for a in inv.args), dict(inv.kwargs)


def real_world(kernel_type, *args, **more):
    seen = []
    w = world(kernel_type(seen), *args, tuner=Tuner(1, 1), **more)
    return w, seen


TRACES = {
    "jit": lambda f, x: jax.jit(f)(x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "grad": lambda f, x: jax.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "jit of grad of vmap": lambda f, x: jax.jit(jax.grad(lambda y: jax.vmap(f)(jnp.stack([y, y])).sum()))(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, y: (f(carry), y), x, jnp.arange(2)),
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "while": lambda f, x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x)),
    "checkpoint": lambda f, x: jax.grad(lambda y: jax.checkpoint(f)(y).sum())(x),
    "export": lambda f, x: jax.export.export(jax.jit(f))(x),
}


@pytest.mark.parametrize("trace", TRACES)
def test_tracing_may_tune(trace):
    """Inside any trace the candidates are run for real, on random values of the right shape."""
    w, seen = real_world(Logged)
    chosen = []

    def function(x):
        chosen.append(w.selector.choose(call_of(w.kernel, x), w.kernel))
        return x * 1.0

    TRACES[trace](function, jnp.zeros(5))

    assert chosen[0] in (Blocks(1), Blocks(2))
    assert w.listener.names[:2] == ["autotune_start", "autotune_finish"]
    assert w.listener.names.count("autotune_start") == 1
    assert seen
    assert all(values.shape == (5,) and values.all() for values in seen)


def test_a_policy_prevents_tuning_in_a_trace():
    """With tuning off a trace gets the heuristic and nothing is run."""
    w, seen = real_world(Logged, policy=NO_TUNING)
    jax.eval_shape(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1], jnp.ones(5))

    assert (w.listener.names, seen) == (["heuristics"], [])


def test_a_trace_and_its_eager_call_share_their_entry():
    """What was tuned while tracing answers the eager call of the same shapes."""
    w, _ = real_world(Logged)
    jax.eval_shape(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1], jnp.ones(8))
    w.choose()

    assert w.listener.names == ["autotune_start", "autotune_finish", "cache_hit"]


def test_symbolic_shapes_are_never_measured():
    """An exported function of any size gets the heuristic, with the reason."""
    w, seen = real_world(Logged)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32)
    jax.export.export(jax.jit(lambda x: (w.selector.choose(call_of(w.kernel, x), w.kernel), x)[1]))(shape)

    assert "symbolic" in heuristic_reason(w)
    assert seen == []


def test_a_call_of_symbolic_shape_is_answered_by_a_store():
    """What was put for it is found."""
    w, _ = real_world(Logged)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32)
    inv = call_of(w.kernel, shape)
    w.selector.persistent.put(*key_of(w.kernel, inv), Blocks(2))

    assert w.selector.choose(inv, w.kernel) == Blocks(2)


def test_a_call_whose_inputs_are_too_large_is_never_measured():
    """Sixteen terabytes are refused by their shape, before anything is made, with the reason."""
    w, seen = real_world(Logged, jax.ShapeDtypeStruct((2**42,), jnp.float32))

    assert w.choose() == Blocks(1)
    assert "memory" in heuristic_reason(w)
    assert seen == []


def test_a_call_whose_outputs_are_too_large_is_never_measured(monkeypatch):
    """Outputs count as inputs do."""

    class Wide(Logged):
        def run(self, x, *, cfg):
            return jnp.broadcast_to(super().run(x, cfg=cfg)[:, None], (x.size, 1000))

    monkeypatch.setattr(tunability, "free_memory", lambda device: 16_000)
    small, _ = real_world(Logged)
    wide, seen = real_world(Wide)
    small.choose()
    wide.choose()

    assert small.listener.names == ["autotune_start", "autotune_finish"]
    assert "memory" in heuristic_reason(wide)
    assert seen == []


def test_a_call_that_is_too_large_is_answered_by_memory(monkeypatch):
    """Only the measuring is refused."""
    monkeypatch.setattr(tunability, "free_memory", lambda device: 1)
    w, _ = real_world(Logged)
    w.selector.cache.put(*w.key, Blocks(2))

    assert w.choose() == Blocks(2)


def trace_with(w, *others):
    jax.jit(lambda x, *more: (w.selector.choose(call_of(w.kernel, x, *more), w.kernel), x)[1])(jnp.ones(8), *others)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_a_traced_call_with_integers_is_not_tuned(dtype):
    """Random indices could read out of bounds: the heuristic answers, with the reason."""
    w, seen = real_world(Logged)
    trace_with(w, jnp.ones(3, dtype))

    assert "integer" in heuristic_reason(w)
    assert seen == []


def test_a_traced_call_with_a_mask_is_tuned():
    """True and false are no indices."""
    w, _ = real_world(Logged)
    trace_with(w, jnp.ones(3, bool))

    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_a_traced_call_with_a_random_key_is_tuned():
    """A PRNG key is no integer array."""
    w, _ = real_world(Logged)
    trace_with(w, jax.random.key(0))

    assert w.listener.names == ["autotune_start", "autotune_finish"]


def test_a_traced_call_with_integers_is_tuned_on_the_kernels_examples():
    """With `example_inputs` it is tuned, on those values."""
    w, seen = real_world(Exemplary)
    trace_with(w, jnp.ones(3, jnp.int32))

    assert w.listener.names == ["autotune_start", "autotune_finish"]
    assert seen
    assert all((values == 7).all() for values in seen)


def test_an_eager_call_uses_its_own_integers():
    """Indices that the caller gave are in bounds, so they are the ones to measure with."""
    w, seen = real_world(Logged, jnp.array([3, 1, 2], jnp.int32))
    w.choose()

    assert w.listener.names == ["autotune_start", "autotune_finish"]
    assert all(values.tolist() == [3, 1, 2] for values in seen)


def test_an_eager_call_of_zeros_is_not_measured_on_zeros():
    """Zeros mislead the clock: floats are random."""
    w, seen = real_world(Logged, jnp.zeros(8))
    w.choose()

    assert seen
    assert all(values.all() for values in seen)
