"""Many lines that are checked at once are judged as each of them alone."""

from __future__ import annotations

import json

import pytest
from fakes_store import key

from ejkernel.ops.store.lines import whole_entries
from ejkernel.ops.store.snapshot import Snapshot, line, seal, spell


def sealed(number, cfg=None, **more):
    """A key and its line, with a right checksum whatever it holds."""
    name = spell(key(f"{number:04}"))
    raw = seal(name, {"cfg": {"b": number, "a": [number]} if cfg is None else cfg, "seq": 1, "writer": "0", **more})
    return name, line(name, raw)


def found(lines):
    """What reading the lines at once gives, and what each of them gives alone."""
    alone = {name: Snapshot(lines).find(name) for name in lines}
    return dict(Snapshot(lines).entries()), {name: raw for name, raw in alone.items() if raw is not None}


ODD = {
    "a cfg with words for numbers": sealed(7, {"text": "NaN and Infinity"}),
    "letters of other scripts": sealed(7, {"é\u2028": "\ud800\x7f"}),
    "many brackets": sealed(7, [[] for _ in range(200)]),
    "a count that is none": sealed(7, seq=-1),
    "a count over the limit": sealed(7, seq=10**13),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_unusual_line_is_judged_as_it_is_alone(kind):
    """The lines around it are not touched by it."""
    lines = dict([*(sealed(number) for number in range(5)), ODD[kind], sealed(9)])
    together, alone = found(lines)

    assert together == alone
    assert len(together) >= 6


def damaged(change):
    name, text = sealed(7)
    return name, change(name, text)


DAMAGE = {
    "another number": lambda name, text: text.replace('"b": 7', '"b": 8'),
    "another key": lambda name, text: text.replace("|0007", "|0008"),
    "cut": lambda name, text: text[:-20] + "},",
    "a number beyond floats": lambda name, text: text.replace('"b": 7', '"b": 1e999'),
    "thousands of brackets": lambda name, text: text.replace('"b": 7', '"b": ' + "[" * 5000 + "]" * 5000),
    "thousands of digits": lambda name, text: text.replace('"b": 7', '"b": ' + "7" * 5000),
    "no object": lambda name, text: f'"{name}": 5,',
    "no checksum of text": lambda name, text: text.replace('"sha256": "', '"sha256": ["').replace('"},', '"]},'),
    "a line of its own behind it": lambda name, text: text + sealed(8)[1],
    "over the limit": lambda name, text: text.replace('"b": 7', '"b": "' + "x" * (1 << 20) + '"'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_costs_no_other_line(kind):
    """It is left out, or taken, as if it were read alone."""
    lines = dict([*(sealed(number) for number in range(5)), damaged(DAMAGE[kind]), sealed(9)])
    together, alone = found(lines)

    assert together == alone
    assert len(together) == (7 if kind == "a line of its own behind it" else 6)


def test_lines_that_make_sense_only_together_are_no_entries():
    """One leaves an array open, and a later one closes it and brings the keys of both: alone none of them is JSON."""
    names = [sealed(number)[0] for number in (1, 2, 3)]
    whole = [sealed(number)[1] for number in (1, 2, 3)]
    first = f'"{names[0]}": {{"cfg": [{{"{names[1]}": {{}},'
    third = f'"{names[2]}": {{}}}}]}}, {whole[1][:-1]}, {whole[2]}'
    lines = {names[0]: first, names[1]: whole[1], names[2]: third}
    assert list(json.loads("{" + "".join([first, whole[1], third])[:-1] + "}")) == names

    together, alone = found(lines)

    assert together == alone
    assert list(together) == [names[1]]


def test_every_line_of_many_blocks_is_found(monkeypatch):
    """Blocks end where they are full, by lines or by letters, and the last one is not full."""
    monkeypatch.setattr("ejkernel.ops.store.lines._LINES", 7)
    lines = dict(sealed(number, "x" * (number % 5)) for number in range(50))

    assert list(dict(Snapshot(lines).entries())) == list(lines)
    monkeypatch.setattr("ejkernel.ops.store.lines._LETTERS", 300)
    assert list(dict(Snapshot(lines).entries())) == list(lines)


def test_lines_as_we_write_them_are_not_read_one_by_one():
    """What makes a million of them quick: nothing is left for the slow way."""
    lines = [sealed(number) for number in range(600)]

    def alone(name, text):
        raise AssertionError(f"{name} was read alone")

    assert len(list(whole_entries(lines, alone))) == 600
