"""Many processes and threads, forks, spawns and kill -9: nothing acknowledged is lost."""

from __future__ import annotations

import multiprocessing
import threading

import campaigns
import pytest
from fakes_store import cfgs, entry_files, keep, never_small, run_script, store, value
from thinning import AT_LENGTH


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Runs one campaign in an interpreter of its own and says what it counted."""
    monkeypatch.setenv("CAMPAIGN_FOLDER", str(tmp_path))

    def run(call):
        found = run_script(f"import campaigns, json\nprint(json.dumps(campaigns.{call}))")
        print(f"\n{call}: {found}")
        return found

    return run


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_processes_that_put_different_keys_lose_nothing(campaign, large):
    """Four processes put at once, and every put is there and in the file."""
    found = campaign(f"together(4, 25, one_key=False, large={large})")

    assert (found["acknowledged"], found["lost"], found["in file"], found["ended well"]) == (100, 0, 100, 4)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_processes_that_put_one_key_agree_on_the_newest(campaign, large):
    """The answer is the last put of one of them, and no process ever saw an older one of its own."""
    found = campaign(f"together(4, 25, one_key=True, large={large})")

    assert (found["acknowledged"], found["lost"], found["in file"], found["ended well"]) == (100, 0, 1, 4)


@AT_LENGTH
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("one_key", [False, True], ids=["different keys", "one key"])
def test_eight_processes_with_200_puts_each_lose_nothing(campaign, one_key, large):
    """The same at length."""
    found = campaign(f"together(8, 200, one_key={one_key}, large={large})")

    assert (found["acknowledged"], found["lost"], found["ended well"]) == (1600, 0, 8)
    assert found["in file"] == (1 if one_key else 1600)


def test_threads_of_two_caches_lose_nothing(tmp_path):
    """Threads that share two caches on one file: every put is there for all of them."""
    caches = [store(tmp_path), store(tmp_path)]
    start = threading.Barrier(8)

    def work(who):
        start.wait()
        for number in range(10):
            keep(caches[who % 2], f"{who}-{number}", number)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(value(cache, f"{who}-{n}") == n for cache in caches for who in range(8) for n in range(10))
    # A thread that found the lock taken left its entry to the one that held it.
    assert len(cfgs(caches[0].path)) == 80


def test_forks_while_threads_put_lose_nothing(campaign):
    """Children that were forked in the middle of puts go on with the cache that they were born with."""
    found = campaign("forks(3)")

    assert (found["acknowledged by children"], found["lost"], found["in file"], found["ended well"]) == (24, 0, 0, 8)


FIRST_PUT = """
import json, sys
from pathlib import Path
from fakes_store import keep, store
cache = store(Path(sys.argv[1]))
before = set(sys.modules)
keep(cache, "first", 1)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_first_put_imports_nothing(tmp_path):
    """A child that is forked while another thread imports waits for ever when it needs the same module."""
    assert run_script(FIRST_PUT, str(tmp_path)) == []


@AT_LENGTH
def test_many_puts_of_forked_children_lose_nothing(campaign):
    """The same at length."""
    found = campaign("forks(100)")

    assert (found["acknowledged by children"], found["lost"], found["ended well"]) == (800, 0, 8)


def spawn(path, processes, puts):
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=campaigns.spawned, args=(path, who, puts)) for who in range(processes)]
    for child in children:
        child.start()
    return children


def test_spawned_processes_lose_nothing(tmp_path):
    """Fresh interpreters put while this process does."""
    mine = store(tmp_path)
    children = spawn(mine.path, 2, 5)
    number = 0
    while any(child.is_alive() for child in children) and number < 200:
        keep(mine, f"mine-{number}", number)
        number += 1
    for child in children:
        child.join()

    assert [child.exitcode for child in children] == [0, 0]
    assert all(value(mine, f"{who}-{n}") == n for who in range(2) for n in range(5))
    assert all(value(store(tmp_path), f"mine-{n}") == n for n in range(number))


@AT_LENGTH
def test_eight_spawned_processes_lose_nothing(tmp_path):
    """The same at length."""
    children = spawn(str(tmp_path / "ops.json"), 8, 50)
    for child in children:
        child.join()
    fresh = store(tmp_path)
    lost = sum(value(fresh, f"{who}-{n}") != n for who in range(8) for n in range(50))
    print(f"\nspawned: 8 processes x 50 puts, lost {lost}")

    assert [child.exitcode for child in children] == [0] * 8
    assert lost == 0


