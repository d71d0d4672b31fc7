"""Records of tunings: lossless JSON that needs no JAX to be read.

Covers `core/record_shape.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops.core.codec import decode
from ejkernel.ops.core.record import FORMAT, Objective, Record, Status, Stop, Trial
from ejkernel.ops.timing.race import Lane

texts = st.text(max_size=12)
# What a tuning can write: beyond this a number in a file is taken for damage.
times = st.floats(0, 1e299, allow_nan=False, allow_infinity=False)
plain_cfgs = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
trials = st.builds(
    Trial,
    cfg=plain_cfgs,
    status=st.sampled_from(get_args(Status)),
    message=texts,
    compile_s=st.none() | times,
    samples_s=st.lists(times, max_size=4).map(tuple),
    dropped_round=st.none() | st.integers(0, 30),
    error=st.none() | times,
)


@st.composite
def records(draw):
    """Any record that a tuning may leave behind."""
    found = tuple(draw(st.lists(trials, max_size=3)))
    index = st.none() | st.integers(0, len(found) - 1) if found else st.none()
    return Record(
        key=draw(st.dictionaries(texts, texts, max_size=3)),
        kernel=draw(texts),
        environment=draw(st.dictionaries(texts, texts, max_size=3)),
        objective=draw(st.sampled_from(get_args(Objective))),
        clock=draw(texts),
        seed=draw(st.integers(-(2**62), 2**62)),
        budget_s=draw(st.none() | times),
        stop=draw(st.sampled_from(get_args(Stop))),
        trials=found,
        winner=draw(index),
        heuristic=draw(index),
        runner_up=draw(index),
        gain=draw(st.none() | st.tuples(times, times, times)),
        tied=tuple(range(len(found))) if draw(st.booleans()) else (),
    )


@given(records())
@settings(max_examples=80, deadline=None)
def test_a_record_comes_back_equal(record):
    """Every record is equal after the trip through JSON, types of numbers included."""
    back = Record.loads(record.dumps())
    assert back == record
    assert repr(back) == repr(record)


@given(records())
@settings(max_examples=30, deadline=None)
def test_a_record_is_strict_json_of_one_format(record):
    """The text is JSON that any reader opens, and says its format."""
    data = json.loads(record.dumps(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["format"] == FORMAT


@dataclasses.dataclass(frozen=True)
class Block:
    """A cfg as users write it."""

    m: int
    shape: tuple[int, ...] = ()


def test_cfgs_are_rebuilt_by_the_reader():
    """A record of dataclass cfgs is equal after the trip when the reader rebuilds them."""
    record = Record(trials=(Trial(Block(64, (1, 2))), Trial(Block(128))), winner=1)
    assert Record.loads(record.dumps(), load_cfg=lambda data: decode(Block, data)) == record


def test_conditions_and_note_survive_the_trip():
    """What caches were like, and what became of the winner; a record of an earlier release has neither."""
    record = Record(conditions="warm caches", note="taken back: slower in the program")
    assert Record.loads(record.dumps()) == record
    early = json.loads(record.dumps())
    del early["conditions"], early["note"]
    assert Record.loads(json.dumps(early)) == Record()


def test_the_table_ends_with_the_note():
    """A winner beside a faster candidate needs a reason."""
    record = Record(trials=(Trial(1, samples_s=(2.0,)), Trial(2, samples_s=(1.0,))), winner=0)
    noted = dataclasses.replace(record, note="taken back: slower in the program")
    assert noted.table().splitlines()[:-1] == record.table().splitlines()[:-1]
    assert noted.table().splitlines()[-1] == "taken back: slower in the program"


def test_the_winner_is_the_cfg():
    """A record's cfg is that of the winning trial, and None without a winner."""
    found = (Trial("a"), Trial("b"))
    assert Record(trials=found, winner=1).cfg == "b"
    assert Record(trials=found).cfg is None


def test_a_trial_takes_the_median_of_its_samples():
    """One slow sample does not decide a trial's time; without samples there is none."""
    assert Trial(1, samples_s=(1.0, 9.0, 2.0)).seconds == 2.0
    assert Trial(1).seconds is None


def test_failures_are_kept_as_data():
    """What could not be used is listed with its reason; what was skipped is no failure."""
    found = (Trial(1), Trial(2, "memory", "too big"), Trial(3, "skipped"), Trial(4, "wrong", "off by 1"))
    assert [(t.cfg, t.message) for t in Record(trials=found).failures] == [(2, "too big"), (4, "off by 1")]


