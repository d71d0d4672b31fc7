"""How processes agree, step by step: a service in memory, a clock that only waiting moves, one thread unless said.

Covers `fleet/kv_store.py`, `fleet/manifest.py` and `fleet/proposal.py`.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Blocks, DictStore, Doubling, TableTuner, call_of, child
from fakes_fleet import SIZES, FakeClient, Saying, process
from ranks import wait_for

from ejkernel.ops import ConfigCache, ConfigSelectorChain, OpsError, _jax, agreement_report
from ejkernel.ops.config.selection import _Proposal
from ejkernel.ops.core.errors import AgreementError, JaxChangedError
from ejkernel.ops.core.request import Keep, ask
from ejkernel.ops.fleet import manifest
from ejkernel.ops.fleet.agreement import AgreementWarning
from ejkernel.ops.fleet.heartbeat import Heartbeat, beat_key
from ejkernel.ops.fleet.kv_store import KeyValueStore
from ejkernel.ops.fleet.manifest import manifest_of
from ejkernel.ops.fleet.messages import Claim
from ejkernel.ops.fleet.protocol import ROOT, topic_of


@pytest.fixture
def client():
    return FakeClient()


def claim(client, saying, number, life="first"):
    """Another process says that it works on this."""
    text = Claim(number, life, manifest_of(saying.request)).dumps()
    client.data[f"{topic_of(saying.request).folder}/claim"] = text
    client.data[beat_key(ROOT, number)] = f"{life} 1"


def size(agreement, saying, seconds=60.0):
    return agreement.decide(saying, seconds).cfg.size


# The process that decides.


def test_the_first_one_decides_and_the_second_follows(client):
    """The second process runs what the first found, and makes nothing itself."""
    first, second = Saying(tuned=2), Saying(tuned=4)

    assert size(process(client, 0), first) == 2
    assert size(process(client, 1), second) == 2
    assert (first.made, second.made) == (1, 0)


def test_an_answer_is_kept_once_and_told_each_time(client):
    """What another process decided is kept in memory at first; later choices leave memory alone."""
    size(process(client, 0), Saying())
    follower, saying = process(client, 1), Saying()

    size(follower, saying)
    size(follower, saying)

    kept = [(hit.event, hit.keep, hit.data["process"]) for hit in saying.kept]
    assert kept == [("cache_hit", Keep.MEMORY, 0), ("cache_hit", Keep.NOTHING, 0)]


def test_a_decision_takes_few_requests(client):
    """Eight to decide by tuning, four to publish what is known, three to follow, none to choose again."""
    first, second = process(client, 0), process(client, 1)
    known = ask(call_of(Doubling(SIZES), jnp.ones(9)), Doubling(SIZES), "forward")
    asked = []

    for agreement, saying in [(first, Saying()), (first, Saying(known=8, request=known)), (second, Saying())] * 2:
        before = client.asked
        size(agreement, saying)
        asked.append(client.asked - before)

    assert asked == [8, 4, 3, 0, 0, 0]


def test_who_knows_does_not_wait_for_who_tunes(client):
    """A claim of another process does not stop an answer that is there; the one that tuned follows it."""
    slow = Saying(tuned=2, before=lambda: size(process(client, 1), Saying(known=8)))

    assert size(process(client, 0), slow) == 8
    assert client.clock.now == 0


def test_nothing_is_tuned_for_an_answer_that_came_meanwhile(client, monkeypatch):
    """A verdict that is published between the look and the claim is followed without a tuning."""
    saying = Saying(tuned=2)
    real = client.key_value_set

    def set_after_another(key, value, allow_overwrite=False):
        if key.endswith("/claim"):
            monkeypatch.setattr(client, "key_value_set", real)
            size(process(client, 1), Saying(known=8))
        return real(key, value, allow_overwrite)

    monkeypatch.setattr(client, "key_value_set", set_after_another)

    assert size(process(client, 0), saying) == 8
    assert saying.made == 0


def test_a_process_that_gives_up_leaves_the_key_to_the_next(client):
    """An error while deciding is raised where it happened; the next process decides without a wait."""

    def fail():
        raise ZeroDivisionError("no blocks")

    with pytest.raises(ZeroDivisionError):
        size(process(client, 0), Saying(before=fail))

    assert size(process(client, 1), Saying(tuned=4)) == 4
    assert client.clock.now == 0


def test_whoever_waits_takes_over_from_one_that_gave_up(client):
    """A claim that vanishes while one waits is taken up."""
    saying = Saying(tuned=4)
    claim(client, saying, 0)
    client.meanwhile = lambda: client.data.pop(f"{topic_of(saying.request).folder}/claim", None)

    assert size(process(client, 1), saying) == 4


def test_objectives_are_decided_apart(client):
    """Forward, and forward with backward, are two questions."""
    saying = Saying(tuned=2)
    both = Saying(tuned=4, request=replace(saying.request, objective="forward+backward"))
    agreement = process(client, 0)

    assert (size(agreement, saying), size(agreement, both)) == (2, 4)


def test_kinds_of_device_are_decided_together(client):
    """Processes on unlike processors still run one program."""
    saying = Saying(tuned=4)
    other = Saying(tuned=2, request=replace(saying.request, key=saying.request.key._replace(device="cpu|another")))

    assert size(process(client, 0), saying) == size(process(client, 1), other) == 4


def test_explicit_tunings_are_counted(client):
    """The second tuning of a key is another one than the first, in every process alike."""
    first, second = process(client, 0), process(client, 1)

    found = [size(first, Saying(tuned=number, is_tuning=True)) for number in (2, 4)]

    assert found == [2, 4]
    assert [size(second, Saying(tuned=8, is_tuning=True)) for _ in range(2)] == [2, 4]


# No process waits for ever.


def test_a_dead_process_is_noticed(client):
    """Without a new sign of life within the lease the heuristic cfg is published, long before the bound."""
    saying = Saying(guess=1)
    claim(client, saying, 3)

    with pytest.warns(AgreementWarning, match="process 3 stopped answering"):
        assert size(process(client, 0, lease=10), saying, seconds=1000) == 1

    assert 10 <= client.clock.now <= 10 + 2 * 10 / 4


def test_a_living_process_is_waited_for_up_to_the_bound(client):
    """Signs of life prolong the wait, but never beyond the bound."""
    saying = Saying()
    claim(client, saying, 3)
    client.meanwhile = lambda: client.data.update({beat_key(ROOT, 3): f"first {client.clock.now}"})

    with pytest.warns(AgreementWarning, match="process 3 had not decided after 45 s"):
        assert size(process(client, 0), saying, seconds=45) == 1

    assert client.clock.now == pytest.approx(45)


def test_a_restarted_process_is_not_waited_for(client):
    """Signs of another life than the claim's end the wait at the first look."""
    saying = Saying()
    claim(client, saying, 3, life="before")
    client.data[beat_key(ROOT, 3)] = "after 1"

    with pytest.warns(AgreementWarning, match="process 3"):
        assert size(process(client, 0, lease=10), saying) == 1

    assert client.clock.now <= 10 / 4


