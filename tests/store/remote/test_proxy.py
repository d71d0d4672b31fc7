"""A remote behind a proxy that delays, cuts, repeats and corrupts: no wrong answer, no hang, no word too many."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings

import pytest
import servers
from fakes_remote import SECRET, granted_waits, key_of_call, remote_warnings, unhurried

pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")
pytest.importorskip("aiohttp", reason="needs the extra `servers`")

from ejkernel.ops.store.remote.folding import compact_remote
from ejkernel.ops.store.remote.remote_store import RemoteStore
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.engines

COUNT = 6
# Seconds in which a connection that hangs gets no answer, and in which all calls must have gone on without it.
HANGS, GOES_ON = 240, 120


@pytest.fixture(params=["entries", "snapshot"])
def proxied(request, tmp_path):
    """A remote with a few entries behind an HTTP server, and a proxy in front of that."""
    writer = RemoteStore(f"file://{tmp_path}/team", key=SECRET, write=True, on_fault="raise", fresh_seconds=0.0)
    for number in range(COUNT):
        writer.keep(key_of_call(number), StoredEntry({"right": number}))
    if request.param == "snapshot":
        compact_remote(writer)
    with servers.server("http", tmp_path) as port, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        proxy = servers.Proxy(port)
        yield proxy
        proxy.close()
        gc.collect()


def opened(proxy):
    """A store of an empty machine."""
    store = RemoteStore(f"http://127.0.0.1:{proxy.port}/team", key=SECRET, fresh_seconds=0.0)
    # The import of a driver is no wait for the remote.
    store.objects.load()
    return store


def asked(store):
    """What a store finds, the seconds that it was ready to wait, and what it said."""
    with remote_warnings() as said, granted_waits() as granted:
        start = time.perf_counter()
        found = [store.lookup(key_of_call(number)) for number in range(COUNT)]
        assert time.perf_counter() - start < GOES_ON
    return found, sum(granted), said


def no_wrong_answer(found):
    """Each is right and trusted, or none, or not trusted."""
    for number, entry in enumerate(found):
        assert entry is None or not entry.trusted or entry.cfg == {"right": number}


def test_without_a_fault_everything_is_found(proxied):
    """The proxy itself changes nothing."""
    found, _, said = asked(unhurried(opened(proxied)))
    assert [entry.cfg for entry in found] == [{"right": number} for number in range(COUNT)]
    assert said == []


def test_a_place_that_never_answers_is_left_out(proxied):
    """All calls together wait less than two seconds, and one line says so."""
    gate = threading.Event()
    proxied.answer = lambda number, piece: gate.wait(HANGS) and None
    found, waited, said = asked(opened(proxied))
    gate.set()
    assert found == [None] * COUNT
    assert waited < 2.0
    assert len(said) == 1


def test_a_place_that_refuses_is_left_out(proxied):
    """At once."""
    proxied.refuses = True
    found, waited, said = asked(opened(proxied))
    assert found == [None] * COUNT
    assert waited < 2.0
    assert sum("left out" in text for text in said) == 1


@pytest.mark.parametrize("size", [0, 1, 100, 300])
def test_answers_that_are_cut_give_nothing_wrong(proxied, size):
    """At the head, in the listing, in an entry."""
    proxied.answer = lambda number, piece: piece[:size] or None
    found, waited, _ = asked(opened(proxied))
    no_wrong_answer(found)
    assert waited < 2.0


@pytest.mark.parametrize("bit", [1, 2, 4, 64])
def test_answers_that_are_corrupted_give_nothing_wrong(proxied, bit):
    """Every fiftieth byte of what the server sends, the heads of its answers aside."""

    def corrupt(number, piece):
        head, found, body = piece.rpartition(b"\r\n\r\n")
        return head + found + bytes(byte ^ (bit if place % 50 == 49 else 0) for place, byte in enumerate(body))

    proxied.answer = corrupt
    found, waited, _ = asked(opened(proxied))
    no_wrong_answer(found)
    assert waited < 2.0


def test_answers_that_are_repeated_give_nothing_wrong(proxied):
    """Every piece twice."""
    proxied.answer = lambda number, piece: piece + piece
    found, waited, _ = asked(opened(proxied))
    no_wrong_answer(found)
    assert waited < 2.0


def test_answers_that_belong_to_another_request_give_nothing_wrong(proxied):
    """Each piece may be one of an earlier connection."""
    earlier, dice = [], random.Random(0)

    def swap(number, piece):
        earlier.append(piece)
        return dice.choice(earlier)

    proxied.answer = swap
    found, _, _ = asked(opened(proxied))
    no_wrong_answer(found)


def test_a_place_that_works_now_and_then_costs_two_seconds_at_most(proxied):
    """Every second connection hangs."""
    gate = threading.Event()
    proxied.answer = lambda number, piece: piece if number % 2 else (gate.wait(HANGS) and None)
    found, waited, _ = asked(opened(proxied))
    gate.set()
    no_wrong_answer(found)
    assert waited < 2.0
