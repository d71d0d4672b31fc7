"""Lines about the tuning of many calls on a pool."""

from __future__ import annotations

import io

import pytest

from ejkernel.ops import Entry
from ejkernel.ops.programs import batch_progress
from ejkernel.ops.programs.batch_progress import BatchProgress

ENTRY = Entry("op@v1", "00", 1, source="heuristics", note="nothing to measure")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def shown(stream, **about):
    """A progress of ten calls, one of them done by a worker."""
    found = BatchProgress(on=True, stream=stream, **about)
    found.total = 10
    found.tuned(ENTRY, "node:12")
    return found


def test_a_log_has_a_line_for_each_call_with_its_worker():
    """There is nothing to tell about the whole at once."""
    stream = io.StringIO()
    assert not shown(stream, clock=Clock()).is_due
    assert stream.getvalue() == "1 of 10: op@v1 00: not tuned: nothing to measure by node:12\n"


def test_a_log_has_a_line_of_the_whole_every_thirty_seconds():
    """Done, running where, failed, gain so far and the time left; between them nothing is written over."""
    stream, clock, due = io.StringIO(), Clock(), []
    found = shown(stream, clock=clock)
    for now in range(0, 100, 5):
        clock.now = float(now)
        if found.is_due:
            due.append(now)
            found.under_way(3, " (gpu:0, gpu:1)", 2, 1.234, "80 s left")
    assert due == [30, 60, 90]
    line = "1 of 10 done, 3 running (gpu:0, gpu:1), 2 failed, 1.23x so far, 80 s left\n"
    assert stream.getvalue().partition("\n")[2] == 3 * line


def test_a_terminal_has_the_whole_in_one_line(monkeypatch):
    """Done, running where, failed, gain so far and the time left, written over each time."""
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    found = shown(stream)
    assert found.is_due
    found.under_way(3, " (gpu:0, gpu:1)", 2, 1.234, "80 s left")
    line = stream.getvalue().rpartition("\r\x1b[K")[2]
    assert line == "1 of 10 done, 3 running (gpu:0, gpu:1), 2 failed, 1.23x so far, 80 s left"
    assert not found.is_due


def test_a_line_that_is_written_over_does_not_wrap(monkeypatch):
    """It is cut at the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    shown(stream).under_way(3, f" ({'gpu:0, ' * 20})", 0, None, "")
    assert len(stream.getvalue().rpartition("\r\x1b[K")[2]) == 39


def test_a_terminal_that_went_away_ends_the_showing_alone():
    """The tuning that tells of itself goes on."""

    class Gone(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    found = shown(Gone())
    found.under_way(3, "", 0, None, "")
    found.note("still here")


def test_a_notebook_has_that_line_too(monkeypatch):
    """In a place of its own that is updated."""
    written = []

    class Handle:
        def update(self, shown, raw):
            written.append(shown["text/plain"])

    def display(shown, **settings):
        written.append(shown["text/plain"])
        return Handle()

    monkeypatch.setattr(batch_progress, "notebook_display", lambda: display)
    found = shown(io.StringIO())
    assert found.is_due
    found.under_way(3, "", 0, 2.0, "")
    found.under_way(2, "", 0, 2.0, "")
    assert written == ["1 of 10 done, 3 running, 2.00x so far", "1 of 10 done, 2 running, 2.00x so far"]


@pytest.mark.parametrize("display", [None, print])
def test_without_progress_nothing_is_written(monkeypatch, display):
    """Neither on the stream nor in a notebook."""
    monkeypatch.setattr(batch_progress, "notebook_display", lambda: display)
    stream = Terminal()
    found = BatchProgress(on=False, stream=stream)
    found.under_way(3, "", 0, None, "")
    assert not found.is_due
    assert stream.getvalue() == ""
