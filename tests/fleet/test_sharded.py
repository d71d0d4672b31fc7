"""A training step over the devices of two processes: one program, whichever process measured."""

from __future__ import annotations

import pytest
from ranks import once, run_program


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What two processes with two devices each said."""
    folder = tmp_path_factory.mktemp("sharded")
    return once(tmp_path_factory.getbasetemp(), "sharded", lambda: run_program("sharded", 2, folder, devices=2))


def test_both_lower_and_run_the_same_step(said):
    """Without stored cfgs one process measures the part of one device, and both train alike with what it found."""
    first, second = said["sharded"].values()
    assert first["text"] == second["text"]
    assert first["losses"] == second["losses"]
    assert first["losses"] == sorted(first["losses"], reverse=True)
    assert first["cfgs"] == second["cfgs"]
    assert first["tuned"] + second["tuned"] == 1


def test_both_lower_and_run_the_same_step_with_a_cfg_that_one_has_stored(said):
    """With a cfg in one process's own folder both run that one, although the other was free to measure."""
    first, second = said["sharded_stored"].values()
    assert first["text"] == second["text"]
    assert first["losses"] == second["losses"]
    assert first["cfgs"] == second["cfgs"] == [77]
    assert second["tuned"] == 0


def test_arrays_over_both_processes_are_not_measured_by_one(said):
    """A process that ran candidates alone would wait for the other for ever: the heuristic cfg serves both."""
    first, second = said["global_arrays"].values()
    assert first["sums"] == second["sums"]
    assert first["text"] == second["text"]
    assert (first["tuned"], second["tuned"]) == (0, 0)
    assert any(
        "span processes" in text or "shards automatically" in text for text in first["warned"] + second["warned"]
    )
