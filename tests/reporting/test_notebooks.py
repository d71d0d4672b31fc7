"""Notebooks, run by a real kernel: the live line, the forms of values, and the notebook of the examples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`: pip install 'ejkernel-ops[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebooks`: pip install 'ejkernel-ops[notebooks]'")
pytest.importorskip("ipykernel", reason="needs the extra `notebooks`: pip install 'ejkernel-ops[notebooks]'")

ROOT = Path(__file__).parents[2]

DECLARED = """
import jax, jax.numpy as jnp
from ejkernel.ops import autotune, explain, tunable, AutotuneOptions

@tunable(way=["count", "sort"], version="1", op_id="ranks")
def ranks(x, *, way):
    return jnp.sum(x[:, None] > x, axis=1) if way == "count" else jnp.searchsorted(jnp.sort(x), x).astype(jnp.int32)

x = jnp.arange(512.0)
"""


@pytest.fixture(autouse=True)
def of_this_tree(monkeypatch, tmp_path):
    """The kernel's process imports this package, and its files lie in a folder of the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def execute(notebook, cwd):
    """Runs a notebook in a folder; the limits are for a hang."""
    place = {"metadata": {"path": str(cwd)}}
    nbclient.NotebookClient(notebook, timeout=600, startup_timeout=300, resources=place).execute()


def run(*cells, cwd):
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    execute(notebook, cwd)
    return [cell.outputs for cell in notebook.cells]


def shown(outputs):
    """The texts that a cell displays, whatever their kind."""
    return [out["data"]["text/plain"] for out in outputs if out.output_type in ("display_data", "execute_result")]


def test_a_tuning_has_one_live_line_that_ends_as_its_outcome(tmp_path):
    """The first call tunes; the second one is silent."""
    _, first, second = run(DECLARED, "ranks(x).block_until_ready();", "ranks(x).block_until_ready();", cwd=tmp_path)
    (line,) = shown(first)
    assert line.startswith("tuned ranks@v1 ")
    assert "2 candidates in" in line
    assert [out for out in first if out.output_type == "stream"] == []
    assert second == []


def test_values_show_as_tables_and_short_lines(tmp_path):
    """A result and an explanation have HTML forms; a list of records is a list of lines."""
    cells = (
        DECLARED,
        "result = autotune(lambda x: ranks(x) + 1, x, tuning=AutotuneOptions(progress=False)); result",
        "ranks.explain(x)",
        "[entry.record for entry in result.entries]",
        "explain(ranks, x), ranks.choose(x)",
    )
    _, table, explained, records, pair = run(*cells, cwd=tmp_path)
    forms = [out["data"] for out in (*table, *explained) if out.output_type == "execute_result"]
    assert all("<table>" in form["text/html"] for form in forms)
    assert len(shown(records)[0]) < 250
    assert "<Record: ranks@v1" in shown(records)[0]
    assert "<Explanation: ranks@v1(float32[512])" in shown(pair)[0]


def test_an_interrupted_cell_keeps_the_best_so_far(tmp_path):
    """Ctrl-C during a race: the cell ends, and the next one answers from memory."""
    clock = """
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner

class Pressed:
    name = "table"
    rounds = 0
    def round(self, runs):
        self.rounds += 1
        if self.rounds > 2:
            raise KeyboardInterrupt
        return {run.number: 2.0 - run.number for run in runs}

executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=9, clock=Pressed())))
try:
    executor(ranks.kernel, x)
except KeyboardInterrupt:
    print("interrupted")
"""
    cells = (
        DECLARED,
        clock,
        "print(explain(ranks, x, executor=executor).tier, executor.choose_config(ranks.kernel, x).way)",
    )
    _, first, second = run(*cells, cwd=tmp_path)
    assert any(out.get("text") == "interrupted\n" for out in first)
    assert second[0]["text"] == "memory sort\n"


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_of_the_examples_runs(path, tmp_path):
    """From the first cell to the last, and it was saved without outputs."""
    notebook = nbformat.read(path, as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []
    execute(notebook, tmp_path)
