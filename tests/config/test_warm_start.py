"""Where a search starts: what a store knows of other calls and other devices of the same operation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from fakes import call_of, key_of

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Kernel, PersistentCache, Tuner, make_pack
from ejkernel.ops.config.warm_start import warm_start_configs
from ejkernel.ops.core.description import described
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.core.request import ask
from ejkernel.ops.store.layered import LayeredStore, MemoryStore
from ejkernel.ops.store.store import StoredEntry
from ejkernel.ops.tuning.search.effort import FEW


@dataclass(frozen=True)
class Tiles:
    """A cfg with two fields."""

    m: int
    n: int


SIZES = (1, 2, 4, 8, 16, 32)
CFGS = [Tiles(m, n) for m, n in itertools.product(SIZES, SIZES)]


class Large(Kernel[Tiles, object]):
    """A kernel with more candidates than are raced without a search."""

    op_id = "large"
    cfg_type = Tiles

    def run(self, x, *, cfg):
        return x * 2.0

    def heuristic_cfg(self, inv):
        return CFGS[0]

    def candidate_cfgs(self, inv):
        return CFGS


class Judging(Large):
    """One that knows which cfgs are valid."""

    def valid_cfg(self, inv, cfg):
        return cfg.m < 100 or "m is too large"


def asked(kernel, x):
    return ask(call_of(kernel, x), kernel, "forward")


def stored(store, kernel, x, cfg, *, device=None, behind=()):
    """Keeps a cfg as if a search on that device had found it for this call."""
    inv = call_of(kernel, x)
    own, op, call = key_of(kernel, inv)
    timed = [Trial(c, samples_s=(1.0 + i,)) for i, c in enumerate([cfg, *behind])]
    record = Record(trials=tuple(timed), winner=0, space=36)
    entry = StoredEntry(cfg, source="autotune", summary=record.summary(), call=described(inv))
    store.keep((device or own, op, call), entry)


def test_the_nearest_calls_come_first():
    """By how often a size must be doubled; the call's own entry is not among them."""
    store, kernel = MemoryStore(), Large()
    for size, cfg in ((8, CFGS[1]), (16, CFGS[2]), (1024, CFGS[3]), (64, CFGS[4])):
        stored(store, kernel, jnp.ones(size), cfg)

    assert warm_start_configs([store], asked(kernel, jnp.ones(8)), CFGS) == [CFGS[2], CFGS[4], CFGS[3]]


def test_the_same_call_on_a_sibling_device_comes_before_distant_calls():
    """And a device of the same platform before one of another."""
    store, kernel, x = MemoryStore(), Large(), jnp.ones(8)
    stored(store, kernel, jnp.ones(4096), CFGS[1])
    stored(store, kernel, x, CFGS[2], device="gpu|other")
    stored(store, kernel, x, CFGS[3], device="cpu|other")

    assert warm_start_configs([store], asked(kernel, x), CFGS) == [CFGS[3], CFGS[2], CFGS[1]]


def test_the_next_best_of_a_search_are_seeds_too():
    """The best of each relative, then the second of each; those that are much like the best are left out."""
    store, kernel, x = MemoryStore(), Large(), jnp.ones(8)
    one, other = [Tiles(1, 2), Tiles(1, 4), Tiles(2, 8)], [Tiles(4, 4), Tiles(8, 8)]
    stored(store, kernel, x, one[0], device="cpu|one", behind=one[1:])
    stored(store, kernel, x, other[0], device="cpu|other", behind=other[1:])

    assert warm_start_configs([store], asked(kernel, x), CFGS) == [one[0], other[0], one[2], other[1]]


def test_other_operations_and_versions_are_no_kin():
    """Only entries of the same op_id, version included, count."""
    store, kernel, x = MemoryStore(), Large(), jnp.ones(8)
    _, op, call = key_of(kernel, call_of(kernel, x))
    store.keep(("cpu|other", "small@v0", call), StoredEntry(CFGS[1]))
    store.keep(("cpu|other", op.replace("v0", "v1"), call), StoredEntry(CFGS[2]))

    assert warm_start_configs([store], asked(kernel, x), CFGS) == []


@pytest.mark.parametrize(("kernel", "found"), [(Large(), []), (Judging(), [Tiles(64, 1)])], ids=["silent", "judging"])
def test_only_what_may_run_here_is_a_seed(kernel, found):
    """A cfg that is no candidate of this call needs the kernel's own word that it is valid."""
    store, x = MemoryStore(), jnp.ones(8)
    stored(store, kernel, x, Tiles(64, 1), device="cpu|one")
    stored(store, kernel, x, Tiles(128, 1), device="cpu|two")

    assert warm_start_configs([store], asked(kernel, x), CFGS) == found


def test_what_does_not_fit_the_kernel_is_passed_over():
    """An entry of another shape is no seed, and no error."""
    store, kernel, x = MemoryStore(), Large(), jnp.ones(8)
    _, op, call = key_of(kernel, call_of(kernel, x))
    store.keep(("cpu|one", op, call), StoredEntry({"block": 1}))
    store.keep(("cpu|two", op, call), StoredEntry({"m": 2, "n": 4}, summary={"next": "odd"}))

    assert warm_start_configs([store], asked(kernel, x), CFGS) == [Tiles(2, 4)]


def test_looking_for_kin_promotes_nothing():
    """An entry of a shared layer that is only looked at does not become the user's own."""
    own, shared, kernel, x = MemoryStore(), MemoryStore(), Large(), jnp.ones(8)
    stored(shared, kernel, x, CFGS[5], device="cpu|other")

    assert warm_start_configs([LayeredStore(own, shared)], asked(kernel, x), CFGS) == [CFGS[5]]
    assert own.keys() == []


def test_no_store_is_no_kin():
    """Then a search starts from the heuristic alone."""
    assert warm_start_configs([], asked(Large(), jnp.ones(8)), CFGS) == []


class Keeping(Tuner):
    """A tuner that keeps its job."""

    def tune(self, job, **around):
        self.job = job
        return super().tune(job, **around)


def test_a_selector_gives_its_tuner_what_the_store_knows(tmp_path):
    """The winner of one shape is a seed of the next one's search, through the file on disk."""
    kernel, tuner = Large(), Keeping(0, 1, effort="exhaustive")
    cache = PersistentCache("large", tmp_path / "large.json")
    stored(cache, kernel, jnp.ones(16), CFGS[20])
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=cache)
    selector.choose(call_of(kernel, jnp.ones(8)), kernel)

    assert len(CFGS) > FEW
    assert list(tuner.job.seeds) == [CFGS[20]]


def test_packs_have_kin_too(tmp_path, monkeypatch):
    """Behind the user's own store, which counts where both know a call."""
    kernel, tuner = Large(), Keeping(0, 1, effort="exhaustive")
    shipped, own = MemoryStore(), PersistentCache("large", tmp_path / "large.json")
    stored(shipped, kernel, jnp.ones(16), CFGS[20])
    stored(shipped, kernel, jnp.ones(32), CFGS[21])
    stored(own, kernel, jnp.ones(32), CFGS[22])
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", make_pack(tmp_path / "pack.json", shipped).path)
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=own)
    selector.choose(call_of(kernel, jnp.ones(8)), kernel)

    assert list(tuner.job.seeds) == [CFGS[20], CFGS[22]]
