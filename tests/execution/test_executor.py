"""A call through the executor: its keywords, what the chooser is asked, what a kernel sees, shared programs.

Covers `execution/arguments.py` and `execution/kernel_run.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Picking, Times, executor_with, mesh_of, selector_with
from jax.sharding import PartitionSpec as P

from ejkernel.ops import ConfigChooser, Executor, Kernel

X = jnp.arange(4.0)


def test_an_executor_keeps_its_constructor_arguments():
    """`chooser` and `stamp_prefix` are attributes; the prefix has the documented default."""
    chooser = Asked()
    assert Executor(chooser).chooser is chooser
    assert Executor(chooser).stamp_prefix == "ejkernel_ops"
    assert Executor(chooser, stamp_prefix="mine").stamp_prefix == "mine"
    assert Executor(chooser, "mine").stamp_prefix == "mine"


def test_the_chooser_s_cfg_runs():
    """The kernel runs with what the chooser answered."""
    np.testing.assert_array_equal(Executor(Asked(7))(Times.fresh()(), X), X * 7)


def test_any_object_with_choose_is_a_chooser():
    """Nothing but `choose` is looked for on a chooser."""

    class Bare:
        __slots__ = ()

        def choose(self, inv, kernel):
            return 3

    np.testing.assert_array_equal(Executor(Bare())(Times.fresh()(), X), X * 3)
    np.testing.assert_array_equal(Executor(Bare()).compile(Times.fresh()(), X)(X), X * 3)
    assert Executor(Bare()).choose_config(Times.fresh()(), X) == 3


def test_config_chooser_is_a_protocol_with_choose():
    """`ConfigChooser` names the interface, and can be subclassed by a chooser."""

    class Mine(ConfigChooser):
        def choose(self, inv, kernel):
            return 4

    np.testing.assert_array_equal(Executor(Mine())(Times.fresh()(), X), X * 4)


def test_a_chooser_is_asked_once_per_trace_not_per_call():
    """Warm calls of one shape ask nothing, a new shape asks once."""
    chooser, kernel = Asked(2), Times.fresh()()
    executor = Executor(chooser)
    for _ in range(5):
        executor(kernel, X)
    assert chooser.count == 1
    for _ in range(5):
        executor(kernel, jnp.ones((2, 2)))
    assert chooser.count == 2


def test_a_jitted_function_asks_once_per_trace():
    """A user's jit asks the chooser when it is traced, and never again while it is warm."""
    chooser, kernel = Asked(2), Times.fresh()()
    executor = Executor(chooser)
    step = jax.jit(lambda x: executor(kernel, x))
    for _ in range(5):
        step(X)
    assert chooser.count == 1
    assert chooser.last.traced


def test_the_same_call_eager_and_jitted_has_one_key():
    """A tracer gives the key of the array it stands for."""
    chooser, kernel = Asked(2), Times.fresh()()
    executor = Executor(chooser)
    executor(kernel, X)
    jax.jit(lambda x: executor(kernel, x))(X)
    assert len({question.call_key for question in chooser.questions}) == 1


@pytest.mark.parametrize("spelling", ["cfg", "_cfg"])
def test_a_given_cfg_runs(spelling):
    """`cfg=`, and its other spelling, is what runs."""
    executor = executor_with()
    np.testing.assert_array_equal(executor(Times.fresh()(), X, **{spelling: 11}), X * 11)


@pytest.mark.parametrize("spelling", ["cfg", "_cfg"])
@pytest.mark.parametrize("cfg", [0, {"block": 2}, [4, 5], (1, 2), "text"])
def test_a_cfg_of_any_type_can_be_given(spelling, cfg):
    """Falsy and unhashable cfgs reach the kernel as they are."""

    class Sees(Kernel):
        op_id = "sees"
        seen: ClassVar[list] = []

        def run(self, x, *, cfg):
            self.seen.append(cfg)
            return x

        def heuristic_cfg(self, inv):
            return 1

    executor = executor_with()
    executor(Sees(), X, **{spelling: cfg})
    assert Sees.seen == [cfg]


def test_the_other_spelling_never_reaches_the_kernel():
    """`_cfg=` is the executor's own in all three ways to use a kernel."""

    class Open(Kernel):
        op_id = "open"
        seen: ClassVar[list] = []

        def run(self, x, *, cfg, **rest):
            self.seen.append(rest)
            return x * cfg

        def prepare(self, *args, **kwargs):
            self.seen.append(kwargs)
            return args, kwargs

        def heuristic_cfg(self, inv):
            return 1

    executor = executor_with()
    np.testing.assert_array_equal(executor(Open(), X, _cfg=2, flag=1), X * 2)
    np.testing.assert_array_equal(executor.compile(Open(), X, _cfg=3, flag=1)(X), X * 3)
    assert executor.choose_config(Open(), X, _cfg=4, flag=1) == 4
    assert Open.seen
    assert all(set(seen) == {"flag"} for seen in Open.seen)


