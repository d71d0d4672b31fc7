"""Every fast form of a call notices what the executor's own call notices: changes, and calls of another kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Picking, Times, close, executor_with, key_for, put, selector_with

from ejkernel.ops import (
    ConfigCache,
    Executor,
    PersistentCache,
    find_labels_in_lowered,
    overlay_cache,
    policy_override,
    refresh,
    tunable,
)
from ejkernel.ops.core.errors import KernelError
from ejkernel.ops.execution.arguments import PLAIN, invocation_of
from ejkernel.ops.execution.plan import Plan, Program
from ejkernel.ops.execution.planned import planned

X = jnp.arange(1.0, 5.0)


class Trees(Counting):
    """The sum of a tree's arrays times the cfg."""

    op_id = "trees"

    def run(self, tree, *, cfg):
        self.log.append(cfg)
        return sum(jax.tree_util.tree_leaves(tree)) * cfg


class Way:
    """One form of a call: a kernel, a function of one array, and the arguments that the kernel gets."""

    def __init__(self, name, executor):
        self.executor = executor
        self.kernel = (Trees if name == "tree" else Times).fresh()()
        self.log = self.kernel.log
        self.given = (lambda x: ({"a": x},)) if name == "tree" else (lambda x: (x,))
        self.call = getattr(self, f"_{name}")()

    def _executor(self):
        return lambda x: self.executor(self.kernel, *self.given(x))

    _tree = _executor

    def _bound(self):
        return self.executor.bind(self.kernel)

    def _planned(self):
        @planned()
        def front(x, *, executor=None):
            return Plan(self.kernel, (x,), {}, None, executor)

        return lambda x: front(x, executor=self.executor)

    def _program(self):
        @planned()
        def front(x, *, executor=None):
            return Program("whole", lambda executor: executor(self.kernel, x), executor)

        return lambda x: front(x, executor=self.executor)

    def _tunable(self):
        log = self.log

        @tunable(candidates=[2, 3, 5], executor=self.executor, op_id="times")
        def times(x, *, cfg):
            log.append(cfg)
            return x * cfg

        self.kernel = times.kernel
        return times

    def key(self, x=X):
        return key_for(self.kernel, *self.given(x))

    def put(self, cfg, x=X):
        put(self.executor, self.kernel, cfg, *self.given(x))


WAYS = ("executor", "bound", "planned", "program", "tunable", "tree")


@pytest.fixture(params=WAYS)
def way(request):
    """A form of a call that was made twice, so that the third call takes its fast way."""
    made = Way(request.param, executor_with(Picking(), policy=None))
    made.executor.chooser.policy = selector_with().policy
    close(made.call(X), X * 2)
    close(made.call(X), X * 2)
    assert made.log == [2]
    return made


@pytest.fixture
def no_long_way(monkeypatch):
    """Fails where a call takes the long way."""

    def forbid():
        for name in ("call_anew", "call_planned"):
            monkeypatch.setattr(Executor, name, lambda *_: pytest.fail("took the long way"))

    return forbid


def test_a_warm_call_takes_nothing_apart(way, no_long_way):
    """The third call is looked up, and nothing of the long way runs."""
    no_long_way()

    close(way.call(X), X * 2)


def test_a_put_reaches_the_next_call(way):
    """A cfg that is put into the cache replaces the guess, and another one replaces that."""
    for cfg in (7, 8):
        way.put(cfg)
        close(way.call(X), X * cfg)


def test_a_put_of_another_call_compiles_nothing(way):
    """What is learned about another shape leaves this program as it is."""
    way.put(7, jnp.ones(9))

    close(way.call(X), X * 2)
    assert way.log == [2]


def test_a_cleared_cache_is_noticed(way):
    """After `clear` the heuristic cfg serves again."""
    way.put(7)
    close(way.call(X), X * 7)

    way.executor.chooser.cache.clear()
    close(way.call(X), X * 2)


def test_another_cache_is_noticed(way):
    """A cache that takes the place of the selector's own answers the next call."""
    other = ConfigCache()
    other.put(*way.key(), 9)

    way.executor.chooser.cache = other
    close(way.call(X), X * 9)


def test_a_store_is_noticed(way, tmp_path):
    """A store that the selector is given later answers the next call, and so does a put into it."""
    store = PersistentCache("times", tmp_path / "times.json")
    store.put(*way.key(), 9)

    way.executor.chooser.persistent = store
    close(way.call(X), X * 9)
    way.executor.chooser.cache.clear()
    store.put(*way.key(), 4)
    close(way.call(X), X * 4)