def test_a_restarted_process_decides_what_it_had_begun(client):
    """A claim of its own former life keeps it from nothing."""
    saying = Saying(tuned=4)
    claim(client, saying, 0, life="before")

    assert size(process(client, 0), saying) == 4
    assert client.clock.now == 0


def test_a_slow_process_follows_what_was_published_meanwhile(client):
    """A process that decides after the others' patience runs what they run, and keeps it."""
    other = process(client, 1)

    def give_up():
        with pytest.warns(AgreementWarning, match="had not decided"):
            size(other, Saying(guess=1), seconds=5)

    slow = Saying(tuned=2, before=give_up)
    with pytest.warns(AgreementWarning, match="process 0 had not decided after 5 s"):
        assert size(process(client, 0), slow) == 1
    assert [hit.tier for hit in slow.kept] == ["heuristics"]


def test_without_heuristics_a_wait_ends_in_an_error(client):
    """Where the policy forbids guesses the error says which process was waited for, and why nothing else serves."""
    saying = Saying(guess=None)
    claim(client, saying, 3)

    with pytest.raises(AgreementError, match=r"process 3 stopped answering.*heuristics are off"):
        size(process(client, 0), saying)


# Other code.


class Newer(Doubling):
    version = "4"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Doubling((1, 2, 4, 8)), r"5 candidates in process 0, 4 in process 2; only in process 0: {\"size\": 16}"),
        (Doubling((1, 4, 2, 8, 16)), "in another order"),
        (Newer(SIZES), "kernel doubling@v3 in process 0, doubling@v4 in process 2"),
    ],
    ids=["candidates", "order", "version"],
)
def test_other_code_is_named_with_its_process(client, other, named):
    """A process whose kernel differs gets an error, and so does every process at its next decision."""
    first = process(client, 0)
    size(first, Saying())

    with pytest.raises(AgreementError, match=named):
        size(process(client, 2), Saying(kernel=other))
    another = Saying(request=ask(call_of(Doubling(SIZES), jnp.ones(9)), Doubling(SIZES), "forward"))
    with pytest.raises(AgreementError, match=named) as caught:
        size(first, another)
    assert "doubling@v3" in str(caught.value).splitlines()[-1]


