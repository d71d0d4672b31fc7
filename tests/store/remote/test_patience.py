"""Patience with a remote: two seconds in all, failures in a row, and how a remote comes back."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext

import pytest
from fakes_remote import Hands, patient

from ejkernel.ops.store.remote.patience import SECONDS, LeftOutError, Patience, within


def never():
    """A request without an answer."""
    threading.Event().wait(30)


def test_an_answer_comes_through():
    """Value and error of a request are the caller's."""
    patience = patient([])
    assert patience.call(lambda: 7) == 7
    with pytest.raises(NotADirectoryError):
        patience.call(lambda: os.listdir(__file__))


def test_a_request_without_an_answer_is_given_up_and_the_remote_left_out():
    """One message says so, and the next request is not made at all."""
    said, asked = [], []
    patience = patient(said, seconds=0.2)
    with pytest.raises(LeftOutError, match="did not answer within"):
        patience.call(never)
    for _ in range(5):
        with pytest.raises(LeftOutError):
            patience.call(lambda: asked.append(1))
    assert (len(said), asked) == (1, [])
    assert "did not answer" in patience.reason


def test_waits_add_up_to_the_limit_and_quick_answers_do_not_count():
    """A slow remote uses the patience up, however its requests end; a quick one never does."""
    hands, whole = Hands(), 100 * SECONDS
    patience = Patience(lambda reason: None, seconds=whole, clock=hands)

    def taking(seconds, error=None):
        def request():
            hands.now += seconds
            if error is not None:
                raise error

        return request

    for _ in range(100):
        patience.call(taking(0.05))
    assert patience.left == pytest.approx(whole)
    patience.call(taking(100.0))
    assert patience.left == pytest.approx(whole - 100.0, abs=1.0)
    with pytest.raises(OSError, match="reset"):
        patience.call(taking(whole, OSError("reset")))
    with pytest.raises(LeftOutError, match="too slow"):
        patience.call(taking(0.0))


def test_quick_failures_in_a_row_are_a_remote_that_does_not_work():
    """Three of them; an answer between them begins the count again."""
    patience = patient([])

    def fail():
        raise ConnectionRefusedError("refused")

    for request in (fail, fail, lambda: 1, fail, fail):
        with pytest.raises(OSError, match="refused") if request is fail else nullcontext():
            patience.call(request)
    assert patience.reason == ""
    with pytest.raises(OSError, match="refused"):
        patience.call(fail)
    assert "refused" in patience.reason


@pytest.mark.parametrize("error", [PermissionError("no"), ImportError("s3fs"), ValueError("Access Denied")])
def test_what_lasts_is_not_tried_again(error):
    """Wrong credentials and missing drivers leave the remote out at once."""
    patience = patient([])

    def fail():
        raise error

    with pytest.raises(OSError, match=str(error)):
        patience.call(fail)
    assert patience.reason


def test_a_remote_that_answers_again_is_asked_again():
    """After the pause a probe runs in the background; the call that starts it does not wait."""
    hands, probed = Hands(), threading.Event()
    patience = patient([], clock=hands)
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            patience.call(lambda: (_ for _ in ()).throw(OSError("refused")))
    with pytest.raises(LeftOutError):
        patience.call(lambda: 1, probe=probed.set)
    assert not probed.is_set()
    hands.now += 60
    with pytest.raises(LeftOutError):
        patience.call(lambda: 1, probe=probed.set)
    assert probed.wait(60)
    for _ in range(6000):
        if not patience.reason:
            break
        threading.Event().wait(0.01)
    assert patience.call(lambda: 1) == 1


def test_a_probe_that_fails_waits_longer():
    """The remote stays out, and the next probe comes later."""
    hands, probes = Hands(), []
    patience = patient([], clock=hands)
    patience.call(lambda: 1)
    done = threading.Event()

    def probe():
        probes.append(hands.now)
        done.set()
        raise OSError("still dead")

    with pytest.raises(OSError, match="no"):
        patience.call(lambda: (_ for _ in ()).throw(PermissionError("no")))
    hands.now += 31
    with pytest.raises(LeftOutError):
        patience.call(lambda: 1, probe=probe)
    assert done.wait(60)
    hands.now += 31
    with pytest.raises(LeftOutError):
        patience.call(lambda: 1, probe=probe)
    assert len(probes) == 1


def test_a_bound_for_one_request():
    """`within` gives the answer, the error, or up."""
    assert within(60, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0)
    with pytest.raises(LeftOutError, match=r"within 0\.05 s"):
        within(0.05, never)
