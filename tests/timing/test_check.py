"""Do two answers agree, but for rounding? On the host and by the program that runs on devices."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.core.record import Finding
from ejkernel.ops.timing import check, comparing, program
from ejkernel.ops.timing.check import Comparison, Standard, builders, worst_of

SHAPE = (64, 64)
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
# The rounding unit of each, which errors are told in.
UNIT = {"float64": 2.0**-32, "float32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(params=["host", "device"])
def compare(request):
    """One comparison, by numpy or by the compiled program of devices, which gives the same verdicts here."""
    with jax.enable_x64(True):
        yield functools.partial(check.compare, on_device=request.param == "device")


def values(dtype, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def scaled(array, factor):
    return (array.astype(np.float64) * factor).astype(array.dtype)


# Form and kind.


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
def test_equal_outputs_are_right(compare, dtype):
    """The same values have no error and no reason."""
    found = compare(values(dtype), values(dtype))

    assert (found.error, found.reason) == (0.0, "")


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.float16)),
        (np.ones(3, np.int32), np.ones(3, np.float32)),
        ((np.ones(3),), np.ones(3)),
        ({"a": np.ones(3)}, {"b": np.ones(3)}),
        ((np.ones(3), np.ones(3)), (np.ones(3),)),
    ],
    ids=["shape", "float dtype", "kind", "tuple", "name", "count"],
)
def test_another_form_is_wrong(got, want):
    """Shape, dtype and structure belong to the answer."""
    found = check.compare(got, want)

    assert found.reason
    assert found.finding.test == "form"


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool", "int4"])
def test_integers_must_be_equal(compare, dtype):
    """One integer that differs is wrong."""
    want = np.ones(100, jnp.dtype(dtype))
    got = want.copy()
    got[5] = 0

    assert compare(want.copy(), want).reason == ""
    assert compare(got, want).reason == "output: 1 of 100 values differ, and they must be equal"
    assert compare(got, want).finding.test == "equal"


def test_keys_are_compared_by_their_data(compare):
    """PRNG keys are equal or not."""
    assert compare(jax.random.key(1), jax.random.key(1)).reason == ""
    assert compare(jax.random.key(1), jax.random.key(2)).reason != ""


def test_empty_outputs_are_equal(compare):
    """Nothing differs from nothing, and a gradient without values has none."""
    assert compare(np.ones((0, 3), np.float32), np.ones((0, 3), np.float32)) == Comparison()
    nothing = np.zeros((3,), jax.dtypes.float0)
    assert compare(nothing, nothing) == Comparison()


@pytest.mark.parametrize("got", [1.0, "text"])
def test_a_python_value_in_place_of_an_array_is_wrong(got):
    """A candidate that returns something else gets a reason; the comparison itself does not fail."""
    assert check.compare(got, np.float32(1.0)).reason != ""


def test_python_values_are_compared_as_they_are():
    """Outputs that are no arrays must be equal."""
    assert check.compare(3, 3).reason == ""
    assert check.compare(3, 4).reason != ""


def test_every_output_is_looked_at(compare):
    """The reason says which of several outputs is wrong, and the finding too."""
    want = {"first": values("float32"), "second": [values("float32", seed=1)]}
    got = {"first": want["first"], "second": [want["second"][0] * 2]}

    found = compare(got, want)
    assert found.reason.startswith("output['second'][0]: ")
    assert found.finding.output == "output['second'][0]"


def test_gradients_are_called_so():
    """The second part of an answer."""
    standard = Standard([values("float32"), (values("float32"),)])

    assert standard.compare([values("float32"), (values("float32") * 2,)]).reason.startswith("gradient[0]: ")


# Values that are not finite.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_in_place_of_a_number_is_wrong(compare, bad):
    """NaN and infinity never pass for numbers, and the other way round."""
    want = values("float32")
    got = want.copy()
    got[3, 4] = bad

    assert compare(got, want).finding.test == "finite"
    assert compare(want, got).reason.startswith("output: 1 of 4096 values are NaN or infinite on one side alone")


def test_the_same_non_finite_values_are_right(compare):
    """A mask of infinities that both have is part of the answer, and the rest is compared without it."""
    want = values("float32")
    want[0] = -math.inf
    want[1] = math.nan
    got = want.copy()
    got[7, 7] *= 2

    assert compare(scaled(want, 1 + 1e-6), want).reason == ""
    assert compare(got, want).finding.test == "element"


def test_another_infinity_is_wrong(compare):
    """Minus infinity is not infinity, and neither is NaN."""
    want = values("float32")
    want[0] = -math.inf
    for bad in (math.inf, math.nan):
        got = want.copy()
        got[0, 5] = bad
        assert compare(got, want).finding.test == "finite"


# What rounding does passes.


def test_sums_in_another_order_agree(compare):
    """What differs by rounding alone is right."""
    x = values("float32", (256, 64))
    ours = np.cumsum(x, axis=0, dtype=np.float32)[-1]
    theirs = x[::-1].sum(0, dtype=np.float32)

    assert (ours != theirs).any()
    assert compare(ours, theirs).reason == ""


def product(a, b, dtype, *, parts=1, rounded=False):
    """A product summed in parts, each rounded to the dtype or not."""
    pieces = [
        x.astype(np.float32) @ y.astype(np.float32)
        for x, y in zip(np.split(a, parts, 1), np.split(b, parts), strict=True)
    ]
    pieces = [piece.astype(dtype).astype(np.float32) if rounded else piece for piece in pieces]
    return sum(pieces[1:], pieces[0]).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_few_rounded_parts_are_right_and_many_rounded_sums_are_not(compare, dtype):
    """A product in four parts passes; one whose sum is rounded after each of 64 steps has lost digits."""
    dtype = jnp.dtype(dtype)
    a, b = values(dtype, (64, 1024)), values(dtype, (1024, 64), seed=1)
    whole = product(a, b, dtype)
    total = np.zeros(SHAPE, dtype)
    for x, y in zip(np.split(a, 64, 1), np.split(b, 64), strict=True):
        total = (total.astype(np.float32) + x.astype(np.float32) @ y.astype(np.float32)).astype(dtype)

    assert compare(product(a, b, dtype, parts=4, rounded=True), whole).reason == ""
    assert compare(total, whole).finding.test == "whole"


def test_gradients_of_an_embedding_are_right_in_another_order(compare):
    """Most rows are zero, and a few have most of the sum."""
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.pareto(0.8, 4096) * 3, 63).astype(int)
    updates = values("bfloat16", (4096, 64)).astype(np.float32)

    def summed(order):
        out = np.zeros(SHAPE, np.float32)
        np.add.at(out, rows[order], updates[order])
        return out.astype(jnp.bfloat16)

    want = summed(np.arange(4096))
    lost = want.copy()
    lost[rows[0]] = 0
    assert compare(summed(rng.permutation(4096)), want).reason == ""
    assert compare(lost, want).reason != ""


def test_an_output_of_mostly_zeros_is_judged_by_the_rest(compare):
    """One rounding step of the few values is right, and one of the many zeros that is none is wrong."""
    want = np.zeros((1024, 64), jnp.bfloat16)
    want[:4] = values("bfloat16", (4, 64)) * 30
    stepped = want.copy()
    stepped[0] = (want[0].astype(np.float32) * (1 + 2.0**-8)).astype(jnp.bfloat16)
    written = want.copy()
    written[900, 3] = 0.5

    assert compare(stepped, want).reason == ""
    assert compare(written, want).reason == "output: an element differs where all values around it are zero"


@pytest.mark.parametrize("axis", [0, 1])
def test_values_of_many_magnitudes_are_right_and_small_ones_are_looked_at(compare, axis):
    """Rows, or columns, from 1e-8 to 1e8: each is judged by its own size."""
    sizes = np.logspace(-8, 8, 64)
    want = (values("float32") * (sizes[:, None] if axis == 0 else sizes)).astype(np.float32)
    wrong = want.copy()
    small = np.s_[:8] if axis == 0 else np.s_[:, :8]
    wrong[small] *= 1.5

    assert compare((want * (1 + 2.0**-13)).astype(np.float32), want).reason == ""
    assert compare(wrong, want).reason != ""


# What rounding does not do is found.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", ["zeroed", "negated", "stale", "half as large again"])
def test_a_wrong_tile_is_found(compare, dtype, wrong):
    """16x16 of 64x64 elements that were not written, or hold another tile's values, whatever the dtype."""
    want = values(dtype)
    got = want.copy()
    tile = want[16:32, 32:48]
    other = {
        "zeroed": np.zeros_like(tile),
        "negated": scaled(tile, -1),
        "stale": want[16:32, :16],
        "half as large again": scaled(tile, 1.5),
    }[wrong]
    got[16:32, 32:48] = other

    assert compare(got, want).reason != ""


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_row_is_found(compare, dtype):
    """A row that holds another row's values is wrong."""
    want = values(dtype)
    got = want.copy()
    got[7] = want[8]

    assert compare(got, want).reason != ""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_element_in_a_million_is_found(dtype):
    """Off by sixteen units of the values around it, and nothing else is."""
    want = values(dtype, (1000, 1000))
    got = want.copy()
    size = float(np.sqrt(np.mean(want.astype(np.float64) ** 2)))
    got[500, 500] = want[500, 500].astype(np.float64) + 16 * UNIT[dtype] * size

    assert check.compare(got, want).finding.test == "element"
    assert check.compare(got, want).reason != ""


