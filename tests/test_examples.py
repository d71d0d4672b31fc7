"""Every file under examples/ runs, and shows what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forked_python
import pytest

ROOT = Path(__file__).parent.parent
# Compiled as the suite compiles, which is half of what these take; the first example is run as a user would.
QUICKLY = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
FILES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all: what one example tuned the next one finds."""
    return tmp_path_factory.mktemp("examples")


def run(name: str, cache: Path, **settings: str) -> str:
    """What an example prints, run as a user would, with warnings as errors."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"EJKERNEL_PERSISTENT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
    done = forked_python.run(command, env=env, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_every_example_has_a_test() -> None:
    """A new example is run here too."""
    assert FILES == ["first_kernel", "pallas_kernel", "transformer", "transformer_sharded"]


def test_a_first_kernel_is_tuned_once_and_then_answered_from_disk(cache: Path) -> None:
    """The second run, which may not measure anything, has the first one's answer."""
    first = run("first_kernel", cache)
    second = run("first_kernel", cache, EJKERNEL_OPS_AUTOTUNE="off")

    assert first.startswith("nearest(rows=")
    assert second == first
    assert (cache / "first_kernel.nearest.json").exists()


def test_a_pallas_kernel_is_wrapped(cache: Path) -> None:
    """Each of its candidates is right, one is chosen, and it has a gradient."""
    text = run("pallas_kernel", cache, XLA_FLAGS=QUICKLY)
    assert text.count("rows: ok") == 4
    assert "gradient (512, 128)" in text


def test_a_transformer_learns(cache: Path) -> None:
    """The loss falls, and its kernels were tuned while the step was traced."""
    text = run("transformer", cache, XLA_FLAGS=QUICKLY)
    assert "loss 6." in text
    assert "library.attention" in text


def test_a_sharded_transformer_learns_as_well(cache: Path) -> None:
    """Over four devices, from the loss that one device computes; the example compares the two."""
    # Enough for its first kernels; that whole steps are tuned is shown elsewhere.
    flags = f"--xla_force_host_platform_device_count=4 {QUICKLY}"
    text = run("transformer_sharded", cache, EJKERNEL_OPS_TUNE_SECONDS="1", XLA_FLAGS=flags)
    assert text.startswith("4 devices: loss 6.")
