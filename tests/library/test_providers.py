"""Implementations from other packages: raced, checked, named, and never imported unless asked for.

Covers `library/provided/tokamax.py`.
"""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import REPOSITORY
from fakes_library import UNTUNED, normal

from ejkernel.library import (
    ProviderError,
    RmsNormConfig,
    SoftmaxConfig,
    TopKConfig,
    attention,
    linear_cross_entropy,
    providers,
    ragged_dot,
    register_provider,
    rms_norm,
    softmax,
    top_k,
    unregister_provider,
)
from ejkernel.library.providers import with_providers
from ejkernel.library.softmax import Softmax
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation, check, default_selector


@pytest.fixture(autouse=True)
def no_provider_is_left():
    """Providers are of the process."""
    yield
    for operation in ("softmax", "rms_norm", "attention", "ragged_dot", "linear_cross_entropy", "top_k"):
        for one in providers(operation):
            unregister_provider(operation, one.name)


def by_hand(x, *, axis=-1):
    """A softmax from elsewhere."""
    powers = jnp.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def tried(x, **static):
    """Every candidate's outcome, by its implementation."""
    return {trial.cfg.implementation: trial for trial in check(with_providers(Softmax()), x, **static)}


def test_a_provider_is_a_candidate_with_its_name():
    """In the race beside the library's own, checked with its gradient, and right."""
    register_provider("softmax", "mine", by_hand)
    found = tried(normal(6, 64))
    assert found["provider:mine"].status == "ok"
    assert found["xla"].status == "ok"


def test_its_name_is_in_the_key():
    """What was tuned with it is not found without it, and the other way round."""
    register_provider("softmax", "mine", by_hand)
    softmax(normal(4, 32))
    unregister_provider("softmax", "mine")
    softmax(normal(4, 32))
    assert {key[1] for key in default_selector().persistent.keys()} == {"library.softmax.mine@v3", "library.softmax@v3"}


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, axis: 1 / 0, "provider bad of softmax raised ZeroDivisionError: division by zero"),
        (lambda x, axis: x[:1], r"provider bad of softmax returned float32\[1, 64\] in place of float32\[6, 64\]"),
        (lambda x, axis: x.astype(jnp.bfloat16), r"returned bfloat16\[6, 64\] in place of float32\[6, 64\]"),
        (lambda x, axis: 1.0, r"provider bad of softmax returned a float in place of float32\[6, 64\]"),
    ],
    ids=["raises", "another shape", "another dtype", "no array"],
)
def test_one_that_fails_is_named(fn, message):
    """As a failed candidate, and as an error where it was asked for by hand."""
    register_provider("softmax", "bad", fn)
    trial = tried(normal(6, 64), axis=-1)["provider:bad"]
    assert trial.status == "compile"
    assert "provider bad of softmax" in trial.message
    with pytest.raises(ProviderError, match=message):
        softmax(normal(6, 64), cfg=SoftmaxConfig("provider:bad"), executor=UNTUNED)


def test_a_list_is_as_good_as_a_tuple():
    """`lax.top_k` returns one."""
    register_provider("top_k", "jax", lambda x, *, k: list(jax.lax.top_k(x, k)))
    found = top_k(normal(3, 32), 4, cfg=TopKConfig("provider:jax"), executor=UNTUNED)
    np.testing.assert_array_equal(found[1], jax.lax.top_k(normal(3, 32), 4)[1])


def test_wrong_values_never_win():
    """A fast provider that computes something else is a wrong candidate with its name."""
    register_provider("softmax", "wrong", lambda x, axis: x)
    assert tried(normal(6, 64), axis=-1)["provider:wrong"].status == "wrong"


def test_what_a_provider_does_not_support_is_left_out_with_its_reason():
    """By its own words, by a plain no, and by an error."""
    x = normal(4, 64)
    inv = Invocation("x", (x,), {})
    for supports, reason in (
        (lambda x, **static: "only rows of 128", "only rows of 128"),
        (lambda x, **static: False, "provider mine does not support this"),
        (lambda x, **static: 1 / 0, "supports of provider mine raised ZeroDivisionError"),
    ):
        register_provider("softmax", "mine", by_hand, supports)
        assert with_providers(Softmax()).valid_cfg(inv, SoftmaxConfig("provider:mine")).startswith(reason)
    assert len(providers("softmax")) == 1


