"""The command line itself: help, wrong names, statuses and errors.

Covers `cli/__main__.py`, `cli/demo.py`, `cli/errors.py`, `cli/main.py` and `cli/parsing.py`.
"""

from __future__ import annotations

import importlib
import sys

import pytest
from fakes_cli import piped

from ejkernel.cli.main import COMMANDS
from ejkernel.cli.parsing import Group


def every_command():
    """The words of each command there is, and what it is."""
    for name in COMMANDS:
        found = importlib.import_module(f"ejkernel.cli.{name}").COMMAND
        if isinstance(found, Group):
            yield from (((name, inner), command) for inner, command in found.commands.items())
        else:
            yield (name,), found


EVERY = dict(every_command())


def test_help_lists_the_commands(shell):
    """With a line about each, and examples."""
    done = shell("--help")
    assert done.status == 0
    assert all(f"  {name}" in done.out for name in COMMANDS)
    assert "ejkernel record -- python train.py" in done.out


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_help_with_examples(shell, words):
    """The examples are calls of that very command, or of a program with what it made."""
    done = shell(*words, "--help")
    assert (done.status, done.err) == (0, "")
    assert f"usage: ejkernel {' '.join(words)}" in done.out
    assert f"  ejkernel {' '.join(words)}" in done.out.partition("examples:")[2]


@pytest.mark.parametrize("words", [w for w, c in EVERY.items()], ids=" ".join)
def test_the_examples_of_a_command_are_calls_that_it_takes(words):
    """None of them has an option that does not exist."""
    import shlex

    command = EVERY[words]
    for example in command.examples:
        first, *rest = shlex.split(example)
        if first == "ejkernel":
            assert tuple(rest[: len(words)]) == words
            command.parser("ejkernel").read(rest[len(words) :])


def test_nothing_at_all_is_answered_with_the_help(shell):
    """And with the status of a wrong command line."""
    assert shell().status == 2
    done = shell("cache")
    assert done.status == 2
    assert "verify" in done.out


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("tnue",), "ejkernel has no command tnue (did you mean tune?)"),
        (("cache", "lst"), "ejkernel cache has no command lst (did you mean list?)"),
        (("cache", "list", "--jsn"), "there is no option --jsn (did you mean --json?)"),
        (("tune", "x.json", "--secnds=3"), "there is no option --secnds (did you mean --seconds?)"),
        (("--versoin",), "has no option --versoin (did you mean --version?)"),
        (("cache", "path", "extra"), "there is no argument extra"),
        (("demo", "matmull"), "the demo has no matmull (did you mean matmul?)"),
        (("cache", "list", "--older-than", "long"), "'long' is no age"),
        (("record",), "record needs a program behind --"),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_a_wrong_command_line_names_the_nearest(shell, words, advice):
    """In one sentence, with the status for it."""
    done = shell(*words)
    assert done.status == 2
    assert advice in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_an_unforeseen_error_is_a_sentence_and_a_traceback_for_who_asks(shell, monkeypatch):
    """Both name the error."""

    def broken(options):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("ejkernel.cli.cache.store_paths", broken)
    done = shell("cache", "list")
    assert done.status == 4
    assert done.err == "ejkernel: ZeroDivisionError: by zero; --traceback shows where this comes from\n"
    assert "Traceback" in shell("cache", "list", "--traceback").err


def test_the_version_is_one_line(shell):
    """Of the distribution."""
    assert shell("--version").out.startswith("ejkernel-ops ")


def test_help_and_lists_need_no_jax():
    """They must start at once."""
    code = (
        "import sys\n"
        "from ejkernel.cli.main import run\n"
        "for words in (['--help'], ['tune', '--help'], ['cache', 'list'], ['cache', 'verify'], ['cache', 'path']):\n"
        "    assert run(words) == 0\n"
        "assert not {'jax', 'jaxlib', 'numpy'} & set(sys.modules)\n"
    )
    import subprocess

    from fakes_cli import variables

    done = subprocess.run([sys.executable, "-c", code], env=variables(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_command_reads_no_environment_and_no_private_names():
    """Settings and private names of JAX have one place each."""
    import re

    from fakes_cli import ROOT

    for path in (ROOT / "ejkernel" / "cli").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"\benvironb?\b|\bgetenvb?\b|jax\._src", text) == [], path.name


def test_nothing_else_imports_the_command():
    """It is the last room."""
    from fakes_cli import ROOT

    for path in [*(ROOT / "ejkernel" / "ops").rglob("*.py"), *(ROOT / "ejkernel" / "library").rglob("*.py")]:
        assert "cli" not in [part for line in _imports(path) for part in line.split(".")], path


def _imports(path):
    import ast

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_make_demo_is_the_same_demo():
    """One demo, two doors."""
    from fakes_cli import ROOT

    assert "python -m ejkernel.cli demo\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_console_script_is_declared():
    """With the function that ends the process itself."""
    import tomllib

    from fakes_cli import ROOT

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["ejkernel"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_module_is_the_command():
    """`python -m ejkernel.cli` works where the console script is not installed."""
    done = piped("cahce")
    assert done.status == 2
    assert "did you mean cache?" in done.err
