"""Policies: what a selector may do, and how that is changed for a while."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    OpsError,
    forward_autotune_only,
    policy_override,
)


@pytest.fixture
def selector():
    return ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), on_event=Listener())


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_the_defaults_are_documented():
    """A policy made of nothing tunes on a miss, allows heuristics and looks at the forward pass."""
    policy = AutotunePolicy()

    assert (policy.allow_autotune, policy.allow_heuristics) == (True, True)
    assert (policy.cache_miss_fallback, policy.validate_backward) == ("autotune", False)


def test_fields_are_taken_by_position():
    """The documented order of the arguments holds."""
    assert AutotunePolicy(False, True, "heuristics", True) == AutotunePolicy(
        allow_autotune=False, allow_heuristics=True, cache_miss_fallback="heuristics", validate_backward=True
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_miss_fallback": "guess"},
        {"cache_miss_fallback": None},
        {"cache_miss_fallback": ["autotune"]},
        {"allow_autotune": "yes"},
        {"allow_autotune": None},
        {"allow_heuristics": 2},
        {"validate_backward": "False"},
    ],
    ids=str,
)
def test_unknown_values_are_a_value_error(wrong):
    """A value that means nothing is refused where it is written, and the message has field and value."""
    with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
        AutotunePolicy(**wrong)

    assert repr(next(iter(wrong.values()))) in str(caught.value)
    assert isinstance(caught.value, OpsError)


def test_an_unknown_field_of_a_policy_is_a_type_error():
    """A policy has four fields."""
    with pytest.raises(TypeError):
        AutotunePolicy(allow_everything=True)


def test_a_policy_is_frozen():
    """A policy is a value; another one is assigned to the selector instead."""
    with pytest.raises(FrozenInstanceError):
        AutotunePolicy().allow_autotune = False


def test_a_selector_without_a_policy_has_the_default(selector):
    """`policy=None` is `AutotunePolicy()`."""
    assert selector.policy == AutotunePolicy()


def test_an_override_changes_the_policy_in_force(selector):
    """`selector.policy` reads as changed inside and as before outside."""
    with policy_override(selector, allow_autotune=False, validate_backward=True):
        inside = selector.policy

    assert inside == AutotunePolicy(allow_autotune=False, validate_backward=True)
    assert selector.policy == AutotunePolicy()


def test_an_override_changes_what_is_chosen(selector):
    """Without tuning the heuristic answers; afterwards the tuning's winner."""
    kernel = Doubling()
    with policy_override(selector, allow_autotune=False):
        inside = selector.choose(call_of(kernel), kernel)

    assert (inside, selector.choose(call_of(kernel), kernel)) == (Blocks(1), Blocks(2))


def test_an_override_is_of_one_selector(selector):
    """Another selector keeps its own policy."""
    other = ConfigSelectorChain(ConfigCache())
    with policy_override(selector, allow_autotune=False):
        assert other.policy == AutotunePolicy()


def test_other_threads_do_not_see_an_override(selector):
    """A thread that runs meanwhile has the selector's own policy."""
    with policy_override(selector, allow_autotune=False):
        assert in_thread(lambda: selector.policy) == AutotunePolicy()


def test_other_tasks_do_not_see_an_override(selector):
    """Tasks that interleave keep their overrides apart, and leaving them in any order is fine."""

    async def task(updates, entered, leave):
        with policy_override(selector, **updates):
            entered.set()
            await leave.wait()
            return selector.policy

    async def main():
        e = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(task({"allow_autotune": False}, e[0], e[1]))
        await e[0].wait()
        second = asyncio.create_task(task({"validate_backward": True}, e[2], e[3]))
        await e[2].wait()
        e[1].set()
        found = [await first]
        e[3].set()
        return [*found, await second, selector.policy]

    assert asyncio.run(main()) == [
        AutotunePolicy(allow_autotune=False),
        AutotunePolicy(validate_backward=True),
        AutotunePolicy(),
    ]