def test_two_spellings_at_once_are_an_error():
    """`cfg=` and `_cfg=` together: which was meant is not known."""
    with pytest.raises(TypeError, match=r"times@v0.*cfg= and _cfg="):
        executor_with()(Times.fresh()(), X, cfg=1, _cfg=2)


def test_every_keyword_of_a_call_reaches_the_chooser():
    """What the executor was told stands in the invocation."""
    mesh = mesh_of(2)
    chooser = Asked(2)
    Executor(chooser)(
        Times.fresh()(),
        X,
        cfg=9,
        stamp=False,
        method="shard_map",
        mesh=mesh,
        in_specs=(P("i"),),
        out_specs=P("i"),
        check_vma=True,
    )
    asked = chooser.last
    assert (asked.override_cfg, asked.stamp, asked.method, asked.mesh) == (9, False, "shard_map", mesh)
    assert (asked.in_specs, asked.out_specs, asked.check_vma) == ((P("i"),), P("i"), True)
    assert asked.keywords == ()


def test_choose_config_takes_every_keyword_of_a_call():
    """The question is the one that the call itself would ask."""
    mesh = mesh_of(2)
    chooser, kernel = Asked(2), Times.fresh()()
    keywords = {
        "cfg": 9,
        "stamp": False,
        "method": "shard_map",
        "mesh": mesh,
        "in_specs": (P("i"),),
        "out_specs": P("i"),
        "check_vma": True,
    }
    executor = Executor(chooser)
    executor.choose_config(kernel, X, **keywords)
    executor(kernel, X, **keywords)
    one, other = chooser.questions
    for name in ("override_cfg", "stamp", "method", "mesh", "in_specs", "out_specs", "check_vma", "call_key"):
        assert getattr(one, name) == getattr(other, name)


def test_choose_config_runs_nothing():
    """The cfg is chosen and the kernel does not run."""
    kernel = Times.fresh()()
    assert Executor(Asked(6)).choose_config(kernel, X) == 6
    assert kernel.log == []


def test_choose_config_and_the_call_share_one_tuning():
    """What `choose_config` learnt, the call uses."""
    tuner, kernel = Picking(), Times.fresh()()
    executor = executor_with(tuner)
    chosen = executor.choose_config(kernel, X)
    np.testing.assert_array_equal(executor(kernel, X), X * chosen)
    assert tuner.calls == 1


def test_choose_config_takes_shapes_instead_of_arrays():
    """A shape stands for an array, with the array's key."""
    chooser, kernel = Asked(2), Times.fresh()()
    executor = Executor(chooser)
    executor.choose_config(kernel, jax.ShapeDtypeStruct((4,), jnp.float32))
    executor.choose_config(kernel, X)
    assert chooser.questions[0].call_key == chooser.questions[1].call_key


def test_an_unknown_method_is_an_error_that_names_kernel_and_method():
    """Only `shard_map` and None mean something."""
    with pytest.raises((TypeError, ValueError), match=r"(?s)pmap.*times@v0.*shard_map"):
        executor_with()(Times.fresh()(), X, method="pmap")


def test_an_unknown_keyword_is_the_kernel_s():
    """What the executor does not know goes to `run`, which says that it does not know it either."""
    with pytest.raises(TypeError, match="unknown_word"):
        executor_with()(Times.fresh()(), X, unknown_word=1)


def test_a_keyword_called_kernel_belongs_to_the_kernel():
    """The executor's own `kernel` parameter is positional-only in all three ways."""

    class Convolution(Counting):
        op_id = "convolution"

        def run(self, x, *, kernel, cfg):
            return x * kernel

    executor = executor_with()
    np.testing.assert_array_equal(executor(Convolution(), X, kernel=3.0), X * 3)
    np.testing.assert_array_equal(executor.compile(Convolution(), X, kernel=3.0)(X), X * 3)
    assert executor.choose_config(Convolution(), X, kernel=3.0) == 2


def test_prepare_normalises_the_call_before_choosing():
    """The chooser and `run` see what `prepare` returned."""

    class Flat(Times.fresh()):
        op_id = "flat"

        def prepare(self, x, *, rows=1, **kwargs):
            return (x.reshape(rows, -1),), kwargs

    chooser = Asked(2)
    out = Executor(chooser)(Flat(), X, rows=2)
    assert chooser.last.shapes == ((2, 2),)
    assert chooser.last.keywords == ()
    np.testing.assert_array_equal(out, X.reshape(2, 2) * 2)


