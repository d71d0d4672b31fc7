"""What reaches which function when: overlays, puts, clears, policies, finished tunings; what is never traced again.

Covers `core/invalidation.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Asked, Counting, Picking, Times, close, executor_with, key_for, put

from ejkernel.ops import (
    AutotunePolicy,
    Executor,
    autotune_recorded,
    current_scope,
    forward_autotune_only,
    overlay_cache,
    policy_override,
    refresh,
)

X = jnp.arange(1.0, 5.0)


def in_thread(function):
    """What a function gives, or raises, in another thread."""
    found = []

    def run():
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [(out, error)] = found
    if error is not None:
        raise error
    return out


@pytest.fixture
def kernel():
    return Times.fresh()()


def test_a_put_reaches_eager_calls_at_once(kernel):
    """The next call runs with what was put, after a guess and after another put."""
    executor = executor_with()
    close(executor(kernel, X), X * 2)
    for cfg in (7, 8):
        put(executor, kernel, cfg, X)
        close(executor(kernel, X), X * cfg)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (True, 1), (1.0, True)])
def test_a_put_of_an_equal_cfg_of_another_type_reaches_eager_calls(one, other):
    """1, 1.0 and True are three cfgs."""

    class Shows(Counting):
        op_id = "shows"

        def run(self, x, *, cfg):
            return x + {int: 10, float: 20, bool: 30}[type(cfg)]

    executor, kernel = executor_with(), Shows()
    seen = []
    for cfg in (one, other):
        put(executor, kernel, cfg, X)
        seen.append(float(executor(kernel, X)[0] - X[0]))
    assert seen == [{int: 10.0, float: 20.0, bool: 30.0}[type(cfg)] for cfg in (one, other)]


def test_a_put_of_the_same_cfg_traces_nothing(kernel):
    """What is already in force is no news."""
    executor = executor_with()
    close(executor(kernel, X), X * 2)
    put(executor, kernel, 2, X)
    close(executor(kernel, X), X * 2)
    assert len(kernel.log) == 1


def test_a_clear_reaches_eager_calls_at_once(kernel):
    """After a clear the call is chosen for anew."""
    executor = executor_with()
    put(executor, kernel, 7, X)
    close(executor(kernel, X), X * 7)
    executor.chooser.cache.clear()
    close(executor(kernel, X), X * 2)


def test_a_policy_reaches_eager_calls_at_once(kernel):
    """A guess gives way to a tuning once the policy allows one."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    close(executor(kernel, X), X * 2)
    executor.chooser.policy = AutotunePolicy()
    close(executor(kernel, X), X * 5)


def test_a_policy_override_reaches_eager_calls_inside_alone(kernel):
    """Inside the block a tuning, which then stays; outside of another block a guess."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    other = Times.fresh(op_id="times2")()
    close(executor(kernel, X), X * 2)
    close(executor(other, X), X * 2)
    with policy_override(executor.chooser, allow_autotune=True):
        close(executor(kernel, X), X * 5)
    close(executor(kernel, X), X * 5)
    close(executor(other, X), X * 2)


def test_a_policy_override_belongs_to_its_thread(kernel):
    """Another thread's eager call is a guess while this one may tune."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    with policy_override(executor.chooser, allow_autotune=True):
        close(in_thread(lambda: executor(kernel, X)), X * 2)
        close(executor(kernel, X), X * 5)


def test_entering_a_policy_override_again_traces_nothing_new(kernel):
    """Equal overrides share programs."""
    executor = executor_with()
    for _ in range(4):
        with policy_override(executor.chooser, allow_heuristics=True):
            executor(kernel, X)
        with forward_autotune_only():
            executor(kernel, X)
    assert len(kernel.log) == 2


