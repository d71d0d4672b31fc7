"""The benchmark of opponents: what is timed and counted, what a row says, and what a crash costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Kernel
from ejkernel.ops.timing.clock import Run

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import opponents_gpu
from cases.case import Case
from library_programs import HEURISTIC, TUNED, Study, compiled
from opponents import clock, contest, ours
from opponents.clock import MARK, Event, Foreign, MixedClock, attributed
from opponents.opponent import Opponent
from opponents.ours import BARE, SWITCH
from opponents.table import ENTRIES, SMALL, Entry, Limits, selected
from opponents.verdict import judged, lines


def test_kernels_without_a_name_belong_to_the_mark_before_them():
    """Torch's kernels carry no program's name: those after a mark are its run's, until a program with a name."""
    events = [
        *(Event(0, 5.0, None), Event(1, 1.0, "row0_0"), Event(2, 1.0, "row0_0")),
        *(Event(3, 0.1, MARK), Event(4, 2.0, None), Event(5, 3.0, None)),
        *(Event(6, 0.1, MARK), Event(7, 4.0, None), Event(8, 1.0, "row0_1"), Event(9, 9.0, None)),
    ]
    named, foreign = attributed(list(reversed(events)), [7, 3])
    assert named == {"row0_0": 2.0, "row0_1": 1.0}
    assert foreign == {7: 5.0, 3: 4.0}
    # With a mark that was lost, kernels could be another's.
    assert attributed(events[:6], [7, 3])[1] == {}


def test_kernels_of_all_packages_are_read_from_a_trace(monkeypatch, tmp_path):
    """From the streams of a GPU, with the program's name where they have one."""

    def ran(start, *stats):
        return SimpleNamespace(start_ns=start, duration_ns=2000.0, stats=stats)

    streams = [
        SimpleNamespace(name="Stream #1(Compute)", events=[ran(5, ("hlo_module", "jit_row0_1"), ("other", 1))]),
        SimpleNamespace(name="Stream #7(Compute)", events=[ran(9, ("correlation_id", 3))]),
        SimpleNamespace(name="XLA Modules", events=[ran(5, ("hlo_module", "jit_row0_1"))]),
    ]
    planes = [SimpleNamespace(name=name, lines=streams) for name in ("/device:GPU:0", "/host:CPU")]
    data = SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", data)
    (tmp_path / "one.xplane.pb").touch()
    assert clock.read(str(tmp_path)) == [Event(5, pytest.approx(2e-6), "row0_1"), Event(9, pytest.approx(2e-6), None)]


class Tick:
    """An event of CUDA on a device on which every call takes two milliseconds."""

    def __init__(self, torch):
        self.torch = torch

    def record(self):
        self.at = self.torch.calls

    def elapsed_time(self, other):
        return 2.0 * (other.at - self.at)


def fake_torch():
    """A torch that counts calls."""
    torch = SimpleNamespace(calls=0)
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, synchronize=lambda: None, _sleep=lambda cycles: None, Event=lambda **_: Tick(torch)
    )
    return torch


@pytest.mark.parametrize("in_trace", [True, False], ids=["in the trace", "not in the trace"])
def test_programs_of_torch_are_timed_in_the_same_round(monkeypatch, in_trace):
    """Per call, from the kernels after its mark; by CUDA's events where the trace does not hold them."""
    torch = fake_torch()

    def theirs(x):
        torch.calls += 1
        return x

    doubled = compiled("round_0", lambda x: x * 2, (jnp.ones(4),))
    runs = [
        Run(0, "round_0", doubled, (jnp.ones(4),), 3),
        Run(1, "round_1", Foreign(torch, theirs, (1.0,)), (jnp.ones(4),), 3),
    ]
    events = [Event(0, 0.6, "round_0"), Event(1, 0.1, MARK)]
    monkeypatch.setattr(clock, "read", lambda folder: [*events, Event(2, 0.3, None)] if in_trace else events)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    timer = MixedClock()
    assert timer.round(runs) == pytest.approx({0: 0.2, 1: 0.1 if in_trace else 2e-3})
    assert timer.by_events is not in_trace


def row(**changes):
    """A row that keeps every limit."""
    us = {HEURISTIC: 10.2, TUNED: 10.0, BARE: 10.3, "torch softmax": 10.0, "plain": 20.0}
    found = {"operation": "softmax", "case": "8x8", "us": us, "floor_us": 8.0, "not_counted": {}, "left_out": {}}
    found |= {"chosen": {TUNED: "a", BARE: "b"}, "tuning_s": 5.0, "bare_tuning_s": 2.0, "candidates": 3}
    return found | {"not_tuned": "", "clock": "profiler"} | changes


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"torch softmax": 9.9}, "over_opponent is 1.010, more than 1.0"),
        ({HEURISTIC: 10.6}, "heuristic_over_tuned is 1.060, more than 1.05"),
        ({BARE: 10.6}, "bare_over_tuned is 1.060, more than 1.05"),
    ],
)
def test_a_limit_that_a_time_breaks_is_named(changes, fault):
    """A row that keeps all limits has no fault."""
    limits = Limits(over_opponent=1.0, over_floor=1.3)
    assert judged(row(), limits, 6.0)["broken"] == []
    found = judged(row(us=row()["us"] | changes), limits, 6.0)
    assert found["broken"] == [fault]
    assert f"   LIMIT BROKEN: {fault}" in lines(found)