def test_an_overlay_is_noticed_when_it_is_entered_and_left(way):
    """Inside the overlay its cfg runs, outside the one before; the second time nothing is traced."""
    for _ in range(2):
        with overlay_cache({way.key(): 6}):
            close(way.call(X), X * 6)
        close(way.call(X), X * 2)
    assert way.log == [2, 6]


def test_a_policy_override_is_noticed_when_it_is_entered_and_left(way):
    """Where tuning is allowed the call is tuned, and after it the tuned cfg serves."""
    with policy_override(way.executor.chooser, allow_autotune=True):
        close(way.call(X), X * 5)
    close(way.call(X), X * 5)


def test_an_assigned_policy_is_noticed(way):
    """A policy that allows tuning has the next call tuned."""
    way.executor.chooser.policy = executor_with(Picking()).chooser.policy

    close(way.call(X), X * 5)


def test_a_finished_tuning_is_noticed(way):
    """A tuning that was asked for elsewhere reaches the next call."""
    way.executor.chooser.tune(invocation_of(way.kernel, way.given(X), {}, PLAIN), way.kernel)

    close(way.call(X), X * 5)


def test_refresh_is_noticed(way):
    """After `refresh` the call chooses again."""
    refresh()

    close(way.call(X), X * 2)
    assert way.log == [2, 2]


def test_another_chooser_is_noticed(way):
    """A chooser that takes the place of the executor's own is asked at the next call."""
    way.executor.chooser = Asked(11)

    close(way.call(X), X * 11)


def test_another_label_is_noticed(way):
    """A new prefix of labels has the call traced again."""
    way.executor.stamp_prefix = "mine"

    way.call(X)
    assert way.log == [2, 2]


@pytest.mark.thinned
@pytest.mark.parametrize(
    "other",
    [jnp.ones(5), X.astype(jnp.bfloat16), X.astype(jnp.int32), jnp.asarray(2.0), jnp.bool_(1)],
    ids=["shape", "dtype", "integers", "weak type", "truth"],
)
def test_another_signature_is_another_program_and_the_first_stays(way, other, no_long_way):
    """Another shape, dtype or weak type runs right, is fast the third time, and the first one is not traced again."""
    for _ in range(2):
        close(way.call(other), other * 2)
        close(way.call(X), X * 2)
    # A scalar in a tree may be a number next time: from then on each leaf is looked at, and another program serves.
    is_number = other.ndim == 0 and isinstance(way.kernel, Trees)
    assert len(way.log) == (3 if is_number else 2)
    no_long_way()

    close(way.call(other), other * 2)
    close(way.call(X), X * 2)


def test_a_signature_that_was_refused_once_is_dispatched_by_jax_itself(way, monkeypatch):
    """Integers cannot be traced without their values; once they were, no Python of JAX's runs for them."""
    numbers = jnp.arange(4)
    way.call(numbers)
    way.call(numbers)
    from jax._src import pjit

    monkeypatch.setattr(pjit, "_infer_params", lambda *_: pytest.fail("dispatched in Python"))

    close(way.call(numbers), [0, 2, 4, 6])


def test_a_number_is_static_whatever_arrays_came_before(way):
    """A Python number is no array: after an array of its dtype it is another call."""
    way.call(jnp.asarray(3.0))

    assert float(way.call(3.0)) == 6.0
    assert float(way.call(4.0)) == 8.0
    assert way.log == [2, 2, 2, 2]


def test_numpy_arrays_serve(way):
    """An array of numpy has the same result as one of JAX."""
    close(way.call(np.asarray(X)), X * 2)


@pytest.mark.parametrize("setting", ["precision", "x64"])
def test_a_setting_of_jax_is_noticed(way, setting):
    """A matmul precision, or 64 bits, in force around a call makes it another call to the chooser."""
    asked = way.executor.chooser = Asked(2)
    way.call(X)
    around = jax.default_matmul_precision("highest") if setting == "precision" else jax.enable_x64(True)
    with around:
        way.call(X)
        way.call(X)
    way.call(X)

    assert asked.count == 2
    assert (asked.questions[0].call_key == asked.questions[1].call_key) == (setting == "x64")


