"""What the processes of `ranks.py` run: each program is a list of scenarios with keys of their own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from fakes import Blocks, Doubling, Listener, call_of, key_of
from fakes_remote import MemoryObjects, remote, writing
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    OpsError,
    PersistentCache,
    device_fingerprint,
    explain,
    overlay_cache,
)
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.layered import MemoryStore, ReadOnlyStore
from ejkernel.ops.store.store import StoredEntry

# The heuristic cfg, then one that each of four ranks calls the fastest.
SIZES = (1, 2, 4, 8, 16)


class Rank:
    """This process."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["RANKS"])
        self.folder = Path(os.environ["FOLDER"])

    def say(self, scenario: str, **data: Any) -> None:
        """Writes down what came of a scenario."""
        with (self.folder / f"said-{self.rank}").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"scenario": scenario, **data}) + "\n")

    def raise_flag(self, name: str) -> None:
        (self.folder / f"flag-{name}").touch()

    def wait_for(self, *names: str) -> None:
        """Waits for flags of other processes."""
        deadline = time.monotonic() + 300
        while not all((self.folder / f"flag-{name}").exists() for name in names):
            assert time.monotonic() < deadline, f"rank {self.rank} waited in vain for {names}"
            time.sleep(0.01)

    def meet(self, name: str) -> None:
        """All ranks are here."""
        self.raise_flag(f"{name}-{self.rank}")
        self.wait_for(*(f"{name}-{rank}" for rank in range(self.ranks)))

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]


class RankTuner:
    """Finds another winner in every rank, at once or after what it is told to do before."""

    def __init__(self, rank: Rank, before: Any = None) -> None:
        self.rank = rank
        self.before = before
        self.calls = 0

    def autotune(self, make_fn, args, kwargs, candidates):
        self.calls += 1
        if self.before is not None:
            self.before()
        offered = list(candidates)
        return offered[(self.rank.rank + 1) % len(offered)]


def selector_of(rank: Rank, before: Any = None, **options: Any) -> ConfigSelectorChain:
    tuner = RankTuner(rank, before)
    return ConfigSelectorChain(ConfigCache(), tuner=tuner, on_event=Listener(), **options)


def size_of(selector: ConfigSelectorChain, shape: int, kernel: Kernel | None = None) -> int:
    kernel = kernel or Doubling(SIZES)
    return selector.choose(call_of(kernel, jnp.ones(shape)), kernel).size


def row(shape: int) -> dict[str, Any]:
    """The report's row for a call."""
    from ejkernel.ops import agreement_report

    call_key = call_of(Doubling(SIZES), jnp.ones(shape)).call_key
    found = [row for row in agreement_report().agreed if row.key.call_key == call_key]
    assert len(found) == 1
    return {"process": found[0].process, "tier": found[0].tier, "why": found[0].why, "waited": dict(found[0].waited)}


# Scenarios that end well.


def plain(rank: Rank) -> dict[str, Any]:
    selector = selector_of(rank)
    size = size_of(selector, 100)
    again = size_of(selector, 100)
    rank.meet("plain")
    return {"size": size, "again": again, "tuned": selector.tuner.calls, "row": row(100), "in memory": _sizes(selector)}


def _sizes(selector: ConfigSelectorChain) -> list[int]:
    return [cfg.size for cfg in selector.cache._data.values()]


def permuted(rank: Rank) -> dict[str, Any]:
    selector = selector_of(rank)
    shapes = [200 + (number * 5 + rank.rank * 3) % 8 for number in range(8)]
    found = {shape: size_of(selector, shape) for shape in shapes}
    return {"sizes": sorted(found.items()), "first": shapes[0], "tuned": selector.tuner.calls}


def warm_store(rank: Rank) -> dict[str, Any]:
    """The last rank knows the key from its disk; a tuning elsewhere ends only after it has its answer."""
    last = rank.ranks - 1
    store = PersistentCache("warm", rank.folder / f"warm-{rank.rank}.json", cfg_type=Blocks)
    selector = selector_of(rank, before=lambda: rank.wait_for("warm-store"), persistent=store)
    if rank.rank == last:
        store.put(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(300))), Blocks(32))
    size = size_of(selector, 300)
    if rank.rank == last:
        rank.raise_flag("warm-store")
    rank.meet("warm-store-done")
    return {"size": size, "row": row(300), "again": size_of(selector, 300), "events": selector.on_event.names}


