"""The tunings of a selector: once a key, one at a time on a device, in threads and processes, within their seconds."""

from __future__ import annotations

import subprocess
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest
from fakes import Blocks, DictStore, Doubling, TableTuner, call_of, child, key_of
from fakes_config import heuristic_reason, stored_world, world

from ejkernel.ops import PersistentCache, Tuner, autotune_recorded, record_invocation
from ejkernel.ops.config import tuning_budget

# forbid_reautotune.


def forget(w):
    """Drops the key from memory and disk, without a clear."""
    w.selector.cache._data.clear()
    w.selector.persistent.data.clear()


def test_a_second_tuning_of_a_key_is_an_error():
    """It names the key and the switch."""
    w = world()
    w.choose()
    forget(w)
    with pytest.raises(RuntimeError, match="forbid_reautotune") as caught:
        w.choose()

    assert all(part in str(caught.value) for part in w.key)
    assert w.tuner.calls == 1


def test_forbid_reautotune_false_allows_it():
    """With the switch off a key is tuned as often as it is missing."""
    w = world(forbid_reautotune=False)
    w.choose()
    forget(w)
    w.choose()

    assert w.tuner.calls == 2


def test_the_switch_can_be_assigned():
    """The attribute is read at each choice."""
    w = world()
    w.choose()
    forget(w)
    w.selector.forbid_reautotune = False

    assert w.choose() == Blocks(2)


def test_clearing_the_cache_lifts_it():
    """`cache.clear()` is how a user asks for a new tuning."""
    w = world(persist_autotune=False)
    w.choose()
    w.selector.cache.clear()
    w.choose()

    assert w.tuner.calls == 2


@pytest.mark.parametrize("kept", [True, False], ids=["stored", "in memory alone"])
def test_offline_tuning_lifts_it(kept):
    """An explicit tuning of recorded calls measures what was tuned, and stored, before."""
    w = world(persist_autotune=kept)
    w.choose()
    record_invocation(*w.key, w.kernel, w.inv.args, w.inv.kwargs)
    w.tuner.times = {1: 3, 2: 2, 4: 1}
    result = autotune_recorded(w.selector)

    assert [entry.cfg for entry in result.entries] == [Blocks(4)]
    assert w.tuner.calls == 2
    assert w.choose() == Blocks(4)


def test_another_key_is_not_forbidden():
    """Only the same key counts."""
    w = world()
    w.choose()
    w.choose(args=(jnp.ones(9),))

    assert w.tuner.calls == 2


# Threads and processes.


class CountingStore(DictStore):
    """Says when so many have looked."""

    def __init__(self, awaited):
        super().__init__()
        self.left = awaited
        self.all_looked = threading.Event()
        self.lock = threading.Lock()

    def get(self, *key):
        found = super().get(*key)
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.all_looked.set()
        return found


class WaitingTuner(TableTuner):
    """Does not finish before all threads have missed."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def autotune(self, *args):
        assert self.store.all_looked.wait(60)
        return super().autotune(*args)


@pytest.mark.parametrize("broken", [False, True], ids=["tuned", "failed"])
def test_ten_threads_share_one_tuning(broken):
    """Ten threads that ask for one new key at once get ten answers from one tuning, and at most one warning."""
    store = CountingStore(10)
    w = world(persistent=store, tuner=WaitingTuner(store))
    w.tuner.broken = broken
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda _: w.choose(), range(10)))

    assert answers == [Blocks(1 if broken else 2)] * 10
    assert w.tuner.calls == 1
    assert len(caught) == broken


def test_two_keys_are_tuned_by_two_threads():
    """A thread that tunes one key does not stop a hit of another."""
    w = world()
    w.selector.cache.put(*key_of(w.kernel, call_of(w.kernel, jnp.ones(3))), Blocks(4))
    answers = []

    class Asking(TableTuner):
        def autotune(self, *args):
            with ThreadPoolExecutor(1) as pool:
                answers.append(pool.submit(lambda: w.choose(args=(jnp.ones(3),))).result(60))
            return super().autotune(*args)

    w.selector.tuner = Asking()

    assert w.choose() == Blocks(2)
    assert answers == [Blocks(4)]


NESTED = """
import jax.numpy as jnp
from fakes import Doubling, TableTuner, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain

class Composed(TableTuner):
    def autotune(self, make_fn, args, kwargs, candidates):
        found = super().autotune(make_fn, args, kwargs, candidates)
        if len(self.offered) == 1:
            selector.choose(call_of(inner, jnp.ones(5)), inner)
        return found

outer, inner = Doubling((1, 2, 4)), Doubling((1, 2))
selector = ConfigSelectorChain(ConfigCache(), tuner=Composed())
print(selector.choose(call_of(outer), outer).size, selector.tuner.calls)
"""


def test_a_tuning_inside_a_tuning_does_not_wait_for_itself():
    """A tuner whose candidates call another kernel has that one tuned on the way."""
    with child(NESTED) as process:
        try:
            out, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            pytest.fail("the inner tuning waits for the outer one")

    assert out == "2 2\n"


PROCESS = """
import sys, time
import jax, numpy as np
from fakes import Blocks, Doubling, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Tuner

