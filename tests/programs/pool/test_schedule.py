"""The order of a pool's work, without a clock and without a pool."""

from __future__ import annotations

import sys
from statistics import median

import pytest
from fakes_programs import key_of

from ejkernel.ops.programs.pool.schedule import Schedule, ScheduleRules, Work

RULES = ScheduleRules(straggler_seconds=10.0, silent_seconds=100.0, ahead=0.0)


def works(*names, **about):
    """Work of one call each."""
    return [Work((key_of(name),), **about) for name in names]


def sent(schedule, now=0.0):
    """Sends everything that can be sent now; (work, number) pairs."""
    found = []
    while (work := schedule.next(now)) is not None:
        found.append((work, schedule.sent(work, now)))
    return found


def answer(schedule, number, seconds=1.0):
    """Answers an attempt; the attempts that are of no use any more."""
    return schedule.answered(schedule.came_back(number), [seconds])


def test_as_much_is_sent_as_there_are_workers():
    """The first of the order go out; the next one when an answer has come."""
    schedule = Schedule(works("a", "b", "c"), workers=2, rules=RULES)
    (one, first), (two, _) = sent(schedule)
    assert [one.calls[0].op_id, two.calls[0].op_id] == ["a", "b"]
    answer(schedule, first)
    assert [work.calls[0].op_id for work, _ in sent(schedule)] == ["c"]


def test_a_pool_that_does_not_count_its_workers_gets_everything():
    """Its own queue keeps the order."""
    assert len(sent(Schedule(works("a", "b", "c"), rules=RULES))) == 3


def test_a_call_waits_for_the_kernels_inside_it():
    """An outer call is sent once its inner ones are settled, done or given up."""
    outer, inner = works("outer", "inner")
    schedule = Schedule([outer, inner], inner={outer.calls[0]: inner.calls}, workers=2, rules=RULES)
    ((first, number),) = sent(schedule)
    assert first is inner
    answer(schedule, number)
    assert [work for work, _ in sent(schedule)] == [outer]


def test_a_straggler_is_sent_once_more_where_nothing_waits():
    """Three times the usual, and at least ten seconds; the first answer wins and the other attempt ends."""
    schedule = Schedule(works("a", "b"), workers=2, rules=RULES)
    (_, quick), (slow, first) = sent(schedule)
    answer(schedule, quick, 4.0)
    assert sent(schedule, 11.0) == []
    ((again, second),) = sent(schedule, 12.5)
    assert again is slow
    assert sent(schedule, 99.0) == []
    assert answer(schedule, second) == [first]
    assert schedule.came_back(first) is None
    assert not schedule.is_busy


def test_a_straggler_waits_while_other_work_waits():
    """A worker that is free takes new work first."""
    schedule = Schedule(works("a", "b", "c"), workers=2, rules=RULES)
    (_, quick), (slow, _) = sent(schedule)
    answer(schedule, quick)
    ((next_one, number),) = sent(schedule, 50.0)
    assert next_one is not slow
    answer(schedule, number)
    assert [work for work, _ in sent(schedule, 51.0)] == [slow]


def test_a_straggler_that_waits_for_a_worker_is_not_looked_at_again_and_again():
    """Only an answer brings a free worker: until then there is no time to wait for, and the tuner rests."""
    schedule = Schedule(works("a", "b", "c"), workers=2, rules=RULES)
    (_, quick), _ = sent(schedule)
    answer(schedule, quick)
    assert schedule.seconds_until_late(4.0) == 6.0
    ((_, number),) = sent(schedule, 50.0)
    assert schedule.seconds_until_late(50.0) == 10.0
    answer(schedule, number)
    assert len(sent(schedule, 51.0)) == 1


def test_work_without_an_answer_is_given_up():
    """Repeated in vain, or sent to workers none of which ever answered."""
    schedule = Schedule(works("a", "b"), workers=2, rules=RULES)
    sent(schedule)
    assert schedule.overdue(99.0) == []
    assert [work.reason for work in schedule.overdue(101.0)] == ["no worker answered within 100 s"] * 2


def test_work_that_was_sent_once_is_not_given_up_while_workers_answer():
    """It gets its second attempt when nothing else waits, however long that takes; where none answers it has none."""
    schedule = Schedule(works("hangs", *"abc"), workers=2, rules=RULES)
    (hung, _), (_, number) = sent(schedule)
    for now in (60.0, 120.0, 180.0):
        answer(schedule, number)
        assert schedule.overdue(now) == []
        ((again, number),) = sent(schedule, now)
    assert again is hung
    assert schedule.overdue(280.0) == []
    assert schedule.overdue(281.0) == [hung]


