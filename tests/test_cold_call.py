"""How many files a reader opens to follow one call that is tuned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.one_leg
def test_a_cold_call_leads_through_few_files(tmp_path):
    """No more than these; a file more must be worth it, and the list says which there are."""
    # Without lines of progress, which a slow machine alone would print.
    own = {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu", "EJKERNEL_OPS_PROGRESS": "off"}
    env = {**os.environ, **own, "EJKERNEL_PERSISTENT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(HERE / "cold_call.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)

    assert {"config/walk.py", "tuning/tuner.py", "timing/race.py", "store/persistent.py"} <= set(files)
    assert len(files) <= 74, "\n".join(f"{file}: {', '.join(names)}" for file, names in files.items())
