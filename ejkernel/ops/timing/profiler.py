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


class ProfilerUnavailable(Exception):
    """The profiler cannot be had now, or says nothing about this device: the wall clock serves instead."""


class ProfilerClock:
    """Time on the device alone, without launches and waits; programs are told apart by their names."""

    name = "profiler"

    def round(self, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        """Seconds on the device per call of each program."""
        found: dict[int, float | Exception] = {}
        with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
            self._start(folder)
            try:
                for run in runs:
                    run.before()
                    try:
                        jax.block_until_ready([run.call(*run.leaves) for _ in range(run.calls)][-1])
                    # Whatever a candidate raises is the candidate's outcome.
                    except Exception as error:
                        found[run.number] = error
            finally:
                jax.profiler.stop_trace()
            seconds = device_seconds(folder)
        for run in runs:
            if run.number not in found:
                if run.name not in seconds:
                    raise ProfilerUnavailable(f"the trace holds no device time of {run.name}")
                found[run.number] = seconds[run.name] / run.calls
        return found

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


def device_seconds(folder: str) -> dict[str, float]:
    """Device seconds of each program in a trace, by the name of its jitted function."""
    files = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    if not files:
        raise ProfilerUnavailable("the profiler left no trace")
    total: dict[str, float] = defaultdict(float)
    for path in files:
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if plane.name.startswith("/device:GPU"):
                _add_gpu(plane, total)
            elif plane.name.startswith("/device:TPU"):
                _add_tpu(plane, total)
    return dict(total)


def _add_gpu(plane: Any, total: dict[str, float]) -> None:
    for line in plane.lines:
        # The other lines of a GPU are sums of these.
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            module = next((value for name, value in event.stats if name == "hlo_module"), None)
            if module is not None:
                total[str(module).removeprefix("jit_")] += event.duration_ns * 1e-9


def _add_tpu(plane: Any, total: dict[str, float]) -> None:
    for line in plane.lines:
        if line.name == "XLA Modules":
            for event in line.events:
                total[event.name.partition("(")[0].removeprefix("jit_")] += event.duration_ns * 1e-9
