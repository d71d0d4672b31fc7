"""`ejkernel tune --pool` and `--shard`."""

from __future__ import annotations

import sys

import pytest
from fakes_cli import HERE

from ejkernel.cli.errors import ExitStatus

RUN = "import tuned_program; tuned_program.program()"


@pytest.fixture(autouse=True)
def memory_as_needed(monkeypatch):
    """The command sets this for its own process."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def recording(shell, monkeypatch):
    """A recording of two calls."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parent.parent}:{HERE}")
    monkeypatch.syspath_prepend(HERE)
    assert shell("record", "--", sys.executable, "-c", RUN).status == 0
    return "recorded.json"


@pytest.mark.engines
def test_a_recording_is_tuned_on_processes_of_this_machine(shell, recording):
    """The summary has a line for each worker, and the store what they found."""
    done = shell("tune", recording, "--pool", "1")
    assert done.status == 0, done.err
    assert "2 of 2: cli.row_sum@v1" in done.err
    assert "2 calls tuned in" in done.out
    assert len(shell("cache", "list", "--json").data) == 2


def test_the_shards_of_a_recording_are_all_of_it(shell, recording):
    """Each job tunes its part into the same store; a part without calls is no error."""
    keys = []
    for shard in ("1/3", "2/3", "3/3"):
        done = shell("tune", recording, "--store", "shared", "--shard", shard, "--json")
        assert done.status == 0, done.err
        keys += [call["call_key"] for call in done.data["calls"]]
    assert len(keys) == len(set(keys)) == 2
    whole = shell("tune", recording, "--store", "shared", "--json").data["calls"]
    assert {call["from"] for call in whole} == {"persistent"}
    assert {call["call_key"] for call in whole} == set(keys)


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_shard_that_is_none_is_refused(shell, tmp_path, shard):
    """With how to write one."""
    done = shell("tune", "recorded.json", f"--shard={shard}")
    assert done.status == ExitStatus.UNUSABLE
    assert "write I/N" in done.err


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("carrier-pigeons", "is unknown; write a number of processes"),
        ("0", "whole number of at least 1"),
        ("processes:cuda", "no device"),
    ],
)
def test_a_pool_that_is_none_is_refused(shell, tmp_path, pool, words):
    """Before anything is read."""
    done = shell("tune", "recorded.json", "--pool", pool)
    assert done.status == ExitStatus.UNUSABLE
    assert words in done.err
