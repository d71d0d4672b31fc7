"""The benchmark of predictions: it reads what the collection writes, judges, and skips where there is nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_leg

ROOT = Path(__file__).parent.parent


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "unseen.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


def written(path, best):
    """Tunings of many lengths: the winner is `best(length)`."""
    lines = []
    for number, length in enumerate(range(64, 64 * 17, 64)):
        us = [10.0 if cfg == best(length) else 20.0 for cfg in ("a", "b")]
        lines.append(
            {
                "name": str(length),
                "key": ["cpu|x", "op@v1", str(number)],
                "parts": {"scheme": "1", "args[0]": f"float32[{length}]"},
                "objective": "forward",
                "heuristic": "a",
                "summary": {"times": {"cfgs": ["a", "b"], "us": us}},
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_dataset_that_can_be_predicted_is_predicted(tmp_path):
    """Every call has the same winner: all are answered, all are right, and the whole gap to the heuristic is closed."""
    written(tmp_path / "easy.jsonl", lambda length: "b")
    done = run(tmp_path / "easy.jsonl")

    assert "| all | 16 | 100% | 100% |" in done.stdout, done.stdout + done.stderr
    assert "gap closed kept" in done.stdout


def test_a_dataset_of_chance_is_not_answered_and_breaks_the_limits(tmp_path):
    """Where chance decides the winner the model says nothing, and the exit code is 1."""
    written(tmp_path / "chance.jsonl", lambda length: random.Random(f"call {length}").choice("ab"))
    done = run(tmp_path / "chance.jsonl", "--reasons")

    assert done.returncode == 1
    assert "answered BROKEN" in done.stdout
    assert "not sure enough" in done.stdout


def test_halves_hold_all_calls(tmp_path):
    """The half that settings were chosen on, and the other, have rows of their own."""
    written(tmp_path / "easy.jsonl", lambda length: "b")
    done = run(tmp_path / "easy.jsonl", "--halves")

    assert "| settings chosen on | 8 | 100% |" in done.stdout, done.stdout + done.stderr
    assert "| the others | 8 | 100% |" in done.stdout


def test_without_a_dataset_there_is_nothing_to_predict(tmp_path):
    """A file that is not there is an error; none at all is not."""
    assert "No such file" in run(tmp_path / "none.jsonl").stderr
