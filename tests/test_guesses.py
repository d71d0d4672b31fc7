"""The benchmark of guesses: it asks the kernels as an H200 would be asked, and looks their guesses up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import guesses

LINES = guesses.lines_of(guesses.DATASET)


@pytest.mark.parametrize("setting", ["on", "off"])
def test_every_guess_is_a_candidate_that_can_run(monkeypatch, setting):
    """At every call of the dataset, with Pallas-Triton and without."""
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", setting)
    found = [guesses.guess(line) for line in LINES]
    assert len(found) > 150
    assert not [one for one in found if not one.offered]
    used = {one.cfg.implementation for one in found}
    assert ("triton" in used) == (setting == "on")
    assert "pallas" not in used


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="guesses were measured with JAX 0.11")
@pytest.mark.parametrize("options", [[], ["--without-triton"]], ids=["with triton", "without"])
def test_guesses_are_near_the_best_on_average(monkeypatch, capsys, options):
    """The mean of every operation is within the limit."""
    # Set, so that what the script sets is taken back.
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", "on")
    monkeypatch.setattr(sys, "argv", ["guesses.py", *options])
    assert guesses.main() == 0
    said = capsys.readouterr().out
    assert said.endswith("limit: a mean of 1.05 kept\n")
    assert "library.attention@v4 was tuned at another version" in said
    assert not [
        name for name in ("matmul", "rms_norm", "softmax") if f"| {name} | 0 |" in said or f"library.{name}@" in said
    ]


def written(path, us):
    """A dataset of one softmax: times of two others, and of what is guessed."""
    line = next(line for line in LINES if line["key"][1].startswith("library.softmax"))
    cfg = guesses.codec.encode(guesses.guess(line).cfg)
    others = [{**cfg, "implementation": "lanes", "lanes": lanes} for lanes in (2, 4)]
    line = {**line, "summary": {"times": {"cfgs": [*others, cfg][: len(us)], "us": us}}}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("us", "code", "shown"),
    [
        ([10.0, 11.0, 10.4], 0, "1.040 / 1.040 / 0 of 1"),
        ([10.0, 11.0, 10.6], 1, "1.060 / 1.060 / 1 of 1"),
        ([10.0, 11.0], 0, "| softmax | 1 | 1 |"),
    ],
    ids=["near", "far", "without a time"],
)
def test_a_mean_over_the_limit_is_an_exit_code(monkeypatch, capsys, tmp_path, us, code, shown):
    """A guess that the dataset has no time of is counted and not judged."""
    written(tmp_path / "one.jsonl", us)
    monkeypatch.setattr(sys, "argv", ["guesses.py", str(tmp_path / "one.jsonl"), "--calls"])
    assert guesses.main() == code
    assert shown in capsys.readouterr().out


def test_calls_are_rebuilt_from_their_parts():
    """The key of every call is the one that it was tuned under."""
    for line in LINES:
        assert guesses.call_of(line).make_key() == line["key"][2]