def test_a_last_row_that_was_not_written_is_found(compare):
    """Zeros where values should be."""
    want = values("bfloat16")
    got = want.copy()
    got[-1] = 0

    assert compare(got, want).reason != ""


def test_a_sum_without_its_last_block_is_found(compare):
    """32 of 1024 products are 18% of a sum of random signs."""
    a, b = values("bfloat16", (64, 1024)), values("bfloat16", (1024, 64), seed=1)

    assert compare(product(a[:, :-32], b[:-32], jnp.bfloat16), product(a, b, jnp.bfloat16)).reason != ""


@pytest.mark.parametrize(
    ("dtype", "allowed", "wrong"),
    [("float64", 1e-12, 1e-6), ("float32", 1e-5, 1e-2), ("float16", 2.0**-11, 0.1), ("bfloat16", 2.0**-8, 0.3)],
)
def test_the_limit_depends_on_the_dtype(compare, dtype, allowed, wrong):
    """Fewer mantissa bits allow more, and each dtype has its limit."""
    array = values(dtype)

    assert compare(scaled(array, 1 + allowed), array).reason == ""
    assert compare(scaled(array, 1 + wrong), array).reason != ""


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_are_compared_too(compare, dtype):
    """A step of rounding here and there is noise, another sign is not."""
    array = values(dtype)
    stepped = array.copy()
    stepped[::7, ::7] = scaled(array, 1 + 2.0**-3)[::7, ::7]

    assert (stepped != array).any()
    assert compare(stepped, array).reason == ""
    assert compare(scaled(array, -1), array).reason != ""


