"""Seeing a tuning: the live line, the quiet line and the totals."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest
from fakes import REPOSITORY, Doubling, call_of

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Kernel, Record, Trial, Tuner
from ejkernel.ops.core import formatting
from ejkernel.ops.core.errors import SettingError
from ejkernel.ops.core.standing import verdict
from ejkernel.ops.settings import Settings
from ejkernel.ops.tuning import progress
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.progress import Line, Step, _TuningTotals, shown, tell, unseen

X = jnp.ones(8)


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self):
        return True


# The line.


def test_the_line_says_how_far_it_is():
    """What, the stage, the best so far with its gain, and what time is left; the best stays through later stages."""
    line = Line("matmul@v1 0123", 12.0, io.StringIO())
    line(Step("timing", 3, 8, 5.8e-6, 1.4))
    text = line.text(Step("timing", 5, 8), line._until - 9.0)

    assert text == "tuning matmul@v1 0123  timing 5/8  best 5.8 us (1.40x)  9 s left"


def test_before_anything_is_timed_there_is_no_best():
    """The stage alone, and no end in sight without a budget."""
    assert Line("op", None, io.StringIO()).text(Step("compiling", 1, 8), 0.0) == "tuning op  compiling 1/8"


def test_the_line_is_written_over_and_taken_away(monkeypatch):
    """It never leaves the row, never reaches the end of it, and the row is empty afterwards."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 5)))
    stream = io.StringIO()
    line = Line("a-name-that-is-too-long", None, stream)
    line(Step("compiling", 1, 8))
    line(Step("compiling", 2, 8))
    line.close()

    assert stream.getvalue() == "\r\x1b[Ktuning a-name-that-\r\x1b[K"


def test_a_line_that_was_never_shown_is_not_taken_away():
    """Nothing at all is written then."""
    stream = io.StringIO()
    Line("op", None, stream).close()

    assert stream.getvalue() == ""


def test_a_terminal_that_goes_away_does_not_end_the_tuning():
    """A closed stream is left alone."""
    stream = io.StringIO()
    line = Line("op", None, stream)
    stream.close()

    line(Step("compiling", 1, 8))
    line.close()


@pytest.mark.parametrize(("wanted", "live"), [("auto", True), ("on", True), ("off", False)])
def test_a_terminal_has_a_live_line(monkeypatch, wanted, live):
    """Unless it is turned off."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with shown("op", None, wanted) as watch:
        assert (watch is not unseen) == live


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["a pipe", "none at all"])
def test_elsewhere_no_step_is_written(monkeypatch, stream):
    """A log must not hold control characters, and a short tuning leaves none of these lines."""
    monkeypatch.setattr(sys, "stderr", stream)
    with shown("op", None, "auto") as watch:
        watch(Step("timing", 1, 2))
    tell("op", tuned(2.0), 1.0, "auto")
    assert stream is None or stream.getvalue() == ""


def test_a_long_tuning_without_a_terminal_has_a_line_at_start_and_end(monkeypatch):
    """Once it has been silent for two seconds; a timer that is asked at once stands for them."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    said = threading.Event()

    class AtOnce:
        def __init__(self, seconds, say):
            assert seconds == 2.0
            self.start = lambda: (say(), said.set())
            self.cancel = lambda: None

    monkeypatch.setattr(progress.threading, "Timer", AtOnce)
    with shown("matmul@v1 abc", None, "auto"):
        assert said.wait(60)
    tell("matmul@v1 abc", tuned(2.0), 3.0, "auto")
    first, last = stream.getvalue().splitlines()
    assert first == "ejkernel: tuning matmul@v1 abc; the next process will find it on disk"
    assert last.startswith("ejkernel: tuned matmul@v1 abc: 1 candidates in 3.0 s")


