"""Predictions from made-up records: right where the records are, honest about it, and silent elsewhere.

Covers `tuning/prediction/example.py` and `tuning/prediction/learned.py`.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from ejkernel.ops.core.key import Key
from ejkernel.ops.tuning.prediction.example import Example
from ejkernel.ops.tuning.prediction.predict import Prediction, learn, predict

CFGS = [{"block": block, "warps": warps} for block in (16, 32, 64, 128) for warps in (2, 4, 8)]


def seconds_of(rows, columns, cfg, rng=None):
    """Few rows want small blocks; columns do not matter to the choice."""
    wanted = 4 + 3 / (1 + math.exp(8 - math.log2(rows)))
    slower = 1 + 0.2 * abs(math.log2(cfg["block"]) - round(wanted)) + 0.1 * abs(math.log2(cfg["warps"]) - 2)
    return 1e-9 * rows * columns * slower * (1 if rng is None else rng.lognormvariate(0, 0.005))


def parts(rows, columns):
    return {"args[0]": f"bfloat16[{rows},{columns}]"}


def example(rows, columns, rng=None):
    times = [(cfg, seconds_of(rows, columns, cfg, rng)) for cfg in CFGS]
    return Example(Key("gpu|x", "rows@v1", f"{rows}x{columns}"), parts(rows, columns), times)


def sizes(rng):
    return int(2 ** rng.uniform(3, 14)), int(2 ** rng.uniform(5, 12))


@pytest.fixture(scope="module")
def learned():
    rng = random.Random(0)
    return learn([example(*sizes(rng), rng) for _ in range(120)])


def test_most_calls_are_answered_and_most_answers_are_near_the_best(learned):
    """Of 60 other calls; and the bound holds about as often as it says."""
    rng = random.Random(1)
    found = []
    for _ in range(60):
        rows, columns = sizes(rng)
        answer = predict(learned, parts(rows, columns), CFGS)
        times = [seconds_of(rows, columns, cfg) for cfg in CFGS]
        if isinstance(answer, Prediction):
            found.append((seconds_of(rows, columns, answer.cfg) / min(times), answer.bound))

    assert len(found) >= 42
    assert np.mean([ratio <= 1.05 for ratio, _ in found]) >= 0.85
    assert np.mean([ratio <= bound + 0.01 for ratio, bound in found]) >= 0.8


def test_a_question_is_cheap(learned):
    """A few milliseconds of a busy machine."""
    start = time.process_time()
    for rows in range(100, 200):
        predict(learned, parts(rows, 512), CFGS)

    assert time.process_time() - start < 3


def test_what_does_not_matter_has_the_longer_length(learned):
    """Rows decide, columns do not: the model has learned that."""
    lengths = dict(zip(learned.table.sizes, learned.lengths, strict=False))

    assert lengths["args[0] axis 1"] > lengths["args[0] axis 0"]


def test_an_answer_names_the_nearest_calls_first(learned):
    """With their distances."""
    answer = predict(learned, parts(1024, 512), CFGS)
    distances = [near.distance for near in answer.near]

    assert distances == sorted(distances)
    assert answer.near[0].key.op_id == "rows@v1"


def test_the_same_records_give_the_same_answer():
    """In every process: nothing is by chance."""
    rng = random.Random(3)
    records = [example(*sizes(rng), rng) for _ in range(20)]
    one, other = (predict(learn(records), parts(300, 300), CFGS) for _ in range(2))

    assert (one.cfg, one.chance, one.bound) == (other.cfg, other.chance, other.bound)


def test_candidates_that_no_record_has_are_no_answer(learned):
    """The reason says so."""
    answer = predict(learned, parts(256, 256), [{"way": "a"}, {"way": "b"}])

    assert answer == "the records hold too few of this call's candidates"


def test_one_candidate_needs_no_prediction(learned):
    """Nor does one that is given twice."""
    assert predict(learned, parts(256, 256), [CFGS[0], CFGS[0]]) == "one candidate, nothing to predict"


def test_failures_are_never_predicted():
    """A candidate that failed in all near calls is not the answer, however fast it is elsewhere."""
    records = []
    for number in range(12):
        times = [("crashes", None if number else 1e-6), ("slow", 3e-6), ("good", 2e-6)]
        records.append(Example(Key("gpu|x", "op@v1", str(number)), parts(64 + number, 64), times))
    answer = predict(learn(records), parts(70, 64), ["slow", "crashes", "good"])

    assert isinstance(answer, str) or answer.cfg != "crashes"


def test_a_caller_that_raises_on_every_rounding_sees_none():
    """`np.errstate(all="raise")` around a question changes nothing."""
    rng = random.Random(4)
    with np.errstate(all="raise"):
        model = learn([example(*sizes(rng), rng) for _ in range(12)])
        assert not isinstance(model, str)
        predict(model, parts(300, 300), CFGS)
