"""The calls of a program, noted while it is looked through, and collected while it is traced."""

from __future__ import annotations

import jax.numpy as jnp
from fakes_execution import Asked, Picking, Times, executor_with, selector_with
from fakes_programs import Outer

from ejkernel.ops import Executor, calls_made, overlay_cache, policy_override
from ejkernel.ops.programs.find import find

X = jnp.arange(1.0, 5.0)


def test_nothing_is_tuned_kept_or_told_while_calls_are_looked_for():
    """Selectors answer with heuristics, in silence."""
    events = []
    tuner = Picking()
    selector = selector_with(tuner, on_event=lambda event, **data: events.append(event))
    find(lambda x: Executor(selector)(Times.fresh()(), x), (X,), {})
    assert (tuner.calls, selector.cache.size(), events) == (0, 0, [])


def test_an_answer_that_is_needed_to_trace_is_there_although_heuristics_are_off():
    """A policy without tuning and without heuristics does not keep calls from being found."""
    selector = selector_with(Picking())
    with policy_override(selector, allow_autotune=False, allow_heuristics=False):
        found = find(lambda x: Executor(selector)(Times.fresh()(), x), (X,), {})
    assert [call.inv.args[0].shape for call in found.calls] == [(4,)]


def test_a_kernel_inside_a_kernel_comes_first():
    """The inner call is found, and is before the outer one in the order of tuning."""
    executor = executor_with()
    found = find(lambda x: executor(Outer(executor), x), (X,), {})
    assert [call.key.op_id for call in found.calls] == ["inner@v0", "outer@v0"]
    inner, outer = found.calls
    assert inner.outer == {outer.key}
    assert outer.outer == frozenset()


def test_a_call_with_a_given_cfg_is_the_callers_own():
    """`cfg=` is not looked for, and neither is a compiled kernel."""
    executor, kernel = executor_with(), Times.fresh()()
    fixed = executor.compile(kernel, X)
    found = find(lambda x: executor(kernel, x, cfg=3) + fixed(x), (X,), {})
    assert (found.calls, found.unseen) == ((), 0)


def test_a_call_of_another_chooser_is_counted_and_no_more():
    """A chooser of the user's own answers as always, and cannot be tuned for."""
    asked = Asked(3)
    found = find(lambda x: Executor(asked)(Times.fresh()(), x), (X,), {})
    assert (found.calls, found.unseen, asked.count) == ((), 1, 1)


def test_overlays_answer_while_calls_are_looked_for():
    """The program that is looked through is the one that would run here."""
    executor, kernel = executor_with(), Times.fresh()()
    (call,) = find(lambda x: executor(kernel, x), (X,), {}).calls
    with overlay_cache({call.key: 3}):
        find(lambda x: executor(kernel, x), (X,), {})
    assert kernel.log == [2, 3]


def test_blocks_nest():
    """The outer block has the inner one's calls too."""
    executor, kernel = executor_with(), Times.fresh()()
    with calls_made() as outer:
        executor(kernel, X)
        with calls_made() as inner:
            executor(kernel, X[:2])
    assert (len(outer), len(inner)) == (2, 1)
