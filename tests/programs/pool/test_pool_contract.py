"""One contract for every pool: each call is tuned once or named, nothing is lost, and no process is left."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest
from fakes_pool import Adding, Aged, Other, Troubled, Turns, calls_of, on, selecting
from pool_adapters import ADAPTERS, EVERY, WITH_PROCESSES

from ejkernel.ops import OperationStores, autotune
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.request import ask
from ejkernel.ops.store import files
from ejkernel.ops.store.persistent import StoreWarning


@pytest.fixture(scope="module", params=EVERY)
def pool(request):
    """A pool of two workers, for all tests that leave it as it is."""
    with request.param.open(2) as pool:
        yield pool


def keys_of(calls):
    """The keys of calls."""
    return {ask(inv, kernel, "forward").key for kernel, inv in calls}


def named_in(result):
    """The keys of the calls that a result names as not tuned."""
    found = [note.partition(": not tuned: ")[0] for note in result.notes]
    assert len(found) == len(set(found))
    return found


def is_running(process):
    """Is there such a process, and is it more than remains?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


def troubles(adapter, folder, monkeypatch, *, calls, workers, killed):
    """Tunes with one worker killed, one hung, one of another device, and a store that is full for a while."""
    full = iter(range(3))
    write = files.write

    def sometimes_full(*args, **kwargs):
        if next(full, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args, **kwargs)

    monkeypatch.setattr(files, "write", sometimes_full)
    asked = [*calls_of(calls // 2), *calls_of(calls - calls // 2, Other())]
    with adapter.open(workers) as pool:
        troubled = Troubled(pool, folder / "log", "elsewhere@1", "hung@2", f"killed@{killed}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", StoreWarning)
            result = autotune(asked, tuning=on(troubled, selecting(folder / "store")))
    # Where anything came back, the store was full for it.
    assert any("No space left" in str(one.message) for one in said) == bool(result.entries)
    tuned, named = set(map(str, result.by_key())), named_in(result)
    assert len(tuned) == len(result.entries)
    assert tuned.isdisjoint(named)
    assert tuned | set(named) == set(map(str, keys_of(asked)))
    kept = OperationStores(folder / "store")
    assert {str(Key(*key)) for key in kept.keys()} == tuned
    assert [process for process, _ in troubled.log() if is_running(process)] == []
    return result, troubled


@pytest.mark.parametrize("adapter", WITH_PROCESSES)
def test_in_trouble_every_call_is_tuned_once_or_named(adapter, tmp_path, monkeypatch):
    """Six calls and three workers, all of them with a trouble: a pool that restarts workers tunes everything."""
    result, troubled = troubles(adapter, tmp_path, monkeypatch, calls=6, workers=3, killed=6)
    assert len(list(troubled.folder.glob("*.wanted"))) == 0
    if adapter.restarts:
        assert list(result.notes) == []
    else:
        assert all("the pool broke" in note for note in result.notes)


def test_the_calls_of_a_pool_that_breaks_are_named(tmp_path):
    """Python's own pool ends with a worker: what is done is kept, the rest is named, and nothing waits for ever."""
    with ADAPTERS["processes"].open(1) as pool:
        troubled = Troubled(pool, tmp_path / "log", "killed@2")
        result = autotune(calls_of(3), tuning=on(troubled, selecting(tmp_path / "store")))
    assert len(result.entries) == 1
    assert len(OperationStores(tmp_path / "store").keys()) == 1
    assert len(named_in(result)) == 2
    assert all("the pool broke" in note for note in result.notes)


@pytest.mark.engines
@pytest.mark.parametrize("adapter", WITH_PROCESSES)
def test_in_trouble_forty_calls_are_tuned_once_or_named(adapter, tmp_path, monkeypatch):
    """The same at length: 40 calls, four workers."""
    result, troubled = troubles(adapter, tmp_path, monkeypatch, calls=40, workers=4, killed=20)
    assert len(list(troubled.folder.glob("*.wanted"))) == 0
    if adapter.restarts:
        assert list(result.notes) == []
    else:
        assert all("the pool broke" in note for note in result.notes)
        assert len(result.entries) > 5