def test_two_versions_in_one_process_are_named(client):
    """They would share one cfg: the error says to give one of them another name."""
    agreement = process(client, 0)
    size(agreement, Saying())

    with pytest.raises(AgreementError, match=r"doubling@v3 and doubling@v4.*op_id of its own"):
        size(agreement, Saying(kernel=Newer(SIZES)))


def test_another_package_is_named(client, monkeypatch):
    """A process with another release of this package gets an error that names both."""
    size(process(client, 0), Saying())
    monkeypatch.setattr(manifest, "__version__", "0.9.9")

    with pytest.raises(AgreementError, match=r"ejkernel-ops .* in process 0, 0.9.9 in process 1"):
        size(process(client, 1), Saying())


def test_other_code_is_noticed_while_the_other_still_tunes(client):
    """The process that waits is told at once, and the one that tunes when it is done."""

    def differ():
        with pytest.raises(AgreementError, match="different code"):
            size(process(client, 1), Saying(kernel=Newer(SIZES)))

    with pytest.raises(AgreementError, match="different code"):
        size(process(client, 0), Saying(before=differ))


def test_long_lists_of_candidates_are_compared_by_digest(client):
    """Thousands of candidates do not travel, and still a difference is noticed."""
    size(process(client, 0), Saying(kernel=Doubling(range(5000))))

    assert len(client.data[f"{topic_of(Saying().request).folder}/verdict"]) < 1000
    with pytest.raises(AgreementError, match="5000 candidates in process 0, 4999 in process 1"):
        size(process(client, 1), Saying(kernel=Doubling(range(4999))))


class Bucketed(Doubling):
    """Calls of many shapes under one key, with candidates of their own."""

    op_id = "bucketed"
    key_builder = staticmethod(lambda inv: "bucket")

    def candidate_cfgs(self, inv):
        return [Blocks(size) for size in range(inv.args[0].shape[0])]


def test_a_kernel_with_its_own_keys_may_differ_in_candidates(client):
    """Its calls share keys by the author's will, and not their shapes."""
    requests = [ask(call_of(Bucketed(), jnp.ones(n)), Bucketed(), "forward") for n in (3, 5)]

    assert size(process(client, 0), Saying(request=requests[0])) == size(
        process(client, 1), Saying(request=requests[1])
    )


# What a selector proposes.


def test_an_entry_that_was_tuned_for_less_is_not_known():
    """Neither memory nor a store that has the same cfg answers for forward and backward what was tuned for forward."""
    kernel, store = Doubling(SIZES), DictStore()
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner({size: size for size in SIZES}), persistent=store)
    selector.choose(call_of(kernel), kernel)

    def known(objective):
        tiers = selector._tiers(selector.policy)
        return _Proposal(selector, ask(call_of(kernel), kernel, objective), tiers).known()

    assert store.data
    assert known("forward").tier == "memory"
    assert known("forward+backward") is None


# The service.


