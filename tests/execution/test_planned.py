"""Functions that plan: options by position, numbers that stand for arrays, random keys, and programs of any kernels.

Covers `execution/plan.py`.
"""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, Times, close, executor_with, key_for, put

from ejkernel.ops import Executor, overlay_cache
from ejkernel.ops.core import invalidation
from ejkernel.ops.execution import planned as planning
from ejkernel.ops.execution.plan import Plan, Program
from ejkernel.ops.execution.planned import planned

X = jnp.arange(1.0, 5.0)


class Powers(Counting):
    """The cfg times x to a static power, plus a number."""

    op_id = "powers"

    def run(self, x, added=None, *, power=1, cfg):
        self.log.append((type(power), power))
        out = x**power * cfg
        return out if added is None else out + added


class Drawn(Counting):
    """Random numbers like x, times the cfg."""

    op_id = "drawn"

    def run(self, key, x, *, cfg):
        self.log.append(cfg)
        return jax.random.uniform(key, x.shape) * cfg


@pytest.fixture
def kernel():
    """A kernel with a log of its own."""
    return Powers.fresh()()


@pytest.fixture
def power(kernel):
    """A function of an array, an option by position or by name, and a number."""
    run = executor_with()

    @planned(numbers=("added",))
    def front(x, power=1, *, added=None, executor=None):
        given = (x,) if added is None else (x, jnp.asarray(added, jnp.float32))
        return Plan(kernel, given, {"power": power}, None, executor)

    return lambda *args, **kwargs: front(*args, **kwargs, executor=run)


@pytest.fixture
def no_long_way(monkeypatch):
    """Fails where a call takes the long way."""

    def forbid():
        for name in ("call_anew", "call_planned"):
            monkeypatch.setattr(Executor, name, lambda *_: pytest.fail("took the long way"))

    return forbid


@pytest.mark.parametrize("option", [2, 2.5, None, "2", jnp.float32], ids=str)
def test_an_option_by_position_takes_the_short_way(option, no_long_way):
    """A number, a string, None or a dtype is part of the key as it is."""
    seen = []
    run, kernel = executor_with(), Times.fresh()()

    @planned()
    def front(x, option, *, executor=None):
        seen.append(option)
        return Plan(kernel, (x,), {}, None, executor)

    for _ in range(2):
        front(X, option, executor=run)
    no_long_way()

    close(front(X, option, executor=run), X * 2)
    # Once for the plan, and once in the program.
    assert seen == [option, option]


def test_equal_options_of_other_types_are_told_apart(power, kernel):
    """1, 1.0 and True are three static values by position, as they are by name, and 0.0 is not -0.0."""
    for _ in range(2):
        for option in (1, 1.0, True, 0.0, -0.0):
            power(X, option)

    assert [kind for kind, _ in kernel.log] == [int, float, bool, float, float]


def test_each_option_has_its_own_result(power):
    """A program that is there serves no other value of its option, by position or by name."""
    for _ in range(3):
        for option in (1, 2, 3):
            close(power(X, option), 2 * X**option)
            close(power(X, power=option), 2 * X**option)


def test_a_number_for_an_array_compiles_nothing(power, kernel, no_long_way):
    """Values of an argument that may be an array share one program, whatever way each is written."""
    for added in (1.0, 2.0):
        close(power(X, added=added), 2 * X + added)
    no_long_way()

    for added in (3.0, 4, 0.0, -0.0):
        close(power(X, added=added), 2 * X + added)
    assert len(kernel.log) == 1


def test_numbers_do_not_pile_up(power):
    """A program that counts through them keeps a bounded number of arrays."""
    for added in range(planning._MOST_NUMBERS + 10):
        planning._as_array(added)

    assert len(planning._numbers) <= planning._MOST_NUMBERS
    close(power(X, added=5), 2 * X + 5)


def test_a_number_inside_a_trace_leaves_no_tracer_behind(power):
    """Arrays that a traced function holds make a short call, and its number serves outside as well."""
    inside = jax.jit(lambda: power(X, added=0.125))

    close(inside(), 2 * X + 0.125)
    close(power(X, added=0.125), 2 * X + 0.125)