def test_records_and_trials_are_frozen():
    """Neither can be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Record().winner = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Trial(1).status = "wrong"


def test_the_documented_fields_exist():
    """The fields that store, journal and reports rely on."""
    assert [f.name for f in dataclasses.fields(Trial)] == [
        *("cfg", "status", "message", "compile_s", "samples_s", "dropped_round", "error", "check"),
    ]
    assert {
        *("key", "kernel", "environment", "objective", "clock", "seed", "budget_s", "stop", "trials"),
        *("winner", "heuristic", "runner_up", "gain", "tied", "space", "conditions", "note", "cost", "phases"),
    } == {f.name for f in dataclasses.fields(Record)}


@pytest.mark.parametrize("found", [FORMAT + 1, 0, None, "1"])
def test_another_format_is_refused_by_number(found):
    """A record of another format is a ValueError that names both formats."""
    text = json.dumps({**json.loads(Record().dumps()), "format": found})
    with pytest.raises(ValueError, match=str(FORMAT)) as caught:
        Record.loads(text)
    assert repr(found) in str(caught.value)


def changed(**fields):
    """The text of a record with other fields."""
    return json.dumps({**json.loads(Record(trials=(Trial(1),)).dumps()), **fields})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[]", "3", '"text"', Record().dumps()[:-5]),
        changed(trials=3),
        changed(trials=[3]),
        changed(trials=[{}]),
        changed(trials=[{"cfg": 1, "status": "unheard of"}]),
        changed(trials=[{"cfg": 1, "status": "ok", "samples_s": [], "surprise": 1}]),
        changed(key=3),
        changed(key="ab"),
        changed(environment=None),
        "[" * 100_000,
    ],
    ids=[
        *("empty", "half an object", "null", "list", "number", "string", "cut off"),
        *("trials number", "trial number", "empty trial", "unknown status", "unknown field"),
        *("key number", "key string", "no environment", "too deep"),
    ],
)
def test_damaged_text_is_one_kind_of_error(text):
    """Whatever is wrong with the text, the error is the one that says so."""
    from ejkernel.ops.core.errors import RecordFormatError

    with pytest.raises(RecordFormatError):
        Record.loads(text)


def test_a_winner_that_is_no_trial_is_damage():
    """A record that points at a trial that it does not have is refused when it is read."""
    with pytest.raises(ValueError, match="record"):
        _ = Record.loads(changed(winner=7)).cfg


def test_a_missing_field_is_named():
    """The message of a record without a field names the field."""
    data = json.loads(Record().dumps())
    del data["clock"]
    with pytest.raises(ValueError, match="clock"):
        Record.loads(json.dumps(data))


def test_a_cfg_that_is_not_json_is_named():
    """A cfg that JSON cannot hold is a TypeError when the record is written."""
    with pytest.raises(TypeError, match="object"):
        Record(trials=(Trial(object()),)).dumps()


def test_the_summary_is_json():
    """The few figures that a store keeps can be written as they are."""
    record = Record(trials=(Trial(1, samples_s=(2.0,)), Trial(2, "wrong")), winner=0, gain=(1.5, 1.0, 2.0))
    found = json.loads(json.dumps(record.summary()))
    assert (found["seconds"], found["candidates"], found["failed"]) == (2.0, 2, 1)
    assert found["gain"] == [1.5, 1.0, 2.0]


def test_reading_a_record_imports_no_jax():
    """A command line can show a record without starting JAX, or even numpy."""
    code = (
        "import sys\n"
        "from ejkernel.ops.core.record import Record, Trial\n"
        "assert Record.loads(Record(trials=(Trial(1),)).dumps()).trials[0].cfg == 1\n"
        "found = {'jax', 'jaxlib', 'numpy'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_thousand_tunings_fit_into_twenty_megabytes():
    """A record of 24 candidates, half of which stayed for all rounds, and its summary take less than 20 kB."""
    rng = random.Random(0)
    cfgs = [{"implementation": "triton", "block_m": 128, "block_n": n, "num_warps": 8} for n in range(24)]
    lanes = [Lane({r: math.log(rng.uniform(1e-5, 2e-5)) for r in range(40 if n % 2 else 5)}) for n in range(24)]
    trials = [Trial(cfg, samples_s=lane.seconds, compile_s=0.5) for cfg, lane in zip(cfgs, lanes, strict=True)]
    record = Record(trials=tuple(trials), winner=1, heuristic=0, gain=(1.1, 1.0, 1.2))

    assert len(record.dumps()) + len(json.dumps(record.summary())) < 20_000