def from_a_remote(rank: Rank) -> dict[str, Any]:
    """A remote that every rank has: the requests of each are counted."""
    objects = MemoryObjects()
    key = Key(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(305))))
    writing(objects).keep(key, StoredEntry(Blocks(16), environment(key.device), "autotune", "forward"))
    objects.log.clear()
    selector = selector_of(rank, remote=remote(objects))
    size = size_of(selector, 305)
    rank.meet("from-a-remote")
    return {"size": size, "row": row(305), "requests": len(objects.log), "again": size_of(selector, 305)}


def warm_memory(rank: Rank) -> dict[str, Any]:
    selector = selector_of(rank, before=lambda: rank.wait_for("warm-memory"))
    if rank.rank == 0:
        selector.cache.put(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(310))), Blocks(64))
    size = size_of(selector, 310)
    if rank.rank == 0:
        rank.raise_flag("warm-memory")
    rank.meet("warm-memory-done")
    return {"size": size, "row": row(310), "again": size_of(selector, 310), "in memory": _sizes(selector)}


def different_memories(rank: Rank) -> dict[str, Any]:
    """Every rank has another cfg in memory: one of them holds."""
    selector = selector_of(rank)
    selector.cache.put(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(320))), Blocks(100 + rank.rank))
    return {"size": size_of(selector, 320), "in memory": _sizes(selector), "tuned": selector.tuner.calls}


def slow(rank: Rank) -> dict[str, Any]:
    """Rank 0 tunes until all other ranks have an answer."""
    os.environ["EJKERNEL_OPS_AGREE_SECONDS"] = "0.5"

    def dawdle() -> None:
        rank.raise_flag("slow-tuning")
        rank.wait_for(*(f"slow-{other}" for other in rank.others))

    store = PersistentCache("slow", rank.folder / f"slow-{rank.rank}.json", cfg_type=Blocks)
    selector = selector_of(rank, before=dawdle if rank.rank == 0 else None, persistent=store)
    del os.environ["EJKERNEL_OPS_AGREE_SECONDS"]
    if rank.rank:
        rank.wait_for("slow-tuning")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = size_of(selector, 330)
    rank.raise_flag(f"slow-{rank.rank}")
    rank.meet("slow-done")
    stored = store.get(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(330))))
    return {
        "size": size,
        "row": row(330),
        "warned": [str(w.message) for w in caught],
        "stored": None if stored is None else stored.size,
        "tuned": selector.tuner.calls,
    }


def absent(rank: Rank) -> dict[str, Any]:
    """The last rank never makes the call."""
    if rank.rank == rank.ranks - 1:
        return {}
    selector = selector_of(rank)
    return {"size": size_of(selector, 340)}


def read_only(rank: Rank) -> dict[str, Any]:
    selector = selector_of(rank, persistent=ReadOnlyStore(MemoryStore()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = size_of(selector, 350)
    return {"size": size, "tuned": selector.tuner.calls, "warned": [str(w.message) for w in caught]}


def shared_folder(rank: Rank) -> dict[str, Any]:
    path = rank.folder / "shared.json"
    selector = selector_of(rank, persistent=PersistentCache("shared", path, cfg_type=Blocks))
    size = size_of(selector, 360)
    rank.meet("shared")
    fresh = PersistentCache("shared", path, cfg_type=Blocks)
    stored = fresh.get(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(360))))
    return {"size": size, "stored": stored.size, "tuned": selector.tuner.calls}


def own_folders(rank: Rank) -> dict[str, Any]:
    store = PersistentCache("own", rank.folder / f"own-{rank.rank}.json", cfg_type=Blocks)
    selector = selector_of(rank, persistent=store)
    size = size_of(selector, 370)
    stored = store.get(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(370))))
    return {"size": size, "stored": None if stored is None else stored.size, "tuned": selector.tuner.calls}


def program_text(rank: Rank) -> dict[str, Any]:
    """What the program says itself concerns no other rank, and leaves the agreement alone."""
    kernel, inv = Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(380))
    selector = selector_of(rank)
    given = selector.choose(dataclasses.replace(inv, override_cfg=Blocks(50 + rank.rank)), kernel).size
    with overlay_cache({key_of(kernel, inv): Blocks(60 + rank.rank)}):
        under = selector.choose(inv, kernel).size
    return {"given": given, "under": under, "size": selector.choose(inv, kernel).size}


def put_later(rank: Rank) -> dict[str, Any]:
    """A cfg that one rank puts after the agreement does not part it from the others."""
    selector = selector_of(rank)
    size = size_of(selector, 390)
    if rank.rank == 0:
        selector.cache.put(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(390))), Blocks(99))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        later = [size_of(selector, 390), size_of(selector, 390)]
    selector.cache.clear()
    cleared = size_of(selector, 390)
    return {"size": size, "later": later, "cleared": cleared, "warned": [str(w.message) for w in caught]}


