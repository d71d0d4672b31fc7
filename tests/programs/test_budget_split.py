"""Where a budget goes: what a call is worth by its shapes, whose turn comes first, and how long it may take."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Counting, Cubic, OwnCubic, Picking, Times, executor_with
from fakes_programs import QUIET, Inner, Outer, X, key_of, timed

from ejkernel.library import attention, ragged_dot
from ejkernel.ops import AutotuneOptions, autotune
from ejkernel.ops.programs.budget_split import Share, allotted, in_order, quick_to_trace_first, share_of
from ejkernel.ops.programs.find import find


def shares(**costs):
    """Shares by operation."""
    return {key_of(op): Share(cost) for op, cost in costs.items()}


class FakeCall:
    """What the order of tuning looks at."""

    def __init__(self, op, order=0, outer=()):
        self.key = key_of(op)
        self.order = order
        self.device = SimpleNamespace(platform="cpu")
        self.outer = frozenset(map(key_of, outer))


# The order.


def test_the_costliest_call_has_its_turn_first():
    """Whatever the order of the program."""
    calls = [FakeCall("small"), FakeCall("large"), FakeCall("middle")]
    ordered = in_order(calls, shares(small=1.0, large=9.0, middle=3.0))
    assert [c.key.op_id for c in ordered] == ["large", "middle", "small"]


def test_a_kernel_inside_another_has_its_turn_before_that():
    """However little it costs itself, at any depth."""
    calls = [
        FakeCall("inmost", 0, ["inner", "outer"]),
        FakeCall("inner", 1, ["outer"]),
        FakeCall("outer", 2),
        FakeCall("other", 3),
    ]
    ordered = in_order(calls, shares(inmost=0.1, inner=0.5, outer=9.0, other=3.0))
    assert [c.key.op_id for c in ordered] == ["inmost", "inner", "outer", "other"]


def test_calls_of_equal_worth_keep_the_order_of_the_program():
    """So that two runs tune in one order."""
    calls = [FakeCall("b", 2), FakeCall("a", 1), FakeCall("c", 3)]
    assert [c.key.op_id for c in in_order(calls, shares(a=1.0, b=1.0, c=1.0))] == ["a", "b", "c"]


def test_an_outer_kernel_that_is_not_to_be_tuned_changes_nothing():
    """It may be known already."""
    calls = [FakeCall("inner", 0, ["known"]), FakeCall("other", 1)]
    assert [c.key.op_id for c in in_order(calls, shares(inner=1.0, other=3.0))] == ["other", "inner"]


def test_of_the_calls_that_are_worth_much_the_one_with_the_fewest_candidates_is_traced_first():
    """While it is traced nothing is measured; the others keep their order."""
    calls = [FakeCall("wide"), FakeCall("narrow"), FakeCall("small")]
    costs = {
        key_of("wide"): Share(9.0, 39),
        key_of("narrow"): Share(4.0, 8),
        key_of("small"): Share(1.0, 2),
    }
    found = quick_to_trace_first(calls, costs, 11.0)
    assert [c.key.op_id for c in found] == ["narrow", "wide", "small"]
    assert quick_to_trace_first([], {}, 12.0) == []


def test_where_the_time_may_do_for_all_calls_those_with_few_candidates_are_before_the_others():
    """Behind one with many they would wait for seconds, and the budget end before their turn."""
    calls = [FakeCall("wide"), FakeCall("narrow"), FakeCall("small"), FakeCall("alike")]
    counts = {"wide": (9.0, 39), "narrow": (4.0, 8), "small": (1.0, 2), "alike": (0.5, 8)}
    costs = {key_of(op): Share(*about) for op, about in counts.items()}
    found = quick_to_trace_first(calls, costs, 16.0)
    assert [c.key.op_id for c in found] == ["small", "narrow", "alike", "wide"]
    assert quick_to_trace_first(calls, costs, 15.0) != found


def test_a_kernel_that_holds_another_is_not_moved_before_it():
    """Whatever it costs to trace."""
    calls = [FakeCall("inner", 0, ["outer"]), FakeCall("outer", 1)]
    costs = {key_of("inner"): Share(1.0, 30), key_of("outer"): Share(1.0, 2)}
    for left in (1.0, 100.0):
        assert [c.key.op_id for c in quick_to_trace_first(calls, costs, left)] == ["inner", "outer"]


# The parts.


def test_time_is_given_by_share():
    """What earlier calls left goes to the later ones; a call that has its turn has enough to measure something."""
    large, middle, small = FakeCall("large"), FakeCall("middle"), FakeCall("small")
    costs = shares(large=9.0, middle=0.9, small=0.1)
    assert allotted(large, [large, middle, small], costs, 100.0) == pytest.approx(90.0)
    assert allotted(middle, [middle, small], costs, 50.0) == pytest.approx(45.0)
    assert allotted(small, [large, middle, small], costs, 50.0) == 2.0
    assert allotted(small, [small], costs, 1.5) == 1.5


def test_the_first_call_of_a_gpu_has_the_time_in_which_a_worker_starts():
    """Else its worker would be ended, and each of the next ones, with nothing measured."""
    small, large = FakeCall("small"), FakeCall("large")
    small.device = SimpleNamespace(platform="gpu")
    costs = shares(small=0.1, large=9.9)
    assert allotted(small, [small, large], costs, 16.0) == 12.0
    assert allotted(small, [small, large], costs, 7.9, [2.5]) == 2.5


def test_where_all_calls_may_be_measured_each_has_an_equal_part_at_least():
    """One that is worth little has no less to compile, and what it leaves goes to the others; not on a CPU."""
    small, large = FakeCall("small"), FakeCall("large")
    costs = shares(small=0.1, large=9.9)
    assert allotted(small, [small, large], costs, 20.0, [2.5]) == 2.5
    small.device = large.device = SimpleNamespace(platform="gpu")
    assert allotted(small, [small, large], costs, 20.0, [2.5]) == 10.0
    assert allotted(large, [large], costs, 17.0, [2.5]) == 17.0
    # The one that is worth most leaves the others what each of them needs, if it comes first.
    assert allotted(large, [large, small], costs, 20.0, [2.5]) == 16.0
    # One that is worth nothing is not measured.
    assert allotted(small, [small, large], shares(small=0.0, large=9.9), 20.0, [2.5]) == 2.5


@pytest.mark.parametrize("left", [0.9, 0.0, -1.0])
def test_too_little_time_is_none(left):
    """A tuning that cannot measure anything is not begun."""
    small = FakeCall("small")
    assert allotted(small, [small], shares(small=1.0), left) is None


def test_what_earlier_tunings_took_is_what_a_tuning_takes():
    """The middle one of them is given at the least, and half of it or three seconds must be left."""
    small, large = FakeCall("small"), FakeCall("large")
    costs = shares(small=0.1, large=9.9)
    taken = [1.0, 30.0, 8.0]
    assert allotted(small, [small, large], costs, 50.0, taken) == 8.0
    assert allotted(small, [small, large], costs, 5.0, taken) == 5.0
    assert allotted(small, [small, large], costs, 3.1, taken) == 3.1
    assert allotted(small, [small, large], costs, 2.9, taken) is None


def test_quick_tunings_make_room_for_more():
    """A program whose tunings take moments has its last calls tuned as well."""
    small = FakeCall("small")
    assert allotted(small, [small], shares(small=1.0), 0.5, [0.1, 0.2, 0.3]) == 0.5


def test_calls_that_are_all_worth_nothing_get_what_is_left():
    """There is nothing to divide by."""
    one, other = FakeCall("one"), FakeCall("other")
    assert allotted(one, [one, other], shares(one=0.0, other=0.0), 10.0) == 10.0


# What a call is worth.


class Dot(Counting):
    """A product, which costs more than its memory traffic where it is large."""

    op_id = "dot"

    def run(self, a, b, *, cfg):
        return a @ b


def worth(fn, *args):
    """The share of the only call of a function."""
    (call,) = find(fn, args, {}).calls
    return share_of(call.tuned_for("auto")).cost


def test_a_call_is_worth_its_memory_traffic():
    """Arguments and results, in bytes."""
    executor = executor_with(Picking())
    assert worth(lambda x: executor(Times.fresh()(), x), X) == 2 * X.nbytes


def test_a_large_product_is_worth_its_operations():
    """As many bytes as could be moved meanwhile; twice the size is eight times the work."""
    executor = executor_with(Picking())
    costs = [worth(lambda a: executor(Dot(), a, a), jnp.ones((n, n))) for n in (256, 512)]
    assert costs[0] > 3 * 256 * 256 * 4
    assert costs[1] == 8 * costs[0]


@pytest.mark.parametrize("length", [1, 7])
def test_a_call_is_worth_as_much_as_its_runs(length):
    """Each step of a scan counts."""
    executor, kernel = executor_with(Picking()), Times.fresh()()

    def fn(x):
        return jax.lax.scan(lambda c, _: (executor(kernel, c), None), x, None, length=length)[0]

    assert worth(fn, X) == length * 2 * X.nbytes


@pytest.mark.parametrize("kind", [Cubic, OwnCubic])
def test_a_call_with_a_backward_pass_is_worth_three(kind):
    """Since it is tuned for both passes."""
    executor, kernel = executor_with(Picking()), kind.fresh()()
    alone = worth(lambda x: executor(kernel, x), X)
    assert worth(jax.grad(lambda x: executor(kernel, x).sum()), X) == 3 * alone


def test_a_call_with_one_candidate_is_worth_nothing():
    """There is nothing to measure."""
    executor = executor_with(Picking())
    assert worth(lambda x: executor(Times.fresh(candidates=(2, 2))(), x), X) == 0


def test_a_call_that_cannot_be_measured_is_worth_nothing():
    """Hidden integers without example_inputs."""
    executor = executor_with(Picking())
    assert worth(lambda x: executor(Times.fresh()(), x), jnp.arange(4)) == 0


def test_a_call_with_a_reference_is_worth_what_that_does():
    """Whatever its candidates do to compute it."""

    class Wasteful(Dot):
        op_id = "wasteful"

        def reference(self, a, b):
            return a + b

    executor, a = executor_with(Picking()), jnp.ones((256, 256))
    assert worth(lambda a: executor(Wasteful(), a, a), a) == 3 * a.nbytes


def test_a_kernel_may_say_what_it_computes():
    """Where its reference computes more than a call needs; a vmap makes as many calls as it has examples."""

    class Frugal(Dot):
        op_id = "frugal"

        def operations(self, inv):
            return 2.0**24

        def reference(self, a, b):
            return jax.lax.scan(lambda c, _: (c + a @ b, None), jnp.zeros_like(a), None, length=64)[0] / 64

    executor, a = executor_with(Picking()), jnp.ones((64, 64))
    alone = worth(lambda a: executor(Frugal(), a, a), a)
    assert alone == 2.0**24 / 20
    mapped = worth(jax.jit(jax.vmap(lambda a: executor(Frugal(), a, a))), jnp.ones((3, 64, 64)))
    assert mapped == pytest.approx(3 * alone)


def test_a_reference_that_fails_leaves_the_arguments():
    """They say how large the call is."""

    class Broken(Dot):
        op_id = "broken"

        def reference(self, a, b):
            raise NotImplementedError

    executor, a = executor_with(Picking()), jnp.ones((8, 8))
    assert worth(lambda a: executor(Broken(), a, a), a) == 2 * a.nbytes


def test_asking_what_a_call_is_worth_tunes_nothing():
    """Neither the call nor the kernels inside it."""
    executor = timed()
    outer = find(lambda x: executor(Outer(executor), x), (X,), {}).calls[-1]
    assert outer.key.op_id == "outer@v0"
    assert share_of(outer).cost == 2 * X.nbytes
    assert executor.chooser.tuner.tuned == []


def test_within_a_budget_a_kernel_inside_another_is_tuned_once_and_first():
    """With the time that it was given, and before the kernel around it."""
    executor = timed()
    options = AutotuneOptions(seconds=1000.0, progress=False)
    result = autotune(lambda x: executor(Outer(executor), x), X, tuning=options)
    tuner = executor.chooser.tuner
    assert tuner.tuned == ["inner@v0", "outer@v0"]
    assert None not in tuner.budgets.values()
    assert all(entry.is_measured for entry in result.entries)


def test_a_call_that_leaves_nothing_to_measure_comes_last():
    """Those that can gain have their turns first."""
    executor = timed()
    few, many = Times.fresh(op_id="few", candidates=(2,))(), Times.fresh(op_id="many")()
    options = AutotuneOptions(seconds=1000.0, progress=False)
    result = autotune(lambda x: executor(many, executor(few, x)), X, tuning=options)
    assert [entry.op_id_v for entry in result.entries] == ["many@v0", "few@v0"]


# How often calls run.


def counts(fn, *args):
    """The runs of a program's calls, by operation."""
    return {call.key.op_id.partition("@")[0]: call.count for call in find(fn, args, {}).calls}