name, log = sys.argv[1:3]

def say(text):
    print(text, flush=True)

def work(run):
    with open(log, "a") as file:
        file.write(name + "\\n")
    if name == "first" and not said:
        said.append(1)
        say("timing")
        sys.stdin.readline()
    # Work, so that the tuning is still going on when the other process could begin.
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass
    return np.float32(2)

said = []

class Slow(Doubling):
    op_id = name
    def run(self, x, *, cfg):
        if cfg.size == 4 and not isinstance(x, (np.ndarray,)):
            say("last candidate traced")
        return x * jax.pure_callback(work, jax.ShapeDtypeStruct((), np.float32), np.int32(cfg.size))

kernel = Slow()
inv = call_of(kernel)
selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 3))
say("ready")
sys.stdin.readline()
selector.choose(inv, kernel)
say("chosen")
"""


def test_two_processes_tune_one_after_the_other(tmp_path):
    """On one device the runs of two processes' tunings do not mix."""
    log = tmp_path / "log"

    def expect(process, text):
        while (line := process.stdout.readline()) != text + "\n":
            assert line

    def go(process):
        process.stdin.write("go\n")
        process.stdin.flush()

    with child(PROCESS, "first", str(log)) as first, child(PROCESS, "second", str(log)) as second:
        expect(first, "ready")
        expect(second, "ready")
        go(first)
        expect(first, "timing")
        go(second)
        expect(second, "last candidate traced")
        go(first)
        expect(first, "chosen")
        expect(second, "chosen")
    runs = log.read_text().split()

    assert runs.count("first") > 3
    assert runs.count("second") > 3
    assert runs == sorted(runs)


def test_a_process_that_waited_takes_the_others_answer(tmp_path):
    """What another process stored while this one waited for its turn is not measured again."""
    path = tmp_path / "x.json"
    w = stored_world(tmp_path, tuner=TableTuner())
    other = PersistentCache(path, cfg_type=Blocks)

    class Late(Doubling):
        """The other process finishes while this one makes its candidates."""

        def candidate_cfgs(self, inv):
            other.put(*w.key, Blocks(4))
            return super().candidate_cfgs(inv)

    w.kernel = Late()

    assert w.choose() == Blocks(4)
    assert w.tuner.calls == 0
    assert w.selector.cache._data[w.key] == Blocks(4)


# Seconds.


def test_seconds_bound_the_tuning_of_a_process(monkeypatch):
    """Once the process has spent its seconds, heuristics serve, with the reason."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "5")
    monkeypatch.setattr(tuning_budget, "_spent", 4.0)
    w = world()
    tuned = w.choose()
    monkeypatch.setattr(tuning_budget, "_spent", 5.0)
    guessed = w.choose(args=(jnp.ones(9),))

    assert (tuned, guessed, w.choose()) == (Blocks(2), Blocks(1), Blocks(2))
    assert w.tuner.calls == 1


def test_the_reason_names_the_bound(monkeypatch):
    """A caller that gets a guess for lack of seconds is told so."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "0")
    w = world()
    w.choose()

    assert "EJKERNEL_OPS_TUNE_SECONDS" in heuristic_reason(w)


def test_a_tuning_spends_of_the_bound(monkeypatch):
    """What a tuning took counts against the seconds of the process, whatever tuner did it."""
    monkeypatch.setattr(tuning_budget, "_spent", 0.0)
    world().choose()

    assert tuning_budget.seconds_spent() > 0


def test_a_tuning_gets_what_is_left(monkeypatch):
    """Our own tuner is told to end when the process's seconds end."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "50")
    monkeypatch.setattr(tuning_budget, "_spent", 20.0)
    w = world(tuner=Tuner(1, 1))
    w.choose()

    assert w.tuner.record.budget_s == pytest.approx(30.0)


def test_offline_tuning_keeps_to_the_bound(monkeypatch):
    """Recorded calls are not tuned either once the seconds are spent."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "5")
    monkeypatch.setattr(tuning_budget, "_spent", 6.0)
    w = world()
    record_invocation(*w.key, w.kernel, w.inv.args, w.inv.kwargs)
    autotune_recorded(w.selector)

    assert w.tuner.calls == 0


def test_of_two_processes_that_measure_one_after_the_other_both_use_the_first_answer():
    """One may get its turn before the other has written what it found: its own answer is not written over that."""

    class Beside(TableTuner):
        """Another process's answer is written while this one measures."""

        def autotune(self, make_fn, args, kwargs, candidates):
            here.selector.persistent.put(*here.key, Blocks(4))
            return super().autotune(make_fn, args, kwargs, candidates)

    here = world(tuner=Beside())
    assert here.choose() == Blocks(4)
    assert here.kept() == (Blocks(4), Blocks(4))
    assert here.listener.last[1]["record"].stop == "settled"