def tuned_offline(rank: Rank) -> dict[str, Any]:
    """Explicit tunings are agreed as well, each by itself; one that a single rank makes waits for no other."""
    kernel, inv = Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(400))
    selector = selector_of(rank)
    first = selector.tune(inv, kernel)
    second = selector.tune(inv, kernel)
    single = selector.tune(call_of(kernel, jnp.ones(401)), kernel).cfg.size if rank.rank == 1 else None
    return {
        "sizes": [first.cfg.size, second.cfg.size],
        "tiers": [first.tier, second.tier],
        "single": single,
        "tuned": selector.tuner.calls,
        "then": size_of(selector, 400),
    }


class Broken(Doubling):
    """A kernel whose candidates cannot be listed."""

    op_id = "broken"

    def candidate_cfgs(self, inv):
        raise ZeroDivisionError("no blocks")


def broken(rank: Rank) -> dict[str, Any]:
    """Each rank is told, and none waits for one that was."""
    kernel = Broken(SIZES)
    return {"error": error_of(lambda: size_of(selector_of(rank), 410, kernel))}


def error_of(call: Any) -> str:
    try:
        found = call()
    except OpsError as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, but {found!r}"


class Heavy(Doubling):
    """A kernel whose cfgs are larger than what is sent around."""

    op_id = "heavy"

    def heuristic_cfg(self, inv):
        return "x" * 70_000

    def candidate_cfgs(self, inv):
        return [self.heuristic_cfg(inv)]


class Opaque(Doubling):
    """A kernel whose cfgs have no JSON."""

    op_id = "opaque"

    def heuristic_cfg(self, inv):
        return complex(1, 2)

    def candidate_cfgs(self, inv):
        return [1j, 2j]


def cannot_travel(rank: Rank) -> dict[str, Any]:
    found = {}
    for kernel in (Heavy(SIZES), Opaque(SIZES)):
        inv = call_of(kernel, jnp.ones(420))
        selector = selector_of(rank)
        found[kernel.op_id] = error_of(lambda s=selector, i=inv, k=kernel: s.choose(i, k))
    return found


def threads(rank: Rank) -> dict[str, Any]:
    """Five threads of every rank ask at once."""
    selector = selector_of(rank)
    start = threading.Barrier(5)

    def ask(_: int) -> int:
        start.wait()
        return size_of(selector, 430)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        sizes = list(pool.map(ask, range(5)))
    return {"sizes": sizes, "tuned": selector.tuner.calls}


def warm_call(rank: Rank) -> dict[str, Any]:
    """A second choice, and a second call, ask the service for nothing."""
    from ejkernel.ops.fleet.kv_store import KeyValueStore

    asked = []
    real = KeyValueStore._ask
    KeyValueStore._ask = lambda self, verb, *args: (asked.append(verb), real(self, verb, *args))[1]
    try:
        selector = selector_of(rank)
        executor = Executor(selector)
        x = jnp.ones(440)
        executor(Doubling(SIZES), x)
        first = len(asked)
        for _ in range(3):
            executor(Doubling(SIZES), x)
            selector.choose(call_of(Doubling(SIZES), x), Doubling(SIZES))
        return {"first": first, "later": len(asked) - first}
    finally:
        KeyValueStore._ask = real


class Blocked(Doubling):
    """Its cfg is part of the program."""

    op_id = "blocked"

    def run(self, x, *, cfg):
        return x * 2.0 + cfg.size


def lowered(rank: Rank) -> dict[str, Any]:
    """The program's text, of an eager call's function and of one that the user jits."""
    executor = Executor(selector_of(rank))
    kernel = Blocked(SIZES)
    x = jnp.ones(450)
    step = jax.jit(lambda x: executor(kernel, x).sum())
    return {"text": step.lower(x).as_text(), "compiled": float(executor.compile(kernel, x)(x)[0])}


class Timed(Doubling):
    """A kernel that is really measured, with two cfgs that differ a lot."""

    op_id = "timed"

    def run(self, x, *, cfg):
        for _ in range(cfg.size):
            x = jnp.sin(x) + jnp.cos(x)
        return x * 0.0


def really_tuned(rank: Rank) -> dict[str, Any]:
    kernel = Timed((64, 1, 32))
    selector = ConfigSelectorChain(ConfigCache(), on_event=Listener())
    size = size_of(selector, 4000, kernel)
    return {"size": size, "tuned": selector.on_event.names.count("autotune_finish")}


