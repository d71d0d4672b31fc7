"""One contract for every pool: each call is tuned once or named. With workers in trouble: `test_pool_troubles.py`."""

from __future__ import annotations

import pytest
from fakes_pool import Adding, Aged, Other, Troubled, Turns, calls_of, keys_of, named_in, on, selecting
from pool_adapters import EVERY

from ejkernel.ops import AutotuningResult, OperationStores, autotune


@pytest.fixture(scope="module", params=EVERY)
def pool(request):
    """A pool of two workers, for all tests that leave it as it is."""
    with request.param.open(2) as pool:
        yield pool


class Broken(Adding):
    """A kernel none of whose cfgs can run."""

    op_id = "broken"

    def run(self, x, *, cfg):
        raise ValueError("no cfg of this kernel runs")


def test_every_call_is_tuned_by_a_worker_and_kept_here(pool, tmp_path):
    """The result has each call once with its record; memory and store of this process answer afterwards."""
    calls, selector = [*calls_of(3), *calls_of(2, Other())], selecting(tmp_path)
    result = autotune(calls, tuning=on(pool, selector))
    assert set(result.by_key()) == keys_of(calls)
    assert len(result.entries) == 5
    assert all(entry.is_measured and isinstance(entry.cfg, Turns) for entry in result.entries)
    assert list(result.notes) == []
    kept = OperationStores(tmp_path)
    for key, entry in result.by_key().items():
        assert selector.cache.get(*key) == entry.cfg
        assert kept.record(*key).trials[0].cfg == {"turns": 2}


def test_every_worker_has_a_line_in_the_result(pool):
    """The table ends with what each worker did."""
    result = autotune(calls_of(2), tuning=on(pool, selecting()))
    assert sum(int(line.partition(": ")[2].partition(" ")[0]) for line in result.workers) == 2
    assert result.workers[0] in result.table()
    assert AutotuningResult.loads(result.dumps()).workers == result.workers


def test_what_is_known_is_not_sent(pool, tmp_path):
    """Another run, with another selector, tunes only the call that is new."""
    autotune(calls_of(2), tuning=on(pool, selecting(tmp_path)))
    troubled = Troubled(pool, tmp_path / "log")
    result = autotune(calls_of(3), tuning=on(troubled, selecting(tmp_path)))
    assert sorted(entry.source for entry in result.entries) == ["autotune", "persistent", "persistent"]
    (new,) = keys_of(calls_of(3)) - keys_of(calls_of(2))
    assert [keys for _, keys in troubled.log()] == [[new]]


def test_a_call_that_cannot_travel_is_named_and_the_rest_goes_on(pool):
    """A class inside a function has no path to import it by: its call is not sent."""

    class Local(Adding):
        op_id = "local"

    result = autotune([*calls_of(1, Local()), *calls_of(1)], tuning=on(pool, selecting()))
    assert [entry.op_id_v for entry in result.entries] == ["adding@v1"]
    (note,) = result.notes
    assert "local@v1" in note
    assert "cannot be imported by another process" in note


# A worker that is a thread of this process warns here.
@pytest.mark.filterwarnings("ignore:tuning broken@v1")
def test_a_call_that_no_worker_can_tune_has_the_reason(pool):
    """Every candidate fails there: the entry says so here, with the failed record."""
    result = autotune([*calls_of(1, Broken()), *calls_of(1)], tuning=on(pool, selecting()))
    entries = {entry.op_id_v: entry for entry in result.entries}
    assert "no cfg of this kernel runs" in entries["broken@v1"].note
    assert entries["broken@v1"].record.winner is None
    assert entries["adding@v1"].is_measured


def test_workers_of_another_release_are_named(pool):
    """They refuse every task; the calls are named with both releases, and not for ever sent again."""
    result = autotune(calls_of(3), tuning=on(Aged(pool), selecting()))
    assert list(result.entries) == []
    assert sorted(named_in(result)) == sorted(str(key) for key in keys_of(calls_of(3)))
    assert all("has ejkernel-ops" in note and "0.0.0" in note for note in result.notes)
