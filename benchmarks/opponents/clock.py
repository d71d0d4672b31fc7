"""Device times of programs of JAX and of torch in one race, read from one trace by JAX's profiler.

CUPTI records every kernel of the process. Those of JAX carry the name of their program; torch's carry none. Every run
is waited for before the next one starts, and a small program of JAX marks where torch's kernels begin. Both sides are
timed alike: the sum of the kernels' times, three calls in a row with their results kept, caches as the run before left
them.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops.timing.clock import Run, WallClock
from ejkernel.ops.timing.profiler import ProfilerUnavailable

MARK = "opponents_mark"
# Cycles that the device waits in front of torch's work, so that the host is ahead of it: 2 ms.
AHEAD = 4_000_000


class Foreign:
    """A program of torch, called as if it were one of JAX: what it is given is left, it has tensors of its own."""

    def __init__(self, torch: Any, fn: Callable[..., Any], tensors: tuple[Any, ...]) -> None:
        self.torch, self.fn, self.tensors = torch, fn, tensors

    def __call__(self, *_: Any) -> Pending:
        return Pending(self.torch, self.fn(*self.tensors))

    def seconds(self, calls: int) -> float:
        """Seconds of a call by CUDA's events, gaps between kernels included."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda.synchronize()
        self.torch.cuda._sleep(AHEAD)
        start.record()
        kept = [self.fn(*self.tensors) for _ in range(calls)]
        end.record()
        self.torch.cuda.synchronize()
        del kept
        return float(start.elapsed_time(end)) * 1e-3 / calls


class Pending:
    """A result of torch that can be waited for as JAX's are."""

    def __init__(self, torch: Any, out: Any) -> None:
        self.torch, self.out = torch, out

    def block_until_ready(self) -> Pending:
        """Waits for all of torch's work."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()
        return self


class Event(NamedTuple):
    """A kernel's start in nanoseconds, its seconds, and the name of its program where it has one."""

    start: float
    seconds: float
    program: str | None


class MixedClock:
    """Device seconds of programs of both packages."""

    name = "profiler"

    def __init__(self) -> None:
        self._ones = jnp.ones(128)
        self._mark = _named(MARK).lower(self._ones).compile()
        # Said by the first round in which torch's kernels were not in the trace.
        self.by_events = False

    def round(self, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        """Seconds per call of each, or the exception that it raised."""
        failed: dict[int, Exception] = {}
        marked: list[int] = []
        with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
            jax.profiler.start_trace(folder, profiler_options=_device_alone())
            try:
                for run in runs:
                    if isinstance(run.call, Foreign):
                        marked.append(run.number)
                        jax.block_until_ready(self._mark(self._ones))
                    try:
                        jax.block_until_ready([run.call(*run.leaves) for _ in range(run.calls)][-1])
                    # An opponent may raise anything; that is its result.
                    except Exception as error:
                        failed[run.number] = error
            finally:
                jax.profiler.stop_trace()
            events = read(folder)
        lived = [run for run in runs if run.number not in failed]
        named, foreign = attributed(events, marked)
        found: dict[int, float | Exception] = dict(failed)
        for run in lived:
            seconds = foreign.get(run.number, 0.0) if isinstance(run.call, Foreign) else named.get(run.name, 0.0)
            if seconds:
                found[run.number] = seconds / run.calls
            elif isinstance(run.call, Foreign):
                self.by_events = True
                found[run.number] = run.call.seconds(run.calls)
            else:
                raise ProfilerUnavailable(f"the trace holds no device time of {run.name}")
        return found


class HostClock:
    """Seconds of programs by the host's clock, for machines without a GPU."""

    name = "wall"
    by_events = False

    def round(self, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        """Seconds per call of each."""
        return {run.number: WallClock().time(run.call, run.leaves, run.calls) for run in runs}


def attributed(events: Sequence[Event], marked: Sequence[int]) -> tuple[dict[str, float], dict[int, float]]:
    """Seconds of JAX's programs by name, and of torch's by the numbers that their marks stand for, in order."""
    named: dict[str, float] = {}
    foreign: dict[int, float] = {}
    left, current = list(marked), None
    for event in sorted(events, key=lambda event: event.start):
        if event.program == MARK:
            current = left.pop(0) if left else None
        elif event.program is not None:
            named[event.program] = named.get(event.program, 0.0) + event.seconds
            current = None
        elif current is not None:
            foreign[current] = foreign.get(current, 0.0) + event.seconds
    # With a mark too few or too many, kernels would be another opponent's.
    seen = sum(event.program == MARK for event in events)
    return named, foreign if seen == len(marked) else {}


def read(folder: str) -> list[Event]:
    """Every kernel and copy of a trace."""
    found: list[Event] = []
    for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                # The other lines are sums of these.
                if line.name.startswith("Stream"):
                    found += [_event(event) for event in line.events]
    return found


def _event(event: Any) -> Event:
    module = next((value for name, value in event.stats if name == "hlo_module"), None)
    program = None if module is None else str(module).removeprefix("jit_")
    return Event(event.start_ns, event.duration_ns * 1e-9, program)


def _device_alone() -> Any:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    return options


def _named(name: str) -> Any:
    def mark(x: Any) -> Any:
        return x + 1

    mark.__name__ = mark.__qualname__ = name
    return jax.jit(mark)