def test_a_coordinator_that_is_gone_is_a_clear_error(client):
    """The message names it, and what to do."""
    agreement = process(client, 0)
    client.failing = jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")

    with pytest.raises(AgreementError, match=r"coordinator:1 does not answer.*UNAVAILABLE.*Restart the program"):
        size(agreement, Saying())


def test_a_coordinator_that_hangs_is_a_clear_error(client, monkeypatch):
    """A verb without an answer ends after the service's patience."""
    release = threading.Event()
    monkeypatch.setattr(client, "key_value_try_get", lambda key: release.wait(60))
    service = KeyValueStore(client, "coordinator:1", patience=0.05)
    try:
        with pytest.raises(AgreementError, match=r"coordinator:1 does not answer.*no answer within 0.05 s"):
            service.get("key")
    finally:
        release.set()


@pytest.mark.parametrize("verb", ["key_value_set", "key_value_dir_get", "blocking_key_value_get"])
def test_a_client_that_jax_changed_is_a_clear_error(verb):
    """A verb that is gone is named, with the version of JAX."""

    class Changed:
        def __getattr__(self, name):
            if name == verb:
                raise AttributeError(name)
            return print

    with pytest.raises(JaxChangedError, match=rf"{jax.__version__}.*{verb}"):
        KeyValueStore(Changed(), "coordinator:1")


def test_a_state_that_jax_changed_is_a_clear_error(monkeypatch):
    """The same for the place where JAX keeps the client."""
    monkeypatch.setattr("jax._src.distributed.global_state", object())

    with pytest.raises(JaxChangedError, match=r"jax\._src\.distributed\.global_state"):
        _jax.distributed()


def test_the_pulse_beats_while_it_is_asked_to(client):
    """There is a sign before the block begins, more follow, and the end of the last block ends them."""
    pulse = Heartbeat(KeyValueStore(client, ""), "pulse", "life", lease=0.02)
    with pulse.beating(), pulse.beating():
        assert client.data["pulse"].startswith("life ")
        wait_for(lambda: int(client.data["pulse"].removeprefix("life ")) >= 3, "a third sign")
    assert pulse._rest.is_set()


# One process.


def test_one_process_has_nothing_to_report():
    """The report of a program of one process is empty."""
    assert agreement_report().agreed == ()
    assert str(agreement_report()) == "process 0 of 1: 0 agreed"


def test_a_program_of_one_process_imports_nothing_of_this():
    """A choice, a tuning and a call leave the room unentered."""
    code = (
        "import sys, jax.numpy as jnp\n"
        "from fakes import Doubling, TableTuner\n"
        "from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor\n"
        "Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))(Doubling(), jnp.ones(8))\n"
        "print([name for name in sys.modules if '.fleet' in name])"
    )
    with child(code, env={"JAX_PLATFORMS": "cpu"}) as process:
        assert process.communicate(timeout=300)[0].strip() == "[]"


# Many keys.


@pytest.mark.parametrize("seed", range(3))
def test_threads_as_processes_agree_on_random_keys(seed):
    """Four processes ask for sixty keys in orders of their own; some know answers, some never ask."""
    client = FakeClient(time.monotonic)
    shapes = range(60)
    kernel = Doubling(SIZES)
    requests = {n: ask(call_of(kernel, np.ones(n + 1, np.float32)), kernel, "forward") for n in shapes}

    def run(number):
        rng = random.Random(f"{seed} {number}")
        agreement = process(client, number, lease=60)
        found = {}
        for n in rng.sample(shapes, 50):
            known = rng.choice([None, None, 100 + number])
            found[n] = size(agreement, Saying(request=requests[n], tuned=2**number, known=known), seconds=600)
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(run, range(4)))
    finally:
        sys.setswitchinterval(interval)

    for n in shapes:
        assert len({found[n] for found in answers if n in found}) <= 1
    assert len({number for found in answers for number in found}) > 55


def test_the_errors_are_of_the_one_tree():
    """Code that catches `OpsError` catches these as well."""
    assert issubclass(AgreementError, OpsError)
    assert issubclass(AgreementError, RuntimeError)
