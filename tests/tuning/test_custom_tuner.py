"""A tuner of the user's own, behind the interface of ours."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import pytest
from fakes import Blocks, TableTuner

from ejkernel.ops import Tuner
from ejkernel.ops.tuning.custom_tuner import CustomTuner
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.tuner import engine


def job(**changes):
    return TuningJob(
        **{
            "make_fn": lambda cfg: lambda x, k=1: x * cfg.size * k,
            "args": (jnp.ones(2),),
            "kwargs": {"k": 3},
            "candidates": [Blocks(1), Blocks(2), Blocks(4)],
            "heuristic_first": True,
            **changes,
        }
    )


def test_our_own_tuner_is_used_as_it_is():
    """`Tuner` and subclasses that keep its `autotune` run jobs themselves."""

    class Quiet(Tuner):
        pass

    for tuner in (Tuner(), Quiet()):
        assert engine(tuner) is tuner


def test_a_subclass_with_its_own_autotune_is_asked_through_it():
    """A class that overrides `autotune` means it."""

    class Mine(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            return list(candidates)[-1]

    assert engine(Mine()).tune(job()).cfg == Blocks(4)


def test_it_gets_the_four_documented_arguments():
    """`autotune(make_fn, args, kwargs, candidates)`, by position, with functions that work."""
    seen = []

    class Recording:
        def autotune(self, make_fn, args, kwargs, candidates):
            seen.append((args, kwargs, list(candidates), make_fn(Blocks(2))(*args, **kwargs).tolist()))
            return Blocks(2)

    record = CustomTuner(Recording()).tune(job())
    args, kwargs, candidates, out = seen[0]

    assert record.cfg == Blocks(2)
    assert args[0].tolist() == [1, 1]
    assert kwargs == {"k": 3}
    assert candidates == [Blocks(1), Blocks(2), Blocks(4)]
    assert out == [6, 6]


def test_seeds_are_offered_with_the_candidates():
    """A cfg known from elsewhere is offered last, once."""
    tuner = TableTuner({1: 3, 2: 2, 4: 2, 8: 1})

    assert CustomTuner(tuner).tune(job(seeds=[Blocks(8), Blocks(2)])).cfg == Blocks(8)
    assert tuner.offered == [[Blocks(1), Blocks(2), Blocks(4), Blocks(8)]]


@pytest.mark.parametrize(("objective", "tag"), [("forward", False), ("forward+backward", True)])
def test_it_is_told_about_gradients_by_the_tag(objective, tag):
    """`_ejk_validate_backward` on the functions is how a tuner knows."""
    tuner = TableTuner()
    CustomTuner(tuner).tune(job(objective=objective))

    assert tuner.objectives == [tag]


def test_the_record_has_the_candidates_and_the_winner():
    """What it measured stays its own; the winner and what was offered are recorded."""
    record = CustomTuner(TableTuner()).tune(job())

    assert [trial.cfg for trial in record.trials] == [Blocks(1), Blocks(2), Blocks(4)]
    assert (record.winner, record.heuristic, record.stop) == (1, 0, "foreign")


def test_the_winner_is_told_from_a_cfg_that_a_message_would_show_alike():
    """A copy of a cfg with a long text is that cfg, and not another one with the same beginning."""
    long = ["x" * 300 + end for end in ("first", "second")]

    class Copying:
        def autotune(self, make_fn, args, kwargs, candidates):
            return "".join(list(long[1]))

    record = CustomTuner(Copying()).tune(job(candidates=long))
    assert (record.winner, record.cfg, len(record.trials)) == (1, long[1], 2)


def test_an_answer_that_was_not_offered_is_kept():
    """A tuner that searches on its own may find something else."""

    class Searching:
        def autotune(self, make_fn, args, kwargs, candidates):
            return Blocks(99)

    assert CustomTuner(Searching()).tune(job()).cfg == Blocks(99)


def test_its_runtime_error_means_that_no_candidate_can_be_used():
    """The reason names the tuner and what it said."""
    tuner = TableTuner()
    tuner.broken = True
    with pytest.raises(RuntimeError, match=r"TableTuner.*no candidate ran"):
        CustomTuner(tuner).tune(job())


def test_it_waits_for_its_turn():
    """The device's turn is held while it measures."""
    acts = []

    @contextlib.contextmanager
    def turn(wait):
        acts.append("enter")
        yield
        acts.append("leave")

    class Recording:
        def autotune(self, make_fn, args, kwargs, candidates):
            acts.append("measure")
            return Blocks(1)

    CustomTuner(Recording()).tune(job(), device_lock=turn)

    assert acts == ["enter", "measure", "leave"]


def test_it_is_not_asked_where_the_answer_came_meanwhile():
    """What another process found while this one waited is taken."""
    tuner = TableTuner()
    record = CustomTuner(tuner).tune(job(), answered_elsewhere=lambda: (Blocks(4),))

    assert (record.cfg, record.stop, tuner.calls) == (Blocks(4), "settled", 0)
