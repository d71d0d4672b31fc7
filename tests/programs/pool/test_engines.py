"""Pools by name: engines that are not installed, options that are none, and pools that are used as they are."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from fakes_pool import Inline

from ejkernel.ops import LocalPool, RayPool, SlurmPool
from ejkernel.ops.programs.pool.dask import DaskPool
from ejkernel.ops.programs.pool.engines import ENGINES, opened, suited

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize(
    ("text", "module", "extra"),
    [
        ("dask:tcp://127.0.0.1:1", "distributed", "dask"),
        ("ray", "ray", "ray"),
        ("slurm", "submitit", "slurm"),
        ("mpi", "mpi4py.futures", "mpi"),
    ],
)
def test_an_engine_that_is_not_installed_names_the_extra(monkeypatch, text, module, extra):
    """And the extra exists, with the package in it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}.*pip install 'ejkernel-ops\[{extra}\]'"), opened(text):
        pass
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any(line.startswith(module.partition(".")[0]) for line in extras[extra])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dask", "lacks the address of a scheduler"),
        ("slurm:workers", "'workers' is no option"),
        ("slurm:workers=0", "workers=0 is not a whole number"),
        ("slurm:calls_per_task=many", "calls_per_task='many' is not a whole number"),
        ("mpi:4", "mpiexec says how many"),
        ("abacus:4", "one of dask, mpi, processes, ray, slurm"),
    ],
)
def test_an_engine_with_options_that_are_none_is_refused(text, words):
    """With how to write them."""
    with pytest.raises(ValueError, match=words), opened(text):
        pass


@pytest.mark.parametrize("pool", [Inline(), LocalPool(1)], ids=["inline", "local"])
def test_a_pool_of_no_engine_is_used_as_it_is(pool):
    """Whatever has `submit`."""
    assert suited(pool) is pool


def test_a_client_that_has_to_be_awaited_is_refused():
    """Its futures have no result yet when they are asked."""

    class Awaited:
        asynchronous = True

    with pytest.raises(ValueError, match="asynchronous"):
        DaskPool(Awaited())


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "4"])
@pytest.mark.parametrize("pool", [RayPool, SlurmPool])
def test_a_number_of_workers_that_is_none_is_refused(pool, workers):
    """Before an engine is started."""
    with pytest.raises(ValueError, match="not a whole number of at least 1"):
        pool(workers)


def test_every_engine_has_its_file():
    """A name of the table is a module with `opened`."""
    for module in ENGINES.values():
        __import__(f"ejkernel.ops.programs.pool.{module}")
        assert callable(sys.modules[f"ejkernel.ops.programs.pool.{module}"].opened)