def test_prepare_may_return_a_list_of_arguments():
    """A list is as good as a tuple."""

    class Listed(Times.fresh()):
        op_id = "listed"

        def prepare(self, *args, **kwargs):
            return list(args), kwargs

    np.testing.assert_array_equal(Executor(Asked(2))(Listed(), X), X * 2)


@pytest.mark.parametrize("made", [None, (1, 2, 3), ((1,), 2)], ids=str)
def test_a_prepare_that_returns_something_else_is_an_error_that_names_the_kernel(made):
    """`prepare` returns (args, kwargs)."""

    class Wrong(Times.fresh()):
        op_id = "wrong"

        def prepare(self, *args, **kwargs):
            return made

    with pytest.raises(TypeError, match=r"prepare of kernel wrong@v0"):
        executor_with()(Wrong(), X)


def test_the_platform_s_variant_runs():
    """`run_cpu` goes before `run` on a CPU; `run_gpu` does not."""

    class Several(Times.fresh()):
        op_id = "several"

        def run_cpu(self, x, *, cfg):
            return x + 100

        def run_gpu(self, x, *, cfg):
            return x + 200

    np.testing.assert_array_equal(executor_with()(Several(), X), X + 100)
    np.testing.assert_array_equal(jax.jit(lambda x: executor_with()(Several(), x))(X), X + 100)


