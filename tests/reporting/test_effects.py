"""Effects of parameters, read off a record."""

from __future__ import annotations

from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.reporting.effects import effects, heat_map


def grid(*cfgs_and_seconds):
    """A race that everything finished."""
    trials = tuple(Trial(cfg, samples_s=(s, s, s)) for cfg, s in cfgs_and_seconds)
    return Record(trials=trials, winner=0, heuristic=0, clock="device")


FOUR = grid(
    *(
        ({"m": m, "n": n, "idle": None, "fixed": 1}, 1.0 * (m // 16) * (1.1 if n == 8 else 1.0))
        for m in (16, 32)
        for n in (4, 8)
    )
)


def test_the_parameter_that_matters_most_comes_first():
    """By the best candidate of each value; what never changes, or is None, is left out."""
    found = effects(FOUR)
    assert [effect.name for effect in found] == ["m", "n"]
    assert [round(effect.size, 2) for effect in found] == [2.0, 1.1]
    best, middle, count = found[0].values["32"]
    assert (round(best, 2), round(middle, 2), count) == (2.0, 2.1, 2)


def test_values_are_in_the_order_of_their_size():
    """Numbers as numbers, names as they came."""
    sizes = grid(({"m": 128}, 1.0), ({"m": 16}, 2.0), ({"m": 64}, 3.0))
    names = grid(({"way": "sort"}, 1.0), ({"way": "count"}, 2.0))
    assert list(effects(sizes)[0].values) == ["16", "64", "128"]
    assert list(effects(names)[0].values) == ["sort", "count"]


def test_two_parameters_make_a_map():
    """The best of each pair that was timed."""
    found = heat_map(FOUR)
    assert (found.rows, found.columns, found.row_values, found.column_values) == ("m", "n", ("16", "32"), ("4", "8"))
    assert round(found.best["32", "8"], 2) == 2.2


def test_parameters_that_change_together_make_none():
    """A map of a diagonal says nothing; neither does one parameter alone."""
    assert heat_map(grid(({"a": 1, "b": 1}, 1.0), ({"a": 2, "b": 2}, 2.0))) is None
    assert heat_map(grid(("one", 1.0), ("two", 2.0))) is None
    assert [effect.name for effect in effects(grid(("one", 1.0), ("two", 2.0)))] == ["cfg"]
