"""Tuning outside the program: what the registry saw, or what a lowered program holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    PersistentCache,
    Record,
    Trial,
    Tuner,
    abstractify,
    autotune_lowered,
    autotune_recorded,
    benchmark,
    device_fingerprint,
    label,
    record_invocation,
)

# Labels and names are read from compiled programs.
pytestmark = pytest.mark.usefixtures("own_text")


class Scale(Kernel):
    """Twice the argument; the cfg is a name."""

    op_id = "scale"
    version = "3"

    def run(self, x, *, cfg, shift=0.0):
        return x * 2 + shift

    def heuristic_cfg(self, inv):
        return "usual"

    def candidate_cfgs(self, inv):
        return ["usual", "fast", "odd"]


class Scripted(Tuner):
    """A tuner that measures nothing: the seconds of each tuning stand in a table."""

    def __init__(self, *tables):
        super().__init__()
        self.tables = list(tables)
        self.jobs = []

    def tune(self, job, **around):
        table = self.tables[min(len(self.jobs), len(self.tables) - 1)]
        self.jobs.append(job)
        trials = tuple(Trial(cfg, samples_s=(table[cfg],)) for cfg in dict.fromkeys(job.candidates))
        winner = min(range(len(trials)), key=lambda i: trials[i].seconds)
        return Record(**dict(job.about), trials=trials, winner=winner, heuristic=0)


FAST = {"usual": 3.0, "fast": 1.0, "odd": 2.0}
ODD = {"usual": 9.0, "fast": 8.0, "odd": 7.0}


def selecting(*tables, **settings):
    """A selector whose tuner reads tables."""
    return ConfigSelectorChain(ConfigCache(), tuner=Scripted(*(tables or (FAST,))), **settings)


def record(*args, kernel=None, **kwargs):
    """Records a call by its shapes, as the executor does, and returns its key."""
    kernel = kernel or Scale()
    call = Invocation(kernel.op_id, args, kwargs)
    key = (device_fingerprint(), f"{kernel.op_id}@v{kernel.version}", call.call_key)
    record_invocation(*key, kernel, abstractify(args), abstractify(kwargs))
    return key


def test_every_recorded_call_is_tuned():
    """Each call that the registry saw has an entry with its winner."""
    keys = {record(jnp.ones(4)), record(jnp.ones((2, 3)), shift=1.0)}
    result = autotune_recorded(selecting())
    assert result.device == device_fingerprint()
    assert {(result.device, e.op_id_v, e.call_key) for e in result.entries} == keys
    assert [e.cfg for e in result.entries] == ["fast", "fast"]


def test_nothing_recorded_gives_nothing():
    """Without recorded calls the result is empty."""
    assert list(autotune_recorded(selecting()).entries) == []


def test_calls_of_other_devices_are_left_alone():
    """A call that was recorded for other hardware is not tuned on this."""
    record_invocation("tpu|TPU v5", "scale@v3", "00", Scale(), (jax.ShapeDtypeStruct((4,), jnp.float32),), {})
    assert list(autotune_recorded(selecting()).entries) == []


def test_what_was_tuned_is_kept_under_the_recorded_key(tmp_path):
    """Memory and disk answer the recorded key afterwards."""
    key = record(jnp.ones(4))
    store = PersistentCache("scale", path=tmp_path / "store.json")
    selector = selecting(persistent=store)
    autotune_recorded(selector)
    assert selector.cache.get(*key) == "fast"
    assert store.get(*key) == "fast"


def test_a_recorded_call_is_answered_from_memory_afterwards():
    """The call itself, made later, is not tuned again."""
    record(jnp.ones(4))
    selector = selecting()
    autotune_recorded(selector)
    assert selector.choose(Invocation("scale", (jnp.zeros(4),), {}), Scale()) == "fast"
    assert len(selector.tuner.jobs) == 1


def test_offline_tuning_may_be_repeated():
    """Asking for it again tunes again, although a second tuning is otherwise forbidden."""
    record(jnp.ones(4))
    selector = selecting(FAST, ODD)
    autotune_recorded(selector)
    assert [e.cfg for e in autotune_recorded(selector).entries] == ["odd"]


def test_of_several_repetitions_the_fastest_winner_stays():
    """Each call is tuned as often as asked, and the fastest of the winners is its cfg."""
    record(jnp.ones(4))
    selector = selecting(FAST, ODD)
    result = autotune_recorded(selector, repetition_count=2)
    assert len(selector.tuner.jobs) == 2
    assert [e.cfg for e in result.entries] == ["fast"]


def test_the_cache_agrees_with_the_result_after_repetitions(tmp_path):
    """What is kept in memory and on disk is what the result says."""
    key = record(jnp.ones(4))
    store = PersistentCache("scale", path=tmp_path / "store.json")
    selector = selecting(FAST, ODD, persistent=store)
    (entry,) = autotune_recorded(selector, repetition_count=2).entries
    assert selector.cache.get(*key) == entry.cfg
    assert store.get(*key) == entry.cfg


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_a_repetition_count_that_means_nothing_is_refused(count):
    """Anything but a whole number of at least 1 is a ValueError."""
    with pytest.raises(ValueError, match="repetition_count"):
        autotune_recorded(selecting(), repetition_count=count)


def test_progress_is_shown_where_it_is_asked_for(capsys):
    """One line a call says which of how many, on the error stream; silence otherwise."""
    key = record(jnp.ones(4))
    autotune_recorded(selecting(), show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "1 of 1" in shown.err
    assert key[2] in shown.err
    autotune_recorded(selecting())
    assert capsys.readouterr() == ("", "")


def test_a_result_can_be_used_as_an_overlay():
    """The cfgs of a result are in force inside `with`, for a selector that never tuned."""
    key = record(jnp.ones(4))
    result = autotune_recorded(selecting())
    other = ConfigCache()
    with result:
        assert other.get(*key) == "fast"
    assert other.get(*key) is None


def test_recorded_shapes_are_really_measured():
    """The tuner of the package measures a call of which only shapes are known."""
    record(jnp.ones((8, 8)), shift=1.0)
    seen = []

    class Watched(Tuner):
        def tune(self, job, **around):
            seen.append(super().tune(job, **around))
            return seen[-1]

    selector = ConfigSelectorChain(ConfigCache(), tuner=Watched(iters=1))
    (entry,) = autotune_recorded(selector).entries
    assert entry.cfg in ("usual", "fast", "odd")
    assert [t.status for t in seen[0].trials] == ["ok", "ok", "ok"]
    assert all(t.samples_s for t in seen[0].trials)


def test_a_call_that_cannot_be_measured_has_its_heuristic():
    """A recorded call with integer arrays and no example inputs gets the heuristic cfg, and nothing is stored."""
    record(jnp.ones(4), shift=jnp.ones(4, jnp.int32))
    selector = selecting()
    (entry,) = autotune_recorded(selector).entries
    assert entry.cfg == "usual"
    assert selector.cache.size() == 0


class Renamed(Scale):
    """A kernel that builds its own keys."""

    def key_builder(self, inv):
        return f"rank {inv.args[0].ndim}"


def test_a_built_key_stays():
    """A call whose kernel builds keys is tuned and kept under the built key."""
    record_invocation(device_fingerprint(), "scale@v3", "rank 2", Renamed(), abstractify((jnp.ones((2, 2)),)), {})
    selector = selecting()
    (entry,) = autotune_recorded(selector).entries
    assert entry.call_key == "rank 2"
    assert selector.cache.get(device_fingerprint(), "scale@v3", "rank 2") == "fast"


def labelled_program(*keys):
    """A lowered program with these calls in it."""

    def fn(x):
        for _, op_id, call_key in keys:
            with jax.named_scope(label(op_id, call_key)):
                x = jnp.sin(x)
        return x

    return jax.jit(fn).lower(jnp.ones(4))


def test_the_calls_of_a_lowered_program_are_tuned():
    """Of the recorded calls those in the program are tuned, and no others."""
    inside, outside = record(jnp.ones(4)), record(jnp.ones(5))
    selector = selecting()
    result = autotune_lowered(selector, labelled_program(inside))
    assert [(e.op_id_v, e.call_key, e.cfg) for e in result.entries] == [(*inside[1:], "fast")]
    assert selector.cache.get(*outside) is None


def test_the_calls_of_a_compiled_program_are_tuned():
    """A compiled program will do as well."""
    key = record(jnp.ones(4))
    result = autotune_lowered(selecting(), labelled_program(key).compile())
    assert [e.call_key for e in result.entries] == [key[2]]


def test_calls_that_were_never_recorded_are_left_out():
    """A label alone does not tell shapes: without a record there is nothing to tune."""
    result = autotune_lowered(selecting(), labelled_program((device_fingerprint(), "scale@v3", "0" * 16)))
    assert list(result.entries) == []


def test_benchmark_gives_seconds():
    """A benchmark is a positive number of seconds."""
    seconds = benchmark(lambda x: x @ x, jnp.ones((16, 16)))
    assert isinstance(seconds, float)
    assert seconds > 0


def test_benchmark_passes_arguments_and_keywords():
    """Arrays are traced; static arguments and keywords reach the function as they are."""
    seen = []

    def fn(x, power, *, mode, bias):
        seen.append((isinstance(x, jax.core.Tracer), power, mode, isinstance(bias, jax.core.Tracer)))
        return x**power + bias

    benchmark(fn, jnp.ones(4), 3, mode="fast", bias=np.ones(4, np.float32), warmup=0, iters=1)
    assert seen == [(True, 3, "fast", True)]


def test_benchmark_runs_as_often_as_asked():
    """The function is run `warmup` and then `iters` times."""
    runs = []

    def fn(x):
        return x + jax.pure_callback(lambda: runs.append(1) or np.float32(0), jax.ShapeDtypeStruct((), np.float32))

    benchmark(fn, jnp.ones(4), warmup=2, iters=3)
    assert len(runs) == 5


@pytest.mark.parametrize("settings", [{"iters": 0}, {"warmup": -1}, {"iters": 1.5}])
def test_benchmark_refuses_counts_that_mean_nothing(settings):
    """A count that means nothing is a ValueError that names it."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        benchmark(lambda x: x, jnp.ones(4), **settings)