def test_a_finished_tuning_reaches_eager_calls_at_once(kernel, monkeypatch):
    """An offline tuning ends, and the next call runs with its winner."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    close(executor(kernel, X), X * 2)
    autotune_recorded(executor.chooser)
    close(executor(kernel, X), X * 5)


def test_a_tuning_of_another_thread_reaches_eager_calls(kernel):
    """Another thread tunes the key; this thread's next call uses the winner."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    close(executor(kernel, X), X * 2)

    def tune():
        with policy_override(executor.chooser, allow_autotune=True):
            executor(kernel, X)

    in_thread(tune)
    close(executor(kernel, X), X * 5)


CHANGES = {
    "put": lambda executor, kernel: put(executor, kernel, 7, X),
    "clear": lambda executor, kernel: executor.chooser.cache.clear(),
    "policy": lambda executor, kernel: setattr(executor.chooser, "policy", AutotunePolicy()),
    "tuning": lambda executor, kernel: executor.chooser.tune(_invocation(kernel), kernel),
}


def _invocation(kernel):
    from ejkernel.ops import Invocation

    return Invocation(kernel.op_id, (X,), {})


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_reaches_a_jitted_function_by_itself(change, kernel):
    """A function that the user jitted keeps its program, and is not traced again."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    put(executor, kernel, 6, X)
    step = jax.jit(lambda x: executor(kernel, x))
    close(step(X), X * 6)
    CHANGES[change](executor, kernel)
    # A tuning itself looks at the kernel's shapes.
    before = len(kernel.log)
    close(step(X), X * 6)
    assert len(kernel.log) == before


@pytest.mark.parametrize(("change", "cfg"), [("put", 7), ("clear", 2), ("tuning", 5)])
def test_after_refresh_a_jitted_function_sees_the_change(change, cfg, kernel):
    """`refresh()` has it choose again at its next call, once."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    put(executor, kernel, 6, X)
    step = jax.jit(lambda x: executor(kernel, x))
    close(step(X), X * 6)
    CHANGES[change](executor, kernel)
    refresh()
    before = len(kernel.log)
    for _ in range(3):
        close(step(X), X * cfg)
    assert len(kernel.log) == before + 1


def test_refresh_reaches_every_jitted_function_and_thread(kernel):
    """Two functions, one called in another thread, both choose again."""
    executor = executor_with()
    steps = [jax.jit(lambda x: executor(kernel, x)), jax.jit(lambda x: executor(kernel, x) + 1)]
    for step in steps:
        step(X)
    put(executor, kernel, 7, X)
    refresh()
    close(steps[0](X), X * 7)
    close(in_thread(lambda: steps[1](X)), X * 7 + 1)


def test_refresh_inside_an_overlay_counts_there_too(kernel):
    """A program made under an overlay before the refresh is old after it."""
    executor = executor_with()
    other = Times.fresh(op_id="other")()
    step = jax.jit(lambda x: executor(kernel, x) + executor(other, x))
    with overlay_cache({key_for(other, X): 10}):
        close(step(X), X * 12)
        put(executor, kernel, 7, X)
        refresh()
        close(step(X), X * 17)


def test_a_new_trace_of_a_jitted_function_sees_the_change(kernel):
    """Without a refresh: another shape is another trace, and chooses with what is known then."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))
    step(X)
    put(executor, kernel, 7, X[:2])
    close(step(X[:2]), X[:2] * 7)


def test_an_overlay_reaches_a_jitted_function(kernel):
    """Inside it is traced with the overlay's cfg, outside it has its old program; twice in and out traces once."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))
    close(step(X), X * 2)
    for _ in range(2):
        with overlay_cache({key_for(kernel, X): 9}):
            close(step(X), X * 9)
            close(executor(kernel, X), X * 9)
        close(step(X), X * 2)
        close(executor(kernel, X), X * 2)
    # The jitted function outside and inside, the eager call inside and outside.
    assert len(kernel.log) == 4


def test_an_overlay_reaches_gradients_and_batches(kernel):
    """Jitted gradients and vmaps inside an overlay run with its cfg."""
    executor = executor_with()
    step = jax.jit(jax.grad(lambda x: executor(kernel, x).sum()))
    close(step(X), jnp.full(4, 2.0))
    with overlay_cache({key_for(kernel, X): 9}):
        close(step(X), jnp.full(4, 9.0))
    close(step(X), jnp.full(4, 2.0))