def test_gradients_go_through_a_provider():
    """By JAX's rules, for operations with and without a gradient of their own."""
    register_provider(
        "rms_norm", "mine", lambda x, w=None, *, eps: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * w
    )

    def loss(labels):
        def fn(hidden, weight, labels, **static):
            logits = hidden @ weight
            at = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, 1) - at)

        register_provider("linear_cross_entropy", "mine", fn)

    x, w = normal(4, 32), normal(32, seed=1)

    def norm(name):
        cfg = RmsNormConfig(name)
        return jax.grad(lambda *a: jnp.sum(rms_norm(*a, cfg=cfg, executor=UNTUNED) ** 2), argnums=(0, 1))(x, w)

    for one, other in zip(norm("provider:mine"), norm("xla"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    from ejkernel.library import LinearCrossEntropyConfig

    labels, weight = jnp.array([1, 2, 3, 4]), normal(32, 16, seed=2)
    loss(labels)

    def entropy(name):
        cfg = LinearCrossEntropyConfig(name)
        return jax.grad(lambda *a: linear_cross_entropy(*a, labels, cfg=cfg, executor=UNTUNED), (0, 1))(x, weight)

    for one, other in zip(entropy("provider:mine"), entropy("xla"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_provider_that_wins_is_used():
    """And its record names it."""
    calls = []

    def noted(x, *, axis):
        calls.append(x.shape)
        return by_hand(x, axis=axis)

    register_provider("softmax", "mine", noted)

    class First:
        """A tuner that believes the last candidate."""

        def autotune(self, make_fn, args, kwargs, candidates):
            return list(candidates)[-1]

    executor = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(), First()))
    made = softmax(normal(4, 64), executor=executor)
    np.testing.assert_allclose(made, jax.nn.softmax(normal(4, 64), -1), rtol=1e-5)
    assert calls


def test_tokamax_is_imported_when_it_is_asked_about_a_call():
    """The shipped adapters: registering them needs no tokamax, and without it they say so."""
    program = (
        "import sys, ejkernel.library as lib\n"
        "lib.register_provider('attention', 'tokamax')\n"
        "lib.register_provider('ragged_dot', 'tokamax')\n"
        "print('tokamax' in sys.modules, [p.name for p in lib.providers('attention')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.stdout == "False ['tokamax']\n", done.stderr


class FakeTokamax:
    """As much of tokamax as the adapters call."""

    @staticmethod
    def dot_product_attention(
        q, k, v, *, bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths, **more
    ):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=scale, is_causal=is_causal)

    @staticmethod
    def ragged_dot(lhs, rhs, group_sizes, *, preferred_element_type):
        return jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type)


def test_tokamax_is_given_the_call_as_it_takes_it(monkeypatch):
    """Attention and ragged products, by a stand-in."""
    monkeypatch.setitem(sys.modules, "tokamax", FakeTokamax)
    monkeypatch.setattr("ejkernel.library.provided.tokamax.find_spec", lambda name: name)
    register_provider("attention", "tokamax")
    register_provider("ragged_dot", "tokamax")
    from ejkernel.library import AttentionConfig, RaggedDotConfig

    q, k, v = (normal(1, 8, 2, 16, seed=seed) for seed in range(3))
    found = attention(q, k, v, causal=True, cfg=AttentionConfig("provider:tokamax"), executor=UNTUNED)
    np.testing.assert_allclose(found, attention(q, k, v, causal=True, executor=UNTUNED), rtol=1e-4, atol=1e-5)
    lhs, rhs, sizes = normal(8, 16), normal(2, 16, 4, seed=1), jnp.array([3, 5])
    found = ragged_dot(lhs, rhs, sizes, cfg=RaggedDotConfig("provider:tokamax"), executor=UNTUNED)
    np.testing.assert_allclose(found, ragged_dot(lhs, rhs, sizes, executor=UNTUNED), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: register_provider("softmx", "a", by_hand), ValueError, "operation='softmx' is none of the library"),
        (lambda: register_provider("softmax", "a b", by_hand), ValueError, "no name for a provider"),
        (lambda: register_provider("softmax", "a", 3), TypeError, "fn must be a function, got int"),
        (lambda: register_provider("softmax", "tokamax"), ValueError, "brings no provider 'tokamax' of softmax"),
        (lambda: unregister_provider("softmax", "a"), ValueError, "softmax has no provider 'a'"),
    ],
)
def test_bad_input_is_refused(call, kind, message):
    """With a sentence that says what to do."""
    with pytest.raises(kind, match=message):
        call()
