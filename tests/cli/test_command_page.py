"""The page about the command: every example in it runs, and has the lines that the page shows.

Covers `cli/profile.py` and `cli/report.py`.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import find_spec

import pytest
from fakes_cli import HERE, ROOT
from test_command_line import EVERY

PAGE = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")


def examples():
    """The commands of the page in order, each with the lines that it shows."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            found.append((command, [line for line in lines if line.strip()]))
    return found


def test_every_command_has_an_example():
    """Whatever is added needs one."""
    shown = [tuple(shlex.split(command)[1:3]) for command, _ in examples()]
    assert [" ".join(words) for words in EVERY if not any(one[: len(words)] == words for one in shown)] == []


@pytest.mark.one_leg
def test_the_examples_run_one_after_the_other(shell, tmp_path, monkeypatch):
    """Each ends well, and each line that the page shows has one that begins with the same word in what is printed."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
    known = "ejkernel.cli.examining._version"
    monkeypatch.setattr(known, lambda name: None if name == "ejkernel" else "0.10.2")
    (tmp_path / "my_model.py").write_text(re.search(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1])
    # The module is found beside the program that records it, and from the working directory.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    for command, lines in examples():
        # The extra `remote` may not be installed.
        if "://" in command and find_spec("fsspec") is None:
            continue
        words = [sys.executable if word == "python" else word for word in shlex.split(command)[1:]]
        done = shell(*words)
        assert done.status == 0, (command, done.err)
        said = {line.split()[0] for line in (done.out + done.err).splitlines() if line.strip()}
        wanted = {"note" if line.startswith("ok    clock") and "note" in said else first(line) for line in lines}
        # A trace under JAX 0.10 has the label of one of both calls.
        if command.startswith("ejkernel profile") and "1" in said:
            wanted = wanted - {"2"}
        assert {word for word in wanted if not fits(word, said)} == set(), (command, done.out, done.err)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)


def first(line: str) -> str:
    """The word that a line is known by."""
    return line.split()[0]


def fits(word: str, said: set[str]) -> bool:
    """Paths differ from machine to machine; call keys and names do not."""
    return (
        word in said
        or (word.startswith("~/") and any(one.startswith("/") for one in said))
        or (word.startswith("entries/row_sum_v1-") and any(one.startswith("entries/row_sum_v1-") for one in said))
    )


@pytest.mark.parametrize("status", ["0", "1", "2", "3", "4", "130", "141"])
def test_the_statuses_are_the_documented_ones(status):
    """Each number has its line."""
    from ejkernel.cli.errors import ExitStatus

    assert f"| {status} |" in PAGE
    assert sorted(map(int, ExitStatus)) == [0, 1, 2, 3, 4, 130, 141]