def test_nested_overlays_in_a_jitted_function(kernel):
    """The innermost wins, and each returns to the one around it."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))
    key = key_for(kernel, X)
    with overlay_cache({key: 9}):
        with overlay_cache({key: 10}):
            close(step(X), X * 10)
        close(step(X), X * 9)
    close(step(X), X * 2)


def test_an_overlay_does_not_hide_a_put_from_the_calls_after_it(kernel):
    """A put made inside an overlay is in force outside of it."""
    executor = executor_with()
    with overlay_cache({key_for(kernel, X): 9}):
        put(executor, kernel, 7, X)
        close(executor(kernel, X), X * 9)
    close(executor(kernel, X), X * 7)


def test_an_overlay_belongs_to_its_thread_unless_that_opts_in(kernel):
    """Another thread sees it with `current_scope` alone; programs are shared without being mixed up."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))

    def opted_in(scope):
        with scope:
            return step(X), executor(kernel, X)

    with overlay_cache({key_for(kernel, X): 9}):
        scope = current_scope()
        close(step(X), X * 9)
        close(in_thread(lambda: (step(X), executor(kernel, X))), (X * 2, X * 2))
        close(in_thread(lambda: opted_in(scope)), (X * 9, X * 9))


def test_a_thread_with_a_copied_context_opts_in_from_inside(kernel):
    """A copied context alone changes nothing; `current_scope()` inside it does."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))

    def opted_in():
        with current_scope():
            return step(X)

    with overlay_cache({key_for(kernel, X): 9}):
        copied = contextvars.copy_context()
        close(in_thread(lambda: copied.run(step, X)), X * 2)
        close(in_thread(lambda: copied.run(opted_in)), X * 9)
    close(step(X), X * 2)


def test_tasks_call_kernels_side_by_side(kernel):
    """Overlays of two tasks that do not await inside them do not meet."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x))
    key = key_for(kernel, X)

    async def one(cfg):
        await asyncio.sleep(0)
        with overlay_cache({key: cfg}):
            out = step(X)
        await asyncio.sleep(0)
        return out, executor(kernel, X)

    async def everyone():
        return await asyncio.gather(*(one(cfg) for cfg in (9, 10, 11)))

    for cfg, (inside, outside) in zip((9, 10, 11), asyncio.run(everyone()), strict=True):
        close(inside, X * cfg)
        close(outside, X * 2)


def test_policies_of_tasks_do_not_meet(kernel):
    """A policy override of one task is not seen by another, also over an await."""
    executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
    other = Times.fresh(op_id="other")()

    async def tuning(ready, done):
        with policy_override(executor.chooser, allow_autotune=True):
            ready.set()
            await done.wait()
            return executor(kernel, X)

    async def guessing(ready, done):
        await ready.wait()
        out = executor(other, X)
        done.set()
        return out

    async def both():
        ready, done = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(tuning(ready, done), guessing(ready, done))

    tuned, guessed = asyncio.run(both())
    close(tuned, X * 5)
    close(guessed, X * 2)


def layers(step_kernels, executor):
    """A step of twelve layers."""

    def step(x):
        for kernel in step_kernels:
            x = jnp.tanh(x if kernel is None else executor(kernel, x))
        return x

    return jax.jit(step)


LEARNT = {
    "a shape": lambda executor, kernel: executor(kernel, jnp.ones(77)),
    "a put": lambda executor, kernel: put(executor, kernel, 3, jnp.ones(78)),
    "a put for its own key": lambda executor, kernel: put(executor, kernel, 3, X),
    "a tuning": lambda executor, kernel: executor.chooser.tune(_invocation(kernel), kernel),
    "another kernel": lambda executor, kernel: executor(Times.fresh(op_id="another")(), X),
}


