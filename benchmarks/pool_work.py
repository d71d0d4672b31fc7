"""Work for the benchmark of pools, in a module that workers can import: calls, and tunings that sleep."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Kernel, Record, Trial
from ejkernel.ops.programs.pool.task import Reply, Task, TaskOutcome

# Seconds of a call that sleeps instead of computing.
SLEEP_SECONDS = 0.5


class RowSum(Kernel[int, jax.Array]):
    """Sums rows, so many at a time."""

    op_id = "pool.row_sum"
    version = "1"
    cfg_type = int

    def run(self, x: jax.Array, *, cfg: int) -> jax.Array:
        """The sum of the rows of each block."""
        return jnp.sum(jnp.sin(x).reshape(cfg, -1, x.shape[1]), axis=(0, 1))

    def heuristic_cfg(self, inv: Any) -> int:
        """One block."""
        return 1

    def candidate_cfgs(self, inv: Any) -> list[int]:
        """Block counts that divide any number of rows here."""
        return [1, 2, 4, 8, 16, 32]


def calls(count: int) -> list[tuple[Any, Any]]:
    """Calls of different shapes, so many of them."""
    kernel = RowSum()
    shapes = [jax.ShapeDtypeStruct((256 + 32 * n, 512), jnp.float32) for n in range(count)]
    return [(kernel, Invocation(kernel.op_id, (shape,), {})) for shape in shapes]


def sleeping(text: str) -> str:
    """The reply to a task after the seconds that its calls would take, with a record of made-up times."""
    task = Task.loads(text)
    outcomes = []
    for call in task.calls:
        time.sleep(SLEEP_SECONDS)
        trials = (Trial(1, samples_s=(2e-6,)), Trial(2, samples_s=(1e-6,)))
        record = Record(dict(call.key._asdict()), trials=trials, winner=1, heuristic=0, gain=(2.0, 2.0, 2.0))
        outcomes.append(TaskOutcome(call.key, record.as_json(), seconds=SLEEP_SECONDS))
    return Reply("asleep", tuple(outcomes), task.device, SLEEP_SECONDS * len(outcomes)).dumps()


def awake(text: str) -> str:
    """Imports what a tuning needs, so that a measurement begins with workers that are ready."""
    jax.devices()
    return text
