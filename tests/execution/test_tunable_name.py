"""Names of tunable functions: what a script, a notebook or a line that was typed in keeps its entries under."""

from __future__ import annotations

import linecache
import sys
import types

import jax.numpy as jnp
import pytest
from fakes import TableTuner

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, PersistentCache
from ejkernel.ops.execution import tunable_name

CELL = """
from ejkernel.ops import tunable

@tunable(size=[1, 2], executor=executor)
def doubled(x, *, size):
    return x * 2
"""
OTHER = CELL.replace("x * 2", "x + x")
X = jnp.arange(4.0)


@pytest.fixture
def session(monkeypatch, tmp_path):
    """Starts a session without a file, as a notebook's process is one: cells run in a `__main__` of their own."""

    def start(**names):
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(tunable_name, "_first", {})
        store = PersistentCache("cells", tmp_path / "cells.json")
        selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner({1: 2.0, 2: 1.0}), persistent=store)
        vars(main).update(executor=Executor(selector), tuner=selector.tuner, **names)

        def run(text, source=True):
            path = f"<cell {len(linecache.cache)} of {id(main)}>"
            if source:
                linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
            exec(compile(text, path, "exec"), vars(main))
            return main

        return run

    yield start
    for path in [path for path in linecache.cache if path.startswith("<cell ")]:
        del linecache.cache[path]


@pytest.mark.parametrize("source", [True, False], ids=["with its source", "without"])
def test_functions_of_one_name_in_two_notebooks_do_not_share_entries(session, source):
    """The second one is tuned by itself, and the first still finds its own afterwards."""
    first = session()(CELL, source)
    first.doubled(X)
    second = session()(OTHER, source)
    second.doubled(X)
    assert (first.tuner.calls, second.tuner.calls) == (1, 1)
    again = session()(CELL, source)
    again.doubled(X)
    assert again.tuner.calls == 0


def test_a_cell_that_is_edited_keeps_its_name(session):
    """So what was tuned before is a seed of the next tuning."""
    run = session()
    first = run(CELL).doubled
    assert run(OTHER).doubled.kernel.op_id == first.kernel.op_id


@pytest.mark.parametrize("how", ["server", "editor"])
def test_a_notebook_with_a_name_goes_by_it(session, how, monkeypatch):
    """As a script goes by its file's name, whatever the function says."""
    names = {"__vsc_ipynb_file__": "/home/a/reading.ipynb"} if how == "editor" else {}
    if how == "server":
        monkeypatch.setenv("JPY_SESSION_NAME", "/home/a/reading.ipynb")
    run = session(**names)
    assert {run(text).doubled.kernel.op_id for text in (CELL, OTHER)} == {"reading.doubled"}
