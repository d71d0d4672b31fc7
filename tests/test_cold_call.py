"""How many files a reader opens to follow one call that is tuned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of a cold call in a process of its own, with the functions that ran in each."""
    own = {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    own["EJKERNEL_PERSISTENT_CACHE_DIR"] = str(tmp_path_factory.mktemp("own"))
    command = [sys.executable, "-W", "error", str(HERE / "cold_call.py")]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cold_call_leads_through_few_files(files):
    """No more than these; a file more must be worth it, and the list says which there are."""
    assert {"config/walk.py", "tuning/tuner.py", "timing/race.py", "store/persistent.py"} <= set(files)
    # 78, and one more where a slow machine has a progress line printed.
    assert len(files) <= 79, "\n".join(f"{file}: {', '.join(names)}" for file, names in files.items())
