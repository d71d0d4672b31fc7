"""The programs of the benchmark: what is compared computes one thing."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from thinning import AT_LENGTH

from ejkernel.ops import Entry, Record, Trial, default_selector, policy_override

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import processors
import program_calls
import program_gpu
from processors import Processors, watched_elsewhere
from products_gpu import apart
from program_race import ratio
from programs import PROGRAMS
from programs.operations import Library, Plain


# In a short run the two whose operations no other has: experts, and a cache of keys.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("moe", "decode") else AT_LENGTH) for name in PROGRAMS]
)
def test_both_forms_of_a_program_give_the_same_value(name):
    """Plain JAX and the library, untuned, agree on the loss (or what stands for it) after two steps."""
    program = PROGRAMS[name]
    sizes = program.sized(tiny=True)
    with policy_override(default_selector(), allow_autotune=False):
        found, args = {}, jax.jit(lambda: program.make(sizes))()
        for form in (Plain(), Library()):
            step = jax.jit(program.build(form, sizes))
            out = step(*args)
            following = program.following(args, out) if program.donated else (out[0], *args[1:])
            found[type(form)] = [float(program.value(out)), float(program.value(step(*following)))]
    np.testing.assert_allclose(found[Library], found[Plain], rtol=2e-2)
    # A step that changed nothing would agree, too.
    assert found[Plain][0] != found[Plain][1] or program.donated


def test_sizes_are_changed_by_name():
    """A size that is given replaces the program's own, tiny or not; the others stay."""
    dense = PROGRAMS["dense"]
    sizes = dense.sized(changes={"width": 1024, "experts": 8})
    assert (sizes.width, sizes.layers) == (1024, 4)
    assert not hasattr(sizes, "experts")
    assert dense.sized(tiny=True, changes={"words": 64}).words == 64


@pytest.mark.parametrize(
    ("trials", "measured"),
    [
        ((Trial("guess", samples_s=(2.0,)), Trial("best", samples_s=(1.0,))), True),
        ((Trial("guess", "memory"), Trial("best", samples_s=(1.0,))), True),
        ((Trial("guess", "timeout"), Trial("best", samples_s=(1.0,))), False),
        ((Trial("guess", samples_s=(2.0,)), Trial("best")), False),
    ],
)
def test_a_call_counts_as_measured_with_times_of_winner_and_heuristic(trials, measured):
    """A heuristic cfg that cannot be used needs no time; one that was still compiling does."""
    told = program_calls.told(Entry("op@v0", "key", "best", Record(trials=trials, winner=1, heuristic=0)))
    assert told["measured"] is measured


def row(**changes):
    """A program's row that keeps every limit."""
    calls = [{"operation": "op", "measured": True, "offered": 10, "raced": 8}]
    after = {"wall": {"ratios": {"tuned / heuristics": (1.005, 1.002, 1.01), "tuned / tuned before": (1.01, 1.0, 1.1)}}}
    return {"program": "dense", "calls": calls, "budget": 60.0, "seconds": 63.0, "after": after} | changes


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"calls": [{"operation": "op", "measured": False, "offered": 2, "raced": 2}]}, "1 of 1 calls not measured"),
        ({"calls": [{"operation": "op", "measured": True, "offered": 10, "raced": 7}]}, "7 of 10 candidates raced"),
        ({"seconds": 63.1}, "63.1 s of a budget of 60"),
        ({"after": {"wall": {"ratios": {"tuned / heuristics": (1.006, 1.001, 1.1)}}}}, "tuned / heuristics is 1.0060"),
        ({"after": {"wall": {"ratios": {"tuned / tuned before": (1.02, 1.01, 1.1)}}}}, "tuned / tuned before is 1.02"),
        ({"exhaustive": [{"operation": "op", "call": "k", "pick_off": 0.03}]}, "the pick of op k is off by 0.03"),
    ],
)
def test_a_broken_limit_is_named(changes, fault):
    """Each limit that the issue sets is looked at, and a row that keeps all of them has no fault."""
    assert program_gpu.broken(row()) == []
    (found,) = program_gpu.broken(row(**changes))
    assert found.startswith(fault)


def test_an_interval_of_ratios_is_made_of_rounds():
    """Of 20 rounds the sixth and the fifteenth ratio lie around the median: a few odd rounds do not move them."""
    assert ratio([*range(1, 20), 1000], [1] * 20) == (10.5, 6, 15)


def test_processor_time_is_told_by_process(monkeypatch):
    """What this process spends inside the block is its own, and is shown; what it spent before is not."""
    monkeypatch.setattr(Processors, "interval", 0.02)
    before = time.process_time()
    with Processors() as watch:
        while time.process_time() - before < 0.6:
            sum(range(1000))
    spent = sum(part["this process"] for part in watch.seconds.values())

    # Ticks of the clock are 10 ms; other threads of the process count too.
    assert 0.5 < spent < 0.7 + time.process_time() - before
    assert "this process" in watch.table()


def test_a_process_is_watched_by_another_one():
    """Its own reading of files would wait for this process's lock, and is not counted."""
    with watched_elsewhere() as tables:
        before = time.process_time()
        while time.process_time() - before < 1.0:
            sum(range(1000))
        spent = time.process_time() - before
    [table] = tables
    lines = [line.split() for line in table.splitlines() if "this process:" in line]
    # A table has tenths of a second, and ticks of the clock are 10 ms.
    assert float(lines[0][0]) >= 0.9 * spent


def test_what_is_watched_begins_after_the_first_look(monkeypatch, tmp_path):
    """The other process takes a while to start, and what runs meanwhile would be lost."""
    other, looked = tmp_path / "other.py", tmp_path / "looked"
    text = f"""
        import pathlib, sys
        pathlib.Path({str(looked)!r}).touch()
        print("watching", flush=True)
        sys.stdin.read()
        print("the table")
    """
    other.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.setattr(processors, "__file__", str(other))
    with watched_elsewhere() as tables:
        assert looked.exists()

    assert tables == ["the table"]


def test_a_watch_that_does_not_begin_is_an_error(monkeypatch, tmp_path):
    """The run would else have no table at its end."""
    monkeypatch.setattr(processors, "__file__", str(tmp_path / "missing.py"))
    with pytest.raises(RuntimeError, match="ended at once"), watched_elsewhere():
        pass


def test_two_forms_of_a_product_are_as_far_apart_as_their_gradients():
    """An output that is right says nothing of the gradients beside it, and NaN is told as NaN."""
    out, right, wrong, missing = (np.array(values, np.float32) for values in ([1, 1], [1, 2], [1, 3], [1, np.nan]))

    assert apart((out, (out, right)), (out, (out, right))) == 0
    assert apart((out, (out, right)), (out, (out, wrong))) == 0.5
    assert np.isnan(apart((out, (missing, right)), (out, (out, right))))
