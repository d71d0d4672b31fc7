"""The newest put of a key wins, also when clocks step back or differ.

Covers `store/entry_files.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from fakes_store import entries, entry_files, keep, key, never_small, store, told, value

from ejkernel.ops.store import entry_log, persistent
from ejkernel.ops.store.maintenance import prune
from ejkernel.ops.store.store import StoredEntry

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Clock:
    """Reads what it is set to; stands in for `datetime` where entries are dated."""

    def __init__(self, moment: datetime = NOON) -> None:
        self.moment = moment

    def now(self, zone):
        return self.moment

    def step(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)


@pytest.fixture
def clock(monkeypatch):
    """The clock of every cache in this test."""
    made = Clock()
    monkeypatch.setattr(persistent, "datetime", made)
    return made


@pytest.fixture(params=["small", "large"], autouse=True)
def _size(request, monkeypatch):
    if request.param == "large":
        never_small(monkeypatch)


def test_a_put_after_the_clock_stepped_back_wins(tmp_path, clock):
    """The later put of one cache is answered, though it is dated earlier."""
    cache = store(tmp_path)
    keep(cache, "one", "first")
    clock.step(-3600)
    keep(cache, "one", "second")

    assert value(cache, "one") == value(store(tmp_path), "one") == "second"


def test_every_step_back_is_survived(tmp_path, clock):
    """However often the clock goes back, the last put is the one that counts, before and after a fold."""
    cache = store(tmp_path)
    for number in range(6):
        keep(cache, "one", number)
        clock.step(-60)

    assert value(store(tmp_path), "one") == 5
    cache.fold()
    assert value(store(tmp_path), "one") == value(cache, "one") == 5


def test_a_writer_with_a_slow_clock_wins_over_what_it_had_seen(tmp_path, clock):
    """A second cache whose clock is an hour behind replaces an entry that it has read."""
    fast, slow = store(tmp_path), store(tmp_path)
    keep(fast, "one", "fast")
    assert value(slow, "one") == "fast"
    clock.step(-3600)
    keep(slow, "one", "slow")

    assert [value(cache, "one") for cache in (fast, slow, store(tmp_path))] == ["slow"] * 3


def test_a_writer_sees_what_is_on_disk_when_it_puts(tmp_path, clock):
    """A cache that never asked for the key looks before it puts, so its slow clock does no harm."""
    fast, slow = store(tmp_path), store(tmp_path)
    keep(slow, "other", 0)
    keep(fast, "one", "fast")
    clock.step(-3600)
    keep(slow, "one", "slow")

    assert [value(cache, "one") for cache in (fast, slow, store(tmp_path))] == ["slow"] * 3


def test_caches_that_take_turns_count_on(tmp_path, clock):
    """Each put sees the other's, so the counts grow by one, whatever the clocks say."""
    caches = [store(tmp_path), store(tmp_path)]
    for number in range(6):
        clock.step(-10 if number % 2 else 5)
        keep(caches[number % 2], "one", number)
    caches[0].fold()
    (raw,) = entries(tmp_path / "ops.json").values()

    assert (raw["cfg"], raw["seq"]) == (5, 6)


def test_an_edited_file_has_been_seen_too(tmp_path, clock):
    """A put wins over a file that was checked out under the cache, even one that counts much further."""
    theirs = store(tmp_path / "theirs")
    for number in range(5):
        keep(theirs, "one", number)
    theirs.fold()
    mine = store(tmp_path / "mine")
    keep(mine, "one", "old")
    mine.fold()
    (tmp_path / "mine" / "ops.json").write_bytes((tmp_path / "theirs" / "ops.json").read_bytes())
    clock.step(-3600)
    keep(mine, "one", "new")

    assert value(mine, "one") == value(store(tmp_path / "mine"), "one") == "new"


def blind(cache):
    """Has a cache put as if another process had been faster by a moment: it does not look before."""
    cache._entry_log.unchanged = lambda: True
    cache._entry_log.list_entries = lambda: None
    return cache


def two_that_had_seen_the_same(tmp_path, clock, step, monkeypatch):
    never_small(monkeypatch)
    monkeypatch.setattr(entry_log, "_PENDING", 99)
    first, second = store(tmp_path), blind(store(tmp_path))
    keep(first, "one", "first")
    clock.step(step)
    keep(second, "one", "second")
    assert len(entry_files(first.path)) == 2