def test_complex_numbers_are_judged_by_both_parts(compare):
    """A small imaginary part is rounded as its large real one is; another sign of either is wrong."""
    want = (values("float32") + 1e-4j * values("float32", seed=1)).astype(np.complex64)
    rounded = want + 1e-4j * 2.0**-11 * values("float32", seed=2)
    conjugate = np.conj((values("float32") + 1j * values("float32", seed=1)).astype(np.complex64))

    assert compare(rounded.astype(np.complex64), want).reason == ""
    assert compare((want + 0.05j).astype(np.complex64), want).reason != ""
    assert compare(conjugate, np.conj(conjugate)).reason != ""


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_huge_and_tiny_values_are_compared(compare, factor):
    """Numbers whose squares do not fit into float32 still show a difference."""
    want = (values("float32") * factor).astype(np.float32)

    assert compare(want * np.float32(1 + 1e-5), want).reason == ""
    assert compare(want * np.float32(1.5), want).reason != ""
    assert compare(-want, want).reason != ""


def test_values_that_a_device_takes_for_zero_are_right(compare):
    """Below the smallest normal number of float32."""
    want = np.full(SHAPE, 1e-39, np.float32)

    assert compare(np.zeros_like(want), want).reason == ""
    assert compare(np.full(SHAPE, 1e-36, np.float32), want).reason != ""


@pytest.mark.parametrize("shape", [(), (1,), (3,), (17,), (1, 1, 5), (2, 3, 5, 7), (33, 1), (1000, 3)])
def test_every_shape_is_compared(shape):
    """Short rows, tails of segments, axes of one, scalars."""
    want = np.asarray(values("float32", shape) + np.float32(3), np.float32)
    got = np.array(want)
    got.reshape(-1)[-1] *= 1.05

    assert check.compare(want * np.float32(1 + 1e-5), want).reason == ""
    assert check.compare(got, want).reason != ""


# Each term of the rule is needed: these answers are told apart by that one alone.


