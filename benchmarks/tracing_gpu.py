"""One device, many processors: thirteen calls tuned by one process, by a worker, and by a worker with several tracers.

"one" traces, compiles and measures in a single process; "0" has a worker that compiles and measures while this process
traces; "auto" has processes that trace as well, as many as the processors allow. Each runs in a process of its own with
an empty store. The device's load is what `nvidia-smi` says five times a second.

    python benchmarks/tracing_gpu.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import library
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, OperationStores, Tuner, autotune
from ejkernel.ops.timing.compile_pool import leave_process

# Rows, and the widths of products; the small ones are for a machine without a GPU.
SIZES = {"gpu": (8192, 2048, 5632), "cpu": (64, 64, 128)}


def step(rows: int, width: int, inner: int) -> tuple[Any, tuple[Any, ...]]:
    """A loss with thirteen kernel calls, with its gradients, and the shapes of its arguments."""
    heads, experts = width // 64, 8
    shape = jax.ShapeDtypeStruct
    wide = {
        "up": shape((width, inner), jnp.bfloat16),
        "gate": shape((width, inner), jnp.bfloat16),
        "down": shape((inner, width), jnp.bfloat16),
        "square": shape((width, width), jnp.bfloat16),
        "experts": shape((experts, width, inner), jnp.bfloat16),
        "back": shape((experts, inner, width), jnp.bfloat16),
        "words": shape((width, 4 * inner), jnp.bfloat16),
        "scale": shape((width,), jnp.bfloat16),
        "other": shape((inner,), jnp.bfloat16),
    }

    def loss(x: Any, w: dict[str, Any], labels: Any, sizes: Any) -> Any:
        h = library.rms_norm(x, w["scale"])
        h = library.matmul(h, w["square"])
        q = h.reshape(-1, 1024 if rows >= 1024 else rows, heads, 64)
        h = library.attention(q, q, q, causal=True).reshape(h.shape)
        h = library.attention(q, q, q, causal=False).reshape(h.shape) + h
        h = library.layer_norm(h, w["scale"], w["scale"])
        g = library.matmul(h, w["up"], activation="silu")
        g = library.layer_norm(g, w["other"], w["other"]) * library.matmul(h, w["gate"])
        h = library.matmul(g, w["down"])
        e = library.ragged_dot(h, w["experts"], sizes)
        e = library.rms_norm(e, w["other"])
        h = library.ragged_dot(e, w["back"], sizes)
        return library.linear_cross_entropy(h, w["words"], labels).sum()

    args = (
        shape((rows, width), jnp.bfloat16),
        wide,
        shape((rows,), jnp.int32),
        shape((experts,), jnp.int32),
    )
    return jax.jit(jax.grad(loss, (0, 1))), args


def tune(seconds: float | None, *, alone: bool) -> dict[str, Any]:
    """One tuning from this process; `alone`: with no other one."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=False), persistent=OperationStores())
    fn, args = step(*SIZES["gpu" if jax.default_backend() == "gpu" else "cpu"])
    loads: list[float] = []
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(loads, done), daemon=True)
    watcher.start()
    start = time.perf_counter()
    result = autotune(
        fn, *args, tuning=AutotuneOptions(seconds=seconds, selector=selector if alone else None, progress=False)
    )
    taken = time.perf_counter() - start
    done.set()
    watcher.join()
    records = [entry.record for entry in result.entries if entry.record is not None]
    trials = [trial for record in records for trial in record.trials]
    phases: dict[str, float] = {}
    for record in records:
        for name, part in record.phases.items():
            phases[name] = round(phases.get(name, 0.0) + part, 1)
    return {
        "seconds": round(taken, 1),
        "calls": len(result.entries),
        "measured": sum(entry.is_measured for entry in result.entries),
        "candidates": len(trials),
        "raced": sum(bool(trial.samples_s) for trial in trials),
        "phases": phases,
        "load": round(sum(loads) / len(loads), 1) if loads else None,
        "notes": list(result.notes)[:4],
    }


def _watch(loads: list[float], done: threading.Event) -> None:
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    # No NVIDIA GPU here.
    except OSError:
        return
    threading.Thread(target=lambda: (done.wait(), process.terminate()), daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().isdigit():
            loads.append(float(line))
    process.wait()


def main() -> int:
    """Both ways, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="the budget; none without it")
    parser.add_argument("--tracers", default="one,0,auto", help="numbers of tracing processes, with commas")
    parser.add_argument("--alone", action="store_true", help="without a worker process")
    parser.add_argument("--here", action="store_true", help="one tuning in this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(tune(options.seconds, alone=options.alone)), flush=True)
        leave_process(0)
    found = {}
    for count in options.tracers.split(","):
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": folder}
            if count != "auto":
                variables["EJKERNEL_OPS_TRACERS"] = "0" if count == "one" else count
            more = [] if options.seconds is None else ["--seconds", str(options.seconds)]
            command = [sys.executable, __file__, "--here", *(["--alone"] if count == "one" else []), *more]
            done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            print(done.stderr[-2000:])
            return 1
        found[count] = json.loads(done.stdout.splitlines()[-1])
        print(f"{count:>5} processes: {json.dumps(found[count])}", flush=True)
    first, *others = found.values()
    for count, other in zip(list(found)[1:], others, strict=True):
        print(f"{count} processes: {first['seconds'] / other['seconds']:.2f} times as fast as {next(iter(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
