"""The calls that go to a pool: which of them travel together, and by what cost.

Covers `programs/pool/totals.py`.
"""

from __future__ import annotations

import pytest
from fakes_pool import Adding, Other, calls_of, selecting

from ejkernel.ops import Tuner
from ejkernel.ops.core.errors import SignatureError
from ejkernel.ops.core.request import ask
from ejkernel.ops.programs.found_call import FoundCall
from ejkernel.ops.programs.pool.plan import planned, together_for
from ejkernel.ops.programs.pool.serialization import asked_call, plain_tuner
from ejkernel.ops.programs.pool.totals import PoolTotals


def plan(calls, tuner=None):
    """The plan of some calls."""
    selector = selecting(tuner=tuner)
    found = {}
    for kernel, inv in calls:
        request = ask(inv, kernel, "forward")
        found[request.key] = FoundCall(request.key, kernel, inv, (selector,), request.device)
    asked = {key: asked_call(call) for key, call in found.items()}
    return planned(found, asked, {key: plain_tuner(selector.tuner) for key in found}, exact=False)


def test_tasks_get_smaller_towards_the_end():
    """Many calls travel together at first, and the last ones alone, so that the workers end together."""
    works = plan(calls_of(30)).works(lambda left: together_for(left, 2))
    sizes = [len(work.calls) for work in works]
    assert sizes[0] == 3
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-8:] == [1] * 8
    assert sum(sizes) == 30


def test_each_call_is_in_one_task_with_others_of_its_kernel():
    """The order is by cost over both kernels."""
    works = plan([*calls_of(4), *calls_of(4, Other())]).works(lambda left: 2)
    assert [len(work.calls) for work in works] == [2, 2, 2, 2]
    assert all(len({key.op_id for key in work.calls}) == 1 for work in works)
    keys = [key for work in works for key in work.calls]
    assert len(keys) == len(set(keys)) == 8


@pytest.mark.parametrize("workers", [None, 1, 4, 256])
def test_one_call_is_never_split(workers):
    """There is no task without a call."""
    assert together_for(1, workers) == 1


def test_calls_are_estimated_better_while_they_wait():
    """By their trace instead of the sizes of their arrays; those that were sent are left alone."""
    made = plan(calls_of(3))
    first, *rest = made.rank()
    rough = dict(made.shares)
    while made.estimate(set(rest)):
        pass
    assert made.shares[first] == rough[first]
    assert all(made.shares[key].count == 3 for key in rest)


class Functions(Adding):
    """A kernel with functions for cfgs."""

    op_id = "functions"
    cfg_type = None

    def heuristic_cfg(self, inv):
        return abs

    def candidate_cfgs(self, inv):
        return [abs, max]


class Sets(Functions):
    """A kernel with cfgs that JSON makes something else of."""

    op_id = "sets"

    def heuristic_cfg(self, inv):
        return ("a", (1, 2), {"b": (3,)})


@pytest.mark.parametrize(("kernel", "words"), [(Functions(), "cannot be written as text"), (Sets(), "comes back as")])
def test_a_call_with_cfgs_that_are_no_text_cannot_travel(kernel, words):
    """The reason names the cfg."""
    with pytest.raises(SignatureError, match=words):
        plan(calls_of(1, kernel))


class Clock:
    """A clock of the user's own."""

    name = "mine"

    def time(self, call, leaves, calls):
        return 1.0


@pytest.mark.parametrize("tuner", [Tuner(clock=Clock()), None, object()])
def test_a_tuner_that_is_more_than_settings_cannot_travel(tuner):
    """Only plain values cross."""
    with pytest.raises(SignatureError, match="travel"):
        plain_tuner(tuner)


def test_many_workers_share_the_last_line():
    """A result of a cluster stays readable."""
    totals = PoolTotals()
    for number in range(40):
        totals.of(f"node:{number}").tuned = 100 - number
    lines = totals.lines()
    assert len(lines) == 33
    assert lines[0] == "worker node:0: 100 calls tuned in 0.0 s"
    assert lines[-1].startswith("8 more workers: ")
    assert str(sum(100 - number for number in range(32, 40))) in lines[-1]
