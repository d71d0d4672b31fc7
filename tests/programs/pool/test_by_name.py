"""Functions by name: what can be sent, and where a worker looks for it."""

from __future__ import annotations

import sys

import pytest

from ejkernel.ops.programs.pool.by_name import call, name_of


def shout(text):
    """A function of text."""
    return text.upper()


def test_a_function_of_a_module_is_called_by_its_name():
    """With texts for arguments."""
    assert call(name_of(shout, ["a"], {}), ["a"], []) == "A"


@pytest.mark.parametrize(
    ("function", "texts", "more"),
    [(lambda text: text, ["a"], {}), (shout, [1], {}), (shout, ["a"], {"loud": "yes"})],
    ids=["lambda", "number", "keyword"],
)
def test_other_functions_and_arguments_are_not_sent(function, texts, more):
    """Nothing is pickled."""
    with pytest.raises(ValueError, match="cannot be sent to a process"):
        name_of(function, texts, more)


def test_a_worker_finds_the_modules_of_the_process_that_sent_the_task(monkeypatch, tmp_path):
    """After its own: a folder of the sender must not hide what is installed."""
    (tmp_path / "sent_along.py").write_text("def text():\n    return 'found'\n", encoding="utf-8")
    (tmp_path / "json.py").write_text("raise AssertionError\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sent_along", raising=False)
    monkeypatch.delitem(sys.modules, "json")
    assert call("sent_along:text", [], [str(tmp_path), "/no/such/folder"]) == "found"
    assert call("json:loads", ['"x"'], [str(tmp_path)]) == "x"
    assert "/no/such/folder" not in sys.path
    assert sys.path.count(str(tmp_path)) == 1
