"""The contract of every pool while workers die, hang or are others: nothing is lost, and no process is left."""

from __future__ import annotations

import errno
import os
import warnings

import pytest
from fakes_pool import Other, Troubled, calls_of, is_gone, keys_of, named_in, on, selecting
from pool_adapters import ADAPTERS, AT_LENGTH

from ejkernel.ops import OperationStores, autotune
from ejkernel.ops.core.key import Key
from ejkernel.ops.store import files
from ejkernel.ops.store.persistent import StoreWarning


def troubles(adapter, folder, monkeypatch, *, calls, workers, killed, calls_per_task=None):
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
        # Threads of this process share its troubles; they have a full store.
        tasks = ("elsewhere@0", "hung@0", f"killed@{killed}") if adapter.has_processes else ()
        troubled = Troubled(pool, folder / "log", *tasks, calls_per_task=calls_per_task)
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
    processes = {process for process, _ in troubled.log()} - {os.getpid()}
    assert bool(processes) == adapter.has_processes
    assert [process for process in processes if not is_gone(process)] == []
    return result, troubled


def test_in_trouble_our_own_pool_tunes_every_call(tmp_path, monkeypatch):
    """Six calls and three workers, all of them with a trouble: workers that die or hang are replaced."""
    result, troubled = troubles(ADAPTERS["local"], tmp_path, monkeypatch, calls=6, workers=3, killed=2)
    assert len(list(troubled.folder.glob("*.wanted"))) == 0
    assert list(result.notes) == []


def test_the_calls_of_a_pool_that_breaks_are_named(tmp_path):
    """Python's own pool ends with a worker: what is done is kept, the rest is named, and nothing waits for ever."""
    with ADAPTERS["processes"].open(1) as pool:
        troubled = Troubled(pool, tmp_path / "log", "killed@1")
        result = autotune(calls_of(3), tuning=on(troubled, selecting(tmp_path / "store")))
    assert len(result.entries) == 1
    assert len(OperationStores(tmp_path / "store").keys()) == 1
    assert len(named_in(result)) == 2
    assert all("the pool broke" in note for note in result.notes)


@pytest.mark.engines
@pytest.mark.parametrize("adapter", AT_LENGTH)
def test_in_trouble_forty_calls_are_tuned_once_or_named(adapter, tmp_path, monkeypatch):
    """The same at length over every pool, with the real engine: 40 calls, four workers."""
    result, troubled = troubles(adapter, tmp_path, monkeypatch, calls=40, workers=4, **adapter.at_length)
    assert len(list(troubled.folder.glob("*.wanted"))) == 0
    if adapter.restarts:
        assert list(result.notes) == []
    else:
        assert all("the pool broke" in note for note in result.notes)
        assert len(result.entries) > 5