KINDS = ["put into a small store", "put into a large store", "fold"]


@pytest.mark.one_leg
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_file_operation_loses_nothing(campaign, kind):
    """A process killed right before each operation of a put or a fold leaves everything acknowledged."""
    found = campaign(f"kills({kind!r}, late=False, before=2)")

    assert (found["lost"], found["broken"]) == (0, 0)
    assert found["rounds"] >= 10


@AT_LENGTH
def test_200_kills_at_every_file_operation_lose_nothing(campaign):
    """Before and after every operation of puts and folds of several sizes; the counts are of rounds inside each."""
    found = [
        campaign(f"kills({kind!r}, late={late}, before={before})")
        for kind in KINDS
        for late in (False, True)
        for before in (1, 6)
    ]
    inside_put = sum(each["rounds"] for each in found if each["kind"] != "fold")
    inside_fold = sum(each["rounds"] for each in found if each["kind"] == "fold")
    lost = sum(each["lost"] for each in found)
    print(f"\nkill -9: {inside_put} rounds inside put, {inside_fold} inside fold, lost {lost}")

    assert inside_put >= 50
    assert inside_fold >= 50
    assert inside_put + inside_fold >= 200
    assert lost == sum(each["broken"] for each in found) == 0


@pytest.mark.one_leg
def test_kills_at_any_moment_lose_nothing(campaign):
    """A process killed from outside while it puts and folds leaves everything acknowledged."""
    found = campaign("random_kills(10, seed=1)")

    assert (found["lost"], found["broken"]) == (0, 0)
    assert found["acknowledged"] >= 10


@AT_LENGTH
def test_200_kills_at_any_moment_lose_nothing(campaign):
    """The same at length, in one store."""
    found = campaign("random_kills(200, seed=2)")

    assert (found["rounds"], found["lost"], found["broken"]) == (200, 0, 0)


@pytest.mark.one_leg
def test_puts_of_a_second_process_at_every_operation_of_a_fold_are_kept(campaign):
    """Whenever another process puts during a fold, nothing is lost, and what it replaced stays replaced."""
    found = campaign("puts_during_a_fold()")

    assert found["lost"] == 0
    assert found["rounds"] >= 20


@pytest.mark.one_leg
def test_puts_beside_a_process_that_always_folds_are_kept(campaign):
    """Two processes put while a third folds without a break."""
    found = campaign("folds_and_puts(50)")

    assert (found["acknowledged"], found["lost"], found["in file"]) == (100, 0, 100)


@AT_LENGTH
def test_many_puts_beside_a_process_that_always_folds_are_kept(campaign):
    """The same at length."""
    found = campaign("folds_and_puts(800)")

    assert (found["acknowledged"], found["lost"], found["in file"]) == (1600, 0, 1600)


HOLDER = """
import json, os, sys, filelock
from fakes_store import forked, kill_myself
def hold():
    filelock.FileLock(sys.argv[1], timeout=0).acquire()
    kill_myself()
print(json.dumps(forked(hold)))
"""


def test_a_lock_of_a_killed_process_heals(tmp_path):
    """A process killed while it held the lock does not keep the next one from folding."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    assert run_script(HOLDER, cache.path + ".d/fold.lock") == -9

    keep(cache, "two", 2)
    assert set(cfgs(cache.path)) == {"one", "two"}


EXITING = """
import json, sys
from pathlib import Path
from fakes_store import keep, store
from ejkernel.ops.store import entry_reader
entry_reader.SMALL = -1
held = store(Path(sys.argv[1]))
keep(held, "held", 1)
keep(store(Path(sys.argv[1])), "dropped", 2)
print(json.dumps("done"))
"""


def test_a_process_that_ends_folds_what_it_put(tmp_path):
    """Without a close the file is up to date when the process has ended, also for caches that were dropped before."""
    run_script(EXITING, str(tmp_path))

    assert cfgs(tmp_path / "ops.json") == {"held": 1, "dropped": 2}
    assert entry_files(tmp_path / "ops.json") == []


def test_a_cache_that_nobody_holds_is_gone(tmp_path, monkeypatch):
    """Waiting for the end of the process does not keep a cache in memory."""
    import gc
    import weakref

    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    seen = weakref.ref(cache)
    del cache
    gc.collect()

    assert seen() is None
    assert value(store(tmp_path), "one") == 1
