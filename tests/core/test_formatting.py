"""Tables of text: rows, times and the candidates of a record.

Covers `core/table.py`.
"""

from __future__ import annotations

import pytest

from ejkernel.ops.core import formatting
from ejkernel.ops.core.record import Record, Trial


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 ns"),
        (2.5e-9, "2.5 ns"),
        (1.5e-6, "1.5 us"),
        (999e-6, "999 us"),
        (0.01234, "12.3 ms"),
        (1.0, "1 s"),
        (4321.0, "4,321 s"),
    ],
)
def test_a_time_has_the_unit_that_suits_it(value, text):
    """Three digits are enough to compare candidates."""
    assert formatting.seconds(value) == text


def test_columns_stand_under_each_other():
    """Two spaces between them, none at the end of a line."""
    text = formatting.as_text(("a", "long name", ""), [("longer", "b", "c"), ("d", "", "")])
    assert text.split("\n") == ["a       long name", "longer  b          c", "d"]


def test_a_cell_is_one_line_of_bounded_length():
    """A long message does not break the table."""
    (_, row) = formatting.as_text(("a",), [("x\ny" * 100,)]).split("\n")
    assert row.startswith("x yx y")
    assert row.endswith("...")
    assert len(row) == 60


def test_cells_of_html_are_text():
    """Markup is escaped."""
    assert "<td>&lt;b&gt;</td>" in formatting.as_html(("a",), [("<b>",)])


def test_the_spread_is_half_of_the_middle_half():
    """Over the median; one sample has none."""
    assert Trial(1, samples_s=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1 / 3)
    assert Trial(1, samples_s=(1.0,)).spread is None
    assert Trial(1).spread is None


def test_a_record_is_a_table_with_the_winner_first():
    """Then by time, then what failed; roles, reasons and check errors are there."""
    record = Record(
        trials=(
            Trial("usual", samples_s=(2e-3, 2e-3), error=0.0),
            Trial("broken", "compile", "no such thing"),
            Trial("slow", samples_s=(4e-3,), dropped_round=3, error=1.5e-7),
            Trial("fast", samples_s=(1e-3,)),
            Trial("wrong", "wrong", "differs", samples_s=(1e-4,), error=0.5),
        ),
        winner=3,
        heuristic=0,
        tied=(3, 0),
    )
    rows = [line.split(maxsplit=1) for line in record.table().split("\n")[1:-1]]
    assert [cfg for cfg, _ in rows] == ["'fast'", "'usual'", "'slow'", "'broken'", "'wrong'"]
    rest = [" ".join(text.split()) for _, text in rows]
    assert rest == [
        "1 ms - 1.00x - ok winner, tied",
        "2 ms 0.0% 2.00x 0.0e+00 ok tied, heuristic",
        "4 ms - 4.00x 1.5e-07 ok dropped in round 3",
        "- - - - compile no such thing",
        "- - - 5.0e-01 wrong differs",
    ]


def test_a_record_without_a_winner_is_a_table_as_well():
    """Every failure has its row."""
    table = Record(trials=(Trial(1, "memory", "too large"), Trial(2, "crash", "gone")), stop="failed").table()
    assert [line.split()[0] for line in table.split("\n")] == ["cfg", "1", "2", "no"]
