"""What a session sends to its workers, keeps of what they say, and does when they end: fakes, without any process."""

from __future__ import annotations

import math
import signal

import jax.numpy as jnp
import pytest
from fakes_session import ALL, Scripted, back, done, says, session, starts, statuses

from ejkernel.ops.core.record import Finding
from ejkernel.ops.tuning.worker.export import PortableProgram


def test_after_a_death_within_a_race_the_others_race_afresh(clock):
    """Times of two processes do not compare: what was timed in the dead one is forgotten."""
    rounds = [back(0), says("timed", found=[[0, 2.0], [1, 1.0], [2, 3.0]], clock="wall"), starts(1, "race")]
    made, _ = session(Scripted([starts(0), *rounds], -signal.SIGSEGV), Scripted([], None))

    assert made.run(ALL, deadline=clock.now + 0.1) is None
    assert (made.rows, made.clock) == ([], "wall")


def test_what_is_dropped_is_told_and_rounds_are_kept_until_the_race_is_over():
    """Should the time be up, they decide."""
    told = []
    drop = says("dropped", 1, seconds=3.0, ratio=1.5, clock="wall")
    row = says("timed", found=[[0, 2.0], [1, 3.0]], clock="wall")
    made, watch = session(Scripted([row, drop, done(0, 1)]))
    made.run([0, 1], told=told.append)

    assert ("dropped", "b", 1.5) in watch.told
    assert made.rows == told == [{0: 2.0, 1: 3.0}]


def test_a_failure_is_told_and_not_sent_again():
    """What a worker found out before it died stays known."""
    second = Scripted([done(2)])
    found = {"test": "element", "ratio": 3.0, "output": "output", "widened": 0.0}
    failed = says("failed", 0, status="wrong", message="off", error=0.5, compile_s=1.0, check=found)
    made, watch = session(Scripted([failed, starts(1)], -signal.SIGSEGV), second)
    made.run(ALL)

    assert statuses(made) == ["wrong", "crash", "ok"]
    assert second.programs == [2]
    assert ("failed", "a", "wrong") in watch.told
    assert made.candidates.trial(0).check == Finding(**found)


def test_one_worker_serves_run_after_run():
    """It has what it was sent, and one that was at work when a run ended is not waited for in the next one."""
    one = Scripted([starts(0), back(0), starts(1, "race"), done(0, 1), done(1, 2)])
    made, _ = session(one)
    made.run([0, 1])
    assert one.programs == [0, 1]
    assert not made.watchdog.at_work
    made.run([1, 2])

    assert (one.programs, one.order["runners"]) == ([0, 1, 2], [1, 2])
    assert statuses(made) == ["ok"] * 3


def test_a_worker_that_still_compiles_does_not_serve_the_next_tuning():
    """It would tell of numbers that are others' by then, and may hold the compiler's lock."""
    worker = Scripted([starts(2, "compile"), starts(0), back(0), done(0, 1)])
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert not worker.left


def test_the_next_worker_knows_what_is_right():
    """The first that was right is checked before the others, and runs only where it is wanted."""
    second = Scripted([done(1, 2)])
    first = Scripted([starts(0), back(0), done(0), starts(1)], -signal.SIGKILL)
    made, _ = session(first, second)
    made.run([0])
    made.run([2, 1])

    assert (second.programs, second.order["runners"]) == ([0, 1, 2], [2, 1])


def test_the_first_program_with_gradients_sends_the_tuning_once_more():
    """Behind its cotangents, and marked as the same one."""
    worker = Scripted([done(0, 1, 2)])
    made, _ = session(worker)
    made.add(0)
    assert not worker.tuning["again"]
    program = made.candidates.program(1)
    object.__setattr__(program, "portable", PortableProgram(b"b", (jnp.ones(2),), 1, None, "forward+backward"))
    made.add(1)
    assert worker.tuning["again"]
    assert worker.programs == [0, 0, 1]


def test_programs_are_sent_before_the_run():
    """As soon as each is exported, so that the worker compiles while others are exported; none is sent twice."""
    one = Scripted([done(0, 1, 2)])
    made, _ = session(one)
    made.add(1)
    assert (one.programs, one.order) == ([1], {})
    made.run(ALL)

    assert one.programs == [1, 0, 2]


def test_no_worker_is_started_when_the_time_is_up(clock):
    """What was timed until then has to do."""
    made, _ = session(Scripted([starts(0), back(0), starts(1)], -signal.SIGSEGV))

    assert made.run(ALL, deadline=clock.now) is None
    assert statuses(made) == ["ok", "crash", "ok"]


def test_when_all_are_dead_none_is_left():
    """Then there is nothing to send."""
    made, _ = session(*(Scripted([starts(n)], -signal.SIGSEGV) for n in range(3)))

    assert made.run(ALL) is None
    assert statuses(made) == ["crash"] * 3


def test_a_worker_that_still_compiles_is_given_a_moment_and_kept(clock):
    """Another one takes longer to start, and has none of the programs that this one has compiled ahead."""
    worker = Scripted([starts(1, "compile"), done(0, 2), back(1, "compile")], None)
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert worker.left


@pytest.mark.parametrize("end", [math.inf, 0.5])
def test_a_worker_that_compiles_on_is_ended_after_that_moment(clock, end):
    """It may hold the compiler's lock, and would speak of candidates of this tuning; nor is a budget overrun for it."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], None)
    made, _ = session(worker)
    made.run(ALL, deadline=clock.now + end)
    before = clock.now
    made.close()
    assert not worker.left
    assert clock.now - before == pytest.approx(min(2.0, end), abs=0.01)


def test_a_worker_that_dies_while_it_is_given_a_moment_is_ended(clock):
    """Nothing waits for it, and no candidate is to blame any more."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], -signal.SIGSEGV)
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert not worker.left
    assert statuses(made) == ["ok", "ok", "ok"]


def test_ctrl_c_while_a_worker_is_given_a_moment_ends_it(clock):
    """Else it would live, with the memory that it holds, as long as this process."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], None)
    made, _ = session(worker)
    made.run(ALL)

    def hear():
        raise KeyboardInterrupt

    worker.hear = hear
    with pytest.raises(KeyboardInterrupt):
        made.close()
    assert not worker.left