def test_overrides_nest(selector):
    """The inner one wins, field by field."""
    with policy_override(selector, allow_autotune=False, cache_miss_fallback="heuristics"):
        with policy_override(selector, allow_autotune=True):
            inner = selector.policy
        between = selector.policy

    assert inner == AutotunePolicy(cache_miss_fallback="heuristics")
    assert between == AutotunePolicy(allow_autotune=False, cache_miss_fallback="heuristics")
    assert selector.policy == AutotunePolicy()


def test_an_override_may_be_entered_twice(selector):
    """One object entered inside itself, and again later, works."""
    override = policy_override(selector, allow_autotune=False)
    with override:
        with override:
            pass
        between = selector.policy.allow_autotune
    outside = selector.policy.allow_autotune
    with override:
        again = selector.policy.allow_autotune

    assert (between, outside, again) == (False, True, False)


def test_an_exception_ends_an_override(selector):
    """A block that raises leaves the policy as it was."""
    with pytest.raises(KeyError), policy_override(selector, allow_autotune=False):
        raise KeyError

    assert selector.policy == AutotunePolicy()


def test_an_unknown_field_is_a_type_error(selector):
    """The message names the field and those that exist."""
    with pytest.raises(TypeError, match=r"allow_tuning.*allow_autotune"):
        policy_override(selector, allow_tuning=False)


def test_a_wrong_value_is_a_value_error(selector):
    """A value is checked as in a policy, before the block."""
    with pytest.raises(ValueError, match="sometimes"):
        policy_override(selector, cache_miss_fallback="sometimes")


def test_assigning_a_policy_takes_effect_at_the_next_choice(selector):
    """An assigned policy is in force for every thread at once."""
    kernel = Doubling()
    selector.policy = AutotunePolicy(allow_autotune=False)
    untuned = selector.choose(call_of(kernel), kernel)
    selector.policy = AutotunePolicy()

    assert (untuned, selector.choose(call_of(kernel), kernel)) == (Blocks(1), Blocks(2))
    assert in_thread(lambda: selector.policy) == AutotunePolicy()


def test_a_policy_assigned_inside_an_override_stays(selector):
    """The override covers what is assigned inside it and gives way to it outside."""
    with policy_override(selector, allow_autotune=False):
        selector.policy = AutotunePolicy(validate_backward=True)
        inside = selector.policy

    assert inside == AutotunePolicy(allow_autotune=False, validate_backward=True)
    assert selector.policy == AutotunePolicy(validate_backward=True)


def test_leaving_overrides_in_another_order_is_an_error(selector):
    """In one context the inner block ends first."""
    outer, inner = policy_override(selector, allow_autotune=False), policy_override(selector, allow_autotune=True)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)

    assert selector.policy == AutotunePolicy()


def test_forward_only_covers_every_selector(selector):
    """Inside `forward_autotune_only` no tuning looks at gradients, whatever the policy says."""
    other = ConfigSelectorChain(ConfigCache(), AutotunePolicy(validate_backward=True))
    selector.policy = AutotunePolicy(validate_backward=True)
    with forward_autotune_only():
        inside = selector.policy.validate_backward, other.policy.validate_backward

    assert (inside, selector.policy.validate_backward) == ((False, False), True)


def test_forward_only_wins_over_an_override_inside_it(selector):
    """It disables backward validation also where an override asks for it."""
    with forward_autotune_only(), policy_override(selector, validate_backward=True):
        assert not selector.policy.validate_backward


def test_forward_only_reaches_the_tuner(selector):
    """The tuner is asked for forward and backward outside, and for forward alone inside."""
    selector.policy = AutotunePolicy(validate_backward=True)
    one, other = Doubling((1, 2)), Doubling((1, 4))
    with forward_autotune_only():
        selector.choose(call_of(one, 1.0), one)
    selector.choose(call_of(other, 2.0), other)

    assert selector.tuner.objectives == [False, True]


def test_forward_only_nests_and_ends(selector):
    """One object may be entered twice, and other threads do not see it."""
    selector.policy = AutotunePolicy(validate_backward=True)
    scope = forward_autotune_only()
    with scope, scope:
        elsewhere = in_thread(lambda: selector.policy.validate_backward)

    assert elsewhere
    assert selector.policy.validate_backward