def test_a_row_without_a_right_opponent_is_no_victory():
    """Where all others differ from ours, ours may be the wrong one; a tuning over its seconds is told as well."""
    us = {name: row()["us"][name] for name in (HEURISTIC, TUNED, BARE)}
    found = judged(row(us=us, floor_us=7.0, tuning_s=7.5), Limits(over_opponent=1.0, over_floor=1.3), 6.0)
    assert [fault.split(",")[0] for fault in found["broken"]] == [
        "over_floor is 1.429",
        "no opponent ran and agreed with ours",
        "tuning took 7.5 s",
    ]


@dataclass(frozen=True)
class Way:
    """A cfg."""

    implementation: str


class Doubled(Kernel):
    """A kernel whose fastest way Pallas-Triton compiles."""

    op_id = "doubled"
    cfg_type = Way

    def run(self, x, *, cfg):
        return x * 2 if cfg.implementation == "triton" else x + x

    def heuristic_cfg(self, inv):
        return Way("plain")

    def valid_cfg(self, inv, cfg):
        return cfg.implementation != "triton" or os.environ.get(SWITCH) != "off" or "Triton is off"


@pytest.mark.parametrize("fastest", ["triton", "plain"])
def test_a_choice_that_needs_triton_is_tuned_once_more_without_it(monkeypatch, fastest):
    """With the setting off, then and when its program is traced; a choice that does not need it is kept."""
    case = Case("doubled", "4", "cpu", lambda rng: ((jnp.ones(4),), {}), Doubled, lambda x: x * 2, 0, 1)
    settings = []

    def study(case, seconds, store):
        settings.append(os.environ.get(SWITCH))
        cfg = Way("plain" if settings[-1] == "off" else fastest)
        ways = dict.fromkeys(("plain", HEURISTIC, TUNED), lambda x: x * 2)
        return Study(ways, (jnp.ones(4),), cfg, None, seconds=1.0, first_run=0.1)

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(ours, "study", study)
    found = ours.ours(Entry(case), 6.0, None)
    assert settings == ([None, "off"] if fastest == "triton" else [None])
    assert found.chosen == {TUNED: str(Way(fastest)), BARE: str(Way("plain"))}
    assert found.bare_tuning_s == (1.0 if fastest == "triton" else 0.0)
    assert "add" in jax.jit(found.programs[BARE]).lower(jnp.ones(4)).as_text()
    assert SWITCH not in os.environ


def test_cases_are_asked_for_by_operation_and_text():
    """All of an operation, or those whose names hold a text."""
    assert {entry.case.op for entry in selected(["softmax", "rms_norm"])} == {"softmax", "rms_norm"}
    assert [entry.name for entry in selected(["softmax: 50257"])] == ["softmax: 2048x50257"]
    assert {entry.case.op for entry in SMALL} == {entry.case.op for entry in ENTRIES}


def test_a_wrong_or_failing_opponent_is_named_and_not_counted(monkeypatch):
    """One that agrees is timed beside ours; every program is run under the name by which a profile knows it."""

    def failing(x):
        raise ValueError("no such shape")

    def wrong(x):
        return jax.nn.softmax(x * 1.5)

    rivals = [Opponent("right", lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)), Opponent("wrong", wrong)]
    narrow = Opponent("narrow", jax.nn.softmax, prepare=lambda x: (x.astype(jnp.float16),))
    rivals += [narrow, Opponent("failing", failing)]
    monkeypatch.setattr(contest, "collected", lambda call, without: (rivals, {"torch": "missing"}))
    (entry,) = [entry for entry in SMALL if entry.case.op == "softmax"]
    found = contest.compare(entry, 0, tune_seconds=5.0, store=None, without=())
    assert {HEURISTIC, TUNED, BARE, "plain", "right", "narrow"} <= set(found["us"])
    assert found["not_counted"]["failing"] == "ValueError: no such shape"
    assert found["not_counted"]["wrong"].startswith("WRONG: differs from ours by 0.")
    assert not {"wrong", "failing"} & set(found["us"])
    assert found["left_out"] == {"torch": "missing"}
    assert found["off"]["right"] < contest.AGREES
    # One program with ours is ours.
    assert found["us"][TUNED] == found["us"][BARE]


DIES = """
import json, sys
order = json.loads(sys.stdin.readline())
print("-- 1: softmax: 8x8, from", order["start"], flush=True)
print("   trying jax deadly", flush=True)
if "jax deadly" not in order["without"]:
    sys.exit(3)
print('@row {"name": "softmax: 8x8", "missing": "as told"}', flush=True)
"""


def test_an_operation_goes_on_without_the_opponent_that_ended_its_process(monkeypatch, capsys):
    """The row that it was at is done once more."""

    class Started(subprocess.Popen):
        def __init__(self, command, **more):
            super().__init__([sys.executable, "-c", DIES], **more)

    monkeypatch.setattr(opponents_gpu.subprocess, "Popen", Started)
    options = SimpleNamespace(without=None, tune_seconds=6.0, small=True, store=None, only=None)
    rows = opponents_gpu.operation("softmax", options, time.monotonic() + 60)
    assert rows == [{"name": "softmax: 8x8", "missing": "as told"}]
    told = capsys.readouterr().out
    assert "ended with status 3; it was at jax deadly" in told
    assert [line for line in told.splitlines() if line.startswith("--")] == [
        "-- 1: softmax: 8x8, from 0",
        "-- 1: softmax: 8x8, from 1",
    ]
    assert opponents_gpu.summed(rows) == 1