def heuristics_only(rank: Rank) -> dict[str, Any]:
    selector = selector_of(rank, policy=AutotunePolicy(allow_autotune=False))
    size = size_of(selector, 460)
    # Tuning is allowed again, and would give another cfg here, but what was agreed stands.
    selector.policy = AutotunePolicy()
    told = explain(Doubling(SIZES), jnp.ones(460), selector=selector)
    selector.cache.put(*key_of(Doubling(SIZES), call_of(Doubling(SIZES), jnp.ones(100))), Blocks(64))
    tuned = explain(Doubling(SIZES), jnp.ones(100), selector=selector)
    said = {"told": [told.tier, told.answer], "tuned": [tuned.tier, tuned.answer]}
    return {"size": size, "again": size_of(selector, 460), "events": selector.on_event.names, **said}


# Scenarios that end the agreement of a program.


def other_candidates(rank: Rank) -> dict[str, Any]:
    """The last rank has another list; a rank that was faster hears of that at its next decision."""
    # What follows reaches every decision of the program.
    rank.meet("before-other-candidates")
    sizes = SIZES if rank.rank < rank.ranks - 1 else (*SIZES[:-1], 17)
    first = error_of(lambda: size_of(selector_of(rank), 900, Doubling(sizes)))
    rank.meet("other-candidates")
    second = error_of(lambda: size_of(selector_of(rank), 901, Doubling(sizes)))
    return {"first": first, "second": second}


def agrees(rank: Rank) -> None:
    """Everything that ends well, and then what ends it."""
    start(rank)
    for scenario in (
        *(plain, permuted, warm_store, warm_memory, different_memories, slow, absent, read_only, shared_folder),
        *(own_folders, program_text, put_later, tuned_offline, broken, cannot_travel, threads, warm_call, lowered),
        *(from_a_remote, really_tuned, heuristics_only, other_candidates),
    ):
        rank.say(scenario.__name__, **scenario(rank))


# Processes that die.


def killed(rank: Rank) -> list[int]:
    """The last of more than two ranks is killed while it waits, then rank 1 while it tunes; the ranks that are left."""
    start(rank)
    if rank.ranks > 2:
        rank.say("killed_waiting", **killed_waiting(rank))
    rank.say("killed_tuning", **killed_tuning(rank))
    rank.say("afterwards", size=size_of(selector_of(rank), 502))
    return [0, *range(2, rank.ranks - 1)]


def killed_waiting(rank: Rank) -> dict[str, Any]:
    def tune() -> None:
        rank.raise_flag("tuning")
        rank.wait_for("killed")

    selector = selector_of(rank, before=tune)
    if rank.rank:
        rank.wait_for("tuning")
    if rank.rank == rank.ranks - 1:
        say_when_waiting(rank)
    return {"size": size_of(selector, 500)}


def say_when_waiting(rank: Rank) -> None:
    from ejkernel.ops.fleet.kv_store import KeyValueStore

    real = KeyValueStore.wait

    def wait(self, key, seconds):
        rank.raise_flag("waits")
        return real(self, key, seconds)

    KeyValueStore.wait = wait


