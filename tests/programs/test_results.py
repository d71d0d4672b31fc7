"""What tuning a set of calls gave: values, and an overlay of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from ejkernel.ops import AutotuneData, AutotuningResult, ConfigCache, Entry, Measurement

DEVICE = "gpu|NVIDIA H200"
CACHE: ConfigCache[str] = ConfigCache()


def result(**cfgs):
    """The result of tuning some calls."""
    return AutotuningResult(DEVICE, [Entry("op@v0", key, cfg) for key, cfg in cfgs.items()])


def in_force(call_key="a"):
    """The cfg that an empty cache answers with here."""
    return CACHE.get(DEVICE, "op@v0", call_key)


def test_the_fastest_cfg_is_that_of_the_shortest_time():
    """Of several measurements the shortest wins."""
    data = AutotuneData([Measurement("slow", 3.0), Measurement("fast", 1.0), Measurement("middle", 2.0)])
    assert data.fastest_config == "fast"


def test_the_earlier_of_equals_is_the_fastest():
    """A tie goes to the one that was measured first."""
    assert AutotuneData([Measurement("first", 1.0), Measurement("second", 1.0)]).fastest_config == "first"


def test_nothing_measured_has_no_fastest_cfg():
    """Without measurements it is a RuntimeError that says so."""
    with pytest.raises(RuntimeError, match="nothing was measured"):
        _ = AutotuneData([]).fastest_config


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Measurement, ["cfg", "seconds"]),
        (AutotuneData, ["measurements"]),
        (Entry, ["op_id_v", "call_key", "cfg"]),
        (AutotuningResult, ["device", "entries"]),
    ],
)
def test_the_documented_fields_can_be_given_by_position(kind, fields):
    """Each is a frozen value of the documented fields, in this order."""
    value = kind(*fields)
    assert [getattr(value, name) for name in fields] == fields
    assert value == kind(*fields)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, fields[0], "other")


def test_an_overlay_of_the_result_is_in_force_inside():
    """`as_overlay()` answers the result's calls inside a `with` block, and no others."""
    with result(a="fast").as_overlay():
        assert in_force() == "fast"
        assert in_force("b") is None
    assert in_force() is None


def test_a_result_is_in_force_inside_with():
    """`with result:` does the same, and gives the result itself."""
    found = result(a="fast", b="slow")
    with found as entered:
        assert entered is found
        assert (in_force("a"), in_force("b")) == ("fast", "slow")
    assert in_force() is None


def test_results_nest():
    """The innermost result answers; leaving it restores the outer one."""
    with result(a="outer", b="other"):
        with result(a="inner"):
            assert (in_force("a"), in_force("b")) == ("inner", "other")
        assert in_force() == "outer"


def test_a_result_may_be_entered_again_inside_itself():
    """One result entered twice is left twice."""
    found = result(a="fast")
    with found:
        with found:
            assert in_force() == "fast"
        assert in_force() == "fast"
    assert in_force() is None


def test_a_result_ends_with_an_exception():
    """An exception inside the block ends it."""
    with pytest.raises(KeyError), result(a="fast"):
        raise KeyError
    assert in_force() is None


def test_an_empty_result_is_in_force_without_effect():
    """A result without entries shadows nothing."""
    with AutotuningResult(DEVICE, ()):
        assert in_force() is None


def test_two_threads_may_use_one_result_at_once():
    """Each thread enters and leaves by itself, in any order."""
    found = result(a="fast")
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    failures = []

    def first():
        try:
            with found:
                first_is_in.set()
                assert second_is_in.wait(120)
                assert in_force() == "fast"
            assert in_force() is None
        except BaseException as error:
            failures.append(error)
        finally:
            first_is_in.set()
            first_is_out.set()

    def second():
        try:
            assert first_is_in.wait(120)
            with found:
                second_is_in.set()
                assert first_is_out.wait(120)
                assert in_force() == "fast"
            assert in_force() is None
        except BaseException as error:
            failures.append(error)
        finally:
            second_is_in.set()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
