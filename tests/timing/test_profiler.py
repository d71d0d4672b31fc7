"""The device's own clock: what a profiler's trace says, and when there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Tuner
from ejkernel.ops.timing.clock import Run
from ejkernel.ops.timing.profiler import ProfilerClock, ProfilerUnavailable, device_seconds

# Labels and names are read from compiled programs.
pytestmark = pytest.mark.usefixtures("own_text")

X = jnp.ones(8)


@dataclass
class Event:
    """Something that ran on a device."""

    name: str
    duration_ns: float
    stats: list[tuple[str, object]] = field(default_factory=list)
    start_ns: float = 0.0


@dataclass
class Line:
    """One line of a plane."""

    name: str
    events: list[Event]


@dataclass
class Plane:
    """One device, or the host."""

    name: str
    lines: list[Line]


def ran(module, nanoseconds):
    return Event("kernel", nanoseconds, [("context", 1), ("hlo_module", module)])


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """Lets traces hold these planes, one list of them a file."""

    def write(*files):
        planes = {}
        for number, content in enumerate(files):
            path = tmp_path / "plugins" / f"{number}.xplane.pb"
            path.parent.mkdir(exist_ok=True)
            path.touch()
            planes[str(path)] = content

        class Data:
            def __init__(self, path):
                self.planes = planes[str(path)]

            @staticmethod
            def from_file(path):
                return Data(path)

        monkeypatch.setattr(jax.profiler, "ProfileData", Data)
        return str(tmp_path)

    return write


def test_kernels_of_a_gpu_are_summed_by_program(traced):
    """Every kernel on a stream counts for the program that it belongs to, whichever stream and device it ran on."""
    folder = traced(
        [
            Plane(
                "/device:GPU:0",
                [
                    Line("Stream #1(Compute)", [ran("jit_one", 1000), ran("jit_two", 500), ran("jit_one", 2000)]),
                    Line("Stream #2(Compute)", [ran("jit_two", 250)]),
                ],
            ),
            Plane("/device:GPU:1", [Line("Stream #1(Compute)", [ran("jit_one", 4000)])]),
        ]
    )

    assert device_seconds(folder) == pytest.approx({"one": 7e-6, "two": 0.75e-6})


def test_lines_that_sum_up_others_do_not_count(traced):
    """Only streams hold kernels; the lines of modules and operations show the same time again."""
    lines = [Line(name, [ran("jit_one", 1000)]) for name in ("Stream #1", "XLA Modules", "XLA Ops", "Steps")]

    assert device_seconds(traced([Plane("/device:GPU:0", lines)])) == pytest.approx({"one": 1e-6})


def test_events_of_no_program_do_not_count(traced):
    """Copies and what other libraries run carry no program's name."""
    line = Line("Stream #1", [Event("MemcpyH2D", 9000, [("bytes", 4)]), ran("jit_one", 1000)])

    assert device_seconds(traced([Plane("/device:GPU:0", [line])])) == pytest.approx({"one": 1e-6})


def test_programs_of_a_tpu_are_told_by_their_module(traced):
    """There the line of modules has one event a run, named after the program with a number behind."""
    lines = [
        Line("XLA Modules", [Event("jit_one(123456)", 1000), Event("jit_one(123456)", 3000), Event("jit_two(7)", 500)]),
        Line("XLA Ops", [Event("fusion.1", 900)]),
    ]

    assert device_seconds(traced([Plane("/device:TPU:0", lines)])) == pytest.approx({"one": 4e-6, "two": 0.5e-6})


def test_the_host_does_not_count(traced):
    """Planes of the host hold launches and waits, not what a program takes."""
    plane = Plane("/host:CPU", [Line("Stream #1", [ran("jit_one", 1000)]), Line("XLA Modules", [ran("jit_one", 1)])])

    assert device_seconds(traced([plane])) == {}


def test_every_file_of_a_trace_is_read(traced):
    """A trace may be spread over files, one a host."""
    plane = Plane("/device:GPU:0", [Line("Stream #1", [ran("jit_one", 1000)])])

    assert device_seconds(traced([plane], [plane])) == pytest.approx({"one": 2e-6})


def test_a_trace_without_files_is_no_trace(tmp_path):
    """The reason says that there is none."""
    with pytest.raises(ProfilerUnavailable, match="no trace"):
        device_seconds(str(tmp_path))


@pytest.fixture
def quiet_profiler(monkeypatch):
    """A profiler session that records nothing."""
    open_sessions = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **settings: open_sessions.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: open_sessions.clear())
    return open_sessions


def trace_says(monkeypatch, seconds):
    """A trace with one event a program, or with several, in any order, each as (start, seconds)."""
    events = {name: [(0, value)] if isinstance(value, float) else value for name, value in seconds.items()}
    monkeypatch.setattr("ejkernel.ops.timing.profiler.device_events", lambda folder: events)