def test_work_that_was_sent_once_is_given_up_where_workers_answer_no_more():
    """The only worker hangs: there is no other one for a second attempt."""
    schedule = Schedule(works("a", "hangs"), workers=1, rules=RULES)
    ((_, first),) = sent(schedule)
    answer(schedule, first)
    assert schedule.overdue(50.0) == []
    ((hung, _),) = sent(schedule, 50.0)
    assert schedule.overdue(150.0) == []
    assert schedule.overdue(151.0) == [hung]


def test_a_worker_that_dies_costs_one_retry():
    """The calls of its task are tried once more, one by one; then they are named."""
    both = Work((key_of("a"), key_of("b")))
    schedule = Schedule([both], workers=2, rules=RULES)
    ((_, number),) = sent(schedule)
    assert schedule.died(schedule.came_back(number), "gone") == []
    (one, first), (two, second) = sent(schedule)
    assert [*one.calls, *two.calls] == [key_of("a"), key_of("b")]
    assert schedule.died(schedule.came_back(first), "gone again") == [one]
    answer(schedule, second)
    assert not schedule.is_busy


def test_a_worker_that_dies_while_its_work_runs_elsewhere_costs_nothing():
    """The other attempt goes on."""
    schedule = Schedule(works("a", "b"), workers=2, rules=RULES)
    (_, quick), (_, first) = sent(schedule)
    answer(schedule, quick)
    ((_, second),) = sent(schedule, 20.0)
    assert schedule.died(schedule.came_back(first), "gone") == []
    answer(schedule, second)
    assert not schedule.is_busy


def test_work_that_every_worker_refuses_is_given_up_after_three_rounds():
    """All work of that kind goes with it, without a round trip for each."""
    schedule = Schedule(works(*"abcdef", kind="k"), workers=2, rules=RULES)
    hopeless, attempts = [], 0
    while schedule.is_busy:
        for _, number in sent(schedule):
            attempts += 1
            hopeless += schedule.refused(schedule.came_back(number), "no such device", 0.0)
    assert len(hopeless) == 6
    assert attempts == 8


@pytest.mark.parametrize("ends", ["answered", "refused"])
def test_refused_work_is_not_given_up_while_another_worker_has_work_that_it_did_not_refuse(ends):
    """That worker may be starting, or busy with another kernel: only its refusal, or an answer, tells."""
    schedule = Schedule([*works("long", kind="other"), *works("a", "b", kind="k")], workers=2, rules=RULES)
    (_, busy), _ = attempts = sent(schedule)
    for turn in range(2 * RULES.rounds):
        for _, number in [one for one in attempts if one[1] != busy]:
            assert schedule.refused(schedule.came_back(number), "no such device", 100.0 * turn) == []
        attempts = sent(schedule, 100.0 * turn + 50.0)
    if ends == "answered":
        answer(schedule, busy)
    else:
        schedule.refused(schedule.came_back(busy), "no such device", 0.0)
    hopeless = []
    while len(hopeless) < 2:
        for _, number in attempts:
            if number != busy:
                hopeless += schedule.refused(schedule.came_back(number), "no such device", 0.0)
        attempts = sent(schedule, 1000.0)


def test_work_that_every_worker_refuses_is_given_up_also_where_attempts_never_end_together():
    """Jobs that take seconds each: another one is always under way when one of them is refused."""
    schedule = Schedule(works(*"abc", kind="k"), rules=RULES)
    hopeless, attempts, now = [], sent(schedule), 0.0
    while schedule.is_busy:
        # The oldest ends, the others go on.
        number = min(schedule.numbers)
        hopeless += schedule.refused(schedule.came_back(number), "not here", now)
        now += RULES.refused_longest
        attempts += sent(schedule, now)
    assert len(hopeless) == 3
    assert len(attempts) < RULES.refusals


def test_refused_work_waits_for_a_worker_that_takes_it():
    """A worker of another device that refuses at once does not get everything again and again."""
    schedule = Schedule(works(*"abcd", kind="k"), workers=2, rules=RULES)
    (_, good), (_, bad) = sent(schedule)
    schedule.refused(schedule.came_back(bad), "no such device", 0.0)
    while (work := schedule.next(0.0)) is not None:
        schedule.refused(schedule.came_back(schedule.sent(work, 0.0)), "no such device", 0.0)
    assert schedule.under_way == 1
    answer(schedule, good)
    taken = 0
    while schedule.is_busy:
        ((_, number), *_) = sent(schedule)
        answer(schedule, number)
        taken += 1
    assert taken == 3