def test_tunings_that_are_told_of_elsewhere_have_no_lines(monkeypatch):
    """`autotune` has a line for each of them."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.told_elsewhere(), shown("op", None, "auto") as watch:
        assert watch is unseen


def test_a_notebook_has_one_line_that_becomes_the_outcome(monkeypatch):
    """It is updated in place, as text and as HTML; markup in a name is escaped."""
    written = []

    class Handle:
        def update(self, shown, raw):
            written.append(shown)

    def display(shown, raw, display_id):
        written.append(shown)
        return Handle()

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "notebook_display", lambda: display)
    with shown("<b>op</b>", 60.0, "auto") as watch:
        watch(Step("compiling", 1, 3))
        watch(Step("timing", 2, 3, 1e-3, 2.0))
    tell("<b>op</b>", tuned(2.0), 3.0, "auto")
    assert written[0]["text/plain"].startswith("tuning <b>op</b>  compiling 1/3")
    assert written[-1]["text/plain"].startswith("tuned <b>op</b>: 1 candidates in 3.0 s")
    assert written[-1]["text/html"].startswith("<code>tuned &lt;b&gt;op&lt;/b&gt;")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5.8e-6, "5.8 us"), (999e-6, "999 us"), (1.234e-3, "1.23 ms"), (0.9996, "1 s"), (83.4, "83.4 s")],
)
def test_times_are_spelt_in_their_unit(seconds, text):
    """Three digits are enough."""
    assert formatting.seconds(seconds) == text


# What a tuning tells.


def test_a_tuning_tells_its_steps():
    """Compiling, checking and timing, each with how many of how many; then the best and its gain over the heuristic."""
    told = []

    class Clock:
        name = "table"

        def round(self, runs):
            return {run.number: 1.0 if run.number == 1 else 3.0 for run in runs}

    job = TuningJob(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [2.0, 3.0], heuristic_first=True, watch=told.append)
    Tuner(clock=Clock()).tune(job)

    assert [(s.stage, s.done, s.total) for s in told[:4]] == [
        *(("compiling", 1, 2), ("compiling", 2, 2)),
        *(("checking", 1, 2), ("checking", 2, 2)),
    ]
    assert (told[4].stage, told[4].best_s, told[4].gain) == ("timing", 1.0, 3.0)


# The quiet line and the totals.


def tuned(gain):
    return Record(trials=(Trial("a", samples_s=(1.0,)), Trial("b", "invalid", "no")), winner=0, gain=(gain, gain, gain))


def test_a_tuning_leaves_one_line_in_the_log(caplog, capsys, monkeypatch):
    """What was tuned, how many candidates, seconds and gain; nothing on the streams, if it does not take long."""
    monkeypatch.setattr(progress, "_LONG_SECONDS", 600.0)
    with caplog.at_level("INFO", logger="ejkernel.ops"):
        kernel = Doubling((1, 2))
        found = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 1)).tune(call_of(kernel, X), kernel)

    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("tuned doubling@v3 ")
    assert "2 candidates in" in message
    assert message.endswith(verdict(found.record).text)
    assert capsys.readouterr() == ("", "")


def test_asked_for_it_is_also_on_stderr(monkeypatch, capsys):
    """With EJKERNEL_OPS_PROGRESS=on, for logs that keep the streams alone."""
    monkeypatch.setenv("EJKERNEL_OPS_PROGRESS", "on")
    kernel = Doubling((1, 2))
    ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 1)).choose(call_of(kernel, X), kernel)

    assert capsys.readouterr().err.startswith("ejkernel: tuned doubling@v3 ")


def test_the_totals_are_keys_seconds_and_gain(monkeypatch):
    """The gain is the geometric mean."""
    monkeypatch.setattr("atexit.register", lambda function: None)
    totals = _TuningTotals()
    totals.add(tuned(1.0), 1.5, "off")
    assert totals.text() == "1 key tuned in 1.5 s, on average 1.00 times as fast as the heuristic cfgs"
    totals.add(tuned(4.0), 2.0, "off")
    assert totals.text() == "2 keys tuned in 3.5 s, on average 2.00 times as fast as the heuristic cfgs"


PROGRAM = """
import jax.numpy as jnp
from fakes import Doubling, call_of
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Tuner
kernel = Doubling((1, 2))
ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 1)).choose(call_of(kernel, jnp.ones(8)), kernel)
print("done")
"""


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_process_ends_with_one_line_of_totals(terminal, tmp_path):
    """On a terminal; in a pipe there is nothing that was not asked for."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    env = {**os.environ, "PYTHONPATH": path, "EJKERNEL_PERSISTENT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env, timeout=300)
    os.close(theirs)
    try:
        said = os.read(ours, 1 << 16).decode()
    # A pseudo-terminal whose other end is closed.
    except OSError:
        said = ""
    os.close(ours)

    assert (done.returncode, done.stdout) == (0, "done\n")
    if terminal:
        assert "tuning doubling@v3" in said
        assert said.rpartition("\x1b[K")[2].strip().startswith("ejkernel: 1 key tuned in")
    else:
        assert said == ""


def test_an_unknown_setting_is_refused(monkeypatch):
    """The message says what there is."""
    monkeypatch.setenv("EJKERNEL_OPS_PROGRESS", "loud")
    with pytest.raises(SettingError, match="on or off"):
        Settings.read()


# What the kernel rules out, and what a budget leaves for measuring.


class Choosy(Kernel[int, object]):
    """Only even cfgs are valid."""

    op_id = "choosy"

    def run(self, x, *, cfg):
        return x * 2 * cfg / cfg

    def heuristic_cfg(self, inv):
        return 2

    def candidate_cfgs(self, inv):
        return [1, 2, 3, 4]

    def valid_cfg(self, inv, cfg):
        return True if cfg % 2 == 0 else f"{cfg} is odd"


def test_what_a_kernel_rules_out_is_in_the_record():
    """With its reason, behind what was measured; it is no failure and no candidate."""
    kernel = Choosy()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 1))
    record = selector.decide(Invocation("choosy", (X,), {}), kernel).record

    assert [(t.cfg, t.status, t.message) for t in record.trials[2:]] == [
        (1, "invalid", "1 is odd"),
        (3, "invalid", "3 is odd"),
    ]
    assert record.failures == ()
    assert record.summary()["candidates"] == 2
    assert Record.loads(record.dumps()) == record


def test_with_one_left_the_reason_says_how_many_were_ruled_out():
    """Nothing is measured, and the miss says why."""

    class Narrow(Choosy):
        def valid_cfg(self, inv, cfg):
            return cfg == 2

    decision = ConfigSelectorChain(ConfigCache()).decide(Invocation("choosy", (X,), {}), Narrow())

    assert dict(decision.misses)["autotune"] == "one candidate, nothing to measure (3 ruled out by valid_cfg)"
