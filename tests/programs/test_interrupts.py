"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
import sys
import threading

import pytest

from ejkernel.ops.programs.interrupts import noting_interrupts


def press():
    """Ctrl-C, here and now."""
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_somebody_swallowed_is_raised_again():
    """A finaliser, or a callback of a compiled program, drops what is raised inside it."""
    with noting_interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Pressing:
    """Something whose finaliser is interrupted."""

    def __init__(self, raises):
        self.raises = raises

    def __del__(self):
        self.raises()


def test_one_that_python_drops_is_not_printed():
    """It is raised once more, so a traceback would say that something had gone wrong; other errors are printed."""
    printed, before = [], sys.unraisablehook
    sys.unraisablehook = printed.append
    try:
        with noting_interrupts() as interrupts:
            Pressing(press)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            assert not printed
            Pressing(lambda: 1 / 0)
        assert [found.exc_type for found in printed] == [ZeroDivisionError]
        assert sys.unraisablehook == printed.append
    finally:
        sys.unraisablehook = before


def test_without_one_nothing_is_raised():
    """And Python's own handler is back afterwards."""
    with noting_interrupts() as interrupts:
        interrupts.check()

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_user_s_own_is_left_alone():
    """It may mean something else by Ctrl-C."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with noting_interrupts() as interrupts:
            press()
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)

    assert heard == [signal.SIGINT]


def test_other_threads_cannot_set_handlers_and_need_none():
    """Ctrl-C is the main thread's."""
    done = []

    def work():
        with noting_interrupts() as interrupts:
            interrupts.check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert done == [True]