@pytest.fixture(params=[False, True], ids=["host", "device"])
def failed(request, monkeypatch):
    """The tests of the rule that an answer fails: each alone, all others being off."""
    allowed = check._allowed

    def all_over(got, want):
        found = []
        for name in ("segments", "whole", "element", "factor"):
            with monkeypatch.context() as patch:
                patch.setattr(check, "_allowed", lambda *given, name=name: {name: allowed(*given)[name]})
                found += [name] if check.compare(got, want, on_device=request.param).reason else []
        return found

    return all_over


def test_segments_of_rows_find_small_rows_between_large_ones(failed):
    """Columns are as large as their largest value, and so is the scale of an element."""
    want = values("float32")
    want[1::8] *= 1e-5
    got = want.copy()
    got[1::8] *= 1.5

    assert failed(got, want) == ["segments"]


def test_segments_of_columns_find_small_columns_between_large_ones(failed):
    """The same the other way round."""
    want = values("float32")
    want[:, 1::8] *= 1e-5
    got = want.copy()
    got[:, 1::8] *= 1.5

    assert failed(got, want) == ["segments"]


def test_one_segment_in_sixteen_may_be_off(compare):
    """The first row of a gradient may be noise where the reference is zero; a tenth of the rows may not."""
    want = values("bfloat16")
    want[:6] *= 1e-4
    noise = (2.0**-8 * values("float32", seed=1)).astype(jnp.bfloat16)
    one, many = want.copy(), want.copy()
    one[:3] += noise[:3]
    many[:6] += noise[:6]

    assert compare(one, want).reason == ""
    assert compare(many, want).finding.test == "segments"


def test_neighbours_of_a_query_are_other_queries_and_not_other_heads(compare):
    """The gradient of causal queries (batch, queries, heads, width): the first one's is noise in all heads."""
    want = values("float32", (1, 64, 8, 16))
    want[:, 0] *= 1e-6
    noisy = want.copy()
    noisy[:, 0] += 1e-4 * values("float32", (1, 8, 16), seed=1)

    assert compare(noisy, want).reason == ""


def test_small_heads_are_not_hidden_by_a_large_one(compare):
    """Half of each value is missing; a large column hides that from the rows, and a large head would from columns."""
    want = values("float32", (1, 64, 8, 16))
    want[..., 0] *= 1e5
    want[:, :, 0] *= 1e5
    got = want.copy()
    got[:, :, 1:, 1:] *= 0.5

    assert compare(got, want).reason != ""


def test_noise_below_the_limit_of_each_segment_is_found_on_the_whole(failed):
    """Three units of rounding in every segment: no right computation rounds that often."""
    want = values("float32")

    assert failed((want * (1 + 3 * UNIT["float32"] * signs())).astype(np.float32), want) == ["whole"]


def signs(shape=SHAPE):
    return np.random.default_rng(3).choice([-1.0, 1.0], shape)


def test_one_element_is_found_by_its_neighbours(failed):
    """Eight units off where nothing else is."""
    want = values("float32")
    got = want.copy()
    got[20, 20] += 8 * UNIT["float32"]

    assert failed(got, want) == ["element"]


def test_what_the_neighbours_are_off_by_too_is_noise(compare):
    """The same element passes where those of its row are off by a unit."""
    want = values("float32")
    got = want.copy()
    got[20] += (UNIT["float32"] * signs((64,))).astype(np.float32)
    got[20, 20] = want[20, 20] + 8 * UNIT["float32"]

    assert compare(got, want).reason == ""


def test_a_noisy_answer_may_have_larger_errors_than_an_exact_one(compare):
    """Ten units of its scale pass in an answer that is off by one unit everywhere."""
    want = values("float32")
    noisy = (want * (1 + 1.5 * UNIT["float32"] * signs())).astype(np.float32)
    lone = want.copy()
    for got in (noisy, lone):
        got[20, 20] = want[20, 20] + 10 * UNIT["float32"]

    assert compare(noisy, want).reason == ""
    assert compare(lone, want).finding.test == "element"


@pytest.mark.parametrize(("units", "test"), [(22, ""), (28, "element")])
def test_noise_at_most_doubles_the_limit_of_an_element(compare, units, test):
    """Twelve units of its scale, or 24 where all is off by more than two, as far as a tolerance allows that."""
    want, unit = signs().astype(np.float32), 2.0**-8
    got = (want * (1 + 3.5 * unit * np.random.default_rng(4).choice([-1.0, 1.0], SHAPE))).astype(np.float32)
    got[20, 20] = want[20, 20] * (1 + units * unit)

    found = compare(got, want, 4 * unit)
    assert (found.finding.test if found.reason else "") == test