def test_the_time_of_a_round_is_per_call(monkeypatch, quiet_profiler):
    """The trace holds the sum over all calls of a turn; each program is known by its name."""
    trace_says(monkeypatch, {"one": 6.0, "two": 5.0})
    log = []
    found = ProfilerClock().round([Run(4, "one", log.append, ("x",), 3), Run(7, "two", log.append, ("y",))])

    assert found == {4: 2.0, 7: 5.0}
    assert log == ["x", "x", "x", "y"]


def test_a_program_that_is_not_in_the_trace_makes_it_useless(monkeypatch, quiet_profiler):
    """A time of zero would win."""
    trace_says(monkeypatch, {"one": 6.0})

    with pytest.raises(ProfilerUnavailable, match="two"):
        ProfilerClock().round([Run(0, "one", abs, (1,)), Run(1, "two", abs, (1,))])


def test_what_a_program_raises_is_its_own_outcome(monkeypatch, quiet_profiler):
    """The others are timed, and the session is closed."""
    trace_says(monkeypatch, {"one": 6.0})

    def broken(x):
        raise OSError("worn out")

    found = ProfilerClock().round([Run(0, "two", broken, (1,)), Run(1, "one", abs, (1,))])

    assert (str(found[0]), found[1]) == ("worn out", 6.0)
    assert quiet_profiler == []


def test_rounds_in_one_trace_are_told_apart_by_time(monkeypatch, quiet_profiler):
    """Each round has its share of a program's events in the order of time, be it one kernel a call or several."""
    trace_says(
        monkeypatch,
        {"one": [(9, 4.0), (1, 2.0)], "two": [(2, 1.0), (3, 5.0), (10, 3.0), (11, 4.0), (5, 0.0), (12, 1.0)]},
    )
    one, two = Run(4, "one", abs, (1,), 2), Run(7, "two", abs, (1,), 1)

    assert ProfilerClock().rounds([[one, two], [two, one]]) == [{4: 1.0, 7: 6.0}, {4: 2.0, 7: 8.0}]


def test_the_end_of_a_trace_is_told_from_the_last_run(monkeypatch, quiet_profiler):
    """The program that ran last is done before the session is closed, which takes seconds the first time."""
    trace_says(monkeypatch, {"one": 6.0})
    log = []
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append("stop"))

    def turn(number, name, call):
        return Run(
            number, name, call, (1,), 1, lambda: log.append(f"{name} starts"), lambda: log.append(f"{name} ends")
        )

    ProfilerClock().rounds([[turn(0, "one", abs), turn(1, "two", lambda x: 1 / 0)]] * 2)
    assert log == ["one starts", "two starts", "one starts", "one ends", "stop"]
    assert ProfilerClock().round([]) == {}
    assert log[-1] == "stop"


def test_rounds_that_cannot_be_told_apart_are_one(monkeypatch, quiet_profiler):
    """Three events in two rounds belong to no round for sure: their mean counts once."""
    trace_says(monkeypatch, {"one": [(1, 2.0), (2, 2.0), (3, 4.0)], "two": [(1, 1.0), (2, 3.0)]})
    one, two = Run(4, "one", abs, (1,), 2), Run(7, "two", abs, (1,), 1)

    assert ProfilerClock().rounds([[one, two], [two, one]]) == [{4: 2.0, 7: 2.0}]


def test_what_fails_in_one_round_has_failed_in_all(monkeypatch, quiet_profiler):
    """It has no later turn in that trace, and the others have all of theirs."""
    trace_says(monkeypatch, {"one": [(1, 2.0), (2, 4.0)]})
    turns = []

    def broken(x):
        turns.append(x)
        raise OSError("worn out")

    first, second = ProfilerClock().rounds([[Run(0, "one", abs, (1,)), Run(1, "two", broken, (1,))]] * 2)

    assert (first[0], second[0]) == (2.0, 4.0)
    assert (str(first[1]), str(second[1]), turns) == ("worn out", "worn out", [1])


def test_the_session_is_closed_when_the_user_interrupts(quiet_profiler):
    """Only one can exist: the next one could not be started."""

    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProfilerClock().round([Run(0, "one", interrupted, (1,))])

    assert quiet_profiler == []


def compiled():
    return jax.jit(lambda x: x * 2).lower(X).compile()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's trace is looked at")
def test_a_real_trace_of_a_cpu_holds_no_device_time():
    """The profiler runs and says nothing of the program: the wall clock serves there."""
    with pytest.raises(ProfilerUnavailable, match="no device time"):
        ProfilerClock().round([Run(0, "_lambda", compiled(), (X,))])


def test_the_users_own_session_is_left_alone(tmp_path):
    """While the user profiles, the profiler cannot be had; the user's trace goes on and is written."""
    with jax.profiler.trace(str(tmp_path)):
        with pytest.raises(ProfilerUnavailable, match="in use"):
            ProfilerClock().round([Run(0, "_lambda", compiled(), (X,))])
        tuner = Tuner(1, 1, clock=ProfilerClock())
        tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [2.0, 3.0])

    assert tuner.record.clock.startswith("wall (the profiler is in use")
    assert list(tmp_path.rglob("*.xplane.pb"))