def test_a_call_without_jit_is_right(way):
    """Under `jax.disable_jit` the kernel runs on the values themselves."""
    with jax.disable_jit():
        close(way.call(X), X * 2)
    close(way.call(X), X * 2)


def test_inside_other_traces_the_kernel_becomes_part_of_the_program(way):
    """A warm call inside jit, grad, vmap and scan is right, and its label is in the program."""
    lowered = jax.jit(way.call).lower(X)
    assert find_labels_in_lowered(lowered)
    close(jax.jit(way.call)(X), X * 2)
    close(jax.grad(lambda x: way.call(x).sum())(X), jnp.full(4, 2.0))
    close(jax.vmap(way.call)(jnp.ones((3, 4))), jnp.full((3, 4), 2.0))
    close(jax.lax.scan(lambda c, x: (c, way.call(x)), 0.0, X)[1], X * 2)


def test_a_sharded_array_is_another_call(way):
    """Arrays over two devices run there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    spread = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))

    close(way.call(spread), X * 2)
    assert way.call(spread).sharding.device_set == spread.sharding.device_set


class Scaled(Counting):
    """The argument times cfg, its own factor and the keyword."""

    op_id = "scaled"

    def __init__(self, factor=1):
        super().__init__()
        self.factor = factor

    def run(self, x, y=None, *, cfg, scale=1, shift=None):
        self.log.append(scale)
        out = x * cfg * self.factor * scale + (0 if y is None else y)
        return out if shift is None else out + shift


def test_a_bound_function_has_its_keywords():
    """Static keywords are fixed, and a call may still add to them or replace them."""
    call = executor_with().bind(Scaled.fresh()(), scale=3)

    for _ in range(2):
        close(call(X), X * 6)
        close(call(X, X), X * 7)
        close(call(X, scale=5), X * 10)
        close(call(X, y=X), X * 7)


def test_a_bound_function_tells_equal_keywords_of_other_types_apart():
    """1, 1.0 and True are three static values."""
    executor, kernel = executor_with(), Scaled.fresh()()
    for scale in (1, 1.0, True):
        executor.bind(kernel, scale=scale)(X)
        executor.bind(kernel, scale=scale)(X)

    assert [type(scale) for scale in kernel.log] == [int, float, bool]


def test_a_bound_function_may_hold_arrays_and_trees_of_them():
    """An array among the keywords is passed on with every call."""
    executor, kernel = executor_with(), Scaled.fresh()()

    call = executor.bind(kernel, shift=X)
    for _ in range(3):
        close(call(X), X * 3)
    assert kernel.log == [1]


def test_a_bound_function_keeps_the_kernel_as_it_was():
    """A kernel that is changed afterwards is another kernel."""
    kernel = Scaled.fresh()(3)
    call = executor_with().bind(kernel)
    close(call(X), X * 6)
    kernel.factor = 5

    close(call(X), X * 6)


def test_a_bound_function_with_a_cfg_stays_with_it():
    """`cfg=` among the keywords is what runs, whatever is put."""
    executor, kernel = executor_with(), Times.fresh()()
    call = executor.bind(kernel, cfg=4)
    close(call(X), X * 4)
    put(executor, kernel, 7, X)

    close(call(X), X * 4)


def test_binding_what_cannot_be_called_is_an_error_at_once():
    """No kernel, and two spellings of a cfg, are refused where they are bound."""
    with pytest.raises(KernelError, match="is no kernel"):
        executor_with().bind(Times)
    with pytest.raises(KernelError, match="both cfg= and _cfg="):
        executor_with().bind(Times.fresh()(), cfg=1, _cfg=2)


def test_an_executor_of_another_class_is_called_as_it_is():
    """A subclass that wraps calls sees those of functions that were bound to it."""
    seen = []

    class Loud(Executor):
        def __call__(self, kernel, /, *args, **kwargs):
            seen.append(kernel.op_id)
            return super().__call__(kernel, *args, **kwargs)

    call = Loud(selector_with()).bind(Times.fresh()())
    call(X)
    call(X)

    assert seen == ["times", "times"]


def test_keywords_in_another_order_are_the_same_call():
    """The order of keywords changes neither result nor key."""
    executor, kernel = executor_with(), Scaled.fresh()()
    for _ in range(2):
        close(executor(kernel, X, scale=2, shift=X), X * 5)
        close(executor(kernel, X, shift=X, scale=2), X * 5)