def test_a_step_of_a_large_value_among_small_ones_is_rounding(compare):
    """Its own rounding is larger than all around it."""
    want = (values("bfloat16") * 1e-3).astype(jnp.bfloat16)
    want[20, 20] = 1.0
    got = want.copy()
    got[20, 20] = 1 + 2.0**-7

    assert compare(got, want).reason == ""


def test_a_common_factor_of_the_largest_values_is_found(failed):
    """Three units on a few rows that hold nearly all of the sum of squares."""
    want = values("float32")
    want[:2] *= 100
    got = want.copy()
    got[:2] *= 1 + 3 * UNIT["float32"]

    assert failed(got, want) == ["factor"]


@pytest.mark.parametrize(("steps", "reason"), [(1, ""), (2, "common factor")])
def test_a_scalar_may_be_off_by_one_step(compare, steps, reason):
    """The last digit of bfloat16 passes, two of them do not."""
    found = compare(jnp.bfloat16(1 + steps * 2.0**-7), jnp.bfloat16(1.0))

    assert reason in found.reason
    assert bool(found.reason) == bool(reason)


# The noise of a plain run.


def cancelling(rounded):
    """A product of which little is left, in float32 or from halves that are rounded; bfloat16 at the end."""
    x, y = values("bfloat16", (64, 256)).astype(np.float32), values("bfloat16", (256, 64), seed=1).astype(np.float32)
    other = (-x + 0.02 * values("float32", (64, 256), seed=2)).astype(jnp.bfloat16).astype(np.float32)
    halves = [x @ y, other @ y]
    if rounded:
        halves = [half.astype(jnp.bfloat16).astype(np.float32) for half in halves]
    return (halves[0] + halves[1]).astype(jnp.bfloat16)


def test_what_a_plain_run_is_off_by_is_no_fault(compare):
    """Where values cancel, rounding is most of what is left; limits are wider there, and the finding says where."""
    exact, plain = cancelling(rounded=False), cancelling(rounded=True)
    other = (plain.astype(np.float32) * (1 + 2.0**-8 * signs())).astype(jnp.bfloat16)

    assert compare(other, exact).reason != ""
    found = compare(other, exact, plain=[plain])
    assert found.reason == ""
    assert found.finding.widened > 0.5


def test_a_wrong_answer_is_wrong_beside_a_noisy_plain_run(compare):
    """The limits are wider by what that is off by, and no more."""
    exact, plain = cancelling(rounded=False), cancelling(rounded=True)
    got = exact.copy()
    got[16:32] = 40.0

    found = compare(got, exact, plain=[plain])
    assert "wider already in" in found.reason


def test_the_common_factor_of_a_plain_run_may_be_doubled(compare):
    """What cuts digits off is off by a common factor; others may be too."""
    want = values("float32")
    plain = (want * (1 + 2 * UNIT["float32"])).astype(np.float32)
    got = (want * (1 + 3.5 * UNIT["float32"])).astype(np.float32)

    assert compare(got, want).reason != ""
    assert compare(got, want, plain=[plain]).reason == ""


@pytest.mark.parametrize(("units", "test"), [(6, ""), (7, "factor")])
def test_a_common_factor_beyond_twice_that_of_a_plain_run_is_found(compare, units, test):
    """Two and a half units, and twice the plain run's two; on rows that hold nearly all of the sum of squares."""
    want = signs().astype(np.float32)
    want[:2] *= 100
    plain, got = want.copy(), want.copy()
    plain[:2] *= 1 + 2 * UNIT["float32"]
    got[:2] *= 1 + units * UNIT["float32"]

    found = compare(got, want, plain=[plain])
    assert (found.finding.test if found.reason else "") == test


def test_a_huge_value_of_a_plain_run_allows_no_larger_ones(compare):
    """Its square is a number, and so is the limit that it gives: 2^12 times the largest value here."""
    want = signs().astype(np.float32)
    plain, same, larger = want.copy(), want.copy(), want.copy()
    plain[20, 20] = same[20, 20] = 2.0**12
    larger[20, 20] = 2.0**16

    assert compare(same, want, plain=[plain]).reason == ""
    assert compare(larger, want, plain=[plain]).finding.test == "element"
    assert compare(larger, want).error == pytest.approx(2.0**16, rel=1e-3)


