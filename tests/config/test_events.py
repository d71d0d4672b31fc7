"""Events as log records and as counters."""

from __future__ import annotations

import logging
import threading

import jax.numpy as jnp
import pytest
from fakes import Doubling, call_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Counters,
    Tuner,
    counters,
    overlay_cache,
)
from ejkernel.ops.core.errors import NoConfigError

X = jnp.ones(8)


def selector(**more):
    """One that tunes fast."""
    return ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 1), **more)


def counted(act):
    """What an act adds to the counters, without what it does not touch."""
    before = counters()
    act()
    return {name: value for name, value in (counters() - before).as_dict().items() if value}


def test_each_tier_is_counted(tmp_path):
    """Override, overlay, autotune, memory, persistent, heuristics and error."""
    from ejkernel.ops import PersistentCache

    kernel = Doubling((1, 2))
    store = PersistentCache("", tmp_path / "op.json")
    chain = selector(persistent=store)
    inv = call_of(kernel, X)
    tuned = counted(lambda: chain.choose(inv, kernel))
    assert tuned.pop("tuning_seconds") > 0
    assert tuned == {"autotune": 1}
    assert counted(lambda: chain.choose(inv, kernel)) == {"memory": 1}
    assert counted(lambda: selector(persistent=store).choose(inv, kernel)) == {"persistent": 1}
    from dataclasses import replace

    assert counted(lambda: chain.choose(replace(inv, override_cfg=2), kernel)) == {"override": 1}
    with overlay_cache({chain.cache.keys()[0]: 2}):
        assert counted(lambda: chain.choose(inv, kernel)) == {"overlay": 1}
    off = selector(policy=AutotunePolicy(allow_autotune=False))
    assert counted(lambda: off.choose(inv, kernel)) == {"heuristics": 1}
    nothing = selector(policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False))

    def fails():
        with pytest.raises(NoConfigError):
            nothing.choose(inv, kernel)

    assert counted(fails) == {"error": 1}


def test_threads_lose_no_count():
    """Ten of them, each a hundred choices."""
    kernel = Doubling((1, 2))
    chain, inv = selector(), call_of(kernel, X)
    chain.choose(inv, kernel)

    def work():
        for _ in range(100):
            chain.choose(inv, kernel)

    def act():
        threads = [threading.Thread(target=work) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert counted(act) == {"memory": 1000}


def test_a_failed_tuning_is_counted_apart():
    """The heuristic cfg that serves then is counted as such."""

    class Failing(Doubling):
        def run(self, x, *, cfg):
            raise ValueError("no")

    kernel = Failing((1, 2))
    chain = selector()

    def act():
        with pytest.warns(UserWarning, match="no"):
            chain.choose(call_of(kernel, X), kernel)

    found = counted(act)
    assert found.pop("tuning_seconds") > 0
    assert found == {"failed_tunings": 1, "heuristics": 1}


def test_counters_are_values():
    """Equal, subtracted, and plain data for a metrics library."""
    assert Counters(memory=3) - Counters(memory=1) == Counters(memory=2)
    assert set(Counters().as_dict()) >= {"override", "overlay", "memory", "persistent", "autotune", "heuristics"}


def test_events_are_log_records_with_their_data(caplog):
    """DEBUG for hits, INFO for tunings and guesses, WARNING for errors; `record.ejkernel` has what a listener gets."""
    kernel = Doubling((1, 2))
    chain, inv = selector(), call_of(kernel, X)
    with caplog.at_level("DEBUG", logger="ejkernel.ops"):
        cfg = chain.choose(inv, kernel)
        chain.choose(inv, kernel)
        selector(policy=AutotunePolicy(allow_autotune=False)).choose(inv, kernel)
        nothing = selector(policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False))
        with pytest.raises(NoConfigError):
            nothing.choose(inv, kernel)

    told = [(r.levelname, r.ejkernel["event"]) for r in caplog.records if hasattr(r, "ejkernel")]
    assert told == [
        ("DEBUG", "autotune_start"),
        ("INFO", "autotune_finish"),
        ("DEBUG", "cache_hit"),
        ("INFO", "heuristics"),
        ("WARNING", "error"),
    ]
    hit = caplog.records[2]
    assert (hit.ejkernel["op_id"], hit.ejkernel["level"], hit.ejkernel["cfg"]) == ("doubling@v3", "memory", cfg)
    assert hit.getMessage() == f"doubling@v3 {hit.ejkernel['call_key']}: {cfg} from memory"
    assert caplog.records[3].getMessage().endswith("(size=1) from heuristics: off (allow_autotune=False)")


def test_who_does_not_ask_for_records_sees_none(capsys):
    """Not even of errors, which are raised as well."""
    assert logging.getLogger("ejkernel.ops").handlers
    kernel = Doubling((1, 2))
    nothing = selector(policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False))
    with pytest.raises(NoConfigError):
        nothing.choose(call_of(kernel, X), kernel)
    assert capsys.readouterr() == ("", "")
