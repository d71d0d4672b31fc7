"""The floor of a call: its bytes and operations over the peaks of its device."""

from __future__ import annotations

import pytest
from fakes_reporting import H200, record

from ejkernel.ops.reporting.roofline import amount, floor_of, peaks_of


def test_the_slower_of_memory_and_arithmetic_is_the_floor():
    """Time over that is how far a call is from it."""
    peaks = peaks_of(H200)
    moved = floor_of(record(cost={"bytes": 4.3e8, "operations": 1.0}), peaks)
    worked = floor_of(record(cost={"bytes": 1.0, "operations": 7.9e10}), peaks)
    assert (moved.bound, moved.seconds) == ("memory", pytest.approx(1e-4))
    assert (worked.bound, worked.seconds) == ("arithmetic", pytest.approx(1e-4))
    assert moved.ratio == pytest.approx(1.0, abs=0.02)


def test_what_is_not_known_has_no_floor():
    """No cost, no time, or a device without known peaks."""
    assert floor_of(record(cost={}), peaks_of(H200)) is None
    assert floor_of(record(), peaks_of("cpu|AMD EPYC avx512")) is None
    assert floor_of(record(winner=4), peaks_of(H200)) is None


def test_a_call_below_its_floor_says_why():
    """Arrays that fit into caches are not read from memory."""
    assert "below it: caches" in str(floor_of(record(cost={"bytes": 1e9}), peaks_of(H200)))


def test_peaks_say_where_they_are_from():
    """A data sheet, or a measurement."""
    assert "measured on one H200" in peaks_of(H200).origin
    assert "data sheet" in peaks_of("gpu|NVIDIA A100-SXM4-80GB").origin
    assert peaks_of("gpu|NVIDIA L40S").bytes_s != peaks_of("gpu|NVIDIA L4").bytes_s


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5 B"), (999.9, "1 kB"), (2.5e6, "2.5 MB"), (4e12, "4 TB")])
def test_an_amount_has_the_prefix_that_suits_it(value, text):
    """Three digits."""
    assert amount(value, "B") == text