def test_a_plain_run_of_other_values_is_called_strange():
    """It may compute something else, and then its difference is no noise."""
    want = values("bfloat16")

    assert Standard([want], plain=[values("bfloat16", seed=5)]).strange
    assert not Standard([want], plain=[scaled(want, 1 + 2.0**-8)]).strange
    with_nan = want.copy()
    with_nan[0, 0] = math.nan
    assert Standard([want], plain=[with_nan]).strange


@pytest.mark.parametrize(("rows", "strange"), [(28, False), (36, True)])
def test_a_plain_run_is_strange_if_over_half_of_it_has_other_values(rows, strange):
    """Of 64 rows."""
    want = values("bfloat16")
    plain = want.copy()
    plain[:rows] = values("bfloat16", seed=5)[:rows]

    assert Standard([want], plain=[plain]).strange == strange


def test_a_plain_run_of_another_form_says_nothing():
    """Another dtype or shape: as if there were none."""
    want = values("float32")

    found = Standard([want], plain=[want.astype(np.float16)]).compare([want])
    assert (found.reason, found.finding.widened) == ("", 0.0)


# Inputs and tolerances.


def test_inputs_of_a_narrower_dtype_bring_their_rounding(compare):
    """A float32 output of bfloat16 inputs may be off by as much as a bfloat16 one."""
    want = values("float32")
    got = (want * (1 + 2.0**-8 * signs())).astype(np.float32)

    assert compare(got, want).reason != ""
    assert compare(got, want, inputs=[jnp.bfloat16, np.int32]).reason == ""


def test_a_tolerance_replaces_the_limits(compare):
    """A kernel may allow more, or less, than its dtype: the error of the whole, and a common factor, up to it."""
    want = values("float32")

    assert compare(scaled(want, 1.09), want, 0.1).reason == ""
    assert compare(scaled(want, 1.11), want, 0.1).reason != ""
    assert compare(scaled(want, 1 + 1e-5), want, 1e-7).reason != ""


def test_a_tolerance_of_zero_allows_no_error(compare):
    """It is a limit like any other, not the lack of one."""
    want = values("float32")
    got = want.copy()
    got[3, 3] = np.nextafter(got[3, 3], np.float32(9))

    assert compare(want, want, 0).reason == ""
    assert compare(got, want, 0).reason != ""


def test_the_largest_error_is_relative_to_the_references_size(compare):
    """The figure is the worst element over the reference's root mean square."""
    want = np.full(100, 10.0, np.float32)
    got = want.copy()
    got[0] = 20.0

    assert compare(got, want).error == pytest.approx(1.0)


# Several sets of inputs, and what is made beforehand.


def test_of_several_comparisons_the_wrong_one_counts():
    """Else the one that came nearest to a limit, with the largest error of all."""
    near = Comparison(0.1, "", Finding("element", 0.9))
    far = Comparison(0.2, "", Finding("whole", 0.1))
    wrong = Comparison(0.3, "off", Finding("factor", 2.0))

    assert worst_of([far, wrong, near]) == wrong
    assert worst_of([near, far]) == Comparison(0.2, "", Finding("element", 0.9))


def test_what_is_right_is_looked_at_once(monkeypatch):
    """However many answers are compared with it."""
    made = []
    real = comparing.scales
    monkeypatch.setattr(comparing, "scales", lambda *given: (made.append(given), real(*given))[1])
    standard = Standard([values("float32")])
    for seed in range(3):
        standard.compare([values("float32", seed=seed)])

    assert len(made) == 1


@pytest.mark.parametrize("plain", [False, True])
def test_comparisons_of_all_arrays_are_two_programs_that_can_be_made_before_them(monkeypatch, plain):
    """Built from shapes, on any thread; nothing is compiled when the answers come."""
    monkeypatch.setattr(comparing, "_CPU_ELEMENTS", 100)
    device = jax.devices()[0]
    right = [jnp.asarray(values("float32", (17, 9))), jnp.arange(5)], (jnp.asarray(values("bfloat16", (9, 17))),)
    shapes = jax.eval_shape(lambda: right)
    made = builders(shapes, device, inputs=[np.float32], plain=plain)
    for build in made:
        build()
    compiled = []
    monkeypatch.setattr(program, "compiled_quickly", compiled.append)
    standard = Standard(right, plain=right[:1] if plain else (), inputs=[np.float32])

    assert len(made) == 2
    assert standard.compare(right).reason == ""
    assert compiled == []


def test_small_arrays_are_compared_on_the_host():
    """There is nothing to compile for them."""
    assert builders(([jax.ShapeDtypeStruct((8, 8), np.float32)],), jax.devices()[0]) == []