@pytest.mark.parametrize("taken", [True, False])
def test_refusals_have_an_end(taken):
    """Also where another worker took work of the kind before, and is gone."""
    schedule = Schedule(works("a", "b", kind="k"), workers=1, rules=RULES)
    ((_, number),) = sent(schedule)
    if taken:
        answer(schedule, number)
    else:
        schedule.refused(schedule.came_back(number), "not here", 0.0)
    attempts = 0
    while schedule.is_busy:
        ((_, number),) = sent(schedule)
        schedule.refused(schedule.came_back(number), "not here", 0.0)
        attempts += 1
    assert attempts <= RULES.refusals


def test_refusals_do_not_count_while_other_workers_take_work_of_the_kind():
    """An engine may hand one task to the wrong worker again and again as long as the right ones are busy."""
    count = 1100
    schedule = Schedule(works("a", *(f"b{i}" for i in range(count)), kind="k"), workers=2, rules=RULES)
    unlucky = schedule.next(0.0)
    for _ in range(count):
        assert schedule.refused(schedule.came_back(schedule.sent(unlucky, 0.0)), "not here", 0.0) == []
        answer(schedule, schedule.sent(schedule.next(0.0), 0.0))
    assert unlucky.refusals > RULES.refusals
    assert set(schedule.left) == {unlucky}


def test_work_that_is_refused_again_and_again_is_under_way_twice():
    """While the worker that refuses has one attempt, another worker gets the other."""
    schedule = Schedule(works("a", "b", kind="k"), workers=3, rules=RULES)
    (_, good), (unlucky, number) = sent(schedule)
    answer(schedule, good)
    for turn in range(RULES.unlucky):
        schedule.refused(schedule.came_back(number), "not here", turn * 100.0)
        attempts = sent(schedule, turn * 100.0 + 50.0)
        number = attempts[0][1]
    assert [work for work, _ in attempts] == [unlucky, unlucky]
    assert schedule.refused(schedule.came_back(number), "not here", 300.0) == []
    answer(schedule, attempts[1][1])
    assert not schedule.is_busy


def test_work_that_hangs_at_one_worker_and_is_refused_by_another_gets_to_a_third():
    """The engine prefers the wrong worker as long as that is idle; the first attempt never ends."""
    schedule = Schedule(works("a", "b", kind="k"), workers=4, rules=RULES)
    (_, good), (hung, _) = sent(schedule)
    answer(schedule, good)
    now, turns = 2 * RULES.straggler_seconds, 0
    ((work, number),) = sent(schedule, now)
    assert work is hung
    while len(hung.sent) < 3:
        # The wrong worker waits before it refuses: an attempt beside it would get to another worker.
        assert schedule.refused(schedule.came_back(number), "not here", now) == []
        now, turns = now + RULES.refused_longest, turns + 1
        (_, number), *_ = sent(schedule, now)
        assert turns < RULES.refusals
    assert turns == 2 * RULES.unlucky


def test_work_that_is_under_way_twice_is_given_up_all_the_same():
    """Each refusal finds the other attempt under way, so that none would be the last one."""
    schedule = Schedule(works("a", "b", kind="k"), workers=3, rules=RULES)
    (_, good), (unlucky, number) = sent(schedule)
    answer(schedule, good)
    now, attempts, hopeless = 0.0, [number], []
    for _ in range(10 * RULES.refusals):
        hopeless = schedule.refused(schedule.came_back(attempts.pop(0)), "not here", now)
        now += 100.0
        attempts += [number for _, number in sent(schedule, now)]
        if not attempts:
            break
    assert hopeless == [unlucky]
    assert RULES.refusals <= unlucky.refusals < RULES.refusals + schedule.workers
    assert not schedule.is_busy


def test_work_of_a_kind_that_no_worker_took_is_not_under_way_twice():
    """All workers may be of the wrong kind: after some rounds all of it is given up."""
    schedule = Schedule(works("a", kind="k"), workers=3, rules=RULES)
    ((work, number),) = sent(schedule)
    for turn in range(RULES.rounds - 1):
        assert schedule.refused(schedule.came_back(number), "not here", turn * 100.0) == []
        ((_, number),) = sent(schedule, turn * 100.0 + 50.0)
    assert schedule.refused(schedule.came_back(number), "not here", 1000.0) == [work]


def test_attempts_that_overlap_are_refused_in_vain_as_well():
    """At each refusal another attempt is under way, so that no round has an end."""
    schedule = Schedule(works("a", "b", kind="k"), workers=2, rules=RULES)
    attempts, now, given_up = [number for _, number in sent(schedule)], 0.0, []
    for _ in range(10 * RULES.rounds):
        given_up += schedule.refused(schedule.came_back(attempts.pop(0)), "not here", now)
        now += RULES.refused_longest
        attempts += [number for _, number in sent(schedule, now)]
        if not attempts:
            break
    assert len(given_up) == 2
    assert all(work.refusals <= RULES.rounds + 1 for work in given_up)
    assert not schedule.is_busy


