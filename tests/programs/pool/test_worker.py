"""The other end of a pool: what a worker tunes, and what it refuses.

Covers `programs/pool/task.py` and `programs/pool/serialization.py`.
"""

from __future__ import annotations

import json

import pytest
from fakes_pool import Adding, calls_of, selecting

from ejkernel.ops import Invocation
from ejkernel.ops.core.request import ask
from ejkernel.ops.programs.found_call import FoundCall
from ejkernel.ops.programs.pool.serialization import asked_call, plain_tuner
from ejkernel.ops.programs.pool.task import Reply, Task
from ejkernel.ops.programs.pool.worker import run_task


class Coded(Adding):
    """A kernel that is known by its code."""

    op_id = "coded"
    version = "0"


def task(kernel=None, **changes):
    """The text of a task of one call, with parts of it changed."""
    ((kernel, inv),) = calls_of(1, kernel)
    request = ask(inv, kernel, "forward")
    call = FoundCall(request.key, kernel, inv, (selecting(),), request.device)
    asked = {**json.loads(Task("d", (asked_call(call)[0],)).dumps())["calls"][0], **changes.pop("call", {})}
    text = Task(request.key.device, (), plain_tuner(call.selectors[0].tuner)).dumps()
    return json.dumps({**json.loads(text), "calls": [asked], **changes})


def outcome(text):
    """The only outcome of a reply."""
    (found,) = Reply.loads(run_task(text)).outcomes
    return found


def test_a_task_comes_back_as_a_record():
    """The reply has the key of the call, and a record that names kernel and call."""
    found = outcome(task())
    assert found.why == ""
    assert found.record["key"]["op_id"] == found.key.op_id == "adding@v1"
    assert found.record["kernel"] == "fakes_pool:Adding"
    assert [trial["cfg"] for trial in found.record["trials"]] == [{"turns": 2}, {"turns": 1}, {"turns": 3}]


def test_a_task_is_text_alone():
    """Paths, shapes and numbers: nothing in it runs when it is read."""
    text = task()
    assert json.loads(text)["calls"][0]["signature"]["kernel"] == "fakes_pool:Adding"
    assert Task.loads(text).dumps() == Task.loads(Task.loads(text).dumps()).dumps()


def test_seeds_are_measured_with_the_candidates():
    """A cfg of a similar call that the kernel does not offer takes part."""
    trials = outcome(task(call={"seeds": [{"turns": 7}, "no cfg of this kernel"]})).record["trials"]
    assert {"turns": 7} in [trial["cfg"] for trial in trials]
    assert len(trials) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "gpu|Another GPU"}, "has no gpu|Another GPU; it has cpu|"),
        ({"device": "cpu|another processor"}, "has no cpu|another processor"),
        ({"device": "abacus|wood"}, "has no abacus|wood"),
        ({"version": "9.9.9"}, "has ejkernel-ops"),
        ({"protocol": 99}, "has ejkernel-ops"),
        ({"jaxlib": "0.1.0"}, "and entries are kept for 0.1.0"),
        ({"surprise": 1}, "cannot read the task"),
    ],
)
def test_a_worker_that_is_not_the_right_one_refuses(changes, words):
    """Before it begins, and in words that say what it has and what is wanted."""
    found = outcome(task(**changes))
    assert found.refused
    assert found.record is None
    assert words in found.why


def changed(**changes):
    """A change of the call's signature."""
    return {"signature": {**json.loads(task())["calls"][0]["signature"], **changes}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (changed(kernel="no_such_module:Kernel"), "no_such_module:Kernel cannot be imported: ModuleNotFoundError"),
        (changed(kernel="json:JSONDecoder"), "is no kernel class"),
        (changed(kernel="fakes_pool:Other", state={"op_id": "other"}), "the kernel is other@v1 there"),
        (changed(args=[]), "makes another key of the call there"),
        ({"code": "other code"}, "has other code there"),
    ],
)
def test_a_kernel_that_is_another_one_there_is_refused(changes, words):
    """No module, other code, or another key: a tuning would answer another call."""
    found = outcome(task(call=changes))
    assert found.refused
    assert words in found.why


def test_a_kernel_that_is_known_by_its_code_is_compared():
    """The same code is tuned, and its fingerprint travels."""
    text = task(Coded())
    assert json.loads(text)["calls"][0]["code"]
    assert outcome(text).record is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"calls": 3}', "\x00"])
def test_what_is_no_task_is_answered_all_the_same(text):
    """No text makes a worker raise."""
    assert Reply.loads(run_task(text)).outcomes == ()


def test_an_exception_of_the_kernel_is_a_sentence():
    """Its class may be unknown on the other side."""

    class Odd(Exception):
        pass

    def fails(self, inv):
        raise Odd("two\nlines")

    text = task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adding, "heuristic_cfg", fails)
        found = outcome(text)
    assert not found.refused
    assert found.why == "Odd: two"


def test_an_invocation_with_arrays_travels_by_its_shapes():
    """Values stay here: the worker draws its own."""
    import jax.numpy as jnp

    inv = Invocation("adding", (jnp.ones(8),), {})
    request = ask(inv, Adding(), "forward")
    call = FoundCall(request.key, Adding(), inv, (selecting(),), request.device)
    assert asked_call(call)[0].signature["args"] == [{"array": ["float32", [8], None]}]
