"""Processes of one program that each measure another winner run the same cfg: real processes, two to four of them.

Covers `fleet/report.py`.
"""

from __future__ import annotations

import pytest
from ranks import once, run_program
from thinning import AT_LENGTH

# Three have a majority and a rest. Two processes are run by the campaign and by the sharded step beside this file, and
# four on two cores mostly wait for each other to start.
COUNTS = [pytest.param(2, marks=AT_LENGTH), 3, pytest.param(4, marks=AT_LENGTH)]


@pytest.fixture(params=COUNTS, ids=lambda count: f"{count} processes", scope="module")
def said(request, tmp_path_factory):
    """What every process said of every scenario."""
    name = f"agrees-{request.param}"
    return once(
        tmp_path_factory.getbasetemp(),
        name,
        lambda: run_program("agrees", request.param, tmp_path_factory.mktemp(name)),
    )


def values(by_rank, name):
    return [data[name] for data in by_rank.values() if name in data]


def the_one(items):
    """The only value among them."""
    found = []
    for item in items:
        if item not in found:
            found.append(item)
    assert len(found) == 1, found
    return found[0]


def test_ranks_that_measure_different_winners_run_one_cfg(said):
    """One process tunes, and all run what it found, at once and later."""
    plain = said["plain"]
    size = the_one([*values(plain, "size"), *values(plain, "again")])
    assert sum(values(plain, "tuned")) == 1
    winner = next(rank for rank, data in plain.items() if data["tuned"])
    assert size == (2, 4, 8, 16)[winner]
    assert values(plain, "in memory") == [[size]] * len(plain)


def test_the_report_says_who_decided_and_who_waited(said):
    """Every process has the same row: the one that tuned, the tier, and a wait for each process."""
    row = the_one(values(said["plain"], "row"))
    winner = next(rank for rank, data in said["plain"].items() if data["tuned"])
    assert (row["process"], row["tier"], row["why"]) == (winner, "autotune", "")
    assert sorted(row["waited"]) == sorted(map(str, said["plain"]))
    assert row["waited"][str(winner)] == 0
    assert all(seconds > 0 for rank, seconds in row["waited"].items() if rank != str(winner))


def test_the_order_of_calls_does_not_matter(said):
    """Each process asks for eight keys in an order of its own; each key is tuned once."""
    permuted = said["permuted"]
    the_one(values(permuted, "sizes"))
    assert len(set(values(permuted, "first"))) == len(permuted)
    assert sum(values(permuted, "tuned")) == 8


def test_a_warm_store_of_one_rank_answers_for_all_without_a_wait(said):
    """What one process has on disk holds at once, also where another one is tuning already."""
    warm = said["warm_store"]
    assert the_one([*values(warm, "size"), *values(warm, "again")]) == 32
    row = the_one(values(warm, "row"))
    assert (row["process"], row["tier"]) == (len(warm) - 1, "persistent")
    assert "cache_hit" in warm[len(warm) - 1]["events"]


def test_one_rank_asks_the_remote_and_all_follow(said):
    """The process that decides looks there; the others send no request at all."""
    asked = said["from_a_remote"]
    assert the_one([*values(asked, "size"), *values(asked, "again")]) == 16
    row = the_one(values(asked, "row"))
    assert row["tier"] == "remote"
    assert [rank for rank, data in asked.items() if data["requests"]] == [row["process"]]


def test_a_warm_memory_of_one_rank_answers_for_all_without_a_wait(said):
    """The same for what a program put into one process's cache."""
    warm = said["warm_memory"]
    assert the_one([*values(warm, "size"), *values(warm, "again")]) == 64
    assert the_one(values(warm, "in memory")) == [64]
    assert the_one(values(warm, "row"))["tier"] == "memory"


def test_memories_that_differ_become_one(said):
    """Each process had another cfg in its cache; all run, and remember, one of these."""
    found = said["different_memories"]
    size = the_one(values(found, "size"))
    assert size in range(100, 104)
    assert the_one(values(found, "in memory")) == [size]
    assert sum(values(found, "tuned")) == 0


def test_a_slow_rank_is_not_waited_for_beyond_the_bound(said):
    """The heuristic cfg is published, all are told, and the slow process follows, though it has tuned and stored."""
    slow = said["slow"]
    assert the_one(values(slow, "size")) == 1
    row = the_one(values(slow, "row"))
    assert row["tier"] == "heuristics"
    assert "process 0 had not decided after 0.5 s" in row["why"]
    assert all("EJKERNEL_OPS_AGREE_SECONDS" in the_one(warned) for warned in values(slow, "warned"))
    assert values(slow, "stored") == [2, *[None] * (len(slow) - 1)]


def test_a_rank_that_never_makes_the_call_keeps_nobody_waiting(said):
    """The others agree among themselves."""
    absent = said["absent"]
    the_one(values(absent, "size"))
    assert len(values(absent, "size")) == len(absent) - 1


