"""A short replay of searches, and what can be tried of the GPU benchmark without one."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import REPOSITORY, call_of
from thinning import AT_LENGTH

pytestmark = pytest.mark.one_leg

BENCHMARKS = REPOSITORY / "benchmarks"


def benchmark(name):
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def replaying():
    return benchmark("search_replay")


@pytest.fixture(scope="module")
def large():
    return benchmark("search_gpu")


def run(script, *argv):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(BENCHMARKS / script), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)


def written(folder, name, scale=1):
    """A measured space in the form of the datasets: some configs fail, and the cold run is slow."""
    lines = ["a,b,mode,status,compile_ms,bench_ms,t0,t1,t2,t3"]
    for a in (1, 2, 4, 8, 16, 32):
        for b in (8, 16, 24, 32, 48, 64):
            for mode in (0, 1, 2):
                ok = a * b <= 1024
                t = scale * (1 + abs(a - 8) + abs(b - 32) / 8 + mode)
                lines.append(f"{a},{b},{mode}," + (f"ok,1,1,99,{t},{t * 1.1},{t * 0.9}" if ok else "error,1,1,,,,"))
    head = json.dumps({"name": name, "params": {"a": [], "b": [], "mode": []}})
    with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([f"# {head}", *lines]))


def test_a_space_is_read_as_it_was_measured(replaying, tmp_path):
    """The truth is the median without the first run, and infinity for what failed."""
    written(tmp_path, "kernel_RTX_1", scale=2)
    measured = replaying.load(tmp_path / "kernel_RTX_1.csv.gz")

    assert len(measured.cfgs) == 108
    assert measured.best == 2.0
    assert measured.seconds[measured.cfgs.index({"a": 32, "b": 48, "mode": 0})] == float("inf")


def test_the_replay_reports_and_judges(tmp_path):
    """Two devices of one kernel: every table is there, and all limits are kept on so simple a space."""
    written(tmp_path, "kernel_RTX_1")
    written(tmp_path, "kernel_RTX_2", scale=3)
    done = run("search_replay.py", "--datasets", str(tmp_path), "--seeds", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("guided", "genetic", "random", "worst space", "same path kept", "one sibling at a time"):
        assert word in done.stdout


def test_seeds_come_from_what_a_store_keeps_of_a_search(replaying, tmp_path):
    """The winner of what was measured on the sibling and its next best; not the best of what was not measured."""
    written(tmp_path, "kernel_RTX_1")
    sibling = replaying.load(tmp_path / "kernel_RTX_1.csv.gz")
    known = {i: seconds for i, seconds in enumerate(sibling.seconds) if sibling.cfgs[i]["a"] != 8}
    seeds = replaying.seeds_from(sibling, known)

    assert seeds[0] in ({"a": 4, "b": 32, "mode": 0}, {"a": 16, "b": 32, "mode": 0})
    assert all(cfg["a"] != 8 for cfg in seeds)
    assert [sibling.cfgs[i] for i in replaying.places_of(seeds, sibling)] == seeds


def test_without_datasets_there_is_nothing_to_replay(tmp_path):
    """The benchmark says that it skips, and that is no failure."""
    done = run("search_replay.py", "--datasets", str(tmp_path / "none"))

    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout


@pytest.mark.parametrize("name", ["pnpoly_RTX_2080_Ti", pytest.param("convolution_milo_A4000", marks=AT_LENGTH)])
def test_a_search_ends_near_the_best_of_a_measured_space(replaying, name):
    """Of three searches with 200 evaluations each two at least end within 5% of the best."""
    path = replaying.DATASETS / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip("needs measured search spaces; EJKERNEL_DATASETS names their folder (CONTRIBUTING.md)")
    measured = replaying.load(path)
    paths = [replaying.run(measured, replaying.GuidedSearch(), seed) for seed in range(3)]

    assert {len(path) for path in paths} == {200}
    assert sum(replaying.regret(measured, path) <= 0.05 for path in paths) >= 2


def test_the_large_matmul_has_thousands_of_valid_configs(large):
    """At 4096 by 4096, the heuristic's among them and none twice."""
    kernel, x = large.LargeMatmul(), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    inv = call_of(kernel, x, x)
    cfgs = large.space_of(kernel, inv)

    assert len(set(cfgs)) == len(cfgs) > 3000
    assert cfgs[0] == kernel.heuristic_cfg(inv)


def test_the_large_matmul_is_a_matmul(large):
    """Interpreted, whatever the order of its blocks."""
    kernel = large.LargeMatmul()
    kernel.interpret = True
    a, b = large.arrays((128, 128), (128, 128), dtype=jnp.float32)

    for cfg in (large.Tiling(32, 64, 32, 4, 2, 4), large.Tiling(64, 32, 64, 4, 2, 1)):
        np.testing.assert_allclose(kernel.run(a, b, cfg=cfg), a @ b, atol=1e-3)


def test_without_a_gpu_the_benchmark_says_so(large, capsys):
    """And measures nothing."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")

    assert large.main([]) == 0
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_benchmark_runs_dry(tmp_path):
    """From the search to the last race and the file, on a small made-up space."""
    out = tmp_path / "found.json"
    done = run("search_gpu.py", "--dry", "--repeats", "1", "--out", str(out))
    found = json.loads(out.read_text())

    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["configs"], found["ran"]) == (44, 44)
    assert set(found["searches"][0]) >= {"pick", "seconds", "off", "share", "evaluations"}
