"""The states of candidates: which steps there are, what each leaves behind, and that there is one writer."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import ejkernel.ops.tuning
from ejkernel.ops.core.record import Status
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.tuning import candidates as states
from ejkernel.ops.tuning.candidates import NEXT, CandidateSet, TransitionError, status_of

ROOM = Path(ejkernel.ops.tuning.__file__).parent
WAY = ("traced", "compiled", "checked", "timed")
OUT = sorted(set(get_args(Status)) - {"ok", "invalid"})


class Listening:
    """Keeps what it is told of outcomes."""

    def __init__(self):
        self.told = []

    def failed(self, trial, program):
        self.told.append(("failed", trial.cfg, trial.status, program))

    def lost(self, trial, program):
        self.told.append(("lost", trial.cfg, trial.status, program))


def reached(state, observer=None):
    """A set with one candidate in this state."""
    made = CandidateSet(observer)
    made.enter(["a"])
    for step in ("traced",) if state == "twin" else WAY[: WAY.index(state) + 1] if state in WAY else ():
        more = {"name": "p"} if step == "traced" else {"program": program()} if step == "compiled" else {}
        made.advance(0, step, **more)
    if state == "twin" or state in OUT:
        made.advance(0, state)
    return made


def program():
    return CompiledProgram(lambda x: x, "forward")


@pytest.mark.parametrize("state", ["entered", *WAY, "twin", *OUT])
def test_a_step_that_the_table_does_not_have_is_refused(state):
    """And one that it has is taken: from every state to every other."""
    for to in ("entered", *WAY, "twin", *OUT):
        made = reached(state)
        if to in NEXT[state]:
            made.advance(0, to)
            assert made.state(0) == to
        else:
            with pytest.raises(TransitionError, match=f"from '{state}' to '{to}'"):
                made.advance(0, to)


def test_the_table_knows_every_state_and_none_comes_back():
    """Each end of a record is an end here, but for what was never a candidate."""
    assert set(NEXT) == {"entered", *WAY, "twin", *OUT}
    assert all(not NEXT[end] for end in OUT)
    assert all(set(OUT) <= NEXT[state] for state in ("entered", *WAY))


def test_one_that_is_out_has_no_program():
    """What it held on the device is let go, and its trial has the reason."""
    made = reached("checked")
    assert list(made.running) == [0]
    made.advance(0, "runtime", message="worn out")

    assert not made.running
    assert (made.trial(0).status, made.trial(0).message) == ("runtime", "worn out")


@pytest.mark.parametrize(
    ("end", "facts", "told"),
    [
        ("wrong", {}, [("failed", "a", "wrong", "p")]),
        ("crash", {"lost": True}, [("lost", "a", "crash", "p")]),
        ("timeout", {"lost": True}, [("lost", "a", "timeout", "p")]),
        ("timeout", {}, []),
        ("wrong", {"known": True}, []),
    ],
)
def test_an_observer_is_told_what_is_news(end, facts, told):
    """A failure, a loss; neither a want of time, which says nothing of the candidate, nor what it has told itself."""
    observer = Listening()
    reached("compiled", observer).advance(0, end, **facts)

    assert observer.told == told


def test_equal_programs_have_one_outcome():
    """Whatever becomes of the one that runs, also after it was shared."""
    made = CandidateSet()
    made.enter(["a", "b"])
    made.advance(0, "traced")
    made.advance(1, "traced", compile_s=2.0)
    made.advance(1, "twin", twin=0)
    made.advance(0, "compiled", program=program())
    made.advance(0, "wrong", message="off")

    assert (made.runs_as(1), list(made.running)) == (0, [])
    assert [(t.cfg, t.status, t.message) for t in made.trials()] == [
        ("a", "wrong", "off"),
        ("b", "wrong", "the same program as 'a': off"),
    ]
    assert made.trials()[1].compile_s == 2.0


def test_candidates_that_enter_later_have_the_next_numbers():
    """A search enters batch after batch."""
    made = CandidateSet()

    assert [list(made.enter("ab")), list(made.enter("c"))] == [[0, 1], [2]]
    assert made.having("entered") == [0, 1, 2]


def test_no_other_module_writes_a_candidate():
    """Outside of `candidates.py` no statement changes a set's own fields, and none changes what a set hands out."""
    private = {node.attr for node in ast.walk(ast.parse(Path(states.__file__).read_text())) if _is_own(node)}
    assert private >= {"_trials", "_states", "_programs", "_twins"}
    foreign = []
    for path in sorted(ROOM.rglob("*.py")):
        if path.name != "candidates.py":
            tree = ast.parse(path.read_text())
            foreign += [f"{path.name}:{node.lineno}" for node in ast.walk(tree) if _writes(node, private)]

    assert foreign == []


def _is_own(node):
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return own and node.attr.startswith("_")


def _writes(node, private):
    """Is this `candidates._x`, `candidates.x = ...`, or an item of what `candidates` gives that is set or deleted?"""
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return False
    inner = node.value
    if isinstance(node, ast.Attribute):
        return _is_set(inner) and (node.attr in private or isinstance(node.ctx, (ast.Store, ast.Del)))
    while isinstance(inner, (ast.Attribute, ast.Call, ast.Subscript)) and not _is_set(inner):
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return _is_set(inner) and isinstance(node.ctx, (ast.Store, ast.Del))


def _is_set(node):
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("candidates", "_candidates")


# What kind of failure.


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: shared memory"), "memory"),
        (RuntimeError("Out of memory while trying to allocate"), "memory"),
        (RuntimeError("INVALID_ARGUMENT"), "runtime"),
        (ValueError(), "runtime"),
    ],
    ids=repr,
)
def test_memory_is_told_from_other_failures(error, status):
    """By its type or by what it says."""
    assert status_of(error, "runtime") == status


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("RESOURCE_EXHAUSTED: ptxas fatal : Insufficient registers (128) to compile instruction", "compile"),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000, available 232448", "compile"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9000000000 bytes", "memory"),
    ],
)
def test_what_a_program_asks_of_a_core_is_no_want_of_memory(text, status):
    """More memory would not help."""
    assert status_of(RuntimeError(text), "compile") == status
