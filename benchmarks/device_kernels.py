"""The device kernels of compiled programs: which there are, and how long each takes."""

from __future__ import annotations

import collections
import glob
import os
import tempfile
from typing import Any

import jax


def kernels_of(programs: dict[int, Any], arrays: Any, tag: str, most: int) -> dict[int, list[str]]:
    """The largest kernels of each program, from one trace."""
    if not most:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for program in programs.values():
                jax.block_until_ready(program(*arrays))
        taken: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
            planes = [p for p in jax.profiler.ProfileData.from_file(path).planes if p.name.startswith("/device:GPU")]
            for event in (e for p in planes for line in p.lines if line.name.startswith("Stream") for e in line.events):
                module = next((str(value) for name, value in event.stats if name == "hlo_module"), "")
                taken[module.removeprefix("jit_")][event.name[:48]] += event.duration_ns * 1e-3
    lines = {at: taken[f"{tag}_{at}"].most_common(most) for at in programs}
    return {at: [f"{took:10.1f}      {name}" for name, took in found] for at, found in lines.items()}
