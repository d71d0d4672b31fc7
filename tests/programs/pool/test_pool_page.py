"""The recipes of the page on many machines, copied and run, each with its engine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/pool.md").read_text(encoding="utf-8")
RECORDED = (
    "import jax.numpy as jnp; from ejkernel.library import rms_norm; rms_norm(jnp.ones((64, 256)), jnp.ones(256))"
)
# The module and the extra behind each engine.
ENGINES = {
    "dask": ("distributed", "dask"),
    "mpi": ("mpi4py", "mpi"),
    "ray": ("ray", "ray"),
    "slurm": ("submitit", "slurm"),
}
RECIPES = re.findall(r'^```(\w+) title="(\w+)"\n(.*?)^```', PAGE, re.DOTALL | re.MULTILINE)
pytestmark = pytest.mark.engines


@pytest.fixture
def run(tmp_path):
    """Runs a command as a user would; nothing that it started is left, whatever happens."""
    # Names of sockets may have 107 characters.
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "EJKERNEL_PERSISTENT_CACHE_DIR": str(tmp_path / "cache"),
        "RAY_TMPDIR": short,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_LAUNCHER": "fork",
    }

    def run(*command):
        with open(tmp_path / "said", "w+", encoding="utf-8") as said:
            process = subprocess.Popen(
                command, env=settings, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(timeout=600)
            finally:
                # The servers that a recipe leaves in the background are of its group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            return process.returncode, said.read()

    yield run
    shutil.rmtree(short, ignore_errors=True)


def test_every_engine_has_its_recipe():
    """On the command line, and in Python where there is more to write than the name of a class."""
    assert {engine for _, engine, _ in RECIPES} == ENGINES.keys()
    assert {engine for language, engine, _ in RECIPES if language == "bash"} == ENGINES.keys()


@pytest.mark.parametrize(
    ("language", "engine", "text"), RECIPES, ids=[f"{engine}-{language}" for language, engine, _ in RECIPES]
)
def test_a_recipe_runs(run, tmp_path, language, engine, text):
    """It ends well, and the call was tuned by a worker."""
    module, extra = ENGINES[engine]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the extra `{extra}`: pip install 'ejkernel-ops[{extra}]'")
    if language == "python":
        (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
        status, said = run(sys.executable, "-W", "error", "recipe.py")
    else:
        status, said = run("ejkernel", "record", "--", sys.executable, "-c", RECORDED)
        assert status == 0, said
        status, said = run("bash", "-c", text)
    assert status == 0, said
    assert re.search(r"worker \S+: 1 call tuned", said), said
