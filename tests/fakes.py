"""Stand-ins that several rooms' tests share: a kernel with a few cfgs, tuners and clocks that read a table."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_python
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation, Kernel, device_fingerprint

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Blocks:
    """A cfg with one field."""

    size: int


class Doubling(Kernel[Blocks, jax.Array]):
    """Twice the argument, whatever the cfg says; the heuristic is the first of the candidates given."""

    op_id = "doubling"
    version = "3"

    def __init__(self, sizes: Sequence[int] = (1, 2, 4)) -> None:
        super().__init__()
        self.sizes = tuple(sizes)

    def run(self, x, *, cfg):
        return x * 2.0

    def heuristic_cfg(self, inv):
        return Blocks(self.sizes[0])

    def candidate_cfgs(self, inv):
        return [Blocks(size) for size in self.sizes]


class TableTuner:
    """A tuner of the user's own: the time of a cfg stands in a table, and nothing is run."""

    def __init__(self, times: Mapping[int, float] | None = None) -> None:
        self.times = dict(times or {1: 3.0, 2: 1.0, 4: 2.0})
        self.offered: list[list[Any]] = []
        self.objectives: list[bool] = []
        self.broken = False

    @property
    def calls(self) -> int:
        return len(self.offered)

    def autotune(self, make_fn, args, kwargs, candidates):
        offered = list(candidates)
        self.offered.append(offered)
        self.objectives.append(getattr(make_fn(offered[0]), "_ejk_validate_backward", False))
        if self.broken:
            raise RuntimeError("no candidate ran")
        return min(offered, key=lambda cfg: self.times[cfg.size])


class DictStore:
    """A store of the user's own: only `get` and `put`."""

    def __init__(self) -> None:
        self.data: dict[tuple[str, str, str], Any] = {}

    def get(self, device, op_id, call_key):
        return self.data.get((device, op_id, call_key))

    def put(self, device, op_id, call_key, cfg):
        self.data[device, op_id, call_key] = cfg


class Listener:
    """Keeps every event that it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event, **data):
        self.events.append((event, data))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    @property
    def last(self) -> tuple[str, dict[str, Any]]:
        return self.events[-1]


class Ran:
    """Functions that say each time they are really run, also when they are compiled."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def make_fn(self, cfg: Any) -> Callable[..., Any]:
        """Twice the argument; each run leaves the cfg in the log."""

        def note(x) -> Any:
            self.log.append(cfg)
            return (np.asarray(x) * np.float32(2)).astype(x.dtype)

        # Nothing beside the callback: each cfg's program is compiled, and a product took most of that time.
        def fn(x):
            return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return fn


class TableClock:
    """Runs what it is given and answers from a table, by the cfg that the run left in the log."""

    name = "table"

    def __init__(self, ran: Ran, times: Mapping[Any, Any]) -> None:
        self.ran = ran
        # A number, or a list that is read from the front and then stays at its last item.
        self.times = {cfg: list(t) if isinstance(t, (list, tuple)) else [t] for cfg, t in times.items()}

    def time(self, call, leaves, calls):
        jax.block_until_ready(call(*leaves))
        row = self.times[self.ran.log[-1]]
        return row.pop(0) if len(row) > 1 else row[0]


class ListClock:
    """Runs what it is given and answers with the next number of a list."""

    name = "list"

    def __init__(self, times: Sequence[float]) -> None:
        self.times = list(times)

    def time(self, call, leaves, calls):
        jax.block_until_ready(call(*leaves))
        return self.times.pop(0)


def call_of(kernel: Kernel[Any, Any], *args: Any, cfg: Any = None, **kwargs: Any) -> Invocation[Any, Any]:
    """One call of a kernel; with a small vector where no argument is given."""
    return Invocation(kernel.op_id, args or (jnp.ones(8),), kwargs, override_cfg=cfg)


def key_of(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> tuple[str, str, str]:
    """The key of a call on the default device, as the contract spells it."""
    return device_fingerprint(), f"{kernel.op_id}@v{kernel.version}", inv.call_key


@contextlib.contextmanager
def child(code: str, *argv: str, env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Another Python process that runs this code, with pipes to it; it is gone when the block ends."""
    inherited = {**os.environ, **(env or {})}
    inherited["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    process = forked_python.piped([sys.executable, "-c", code, *argv], env=inherited)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
