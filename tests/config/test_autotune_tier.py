"""What the tier that tunes makes of a kernel's candidates, and of a tuning that fails.

Covers `config/tuning_job.py`.
"""

from __future__ import annotations

import jax
import pytest
from fakes import Blocks, Doubling, TableTuner
from fakes_config import world

from ejkernel.ops import AutotunePolicy, ConfigCache, Kernel, Tuner, policy_override
from ejkernel.ops.config.tuning_budget import TuningWarning

# Candidates.


class Listed(Doubling):
    """The heuristic is not among the candidates that the kernel lists."""

    def candidate_cfgs(self, inv):
        return [Blocks(size) for size in self.sizes[1:]]


def test_the_heuristic_always_takes_part():
    """A kernel whose candidates leave the heuristic out has it measured first."""
    w = world(Listed((1, 2, 4)))
    w.choose()

    assert w.tuner.offered == [[Blocks(1), Blocks(2), Blocks(4)]]


def test_the_heuristic_wins_ties():
    """Of equal times the heuristic's cfg is taken, wherever the kernel lists it."""

    class Last(Doubling):
        def candidate_cfgs(self, inv):
            return [Blocks(2), Blocks(4), Blocks(1)]

    class Even:
        name = "even"

        def time(self, call, leaves, calls):
            jax.block_until_ready(call(*leaves))
            return 1.0

    w = world(Last(), tuner=Tuner(clock=Even()))

    assert w.choose() == Blocks(1)


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1)])
def test_one_distinct_candidate_is_neither_measured_nor_stored(sizes):
    """There is nothing to find out, so the heuristic answers."""
    w = world(Doubling(sizes))

    assert w.choose() == Blocks(1)
    assert w.tuner.calls == 0
    assert w.kept() == (None, None)
    assert w.listener.names == ["heuristics"]


def test_one_distinct_candidate_answers_without_heuristics_too():
    """A policy without heuristics does not turn a sole candidate into an error."""
    w = world(Doubling((1,)), policy=AutotunePolicy(allow_heuristics=False))

    assert w.choose() == Blocks(1)
    assert (w.tuner.calls, w.kept()) == (0, (None, None))


def test_a_kernel_without_candidates_of_its_own_is_not_tuned():
    """By default the heuristic is the only candidate."""

    class Plain(Kernel):
        op_id = "plain"

        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return {"block": 1}

    w = world(Plain())

    assert w.choose() == {"block": 1}
    assert w.tuner.calls == 0


def test_candidates_may_be_an_iterator():
    """Anything that can be iterated once is enough."""

    class Lazy(Doubling):
        def candidate_cfgs(self, inv):
            yield from (Blocks(1), Blocks(2))

    assert world(Lazy()).choose() == Blocks(2)


def test_an_invalid_candidate_is_not_measured():
    """What `valid_cfg` gives a reason against is left out."""

    class Picky(Doubling):
        def valid_cfg(self, inv, cfg):
            return True if cfg.size != 2 else "two is too few"

    w = world(Picky())

    assert w.choose() == Blocks(4)
    assert Blocks(2) not in w.tuner.offered[0]


def test_candidates_that_raise_are_an_error_that_names_the_kernel():
    """The message has kernel, reason and a way out; nothing is kept."""

    class Faulty(Doubling):
        op_id = "faulty"

        def candidate_cfgs(self, inv):
            raise ZeroDivisionError("by design")

    w = world(Faulty())
    with pytest.raises(TypeError, match=r"faulty@v3.*by design"):
        w.choose()

    assert (w.kept(), w.tuner.calls) == ((None, None), 0)
    with policy_override(w.selector, allow_autotune=False):
        assert w.choose() == Blocks(1)


def test_no_candidates_at_all_is_one_warning():
    """An empty list means the heuristic; the warning names the kernel, once."""

    class Empty(Doubling):
        op_id = "empty"

        def candidate_cfgs(self, inv):
            return []

    w = world(Empty())
    with pytest.warns(TuningWarning, match="empty@v3") as caught:
        found = [w.choose(), w.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert len(caught) == 1
    assert w.kept() == (None, None)


# Failed tunings.


class Failing(Doubling):
    """No candidate can be compiled."""

    op_id = "failing"

    def run(self, x, *, cfg):
        raise ValueError(f"size {cfg.size} is impossible")


def test_all_candidates_failed_is_one_warning_with_each_reason():
    """The warning has every candidate's reason; the heuristic answers."""
    w = world(Failing(), tuner=Tuner())
    with pytest.warns(TuningWarning, match="failing@v3") as caught:
        assert w.choose() == Blocks(1)

    assert len(caught) == 1
    assert all(f"size {size} is impossible" in str(caught[0].message) for size in (1, 2, 4))
    assert w.kept() == (None, None)
    assert w.listener.names == ["autotune_start", "autotune_finish", "heuristics"]


def test_a_failed_tuning_is_remembered():
    """There is no second tuning and no second warning for that key."""
    w = world()
    w.tuner.broken = True
    with pytest.warns(TuningWarning):
        w.choose()
    found = [w.choose(), w.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert w.tuner.calls == 1
    assert w.listener.names[-2:] == ["heuristics", "heuristics"]


@pytest.mark.parametrize("shared", [True, False], ids=["one cache", "own caches"])
def test_a_failed_tuning_is_remembered_for_the_process(shared):
    """Another selector of the process does not try those candidates again."""
    cache = ConfigCache()
    tuner = TableTuner()
    tuner.broken = True
    first = world(tuner=tuner, cache=cache)
    second = world(tuner=tuner, cache=cache if shared else ConfigCache())
    with pytest.warns(TuningWarning) as caught:
        found = [first.choose(), second.choose()]

    assert found == [Blocks(1), Blocks(1)]
    assert (len(caught), tuner.calls) == (1, 1)


def test_a_failed_tuning_leaves_an_error_without_heuristics():
    """Where no heuristic may answer, the error has the reason of the failed tuning."""
    w = world(policy=AutotunePolicy(allow_heuristics=False))
    w.tuner.broken = True
    with pytest.warns(TuningWarning), pytest.raises(RuntimeError, match="no candidate ran"):
        w.choose()

    assert w.kept() == (None, None)


def test_a_key_that_failed_is_served_from_what_is_put_later():
    """Memory and disk come before the memory of a failure."""
    w = world()
    w.tuner.broken = True
    with pytest.warns(TuningWarning):
        w.choose()
    w.selector.persistent.put(*w.key, Blocks(4))

    assert w.choose() == Blocks(4)


def test_some_candidates_that_fail_do_not_stop_the_others():
    """The fastest of those that run wins, without a warning."""

    class Half(Doubling):
        op_id = "half"

        def run(self, x, *, cfg):
            if cfg.size != 4:
                raise ValueError("impossible")
            return x * 2.0

    w = world(Half(), tuner=Tuner())

    assert w.choose() == Blocks(4)
    assert w.kept() == (Blocks(4), Blocks(4))


def test_a_tuner_that_breaks_otherwise_is_heard():
    """An error of the tuner itself reaches the caller, and the key can be asked for again."""

    class Buggy(TableTuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            if not self.offered:
                self.offered.append(list(candidates))
                raise KeyError("a bug of the tuner")
            return super().autotune(make_fn, args, kwargs, candidates)

    w = world(tuner=Buggy())
    with pytest.raises(KeyError):
        w.choose()
    assert w.kept() == (None, None)
    assert w.choose() == Blocks(2)