COUNTED = {
    "scan": (lambda call, x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0], 3),
    "scan in scan": (
        lambda call, x: jax.lax.scan(
            lambda c, _: (jax.lax.scan(lambda d, _: (call(d), None), c, None, length=3)[0], None), x, None, length=4
        )[0],
        12,
    ),
    "fori_loop": (lambda call, x: jax.lax.fori_loop(0, 3, lambda i, y: call(y), x), 3),
    "while": (lambda call, x: jax.lax.while_loop(lambda y: y.sum() < 99, call, x), 1),
    "nested jit, called twice": (lambda call, x: jax.jit(lambda y: jax.jit(call)(jax.jit(call)(y)))(x), 2),
    "jit in scan, called twice": (
        lambda call, x: jax.lax.scan(lambda c, _: (jax.jit(lambda y: call(call(y)))(c), None), x, None, length=5)[0],
        10,
    ),
    "checkpoint in scan": (
        lambda call, x: jax.lax.scan(jax.checkpoint(lambda c, _: (call(c), None)), x, None, length=3)[0],
        3,
    ),
}


# A while loop has no reverse mode.
PASSES = [(name, differentiated) for name in COUNTED for differentiated in (False, True)]
PASSES.remove(("while", True))


@pytest.mark.parametrize("kind", [Cubic, OwnCubic])
@pytest.mark.parametrize(("program", "differentiated"), PASSES)
def test_runs_are_counted(program, differentiated, kind):
    """Alone and under a gradient, whose backward pass, recomputation included, is no further run."""
    executor, kernel = executor_with(Picking()), kind.fresh()()
    build, runs = COUNTED[program]

    def fn(x):
        return build(lambda y: executor(kernel, y), x)

    assert list(counts(jax.grad(lambda x: fn(x).sum()) if differentiated else fn, X).values()) == [runs]