def test_a_random_key_takes_the_short_way(no_long_way):
    """Typed keys have a class of their own, and are arrays all the same; other keys draw other numbers."""
    run, kernel = executor_with(), Drawn.fresh()()

    @planned()
    def front(key, x, *, executor=None):
        return Plan(kernel, (key, x), {}, None, executor)

    first, second = jax.random.split(jax.random.key(0))
    for _ in range(2):
        front(first, X, executor=run)
        front(key=first, x=X, executor=run)
        run(kernel, first, X)
    no_long_way()

    for key in (first, second):
        right = 2 * jax.random.uniform(key, X.shape)
        close(front(key, X, executor=run), right)
        close(front(key=key, x=X, executor=run), right)
        close(run(kernel, key, X), right)


def _twice(run):
    kernel = Times.fresh()()

    @planned()
    def front(x, *, executor=None):
        return Program("twice", lambda executor: executor(kernel, executor(kernel, x)[:2]), executor)

    return kernel, lambda x: front(x, executor=run)


def test_a_program_of_two_calls_notices_a_change_of_one(no_long_way):
    """A cfg that is put for the second call alone reaches the next call of the whole."""
    run = executor_with()
    kernel, twice = _twice(run)
    for _ in range(2):
        close(twice(X), X[:2] * 4)
    put(run, kernel, 7, X[:2])
    for _ in range(2):
        close(twice(X), X[:2] * 14)
    no_long_way()

    close(twice(X), X[:2] * 14)


def test_a_program_of_sharded_arrays_runs_part_by_part():
    """Each kernel sees where its arrays are; inside one program it would not."""
    run = executor_with()
    kernel, twice = _twice(run)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    spread = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))

    for _ in range(2):
        close(twice(spread), X[:2] * 4)
    assert len(kernel.log) == 2


def test_a_function_without_an_executor_refuses_one():
    """A keyword that a function does not have is Python's own error, cold and warm."""

    @planned()
    def front(x):
        return Program("plus", lambda executor: x + 1)

    for _ in range(2):
        close(front(X), X + 1)
        with pytest.raises(TypeError, match="executor"):
            front(X, executor=None)


def test_a_change_while_a_call_runs_is_not_overlooked():
    """A put that comes between the choice and the end of a call is noticed by the next one."""
    run = executor_with()
    kernel = Times.fresh()()

    @planned()
    def front(x, *, executor=None):
        def then(out):
            # Inside the trace, after the choice.
            if not changed:
                changed.append(put(run, kernel, 7, X))
            return out

        return Plan(kernel, (x,), {}, None, executor, then)

    changed = []
    front(X, executor=run)

    close(front(X, executor=run), X * 7)


def test_no_thread_meets_a_cfg_that_was_replaced_before_its_call():
    """While one thread puts cfg after cfg, a call that begins after a put never has an older one."""
    run = executor_with()
    kernel = Times.fresh()()

    @planned()
    def front(x, *, executor=None):
        return Plan(kernel, (x,), {}, None, executor)

    latest = [2]
    done = threading.Event()
    wrong = []

    def ask():
        while not done.is_set():
            least = latest[0]
            for call in (lambda: front(X, executor=run), lambda: run(kernel, X)):
                found = float(call()[0])
                if found < least:
                    wrong.append((found, least))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for cfg in range(3, 15):
        put(run, kernel, cfg, X)
        latest[0] = cfg
    done.set()
    for thread in threads:
        thread.join()

    assert not wrong


def test_a_table_that_is_gone_is_told_nothing():
    """Executors leave nothing behind in the list of what is told of changes."""
    known = len(invalidation._dependents)
    executor_with()

    gc.collect()
    assert len(invalidation._dependents) <= known


def test_an_overlay_and_a_setting_reach_a_program_of_several_calls():
    """Inside an overlay its cfg runs in each part, and outside the one before."""
    run = executor_with()
    kernel, twice = _twice(run)
    for _ in range(2):
        with overlay_cache({key_for(kernel, X[:2]): 5}):
            close(twice(X), X[:2] * 10)
        close(twice(X), X[:2] * 4)