def test_a_store_that_cannot_be_written_does_not_stop_an_agreement(said):
    """The process that tuned warns of its store, and all run what it found."""
    found = said["read_only"]
    the_one(values(found, "size"))
    assert sum(values(found, "tuned")) == 1
    assert sorted(len(warned) for warned in values(found, "warned")) == [*[0] * (len(found) - 1), 1]


def test_a_shared_folder_gets_the_winners_entry(said):
    """One process writes, and all find the agreed cfg there."""
    found = said["shared_folder"]
    assert the_one(values(found, "stored")) == the_one(values(found, "size"))
    assert sum(values(found, "tuned")) == 1


def test_of_separate_folders_the_winners_gets_the_entry(said):
    """The process that tuned keeps the cfg; the others have nothing to keep."""
    for data in said["own_folders"].values():
        assert data["stored"] == (data["size"] if data["tuned"] else None)


def test_what_the_program_says_itself_is_not_agreed(said):
    """`cfg=` and overlays are taken as written, and change nothing of what the others run."""
    found = said["program_text"]
    assert values(found, "given") == [50 + rank for rank in found]
    assert values(found, "under") == [60 + rank for rank in found]
    assert the_one(values(found, "size")) in (2, 4, 8, 16)


def test_a_later_put_of_one_rank_does_not_part_it_from_the_others(said):
    """What was agreed holds until the program ends; the process that put is told once."""
    found = said["put_later"]
    size = the_one(values(found, "size"))
    assert all(sizes == [size, size] for sizes in values(found, "later"))
    assert the_one(values(found, "cleared")) == size
    assert "agreed on" in the_one(found[0]["warned"])
    assert all(found[rank]["warned"] == [] for rank in found if rank)


def test_explicit_tunings_are_agreed_each_by_itself(said):
    """`selector.tune` measures in one process and gives all the same; a process that tunes alone waits for no other."""
    found = said["tuned_offline"]
    sizes = the_one(values(found, "sizes"))
    assert the_one(values(found, "tiers")) == ["autotune", "autotune"]
    assert sum(values(found, "tuned")) == 3
    assert found[1]["single"] == 4
    assert the_one(values(found, "then")) in sizes


def test_an_error_of_one_rank_does_not_keep_the_others_waiting(said):
    """A kernel that cannot list its candidates is an error that names it, in every process."""
    assert all("ZeroDivisionError: no blocks" in error for error in values(said["broken"], "error"))


@pytest.mark.parametrize(("op_id", "why"), [("heavy", "70,002 bytes of JSON"), ("opaque", "complex")])
def test_a_cfg_that_cannot_travel_is_an_error_in_every_process(said, op_id, why):
    """Too large, or without JSON: the message says so, and what to do."""
    for error in values(said["cannot_travel"], op_id):
        assert error.startswith("AgreementError: ")
        assert why in error
        assert "EJKERNEL_OPS_AGREE=off" in error


def test_threads_of_all_ranks_get_one_cfg(said):
    """Five threads in each process ask for one new key: one tuning in all."""
    found = said["threads"]
    the_one(size for sizes in values(found, "sizes") for size in sizes)
    assert sum(values(found, "tuned")) == 1


def test_a_warm_call_asks_nobody(said):
    """A key is agreed once: later choices and calls send nothing, and the first one sends little."""
    for data in said["warm_call"].values():
        assert data["later"] == 0
        assert 0 < data["first"] < 10


def test_all_ranks_lower_the_same_program(said):
    """The text is the same everywhere, and so is what a compiled kernel computes."""
    the_one(values(said["lowered"], "text"))
    the_one(values(said["lowered"], "compiled"))


def test_the_tuner_itself_measures_in_one_process(said):
    """With candidates that are really run, one process measures for all; what it finds is the machine's to say."""
    found = said["really_tuned"]
    assert the_one(values(found, "size")) in (1, 32, 64)
    assert sum(values(found, "tuned")) == 1


def test_guesses_are_agreed_as_well(said):
    """Where nothing may be measured all run the heuristic cfg, and are told so each time."""
    found = said["heuristics_only"]
    assert the_one([*values(found, "size"), *values(found, "again")]) == 1
    assert the_one(values(found, "events")) == ["heuristics", "heuristics"]


def test_what_was_agreed_is_explained(said):
    """Whatever this process would find, or has found, by itself: the tier, the cfg and whose decision it was."""
    found = said["heuristics_only"]
    tier, answer = the_one(values(found, "told"))
    assert tier == "heuristics"
    assert answer.startswith("size=1 (as process ")
    size, row = said["plain"][0]["size"], the_one(values(said["plain"], "row"))
    assert the_one(values(found, "tuned")) == [
        "memory",
        f"size={size} (as process {row['process']} decided for all)",
    ]


def test_a_rank_with_other_candidates_is_an_error_for_all(said):
    """It names both processes and what only one of them has, and reaches every process at its next decision."""
    found = said["other_candidates"]
    for data in found.values():
        assert data["second"].startswith("AgreementError: ")
        assert f"process {len(found) - 1}" in data["second"]
        assert '{"size": 17}' in data["second"]
        assert '{"size": 16}' in data["second"]
    assert any(data["first"].startswith("AgreementError: ") for data in found.values())
