"""Records as pictures, behind the extra `plot`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ejkernel.ops import OpsError
from ejkernel.ops.core.record import Record, Trial

RECORD = Record(
    key={"op_id": "matmul@v1"},
    trials=(
        Trial({"block": 16, "stages": None}, samples_s=(3e-3, 3.1e-3, 3e-3)),
        Trial({"block": 32}, samples_s=(1e-3, 1.1e-3, 1e-3)),
        Trial({"block": 64}, samples_s=(9e-3,), dropped_round=1),
        Trial({"block": 128}, "wrong", "output: off by 0.3"),
        Trial({"block": 256}, "compile", "out of $registers$"),
    ),
    winner=1,
    heuristic=0,
    gain=(3.0, 2.9, 3.1),
)


@pytest.fixture
def pyplot():
    """matplotlib without a screen."""
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    matplotlib.use("agg")
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra `plot`")
    yield pyplot
    pyplot.close("all")


def labels(axes):
    """The lines of text beside the picture."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_sample_is_in_the_picture(pyplot):
    """Each timed candidate is a line over the rounds, with its samples as they were taken."""
    axes = RECORD.plot()
    drawn = {tuple(line.get_ydata()) for line in axes.lines if line.get_linestyle() not in ("none", "None")}
    assert {trial.samples_s for trial in RECORD.trials if trial.samples_s} <= drawn


def test_the_picture_says_what_became_of_each_candidate(pyplot):
    """The winner comes first, then the others by time with why they left, then those that could not be used."""
    assert labels(RECORD.plot()) == [
        "block=32, 1 ms, winner",
        "block=16, 3 ms, heuristic",
        "block=64, 9 ms, dropped in round 1",
        "block=128, wrong, output: off by 0.3",
        r"block=256, compile, out of \$registers\$",
    ]


def test_who_was_dropped_is_crossed_out_where_it_left(pyplot):
    """A cross stands at the last sample of a candidate that left the race, and nowhere else."""
    crosses = [tuple(line.get_xydata()[0]) for line in RECORD.plot().lines if line.get_marker() == "x"]
    assert crosses == [(1.0, 9e-3)]


def test_the_title_has_the_gain(pyplot):
    """What the tuning was for, and what it gave."""
    title = RECORD.plot().get_title(loc="left")
    assert title == "matmul@v1: 3.00 times as fast as the heuristic cfg (2.90 to 3.10 with 95%)"


def test_a_picture_can_be_saved_and_goes_where_it_is_asked_to(pyplot, tmp_path):
    """The Axes that are given are drawn into and returned, and the figure can be written."""
    figure, axes = pyplot.subplots()
    assert RECORD.plot(axes) is axes
    figure.savefig(tmp_path / "race.svg")
    assert (tmp_path / "race.svg").read_text(encoding="utf-8").count("<path") > 10


def test_many_candidates_are_counted_and_not_all_named(pyplot):
    """A search has hundreds of trials: each is drawn, ten have their line of text."""
    trials = tuple(Trial(i, samples_s=((i + 1) * 1e-6,) * 2) for i in range(40))
    axes = Record(trials=trials, winner=0).plot()
    assert len(labels(axes)) == 11
    assert labels(axes)[-1] == "and 30 more"
    assert sum(len(line.get_xdata()) == 2 for line in axes.lines) == 40


@pytest.mark.parametrize("record", [Record(), Record(trials=(Trial("_a", "crash"),), stop="failed")])
def test_a_record_without_times_can_be_drawn(pyplot, tmp_path, record):
    """Nothing was timed: the picture is empty but for what is known."""
    axes = record.plot()
    axes.figure.savefig(tmp_path / "none.png")
    assert [label.strip("\u200b") for label in labels(axes)] == ["'_a', crash"] if record.trials else not axes.lines


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    """An ImportError that says what to install, and what works without."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'ejkernel-ops\[plot\]'") as caught:
        RECORD.plot()
    assert isinstance(caught.value, OpsError)
    assert "record.table()" in str(caught.value)


def test_reading_a_record_does_not_import_matplotlib():
    """Only drawing pays for it."""
    code = (
        "import sys; from ejkernel.ops.core.record import Record; Record().table(); Record.loads(Record().dumps())\n"
        "print('matplotlib' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