def test_a_sharded_variant_is_for_sharded_calls_alone():
    """`run_shard_map` runs with `method="shard_map"`, `run` without."""

    class Sharded(Times.fresh()):
        op_id = "sharded"

        def run_shard_map(self, x, *, cfg):
            return x + 100

    executor = executor_with()
    mesh = mesh_of(2)
    np.testing.assert_array_equal(executor(Sharded(), X), X * 2)
    sharded = executor(Sharded(), X, method="shard_map", mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_array_equal(sharded, X + 100)


def test_variants_of_heuristic_and_candidates_are_used():
    """`heuristic_cfg_cpu` and `candidate_cfgs_cpu` answer on a CPU."""

    class Several(Times.fresh()):
        op_id = "several_cfgs"

        def heuristic_cfg_cpu(self, inv):
            return 20

        def candidate_cfgs_cpu(self, inv):
            return [20, 30]

    np.testing.assert_array_equal(executor_with()(Several(), X), X * 20)
    np.testing.assert_array_equal(executor_with(Picking())(Several(), X), X * 30)


def test_a_kernel_of_variants_alone_runs():
    """A kernel without a plain `run` runs where a variant applies."""

    class OnlyCpu(Kernel):
        op_id = "only_cpu"

        def run_cpu(self, x, *, cfg):
            return x + cfg

        def heuristic_cfg(self, inv):
            return 1

    np.testing.assert_array_equal(executor_with()(OnlyCpu(), X), X + 1)


class Stateful(Times):
    """A kernel with a state, counted over all its instances."""

    op_id = "stateful"

    def __init__(self, **state):
        super().__init__()
        vars(self).update(state)

    def run(self, x, *, cfg):
        self.log.append(dict(vars(self)))
        return x * self.scale


@dataclass(frozen=True)
class Scale:
    """A state that is a value of its own."""

    by: float


@pytest.mark.parametrize("scale", [2, 2.5, True, "name", None, (1, 2), [1, 2], {"a": 1}, Scale(1.0)], ids=repr)
def test_fresh_kernels_with_equal_state_share_programs(scale):
    """Users build a kernel per call: equal `vars()` is one kernel, traced once."""

    class Holds(Stateful.fresh()):
        op_id = "holds"

        def run(self, x, *, cfg):
            self.log.append(self.scale)
            return x

    executor = executor_with()
    for _ in range(4):
        executor(Holds(scale=scale), X)
    assert len(Holds.log) == 1


def test_fresh_kernels_without_state_share_programs():
    """The same for a kernel that has none."""
    fresh, executor = Times.fresh(), executor_with()
    for _ in range(4):
        executor(fresh(), X)
    assert len(fresh.log) == 1


DIFFERENT = [
    pytest.param([2, 3], id="numbers"),
    pytest.param([1, 1.0, True], id="types"),
    pytest.param([0.0, -0.0], id="signed zeros"),
    pytest.param([Scale(1.0), Scale(2.0)], id="values of their own"),
    pytest.param([Scale(0.0), Scale(-0.0)], id="signed zeros inside a value"),
    pytest.param([Scale(1), Scale(1.0), Scale(True)], id="types inside a value"),
    pytest.param([(1,), (1.0,), (True,)], id="types inside a tuple"),
    pytest.param([(0.0,), (-0.0,)], id="signed zeros inside a tuple"),
    pytest.param([[1], [1.0]], id="types inside a list"),
    pytest.param([np.float32(0.0), np.float32(-0.0)], id="numpy's signed zeros"),
    pytest.param([np.float32(1), np.float64(1), np.int32(1)], id="numpy's types"),
    pytest.param([{"a": 1}, {"a": 2}], id="dicts"),
    pytest.param([np.arange(3.0), np.ones(3)], id="numpy arrays"),
    pytest.param([jnp.arange(3.0), jnp.ones(3)], id="arrays"),
]


@pytest.mark.parametrize("states", DIFFERENT)
def test_kernels_with_different_state_have_programs_of_their_own(states):
    """Each instance runs with its own state, whatever ran before, in any order and warm."""

    class Shows(Stateful.fresh()):
        op_id = "shows"

        def run(self, x, *, cfg):
            self.log.append(self.scale)
            return x

    executor = executor_with()
    for order in (states, states[::-1]):
        for state in order:
            executor(Shows(scale=state), X)
    assert {(type(s), repr(s)) for s in Shows.log} == {(type(s), repr(s)) for s in states}


def test_arrays_in_a_kernel_s_state_are_its_own():
    """Two kernels whose state holds different arrays give different results."""

    class Weighted(Stateful.fresh()):
        op_id = "weighted"

        def run(self, x, *, cfg):
            return x * self.scale

    executor = executor_with()
    np.testing.assert_array_equal(executor(Weighted(scale=jnp.full(4, 2.0)), X), X * 2)
    np.testing.assert_array_equal(executor(Weighted(scale=jnp.full(4, 3.0)), X), X * 3)


def test_a_state_that_changed_runs_as_it_is_now():
    """A kernel whose attribute was set anew is another kernel."""
    kernel, executor = Stateful.fresh()(scale=2.0), executor_with()
    np.testing.assert_array_equal(executor(kernel, X), X * 2)
    kernel.scale = 3.0
    np.testing.assert_array_equal(executor(kernel, X), X * 3)


def test_a_list_in_the_state_that_changed_in_place_runs_as_it_is_now():
    """The same for a list that was appended to."""

    class Sums(Stateful.fresh()):
        op_id = "sums"

        def run(self, x, *, cfg):
            return x + sum(self.scale)

    kernel, executor = Sums(scale=[1.0]), executor_with()
    np.testing.assert_array_equal(executor(kernel, X), X + 1)
    kernel.scale.append(2.0)
    np.testing.assert_array_equal(executor(kernel, X), X + 3)


def test_a_state_without_a_stable_form_works():
    """An attribute that can be neither hashed nor written down makes the instance itself the kernel."""

    class Odd:
        __hash__ = None

        def __init__(self, by):
            self.by = by

    class Holds(Stateful.fresh()):
        op_id = "holds_odd"

        def run(self, x, *, cfg):
            self.log.append(1)
            return x * self.scale.by

    executor, kernel = executor_with(), Holds(scale=Odd(2.0))
    for _ in range(3):
        np.testing.assert_array_equal(executor(kernel, X), X * 2)
    np.testing.assert_array_equal(executor(Holds(scale=Odd(3.0)), X), X * 3)
    assert len(Holds.log) == 2


def test_two_op_ids_of_one_class_are_two_kernels():
    """An op_id given to an instance is part of what it is."""
    fresh, chooser = Times.fresh(), Asked(2)
    executor = Executor(chooser)
    executor(fresh(op_id="one"), X)
    executor(fresh(op_id="other"), X)
    assert [question.op_id for question in chooser.questions] == ["one", "other"]


def test_two_executors_have_choosers_of_their_own():
    """What one executor chose says nothing about another."""
    kernel = Times.fresh()()
    np.testing.assert_array_equal(Executor(Asked(2))(kernel, X), X * 2)
    np.testing.assert_array_equal(Executor(Asked(3))(kernel, X), X * 3)


def test_an_error_of_the_chooser_reaches_the_caller_and_is_not_kept():
    """The next call asks again."""

    class Fails(Asked):
        def choose(self, inv, kernel):
            cfg = super().choose(inv, kernel)
            if self.count == 1:
                raise LookupError("not today")
            return cfg

    executor, kernel = Executor(Fails(2)), Times.fresh()()
    with pytest.raises(LookupError, match="not today"):
        executor(kernel, X)
    np.testing.assert_array_equal(executor(kernel, X), X * 2)


def test_an_error_of_run_reaches_the_caller_and_is_not_kept():
    """A kernel that fails once works at the next call."""

    class FailsOnce(Times.fresh()):
        op_id = "fails_once"

        def run(self, x, *, cfg):
            self.log.append(cfg)
            if len(self.log) == 1:
                raise ArithmeticError("at first")
            return x * cfg

    executor = executor_with()
    with pytest.raises(ArithmeticError, match="at first"):
        executor(FailsOnce(), X)
    np.testing.assert_array_equal(executor(FailsOnce(), X), X * 2)


def test_a_kernel_without_array_arguments_runs():
    """A call may consist of static values alone, eager and jitted."""

    class Full(Counting):
        op_id = "full"

        def run(self, size, *, value, cfg):
            return jnp.full(size, value * cfg)

    executor = executor_with()
    np.testing.assert_array_equal(executor(Full(), 3, value=1.5), [3.0, 3.0, 3.0])
    np.testing.assert_array_equal(jax.jit(lambda: executor(Full(), 3, value=1.5))(), [3.0, 3.0, 3.0])


def test_outputs_of_any_structure_come_back():
    """Tuples, dicts and None in the output keep their places."""

    class Several(Counting):
        op_id = "several_outputs"

        def run(self, x, *, cfg):
            return {"twice": x * 2, "pair": (x, None), "sum": x.sum()}

    out = executor_with()(Several(), X)
    assert jax.tree_util.tree_structure(out) == jax.tree_util.tree_structure({"twice": 0, "pair": (0, None), "sum": 0})
    np.testing.assert_array_equal(out["twice"], X * 2)
    assert out["pair"][1] is None


def test_many_arguments_keep_their_order():
    """Three hundred arrays by position and a hundred by keyword arrive where they belong."""

    class Stack(Counting):
        op_id = "stack"

        def run(self, *arrays, cfg, **named):
            return jnp.stack([*arrays, *(named[f"n{i}"] for i in range(len(named)))])

    arrays = [jnp.float32(i) for i in range(300)]
    named = {f"n{i}": jnp.float32(1000 + i) for i in reversed(range(100))}
    out = executor_with()(Stack(), *arrays, **named)
    np.testing.assert_array_equal(out, [*range(300), *range(1000, 1100)])


def test_the_order_of_keywords_does_not_matter():
    """Arrays by keyword reach their parameters in whatever order they are written, cold and warm."""

    class Difference(Counting):
        op_id = "difference"

        def run(self, *, a, b, cfg):
            return a - b

    executor = executor_with()
    a, b = jnp.float32(5), jnp.float32(3)
    for _ in range(2):
        assert executor(Difference(), a=a, b=b) == 2
        assert executor(Difference(), b=b, a=a) == 2


def test_the_order_of_keywords_is_one_key():
    """The same call spelled in another order is tuned once."""

    class Difference(Counting):
        op_id = "difference_tuned"

        def run(self, *, a, b, cfg):
            return a - b

    tuner = Picking()
    executor = executor_with(tuner)
    executor(Difference(), a=jnp.ones(2), b=jnp.ones(2))
    executor(Difference(), b=jnp.ones(2), a=jnp.ones(2))
    assert tuner.calls == 1


def test_the_executor_never_donates():
    """The arrays of a call are alive after it, cold, warm, compiled."""
    executor, kernel = executor_with(), Times.fresh()()
    x = jnp.arange(4.0) + 1
    for _ in range(3):
        executor(kernel, x)
    executor.compile(kernel, x)(x)
    assert not x.is_deleted()
    np.testing.assert_array_equal(x, [1, 2, 3, 4])


def test_a_selector_s_answer_is_told_once_per_trace():
    """Events come when the cfg is chosen, which is once per trace."""
    events = []
    selector = selector_with(on_event=lambda event, **data: events.append((event, data["op_id"])))
    executor, kernel = Executor(selector), Times.fresh()()
    for _ in range(5):
        executor(kernel, X)
    assert events == [("heuristics", "times@v0")]


def test_a_class_that_breaks_the_contract_is_refused_by_name():
    """A kernel with a `vjp` and no forward can't be called."""

    class Half(Counting):
        op_id = "half"

        def run(self, x, *, cfg):
            return x

        def vjp(self, *args, **kwargs):
            return ()

    with pytest.raises(TypeError, match=r"Half.*vjp.*fwd_with_residuals"):
        executor_with()(Half(), X)
