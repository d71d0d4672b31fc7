"""Random keys over real processes: none is ever decided twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from thinning import AT_LENGTH

BENCHMARK = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "agreement.py"


@pytest.mark.one_leg
@pytest.mark.parametrize(
    ("processes", "keys"),
    [(2, 60), pytest.param(4, 1000, marks=AT_LENGTH)],
    ids=["short", "long"],
)
def test_no_two_processes_disagree(processes, keys):
    """Orders of their own, own winners, some answers known, some calls left out: one cfg for each key."""
    command = [sys.executable, str(BENCHMARK), "--processes", str(processes), "--keys", str(keys), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["decisions"] == processes * (keys - keys // 10)
    assert found["keys on which processes disagree"] == 0
    assert 0 < found["tunings"] <= keys
