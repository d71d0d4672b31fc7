"""The cache of a process: what is put comes back, from any thread."""

from __future__ import annotations

import threading

import pytest
from fakes import DictStore, Doubling, TableTuner, call_of, key_of

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, overlay_cache
from ejkernel.ops.core.key import Key

KEY = ("gpu|NVIDIA H200", "matmul@v2", "9f3c52e01b7ad844")


def test_an_unknown_key_is_none():
    """A key that was never put has no cfg."""
    assert ConfigCache().get(*KEY) is None


def test_what_was_put_comes_back():
    """`get` gives the very object that `put` was given."""
    cache = ConfigCache()
    cfg = {"block": 128}
    cache.put(*KEY, cfg)

    assert cache.get(*KEY) is cfg


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_part_of_the_key_counts(place):
    """Two keys that differ in the device, the operation or the call are two entries."""
    cache = ConfigCache()
    other = tuple(part + "x" if i == place else part for i, part in enumerate(KEY))
    cache.put(*KEY, "one")
    cache.put(*other, "other")

    assert (cache.get(*KEY), cache.get(*other)) == ("one", "other")


def test_the_later_put_wins():
    """A second `put` under one key replaces the first and adds no entry."""
    cache = ConfigCache()
    cache.put(*KEY, "old")
    cache.put(*KEY, "new")

    assert (cache.get(*KEY), cache.size()) == ("new", 1)


def test_clear_forgets_everything():
    """After `clear` there is no entry, no key and no answer."""
    cache = ConfigCache()
    cache.put(*KEY, "cfg")
    cache.clear()

    assert (cache.get(*KEY), cache.size(), cache.keys()) == (None, 0, [])


def test_size_counts_the_entries():
    """`size` is the number of keys that have a cfg."""
    cache = ConfigCache()
    for number in range(5):
        cache.put("dev", "op", str(number), number)

    assert cache.size() == 5


def test_keys_are_a_list_of_tuples():
    """`keys` gives plain `(device, op_id, call_key)` tuples in a list of its own."""
    cache = ConfigCache()
    cache.put(*KEY, "cfg")
    keys = cache.keys()
    keys.append(("mine", "alone", "here"))

    assert isinstance(keys, list)
    assert all(isinstance(key, tuple) for key in keys)
    assert cache.keys() == [KEY]


def test_none_is_no_entry_for_get_but_false_and_zero_are_cfgs():
    """A cfg that is false in a condition comes back all the same."""
    cache = ConfigCache()
    cache.put("dev", "op", "zero", 0)
    cache.put("dev", "op", "empty", {})

    assert (cache.get("dev", "op", "zero"), cache.get("dev", "op", "empty")) == (0, {})


def test_data_is_there_for_inspection():
    """`_data` holds the entries under their plain keys."""
    cache = ConfigCache()
    cache.put(*KEY, "cfg")

    assert dict(cache._data) == {KEY: "cfg"}


def test_threads_may_use_one_cache_at_once():
    """Puts, gets, keys and clears from many threads raise nothing, and the last puts are all there."""
    cache = ConfigCache()
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def hammer(number: int) -> None:
        try:
            start.wait()
            for turn in range(300):
                cache.put("dev", f"op{number}", str(turn), (number, turn))
                assert cache.get("dev", f"op{number}", str(turn)) in ((number, turn), None)
                assert all(len(key) == 3 for key in cache.keys())
                assert cache.size() >= 0
                if number == 0 and turn == 100:
                    cache.clear()
            start.wait()
            for turn in range(300):
                cache.put("dev", f"op{number}", str(turn), (number, turn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert cache.size() == 8 * 300
    assert all(cache.get("dev", f"op{number}", "299") == (number, 299) for number in range(8))


def test_a_guess_does_not_show_in_the_cache():
    """A heuristic answer is no entry: not for `get`, `size`, `keys` or `_data`."""
    cache = ConfigCache()
    kernel = Doubling()
    inv = call_of(kernel)
    selector = ConfigSelectorChain(
        cache, AutotunePolicy(allow_autotune=False), TableTuner(), DictStore(), persist_autotune=True
    )
    selector.choose(inv, kernel)

    assert (cache.get(*key_of(kernel, inv)), cache.size(), cache.keys(), cache._data) == (None, 0, [], {})


def test_an_entry_has_what_it_was_tuned_for_and_its_call():
    """`put` knows neither; overlays do not stand before it."""
    cache = ConfigCache()
    cache.keep_entry(Key(*KEY), "tuned", objective="forward", call={"x": "float32[8]"})
    with overlay_cache({KEY: "overlay"}):
        assert cache.entry(Key(*KEY)) == ("tuned", "forward", {"x": "float32[8]"})
    cache.put(*KEY, "by hand")
    assert cache.entry(Key(*KEY)).objective is None
    assert [(key, entry.cfg) for key, entry in cache.entries()] == [(Key(*KEY), "by hand")]


def test_clearing_begins_a_new_generation():
    """A put does not."""
    cache = ConfigCache()
    cache.put(*KEY, "cfg")
    before = cache.generation
    cache.clear()
    assert (cache.generation, cache.entry(Key(*KEY))) == (before + 1, None)