@pytest.mark.parametrize(("step", "winner"), [(1, "second"), (-1, "first"), (1e-6, "second")])
def test_between_puts_that_had_not_seen_each_other_the_clock_decides(tmp_path, clock, step, winner, monkeypatch):
    """Two processes put at once: the later date wins, for every reader and after a fold."""
    two_that_had_seen_the_same(tmp_path, clock, step, monkeypatch)

    assert value(store(tmp_path), "one") == winner
    cache = store(tmp_path)
    cache.fold()
    assert value(cache, "one") == value(store(tmp_path), "one") == winner


def test_a_tie_is_broken_the_same_way_everywhere(tmp_path, clock, monkeypatch):
    """Same count and same date: one of both wins, and it is the same one before and after a fold."""
    two_that_had_seen_the_same(tmp_path, clock, 0, monkeypatch)
    before = value(store(tmp_path), "one")
    store(tmp_path).fold()

    assert before in ("first", "second")
    assert value(store(tmp_path), "one") == before


def test_a_put_after_a_tie_wins(tmp_path, clock, monkeypatch):
    """A cache that has seen both counts on from there."""
    two_that_had_seen_the_same(tmp_path, clock, 0, monkeypatch)
    clock.step(-3600)
    third = store(tmp_path)
    keep(third, "one", "third")

    assert value(third, "one") == value(store(tmp_path), "one") == "third"


@pytest.mark.parametrize("seq", [-5, 10**18, 10**30, True, "7", None, 1.5])
def test_a_count_that_makes_no_sense_does_not_hide_a_put(tmp_path, clock, seq):
    """Whatever a hand-written file claims as its count, a put wins over it and is found again."""
    import json

    path = tmp_path / "ops.json"
    path.write_text(json.dumps({"gpu|NVIDIA H200|matmul@v2|one": {"cfg": "old", "seq": seq}}), encoding="utf-8")
    cache = store(tmp_path)
    assert value(cache, "one") == "old"
    keep(cache, "one", "new")

    assert value(cache, "one") == value(store(tmp_path), "one") == "new"
    cache.fold()
    assert value(store(tmp_path), "one") == "new"


def test_a_date_that_comes_with_the_entry_is_kept_and_does_not_decide(tmp_path, clock):
    """An entry from years ago that is kept now is the newest put of its key."""
    cache = store(tmp_path)
    keep(cache, "one", "dated today")
    cache.keep(key("one"), StoredEntry("from long ago", when="2001-01-01T00:00:00+00:00"))

    found = store(tmp_path).lookup(key("one"))
    assert (found.cfg, found.when) == ("from long ago", "2001-01-01T00:00:00+00:00")


def test_a_put_that_is_pruned_before_it_is_acknowledged_is_put_again(tmp_path, monkeypatch):
    """Another process prunes it between the write and the look at it: the put wins, without a warning."""
    never_small(monkeypatch)
    cache, other = store(tmp_path), store(tmp_path)
    real, pruned = cache._entry_log.holds, []

    def holds(found, sealed):
        if not pruned:
            pruned.append(prune(other, where=lambda each, raw: True))
        return real(found, sealed)

    monkeypatch.setattr(cache._entry_log, "holds", holds)
    keep(cache, "one", 1)

    assert (pruned, cache.status) == ([1], "read-write")
    assert value(store(tmp_path), "one") == 1


def test_a_folder_that_drops_what_is_written_is_named(tmp_path, monkeypatch):
    """An entry that is gone twice in a row is not acknowledged, and this process still has it."""
    never_small(monkeypatch)
    cache, other = store(tmp_path), store(tmp_path)
    real = cache._entry_log.holds

    def holds(found, sealed):
        prune(other, where=lambda each, raw: True)
        return real(found, sealed)

    monkeypatch.setattr(cache._entry_log, "holds", holds)
    with told() as said:
        keep(cache, "one", 1)

    assert (cache.status, value(cache, "one"), len(said)) == ("memory-only", 1, 1)
    assert "does not keep what is written there" in said[0]