def test_what_is_moved_out_of_a_loop_does_not_hide_the_runs_inside():
    """JAX computes what no step changes once; the rest of the call runs with every step."""

    class Scaled(Counting):
        op_id = "scaled"

        def run(self, x, w, *, cfg):
            return jnp.sin(x) * jnp.exp(w)

    executor = executor_with(Picking())

    def fn(x, w):
        return jax.lax.scan(lambda c, _: (executor(Scaled(), c, w), None), x, None, length=6)[0].sum()

    assert counts(jax.grad(fn), X, X) == {"scaled": 6}


def test_layers_of_the_library_are_counted():
    """Attention and a grouped product in two layers, forward and backward."""
    executor = executor_with(Picking())

    def layer(h, w):
        heads = h.reshape(1, 8, 2, 4)
        h = h + attention(heads, heads, heads, causal=True, executor=executor).reshape(8, 8)
        return h + ragged_dot(h, w, jnp.array([3, 5]), executor=executor), None

    def loss(w, h):
        return jax.lax.scan(layer, h, w)[0].sum()

    found = counts(jax.grad(loss), jnp.ones((2, 2, 8, 8)), jnp.ones((8, 8)))
    assert list(found.values()) == [2, 2]


def test_a_call_of_another_kernels_gradient_is_counted_where_it_runs():
    """It is in the backward pass alone, and runs forward there, with every step."""
    executor = executor_with(Picking())

    class Behind(OwnCubic.fresh()):
        op_id = "behind"

        def vjp(self, residuals, y, dy, x, *, cfg):
            return (executor(Inner(), dy) * residuals,)

    def fn(x):
        return jax.lax.scan(lambda c, _: (executor(Behind(), c), None), x, None, length=3)[0].sum()

    found = {call.key.op_id: call for call in find(jax.grad(fn), (X,), {}).calls}
    assert {op: call.count for op, call in found.items()} == {"behind@v0": 3, "inner@v0": 3}
    assert {op: call.is_differentiated for op, call in found.items()} == {"behind@v0": True, "inner@v0": False}


def test_a_table_has_the_runs():
    """As the program has them."""
    executor = timed()
    kernel = Times.fresh()()

    def fn(x):
        return jax.lax.scan(lambda c, _: (executor(kernel, c), None), x, None, length=7)[0]

    (entry,) = autotune(fn, X, tuning=QUIET).entries
    assert entry.count == 7
    assert math.isclose(autotune(fn, X, tuning=QUIET).totals.tuned_s, 3.5)
