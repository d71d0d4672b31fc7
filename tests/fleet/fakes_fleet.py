"""Stand-ins for agreement: JAX's key-value service in memory, a clock that only waiting moves, and a proposal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from fakes import Blocks, Doubling, call_of

from ejkernel.ops.core.errors import NoConfigError
from ejkernel.ops.core.record import Record
from ejkernel.ops.core.request import Decision, Hit, Request, ask
from ejkernel.ops.fleet.agreement import Agreement
from ejkernel.ops.fleet.kv_store import KeyValueStore

SIZES = (1, 2, 4, 8, 16)


class Clock:
    """Stands still until a thread waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeClient:
    """JAX's client, with its errors; a wait in vain moves a clock that stands still, and lets things happen."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.data: dict[str, str] = {}
        self.clock = clock or Clock()
        self.meanwhile: Callable[[], Any] = lambda: None
        self.failing: Exception | None = None
        self.asked = 0
        self._lock = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        self._reached()
        with self._lock:
            if key in self.data and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.data[key] = value
            self._lock.notify_all()

    def key_value_try_get(self, key):
        self._reached()
        if key not in self.data:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.data[key]

    def blocking_key_value_get(self, key, milliseconds):
        self._reached()
        if isinstance(self.clock, Clock) and key not in self.data:
            self.clock.now += milliseconds / 1e3
            self.meanwhile()
        with self._lock:
            seconds = 0 if isinstance(self.clock, Clock) else milliseconds / 1e3
            if not self._lock.wait_for(lambda: key in self.data, timeout=seconds):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.data[key]

    def key_value_dir_get(self, folder):
        self._reached()
        with self._lock:
            return [(key, value) for key, value in self.data.items() if key.startswith(f"{folder}/")]

    def key_value_delete(self, key):
        self._reached()
        with self._lock:
            self.data.pop(key, None)

    def _reached(self) -> None:
        self.asked += 1
        if self.failing is not None:
            raise self.failing


class Saying:
    """A proposal that knows, tunes or guesses as it is told."""

    def __init__(
        self,
        *,
        kernel: Any = None,
        known: int | None = None,
        tuned: int = 2,
        guess: int | None = 1,
        before: Callable[[], Any] = lambda: None,
        request: Request | None = None,
        is_tuning: bool = False,
    ) -> None:
        kernel = kernel or Doubling(SIZES)
        self.request = request or ask(call_of(kernel), kernel, "forward")
        self.is_tuning = is_tuning
        self.kept: list[Hit] = []
        self.made = 0
        self._known, self._tuned, self._guess, self._before = known, tuned, guess, before

    def known(self) -> Hit | None:
        return None if self._known is None else Hit(Blocks(self._known), "persistent", "cache_hit", measured=True)

    def make(self, seconds=None) -> Decision:
        self.made += 1
        self._before()
        return Decision(Blocks(self._tuned), "autotune", record=Record(), measured=True)

    def guess(self) -> Hit:
        if self._guess is None:
            raise NoConfigError("heuristics are off")
        return Hit(Blocks(self._guess), "heuristics", "heuristics")

    def keep(self, hit, misses=()) -> Decision:
        self.kept.append(hit)
        return Decision(hit.cfg, str(hit.data.get("tier", hit.tier)), tuple(misses))


def process(client: FakeClient, number: int, *, lease: float = 10.0, processes: int = 4) -> Agreement:
    """One process of a program whose service this is."""
    return Agreement(KeyValueStore(client, "coordinator:1"), number, processes, lease=lease, clock=client.clock)
