"""The demo: what it shows the first time and the second, in a log and on a terminal.

Covers `library/demo_step.py`.
"""

from __future__ import annotations

import io

import pytest

from ejkernel.library import demo
from ejkernel.ops.core.record import Record, Trial


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self):
        return True


def shown(out, *operations):
    """What the demo writes."""
    assert demo.main(operations, out=out) == 0
    return out.getvalue()


def test_the_first_run_measures_and_the_second_answers_from_disk(monkeypatch):
    """Both say what was chosen and where it is kept, in 80 columns of plain text; a terminal gets colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    first = shown(io.StringIO(), "matmul")
    second = shown(io.StringIO(), "matmul")
    assert "measured   3 candidates" in first
    assert "0 of them answered from disk" in first
    assert "measured   3" not in second
    assert "nothing was measured" in second
    assert "1 of them answered from disk" in second
    for text in (first, second):
        assert "library.matmul.json" in text
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 80
    assert "\x1b[1m" in shown(Terminal(), "matmul")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(Terminal(), "matmul")


def test_an_unknown_operation_is_refused(capsys):
    """By name, with those that there are."""
    with pytest.raises(SystemExit):
        demo.main(["convolution"])
    assert "there is no convolution; choose from" in capsys.readouterr().err


def test_every_operation_of_the_library_has_a_case():
    """The table names functions, of which those that exist are shown."""
    names = [case.operation for case in demo.cases()]
    assert {"matmul", "rms_norm", "layer_norm", "softmax"} <= set(names)


def test_a_gain_is_shown_with_how_sure_it_is():
    """The heuristic's time, the winner's, their ratio with its interval, and what else ran."""
    trials = tuple(
        Trial({"implementation": f"way{i}", "rows": i or None}, samples_s=(s,)) for i, s in enumerate((4e-3, 1e-3))
    )
    more = tuple(Trial({"implementation": "x" * 30}, samples_s=(2e-3,)) for _ in range(4))
    record = Record(trials=trials + more, winner=1, heuristic=0, gain=(4.0, 3.9, 4.1))
    case = demo.Case("softmax", "small", lambda: ((), {}))
    lines = [line for line, _ in demo.report(demo.Found(case, trials[1].cfg, 1.0, False, record, "/" + "a" * 90))]
    assert lines[1:4] == [
        "  heuristic      4 ms way0",
        "  tuned          1 ms way1 rows=1",
        "  gain       4.00 times as fast as the heuristic cfg (3.90 to 4.10 with 95%)",
    ]
    assert lines[4].endswith("3 more")
    assert max(map(len, lines)) <= 80


def test_no_winner_is_shown_beside_a_faster_loser_without_a_word():
    """Where the medians say otherwise than the race, the line says that noise decided, and what to do."""
    trials = tuple(Trial({"implementation": f"way{i}"}, samples_s=(s,)) for i, s in enumerate((6e-3, 4e-3)))
    case = demo.Case("softmax", "small", lambda: ((), {}))
    noisy = Record(trials=trials, winner=0, heuristic=0, gain=(1.0, 1.0, 1.0))
    lines = [line for line, _ in demo.report(demo.Found(case, trials[0].cfg, 1.0, False, noisy, "/a"))]
    assert any("too noisy to tell" in line for line in lines)
    assert max(map(len, lines)) <= 80
    plain = Record(trials=trials, winner=1, heuristic=0, gain=(1.5, 1.4, 1.6))
    lines = [line for line, _ in demo.report(demo.Found(case, trials[1].cfg, 1.0, False, plain, "/a"))]
    assert not any("too noisy" in line for line in lines)


def test_the_last_lines_fit_when_some_are_too_noisy_to_tell():
    """The sentence that names gains, noise and the rest is wrapped at 80 columns."""
    trials = tuple(Trial({"implementation": f"way{i}"}, samples_s=(s,)) for i, s in enumerate((6e-3, 4e-3)))
    case = demo.Case("softmax", "small", lambda: ((), {}))
    record = Record(trials=trials, winner=0, heuristic=0, gain=(1.0, 1.0, 1.0))
    noisy = demo.Found(case, trials[0].cfg, 1.0, False, record, "")
    out = io.StringIO()
    demo.summary(demo.Paper(out, colour=False), [noisy] * 3, 12.0)
    assert "3 are too noisy to tell" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
