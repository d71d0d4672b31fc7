"""Choices that are recalled while programs are traced are told as ever, and never outlive a change.

Covers `config/kept_answers.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    calls_made,
    device_fingerprint,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.config import selection

X = jnp.arange(1.0, 5.0)


class Times(Kernel[int, jax.Array]):
    """The argument times the cfg, its factor and the keyword."""

    op_id = "recalled"

    def __init__(self, factor=1):
        super().__init__()
        if factor != 1:
            self.factor = factor

    def run(self, x, *, cfg, scale=1):
        return x * cfg * getattr(self, "factor", 1) * scale

    def heuristic_cfg(self, inv):
        return 2


class Traced:
    """A selector that counts its walks, and calls that are each traced anew."""

    def __init__(self, monkeypatch):
        self.events = []
        self.walks = 0
        self.selector = ConfigSelectorChain(
            ConfigCache(), AutotunePolicy(allow_autotune=False), on_event=lambda event, **data: self.told(event, data)
        )
        self.executor = Executor(self.selector)
        walk = selection.walk

        def counted(*args, **how):
            self.walks += 1
            return walk(*args, **how)

        monkeypatch.setattr(selection, "walk", counted)

    def told(self, event, data):
        self.events.append((event, data["call_key"], data.get("cfg")))

    def put(self, cfg, x=X, kernel=None, **static):
        # Looking a key up is no choice of a program's.
        found = []
        finder = Executor(_Asked(found))
        finder.choose_config(kernel or Times(), x, **static)
        self.selector.cache.put(device_fingerprint(), "recalled@v0", found[0], cfg)

    def __call__(self, x=X, kernel=None, **static):
        kernel = kernel or Times()
        return jax.jit(lambda x: self.executor(kernel, x, **static))(x)


class _Asked:
    """A chooser that remembers the keys of calls."""

    def __init__(self, keys):
        self.keys = keys

    def choose(self, inv, kernel):
        self.keys.append(inv.call_key)
        return 1


@pytest.fixture
def traced(monkeypatch):
    made = Traced(monkeypatch)
    made.put(3)
    assert made()[0] == 3
    assert made.walks == 1
    return made


def test_a_choice_from_memory_is_recalled_and_told(traced):
    """The second trace walks no tiers, and its event is that of the first."""
    assert traced()[0] == 3
    assert traced.walks == 1
    assert traced.events[0] == traced.events[1]


def test_a_guess_is_never_recalled(traced):
    """A heuristic cfg is chosen anew at each trace, so that a later tuning is found."""
    for _ in range(2):
        assert traced(jnp.ones(7))[0] == 2
    assert traced.walks == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda t: t(jnp.ones(4, jnp.bfloat16)), 2),
        (lambda t: t(jnp.ones(5)), 2),
        (lambda t: t(jnp.ones((4, 1)))[0], 2),
        (lambda t: t(scale=5), 10),
        (lambda t: t(scale=True), 2),
        (lambda t: t(kernel=Times(7)), 21),
    ],
    ids=["dtype", "shape", "rank", "keyword", "type of a keyword", "attribute of the kernel"],
)
def test_another_call_is_another_question(traced, given, expected):
    """Whatever is part of a key makes another question; a kernel's attributes are no part of it, but are asked anew."""
    assert given(traced)[0] == expected
    assert traced.walks == 2


def test_a_put_and_a_clear_are_noticed(traced):
    """What is in memory now is what is chosen."""
    traced.put(4)
    assert traced()[0] == 4
    traced.selector.cache.clear()
    assert traced()[0] == 2


def test_an_overlay_and_a_policy_are_noticed(traced):
    """An overlay answers inside it, and an override of the policy is asked."""
    key = traced.selector.cache.keys()[0]
    with overlay_cache({key: 9}):
        assert traced()[0] == 9
    assert traced()[0] == 3
    with policy_override(traced.selector, validate_backward=True):
        traced()
    assert traced.walks == 3


def test_a_matmul_precision_is_another_question(traced):
    """The precision in force is part of the key."""
    with jax.default_matmul_precision("highest"):
        assert traced()[0] == 2


def test_a_collector_sees_recalled_calls(traced):
    """What collects the calls of a program gets those that were chosen before."""
    with calls_made() as calls:
        traced()

    assert len(calls) == 1


def test_a_key_builder_is_asked_every_time(traced):
    """A kernel that makes its own keys may look at anything, so nothing of it is recalled."""
    asked = []

    class Own(Times):
        op_id = "recalled_own"

        def key_builder(self, inv):
            asked.append(inv)
            return "mine"

    kernel = Own()
    traced.selector.cache.put(device_fingerprint(), "recalled_own@v0", "mine", 6)
    assert traced(kernel=kernel)[0] == 6
    count = len(asked)
    assert traced(kernel=kernel)[0] == 6
    assert len(asked) > count