def killed_tuning(rank: Rank) -> dict[str, Any]:
    def die() -> None:
        rank.raise_flag("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    selector = selector_of(rank, before=die)
    if rank.rank != 1:
        rank.wait_for("dies")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = size_of(selector, 501)
    return {"size": size, "row": row(501), "warned": [str(w.message) for w in caught]}


def coordinator_killed(rank: Rank) -> None:
    """Rank 0, which holds the service, is killed while the others wait for its tuning."""
    start(rank)

    def tune() -> None:
        rank.raise_flag("tuning")
        rank.wait_for("never")

    if rank.rank:
        rank.wait_for("tuning")
        say_when_waiting(rank)
    error = error_of(lambda: size_of(selector_of(rank, before=tune), 510))
    rank.say("coordinator_killed", error=error)
    sys.exit(1)


# A mesh over all processes.


class Layer(Blocked):
    """Its cfg shows in the program's text, and it needs all rows of a shard."""

    op_id = "layer"
    # So that a test can store a cfg for what is called inside shard_map.
    key_builder = staticmethod(lambda inv: f"width {inv.args[0].shape[-1]}")

    def run(self, x, *, cfg):
        return jnp.tanh(x) * float(cfg.size) + x.sum()


def sharded(rank: Rank) -> None:
    """A training step over the devices of all processes; without stored cfgs, and with one in rank 1's store."""
    start(rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    for scenario, width in (("sharded", 16), ("sharded_stored", 24)):
        store = PersistentCache("layer", rank.folder / f"layer-{rank.rank}.json", cfg_type=Blocks)
        selector = selector_of(rank, persistent=store)
        if scenario == "sharded_stored":
            selector.tuner.before = lambda: rank.wait_for("lowered-1")
            if rank.rank == 1:
                store.put(device_fingerprint(), "layer@v3", f"width {width}", Blocks(77))
        step, w, x = training(Executor(selector), mesh, width)
        text = step.lower(w, x).as_text()
        if scenario == "sharded_stored":
            rank.raise_flag(f"lowered-{rank.rank}")
        losses = []
        for _ in range(3):
            value, w = step(w, x)
            losses.append(float(value))
        rank.say(scenario, text=text, losses=losses, cfgs=_sizes(selector), tuned=selector.tuner.calls)
    rank.say("global_arrays", **global_arrays(rank, mesh))


def training(executor: Executor, mesh: jax.sharding.Mesh, width: int) -> tuple[Any, jax.Array, jax.Array]:
    def loss(w, x):
        return jax.lax.pmean(jnp.mean(executor(Layer(SIZES), x * w) ** 2), "data")

    @jax.jit
    def step(w, x):
        both = jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
        value, gradient = both(w, x)
        return value, w - 1e-3 * gradient

    return step, spread(mesh, P(), (width,)), spread(mesh, P("data"), (8, width))


def spread(mesh: jax.sharding.Mesh, spec: Any, shape: tuple[int, ...]) -> jax.Array:
    whole = np.linspace(0.1, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return jax.make_array_from_callback(shape, jax.sharding.NamedSharding(mesh, spec), lambda index: whole[index])


def global_arrays(rank: Rank, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Arrays over all processes, called by themselves and in a function that JAX shards: no rank measures alone."""
    executor = Executor(selector_of(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager = float(executor(Layer(SIZES), spread(mesh, P("data"), (8, 32))).sum())
        x = spread(mesh, P("data"), (8, 40))
        step = jax.jit(lambda x: executor(Layer(SIZES), x).sum())
        text, automatic = step.lower(x).as_text(), float(step(x))
    reasons = [str(w.message) for w in caught]
    return {"sums": [eager, automatic], "text": text, "warned": reasons, "tuned": executor.chooser.tuner.calls}


# Programs that begin again.


def begins_again(rank: Rank) -> None:
    """The distributed system is shut down and started again; between the two a process decides by itself."""
    x = 520
    before = selector_of(rank)
    alone = size_of(before, x)
    jax.extend.backend.clear_backends()
    start(rank)
    executor = Executor(selector_of(rank))
    first = size_of(executor.chooser, x)
    text = executor(Blocked(SIZES), jnp.ones(x))[0]
    rank.meet("first")
    jax.distributed.shutdown()
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    between = size_of(selector_of(rank), x)
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    start(rank, "SECOND_PORT")
    # Rank 1 was started anew, so to speak: it remembers nothing of the first life.
    second = size_of(selector_of(rank) if rank.rank else executor.chooser, x)
    from ejkernel.ops import agreement_report

    report = len(agreement_report().agreed)
    rank.say(
        "begins_again",
        alone=alone,
        first=first,
        computed=[float(text), float(executor(Blocked(SIZES), jnp.ones(x))[0])],
        between=between,
        second=second,
        report=report,
    )


def switched_off(rank: Rank) -> None:
    """Every rank decides by itself, and nothing of the agreement is even imported."""
    start(rank)
    rank.say(
        "switched_off", size=size_of(selector_of(rank), 530), imported="ejkernel.ops.fleet.protocol" in sys.modules
    )


def start(rank: Rank, port: str = "PORT", **options: Any) -> None:
    jax.distributed.initialize(f"127.0.0.1:{os.environ[port]}", rank.ranks, rank.rank, **options)
    # JAX's backends wait for each other when they start: all at once, so that no scenario waits for that.
    jax.devices()


def main(program: str) -> None:
    """Runs a program, named by its function."""
    rank = Rank()
    survivors = globals()[program](rank) or range(rank.ranks)
    sys.stdout.flush()
    # JAX ends every process whose coordinator left before it did.
    rank.raise_flag(f"left-{rank.rank}")
    if rank.rank == 0:
        rank.wait_for(*(f"left-{other}" for other in survivors))
    # JAX's own farewell waits for processes that a test has killed.
    os._exit(0)
