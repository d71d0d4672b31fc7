"""Memory stays bounded: programs of changing static values and shapes leave, and no array is kept alive.

Covers `execution/table.py`.
"""

from __future__ import annotations

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, OwnCubic, Picking, Times, close, executor_with, put

# Each new static value compiles a program, so the short tests make the table small and fill it several times over.
SMALL = 24
CALLS = 150
# Static values that are remembered in order to warn of too many: so many of one argument at most.
REMEMBERED = 65
# What the table may hold in earnest.
BOUND = 1024


@pytest.fixture
def small_table(monkeypatch):
    monkeypatch.setattr("ejkernel.ops.execution.table._MOST", SMALL)


class Plain(Counting):
    """As little to trace as can be; a token for each trace shows which programs are still alive."""

    op_id = "plain"

    def run(self, x, *, value=0, cfg):
        return x


class Token:
    """A static value that can be watched."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == other.number


def test_changing_static_values_leave_the_table(small_table):
    """After many static values only a bounded number of entries, and of the values themselves, is alive."""
    executor, kernel = executor_with(), Plain.fresh(key_builder=lambda inv: "k")()
    x = jnp.ones(2)
    alive = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(CALLS):
            token = Token(i)
            alive.append(weakref.ref(token))
            executor(kernel, x, value=token)
    del token
    gc.collect()
    assert len(executor._table) <= SMALL
    assert sum(ref() is not None for ref in alive) <= SMALL + REMEMBERED


def test_an_entry_in_use_stays_while_others_come_and_go(small_table):
    """The table forgets what was used longest ago: a call that is made again and again is not traced again."""
    executor, kernel, other = executor_with(), Times.fresh()(), Plain.fresh(key_builder=lambda inv: "k")()
    x = jnp.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(CALLS):
            executor(kernel, x)
            executor(other, x, value=i)
    assert len(kernel.log) == 1


def test_warm_calls_leave_nothing_behind():
    """Calls and puts for others, again and again, do not grow the table or its lists."""
    executor, kernel = executor_with(), Times.fresh()()
    x = jnp.ones(2)
    for i in range(300):
        executor.chooser.cache.put("cpu|another", "another@v0", "k", i)
        executor(kernel, x)
    assert len(executor._table) == 1
    assert sum(len(shorts) for shorts in executor._table._shorts.values()) <= 2


def test_fresh_kernels_leave_nothing_behind():
    """An instance per call is freed after it."""
    executor, fresh = executor_with(), Times.fresh()
    x = jnp.ones(2)
    alive = []
    for _ in range(20):
        kernel = fresh()
        alive.append(weakref.ref(kernel))
        executor(kernel, x)
    del kernel
    gc.collect()
    # One of them is the entry's own.
    assert sum(ref() is not None for ref in alive) <= 1


CALLERS = {
    "eager": lambda executor, kernel, x: executor(kernel, x),
    "jitted": lambda executor, kernel, x: jax.jit(lambda y: executor(kernel, y))(x),
    "gradient": lambda executor, kernel, x: jax.grad(lambda y: executor(kernel, y).sum())(x),
    "vmap": lambda executor, kernel, x: jax.vmap(lambda y: executor(kernel, y))(x[None]),
    "compiled": lambda executor, kernel, x: executor.compile(kernel, x)(x),
    "chosen": lambda executor, kernel, x: executor.choose_config(kernel, x),
}


@pytest.mark.thinned
@pytest.mark.parametrize("around", ["plain", "recording", "tuned"])
@pytest.mark.parametrize("caller", CALLERS)
def test_no_array_is_kept_alive(caller, around, monkeypatch):
    """Once the caller lets go of its arrays they are gone, recorded or not, tuned or not."""
    if around == "recording":
        monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel = executor_with(Picking() if around == "tuned" else None), OwnCubic.fresh()()
    x = jnp.arange(5.0) + 1
    ref = weakref.ref(x)
    CALLERS[caller](executor, kernel, x)
    del x
    gc.collect()
    assert ref() is None


def test_a_numpy_argument_is_not_kept_alive(monkeypatch):
    """The same for numpy arrays."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel = executor_with(), Times.fresh()()
    x = np.arange(5.0, dtype=np.float32)
    ref = weakref.ref(x)
    executor(kernel, x)
    del x
    gc.collect()
    assert ref() is None


def test_an_executor_that_is_gone_leaves_nothing():
    """An executor, its programs and its selector are freed together."""
    executor, kernel = executor_with(), Times.fresh()()
    executor(kernel, jnp.ones(3))
    ref, selector = weakref.ref(executor), weakref.ref(executor.chooser)
    del executor
    gc.collect()
    assert ref() is None
    assert selector() is None


def test_puts_in_a_loop_keep_the_table_small():
    """A kernel whose cfg is put anew each time leaves its old programs behind."""
    executor, kernel = executor_with(), Times.fresh()()
    x = jnp.ones(2)
    for cfg in range(30):
        put(executor, kernel, cfg, x)
        close(executor(kernel, x), x * cfg)
    assert len(executor._table) == 1


@pytest.mark.slow
def test_ten_thousand_calls_of_changing_statics_and_shapes_keep_memory_bounded(count):
    """The second half of the calls needs next to nothing on top of the first."""
    import resource

    executor, kernel = executor_with(), Plain.fresh()()

    def calls(numbers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in numbers:
                executor(kernel, np.ones(1 + i % 50, np.float32), value=i)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    # In short they still fill the table.
    half = count(4500, short=BOUND)
    calls(range(1000))
    first = calls(range(1000, 1000 + half))
    second = calls(range(1000 + half, 1000 + 2 * half))
    assert len(executor._table) <= BOUND
    # MiB; a leak of one program a call would be some hundred.
    assert second - first < 100
