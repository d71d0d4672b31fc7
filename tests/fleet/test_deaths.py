"""Processes that are killed, and programs that begin again: none hangs, and those that live run one cfg."""

from __future__ import annotations

import pytest
from ranks import Ranks, run_program
from thinning import AT_LENGTH


def kill(ranks: Ranks, rank: int) -> None:
    ranks.processes[rank].kill()
    ranks.processes[rank].wait()


# Of three, one dies while it waits and one while it tunes: two and four show no more, and take as long.
COUNTS = [pytest.param(2, marks=AT_LENGTH), 3, pytest.param(4, marks=AT_LENGTH)]


@pytest.fixture(params=COUNTS, ids=lambda n: f"{n} processes", scope="module")
def killed(request, tmp_path_factory):
    """One process dies while it waits, where there are more than two, and one while it tunes."""
    ranks = Ranks("killed", request.param, tmp_path_factory.mktemp("killed"))
    last = request.param - 1
    if last > 1:
        ranks.until("waits")
        kill(ranks, last)
        ranks.raise_flag("killed")
    codes = ranks.end()
    survivors = [rank for rank in range(request.param) if rank not in ({1, last} if last > 1 else {1})]
    assert [codes[rank] for rank in survivors] == [0] * len(survivors), ranks.output()
    assert codes[1] == -9
    return ranks.said()


def test_the_others_run_one_cfg_when_ranks_die(killed):
    """Killed with -9 while it waits, a process takes no other along; killed while it tunes, the heuristic cfg holds."""
    if "killed_waiting" in killed:
        assert {data["size"] for data in killed["killed_waiting"].values()} == {2}
        assert 1 in killed["killed_waiting"]
    tuning = killed["killed_tuning"]
    assert 1 not in tuning
    for data in tuning.values():
        assert data["size"] == 1
        assert data["row"]["tier"] == "heuristics"
        assert "process 1 stopped answering" in data["row"]["why"]
        assert len(data["warned"]) == 1
    assert len({data["size"] for data in killed["afterwards"].values()}) == 1


def test_a_killed_coordinator_ends_the_others_rather_than_hanging_them(tmp_path):
    """JAX ends the program, or a clear error does, whichever comes first."""
    ranks = Ranks("coordinator_killed", 2, tmp_path)
    ranks.until("waits")
    kill(ranks, 0)

    codes = ranks.end()

    assert codes[1] != 0
    said = ranks.said().get("coordinator_killed", {1: {"error": ""}})
    assert "coordinator of jax.distributed" in said[1]["error"] or "JAX distributed service" in ranks.output()


def test_a_program_that_begins_again_agrees_again(tmp_path):
    """Before, between and after: alone each process decides by itself, together they agree anew."""
    said = run_program("begins_again", 2, tmp_path)["begins_again"]

    assert [said[rank]["alone"] for rank in (0, 1)] == [2, 4]
    assert [said[rank]["between"] for rank in (0, 1)] == [2, 4]
    assert said[0]["first"] == said[1]["first"]
    assert said[0]["second"] == said[1]["second"]
    assert said[0]["computed"] == said[1]["computed"]
    assert [said[rank]["report"] for rank in (0, 1)] == [1, 1]


def test_agreement_can_be_switched_off(tmp_path):
    """Each process then runs what it found itself, and pays nothing."""
    said = run_program("switched_off", 2, tmp_path, EJKERNEL_OPS_AGREE="off")["switched_off"]

    assert [said[rank]["size"] for rank in (0, 1)] == [2, 4]
    assert [said[rank]["imported"] for rank in (0, 1)] == [False, False]