@pytest.mark.parametrize("learnt", LEARNT)
def test_a_jitted_step_is_not_traced_again_when_something_is_learnt(learnt, kernel):
    """Twelve layers with our kernels and twelve without: both keep their programs."""
    executor = executor_with(Picking())
    ours, bare = layers([kernel] * 12, executor), layers([None] * 12, executor)
    ours(X), bare(X)
    LEARNT[learnt](executor, kernel)
    before = len(kernel.log)
    ours(X), bare(X)
    assert before >= 12
    assert len(kernel.log) == before
    assert ours._cache_size() == bare._cache_size() == 1


def test_a_jitted_step_is_traced_once_for_two_visits_to_an_overlay(kernel):
    """With our kernels and without, in and out and in again."""
    executor = executor_with()
    ours, bare = layers([kernel] * 12, executor), layers([None] * 12, executor)
    ours(X), bare(X)
    for _ in range(2):
        with overlay_cache({key_for(kernel, X): 9}):
            ours(X), bare(X)
        ours(X), bare(X)
    assert len(kernel.log) == 24


def test_learning_one_key_traces_no_other_eager_call(kernel):
    """Other kernels and other static values keep their programs."""
    executor = executor_with()
    other = Times.fresh(op_id="other")()
    executor(kernel, X), executor(other, X)
    put(executor, other, 7, X)
    close(executor(kernel, X), X * 2)
    close(executor(other, X), X * 7)
    assert (len(kernel.log), len(other.log)) == (1, 2)


def test_learning_one_shape_traces_no_other_shape(kernel):
    """A put for one shape of a kernel leaves the programs of its other shapes alone."""
    executor = executor_with()
    executor(kernel, X), executor(kernel, X[:2])
    put(executor, kernel, 7, X[:2])
    close(executor(kernel, X[:2]), X[:2] * 7)
    close(executor(kernel, X), X * 2)
    assert kernel.log == [2, 2, 7]


def test_tuning_shape_after_shape_traces_each_once(kernel):
    """Each new shape is traced once, and the earlier ones are warm."""
    executor = executor_with(Picking())
    shapes = [jnp.ones(n) for n in range(1, 9)]
    for x in shapes:
        executor(kernel, x)
    before = len(kernel.log)
    for x in shapes:
        executor(kernel, x)
    assert len(kernel.log) == before
    assert kernel.log.count(5) == len(shapes)


def test_many_puts_for_others_trace_nothing(kernel):
    """Thousands of keys are learnt between two calls, none of them this one's."""
    executor = executor_with()
    executor(kernel, X)
    for i in range(6000):
        executor.chooser.cache.put("cpu|another", "another@v0", str(i), i)
    close(executor(kernel, X), X * 2)
    assert len(kernel.log) == 1


def test_a_guess_is_not_asked_for_again_while_nothing_changes(kernel):
    """Warm calls tell the listener nothing."""
    events = []
    executor = executor_with(on_event=lambda event, **data: events.append(event))
    for _ in range(3):
        executor(kernel, X)
    assert events == ["heuristics"]


def test_a_chooser_of_the_user_s_own_is_asked_again_after_refresh(kernel):
    """`refresh` has eager calls and jitted functions ask it once more."""
    executor = Executor(Asked(2, 3, 4, 5))
    step = jax.jit(lambda x: executor(kernel, x))
    close(executor(kernel, X), X * 2)
    close(step(X), X * 3)
    refresh()
    close(executor(kernel, X), X * 4)
    close(step(X), X * 5)


@pytest.mark.parametrize("puts", [1, 7, 8, 9, 30])
def test_many_changes_of_a_key_elsewhere_do_not_hide_one_here(puts, kernel):
    """Only the last changes of a key are remembered: where an older one may be missing, the program asks again."""
    mine, other = executor_with(), executor_with()
    put(mine, kernel, 2, X)
    close(mine(kernel, X), X * 2)
    put(mine, kernel, 3, X)
    for _ in range(puts):
        put(other, kernel, 2, X)
    close(mine(kernel, X), X * 3)