def test_a_closed_schedule_sends_nothing_and_still_takes_answers():
    """The pool takes no more: what waits is given up, and what is under way ends as it ends."""
    schedule = Schedule(works(*"abcd"), workers=3, rules=RULES)
    (_, first), (second, dead), (third, number) = sent(schedule)
    for work in schedule.close("the pool broke"):
        schedule.give_up(work)
    answer(schedule, first)
    assert schedule.died(schedule.came_back(dead), "gone") == [second]
    assert schedule.refused(schedule.came_back(number), "not here", 0.0) == [third]
    # Another attempt was due to both, so what ended is the pool.
    assert [second.reason, third.reason] == ["the pool broke", "the pool broke"]
    assert sent(schedule) == []
    assert not schedule.is_busy


def test_an_attempt_that_the_pool_did_not_take_waits_again():
    """It was not sent, so it costs no retry."""
    schedule = Schedule(works("a"), workers=1, rules=RULES)
    ((work, number),) = sent(schedule)
    schedule.unsent(number)
    assert schedule.close("the pool broke") == [work]


def test_work_that_waits_takes_a_better_order():
    """What is under way stays there."""
    schedule = Schedule(works(*"abcd"), workers=1, rules=RULES)
    ((_, first),) = sent(schedule)
    schedule.reorder({key_of(name): place for place, name in enumerate("dcba")})
    answer(schedule, first)
    ((work, _),) = sent(schedule)
    assert work.calls == (key_of("d"),)


def test_refused_work_is_sent_again_while_another_task_hangs():
    """No worker of use has answered yet, and one does not answer at all: the work does not wait for it."""
    schedule = Schedule(works("hangs", "a", kind="k"), workers=2, rules=RULES)
    (_, _), (refused, number) = sent(schedule)
    schedule.refused(schedule.came_back(number), "no such device", 0.0)
    assert sent(schedule, 0.0) == []
    assert 0 < schedule.seconds_until_late(0.0) <= RULES.refused_seconds
    assert [work for work, _ in sent(schedule, RULES.refused_seconds)] == [refused]


class Seconds(float):
    """Seconds whose comparisons are calls of Python, which a profile counts."""

    def __lt__(self, other):
        return float(self) < float(other)


def steps(function, *args):
    """How many functions, comparisons of seconds included, one call begins."""
    begun = 0

    def count(frame, event, argument):
        nonlocal begun
        begun += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return begun


@pytest.mark.parametrize("count", [256, 512])
def test_a_turn_costs_a_few_steps_for_each_task_under_way(count):
    """Whatever has been answered: this process serves hundreds of workers, each answer brings a turn."""
    names = [f"op{n}" for n in range(2 * count)]
    schedule = Schedule(works(*names, kind="k"), workers=count + 1, rules=RULES)
    for _, number in sent(schedule)[:count]:
        answer(schedule, number, Seconds(number % 7))
    attempts = sent(schedule)
    assert schedule.under_way == count
    assert schedule.next(1.0) is None
    for look in (schedule.next, schedule.overdue, schedule.seconds_until_late):
        assert steps(look, 1.0) < 16 * count, look
    # An answer makes the work of its kind hopeful again, which is one look at each.
    work = schedule.came_back(attempts[0][1])
    assert steps(schedule.answered, work, [Seconds(3)]) < 16 * count


def test_a_call_that_waits_for_others_costs_a_step_for_each_of_them():
    """Not one for each call that is open."""
    names = [f"op{n}" for n in range(512)]
    outer, *rest = works(*names)
    schedule = Schedule([outer, *rest], inner={outer.calls[0]: rest[0].calls}, workers=4, rules=RULES)
    schedule._open = Counted(schedule._open)
    assert schedule.next(0.0) is rest[0]
    assert schedule._open.asked == 1


class Counted(set):
    """A set that counts what it is asked for, and must not be copied."""

    asked = 0

    def __contains__(self, one):
        self.asked += 1
        return super().__contains__(one)

    def __sub__(self, other):
        raise AssertionError("all open calls are copied")

    __and__ = __rand__ = __sub__


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_what_is_usual_is_the_median_of_all_answers(count):
    """In whichever order they came; three times as long is late."""
    seconds = [(20.0 * n * 7) % 90 + 10 for n in range(count)]
    schedule = Schedule(works(*(f"op{n}" for n in range(count + 1))), workers=count + 1, rules=RULES)
    attempts = [number for _, number in sent(schedule)]
    for number, one in zip(attempts, seconds, strict=False):
        answer(schedule, number, one)
    assert schedule.seconds_until_late(0.0) == pytest.approx(3 * median(seconds))
