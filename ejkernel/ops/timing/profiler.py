"""The device's own clock: one profiler trace for a whole round of programs."""

from __future__ import annotations

import glob
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .clock import Run

# When it began, in nanoseconds, and how many seconds it took.
Event = tuple[float, float]


class ProfilerUnavailable(Exception):
    """The profiler cannot be had now, or says nothing about this device: the wall clock serves instead."""


class ProfilerClock:
    """Time on the device alone, without launches and waits; programs are told apart by their names."""

    name = "profiler"

    def round(self, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        """Seconds on the device per call of each program."""
        return self.rounds([runs])[0]

    def rounds(self, schedule: Sequence[Sequence[Run]]) -> Sequence[Mapping[int, float | Exception]]:
        """Seconds of each of several rounds in one trace: to start a trace costs more than short kernels.

        One round comes back, their mean, where the trace cannot be told apart into rounds.
        """
        failed: dict[int, Exception] = {}
        latest: Run | None = None
        with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
            self._start(folder)
            try:
                for run in (run for runs in schedule for run in runs if run.number not in failed):
                    latest = run
                    run.before()
                    try:
                        jax.block_until_ready([_flushed(run) for _ in range(run.calls)][-1])
                    # Whatever a candidate raises is the candidate's outcome.
                    except Exception as error:
                        failed[run.number] = error
                # The first stop takes seconds, which must not look as if the last run did.
                if latest is not None:
                    latest.after()
            finally:
                jax.profiler.stop_trace()
            events = device_events(folder)
        lived = [run for run in schedule[0] if run.number not in failed]
        for run in lived:
            if run.name not in events:
                raise ProfilerUnavailable(f"the trace holds no device time of {run.name}")
        count = len(schedule) if all(len(events[run.name]) % len(schedule) == 0 for run in lived) else 1
        calls = len(schedule) // count
        split = {run.number: _in_order(events[run.name], count, run.calls * calls) for run in lived}
        return [{**failed, **{number: times[turn] for number, times in split.items()}} for turn in range(count)]

    def _start(self, folder: str) -> None:
        options = jax.profiler.ProfileOptions()
        # The host's side is not looked at, and tracing it costs more than the kernels.
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        # Only one session can exist, and the user's is running.
        except RuntimeError as error:
            raise ProfilerUnavailable(f"the profiler is in use: {error}") from error


def _flushed(run: Run) -> Any:
    run.flush()
    return run.call(*run.leaves)


def _in_order(events: Sequence[Event], rounds: int, calls: int) -> list[float]:
    """Seconds per call in each round: each has its share of the events, in the order of time."""
    durations = [duration for _, duration in sorted(events)]
    share = len(durations) // rounds
    return [sum(durations[turn * share : (turn + 1) * share]) / calls for turn in range(rounds)]


def device_seconds(folder: str) -> dict[str, float]:
    """Device seconds of each program in a trace, by the name of its jitted function."""
    return {name: sum(duration for _, duration in events) for name, events in device_events(folder).items()}


def device_events(folder: str) -> dict[str, list[Event]]:
    """Start of each program's work on the device, and the seconds that it took."""
    files = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    if not files:
        raise ProfilerUnavailable("the profiler left no trace")
    found: dict[str, list[Event]] = defaultdict(list)
    for path in files:
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if plane.name.startswith("/device:GPU"):
                _add_gpu(plane, found)
            elif plane.name.startswith("/device:TPU"):
                _add_tpu(plane, found)
    return dict(found)


def _add_gpu(plane: Any, found: dict[str, list[Event]]) -> None:
    for line in plane.lines:
        # The other lines of a GPU are sums of these.
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            module = next((value for name, value in event.stats if name == "hlo_module"), None)
            if module is not None:
                found[str(module).removeprefix("jit_")].append((event.start_ns, event.duration_ns * 1e-9))


def _add_tpu(plane: Any, found: dict[str, list[Event]]) -> None:
    for line in plane.lines:
        if line.name == "XLA Modules":
            for event in line.events:
                name = event.name.partition("(")[0].removeprefix("jit_")
                found[name].append((event.start_ns, event.duration_ns * 1e-9))
