"""Campaigns over remotes: writers, readers, folds and kills; places that fail in every way that is known."""

from __future__ import annotations

import gc
import itertools
import random
import time
import warnings

import pytest
import remote_campaigns
import servers
from fakes import Blocks, Doubling, TableTuner, call_of
from fakes_remote import SECRET, MemoryObjects, remote, remote_warnings, writing

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.request import ask
from ejkernel.ops.store.remote.patience import SECONDS, Patience
from ejkernel.ops.store.store import StoredEntry

GUESS = Blocks(1)


@pytest.fixture
def collected():
    """Drivers leave their sockets to the garbage collector, which warns of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.mark.slow
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("place", ["folder", "s3", "ssh"])
def test_writers_readers_and_folds_that_are_killed_lose_nothing(place, tmp_path, count, monkeypatch):
    """8 writers, 8 readers and a fold; a kill after the other. Every put that returned is found, nothing is wrong."""
    pytest.importorskip("fsspec", reason="needs the extra `remote`")
    size, kills = count(8, short=2), count(40, short=4)

    def run(url):
        found = remote_campaigns.together(url, writers=size, readers=size, kills=kills, puts=count(40, short=8))
        print(f"\n{place}: {found}")
        assert (found["lost"], found["wrong"], found["ended by themselves"]) == (0, 0, [])
        assert min(found["acknowledged"], found["looks"]) > 0

    if place == "folder":
        run(f"file://{tmp_path}/team")
        return
    pytest.importorskip({"s3": "moto", "ssh": "asyncssh"}[place], reason="needs the extra `servers`")
    with servers.server(place) as port:
        if place == "ssh":
            run(f"sftp://me:any@127.0.0.1:{port}{tmp_path}/team")
        else:
            for name, value in servers.s3_settings(port).items():
                monkeypatch.setenv(name, value)
            servers.make_bucket("team")
            run("s3://team/ejkernel")


# Places that fail.


def dead(objects, dice):
    """No request is ever answered."""
    objects.before = lambda verb, path: objects.gate.wait(60)


def slow(objects, dice):
    """Every request takes ten seconds."""
    objects.before = lambda verb, path: objects.gate.wait(10)


def refusing(objects, dice):
    """Every request fails at once."""

    def refuse(verb, path):
        raise ConnectionRefusedError("connection refused")

    objects.before = refuse


def flapping(objects, dice):
    """Every third request hangs, every other third fails."""
    numbers = itertools.count()

    def flap(verb, path):
        kind = next(numbers) % 3
        if kind == 1:
            objects.gate.wait(10)
        if kind == 2:
            raise ConnectionResetError("connection reset")

    objects.before = flap


def full(objects, dice):
    """Nothing can be written."""

    def refuse(verb, path):
        if verb == "write":
            raise OSError(28, "no space left on device")

    objects.before = refuse


def read_only(objects, dice):
    """Writing is forbidden."""

    def refuse(verb, path):
        if verb in ("write", "remove"):
            raise PermissionError("access denied")

    objects.before = refuse


def poisoned(objects, dice):
    """Every object is another one than was written: bytes changed, cut, swapped, or entries of another key."""
    objects.on_the_way = lambda path, data: dice.choice(
        [
            bytes(byte ^ (1 if dice.random() < 0.02 else 0) for byte in data),
            data[: dice.randrange(len(data) + 1)],
            dice.choice(list(objects.data.values())),
            data.replace(b'"size": ', b'"size": 1'),
            b"",
        ]
    )


def time_travelling(objects, dice):
    """Listings show a random part of what is there, and what is not there any more."""
    gone = [f"{'0' * 24}.{number}.{'f' * 16}.json" for number in range(3)]
    objects.listed = lambda folder, names: dice.sample([*names, *gone], dice.randrange(len(names) + len(gone) + 1))


PLACES = [dead, slow, refusing, flapping, full, read_only, poisoned, time_travelling]


def campaign(fail, *, calls, seconds, seed, secret):
    """Calls of one kernel over a remote that fails: the seconds that the remote cost, and the cfgs that were used."""
    objects, dice = MemoryObjects(), random.Random(seed)
    writer = writing(objects, key=secret)
    kernel = Doubling()
    invs = [call_of(kernel, *call_of(kernel).args, number=number) for number in range(calls)]
    for inv in invs[::2]:
        key = ask(inv, kernel, "forward").key
        writer.keep(key, StoredEntry(Blocks(2), environment(key.device), "autotune", "forward"))
    fail(objects, dice)
    said, waits = [], []
    store = remote(objects, key=SECRET, write=True, patience=Patience(said.append, seconds=seconds))
    ask_store = store.lookup

    def timed(request, *args):
        start = time.perf_counter()
        try:
            return request(*args)
        finally:
            waits.append(time.perf_counter() - start)

    store.lookup = lambda key: timed(ask_store, key)
    used = []
    with remote_warnings():
        for number, inv in enumerate(invs):
            policy = AutotunePolicy(allow_autotune=number % 4 < 2)
            chain = ConfigSelectorChain(ConfigCache(), policy, TableTuner(), remote=store)
            used.append((chain.decide(inv, kernel), policy.allow_autotune))
        timed(store.flush, 0.0 if store.reason else seconds)
        # The faults are over, so that nothing waits at the end of the tests.
        objects.before = lambda verb, path: None
        objects.gate.set()
        store.flush(10.0)
    return used, sum(waits), said


def unmeasured(used):
    """Answers that are neither a guess, nor signed, nor measured here."""
    return [
        decision
        for decision, may_tune in used
        if not (
            (decision.tier == "heuristics" and decision.cfg == GUESS)
            or (decision.tier == "autotune" and may_tune)
            or (decision.tier == "remote" and decision.cfg == Blocks(2))
        )
    ]


@pytest.mark.parametrize("fail", PLACES)
def test_a_place_that_fails_costs_a_moment_and_nothing_else(fail):
    """No hang, and no cfg is used that was neither signed nor measured here; with and without right signatures."""
    for secret in (SECRET, ""):
        used, _, said = campaign(fail, calls=8, seconds=0.2, seed=1, secret=secret)
        assert unmeasured(used) == []
        assert len(said) <= 1
        if secret == "":
            assert not [decision for decision, _ in used if decision.tier == "remote"]


@pytest.mark.slow(at_length=True)
@pytest.mark.parametrize("fail", PLACES)
def test_a_place_that_fails_costs_two_seconds_in_all(fail, count):
    """Many calls, several seeds: two seconds of waiting at most, the end of the process included."""
    for seed, secret in itertools.product(range(count(5, short=1)), (SECRET, "")):
        used, waited, _ = campaign(fail, calls=40, seconds=SECONDS, seed=seed, secret=secret)
        print(f"\n{fail.__name__}, seed {seed}: {waited:.2f} s of waiting in {len(used)} calls")
        assert unmeasured(used) == []
        assert waited < 2.0
