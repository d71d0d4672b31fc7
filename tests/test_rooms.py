"""The drawing of the rooms in the documentation, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_project import FILES, ROOMS, imports, inside, named

pytestmark = pytest.mark.one_leg

ROOT = Path(__file__).parent.parent
DRAWING = re.compile(r"^core <- .*$", re.MULTILINE)


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_the_drawing_shows_the_rooms_in_their_order(page):
    """Every room is in it once, where the test of imports has it; library and cli stand beside `ops`."""
    (line,) = DRAWING.findall((ROOT / page).read_text(encoding="utf-8"))
    assert line.split(" <- ") == [*ROOMS, "library", "cli"]


def test_the_page_lists_the_rooms_that_each_room_imports_from():
    """Each room but the first one has a line, and it names these rooms and no other; lazy imports count."""
    leaned_on = {room: set() for room in ROOMS}
    for path in FILES:
        room = named(path).split(".")[0]
        if room in leaned_on:
            leaned_on[room] |= {found for found in map(inside, imports(path)) if found in ROOMS and found != room}
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^({'|'.join(ROOMS)}) {{2,}}([a-z, ]+)$", text, re.MULTILINE)
    told = {"core": [], **{room: rooms.split(", ") for room, rooms in lines}}
    assert told == {room: sorted(rooms, key=ROOMS.index) for room, rooms in leaned_on.items()}


def test_every_room_is_described():
    """The table of the page names each room, and the files to begin with exist."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z/]+)/` \| .*? \| (.*) \|$", text, re.MULTILINE)
    assert {room.split("/")[0] for room, _ in rows} == set(ROOMS)
    missing = [
        f"{room}/{name}"
        for room, files in rows
        for name in re.findall(r"`([a-z_]+\.py)`", files)
        if not (ROOT / "ejkernel" / "ops" / room / name).exists()
    ]
    assert missing == []


def test_every_file_that_the_page_names_exists():
    """`room/file.py`, or one of several as in `room/{one,other}.py`, is a file of the package."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = "|".join((*ROOMS, "library", "cli"))
    names = set(re.findall(rf"\b((?:{rooms})/[a-z_/]+\.py)", text))
    several = re.findall(rf"\b((?:{rooms})/)\{{([a-z_,]+)\}}\.py", text)
    assert several
    names |= {f"{room}{name}.py" for room, files in several for name in files.split(",")}
    package = ROOT / "ejkernel"
    assert [n for n in sorted(names) if not ((package / "ops" / n).exists() or (package / n).exists())] == []


def test_every_place_that_the_page_names_is_there():
    """The table of places gives, for each file or the last of several, functions and classes that it defines."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("## Where is it?")[2].partition("\n## ")[0].partition("\n`core")[0]
    rows = re.findall(r"^\| [^|`]+ \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    missing = []
    for files, names in rows:
        sources = [(ROOT / "ejkernel/ops" / file).read_text() for file in re.findall(r"`([a-z_/]+\.py)`", files)]
        for name in re.findall(r"`(\w+)`", names):
            if not any(re.search(rf"^ *(?:def|class) {name}\b", source, re.MULTILINE) for source in sources):
                missing.append((files, name))
    assert len(rows) >= 12
    assert missing == []
