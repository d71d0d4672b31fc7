"""Tuning on many processes: how it scales, and where it would saturate.

`python benchmarks/pool.py` tunes 48 calls that sleep instead of computing, and some that compute, on 1, 2 and 4
processes of this machine. Exit code 1 where sleeping calls scale to less than 0.9 N. `--simulate` runs the schedule of
the code on 256 workers and 1,000 calls, on a clock that is a number, by what this process needs for a call (measured
here) and what tunings took on an H200.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import pool_work

from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, LocalPool, OperationStores, Tuner, autotune
from ejkernel.ops.core.key import Key
from ejkernel.ops.programs.pool.plan import together_for
from ejkernel.ops.programs.pool.schedule import Schedule, Work

LIMIT = 0.9
# A worker imports JAX and takes its device.
START_SECONDS = 8.0
# Seconds of a tuning on an H200: norms and decode steps, attention, products forward and backward, searches.
TUNINGS = (2.0, 2.0, 6.8, 6.8, 6.8, 8.6, 13.5, 13.5, 14.0, 27.1, 60.0)


class Sleeping:
    """A pool that runs tunings which sleep."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.workers = pool.workers

    def submit(self, function: Any, text: str) -> Any:
        """Submits the task to a worker that sleeps."""
        return self.pool.submit(pool_work.sleeping, text)


class Answering:
    """A pool that answers at once: what is left is the work of this process."""

    workers = 64
    # When the first task came.
    first = 0.0

    def submit(self, function: Any, text: str) -> Any:
        """A future that is done."""
        from concurrent.futures import Future

        self.first = self.first or time.perf_counter()
        future: Future[str] = Future()
        future.set_result(pool_work.sleeping(text))
        return future


def tuned(pool: Any, count: int) -> float:
    """Seconds of tuning so many calls on a pool, with a store."""
    with tempfile.TemporaryDirectory() as folder:
        tuner: Tuner[Any] = Tuner(isolate=False)
        selector: Any = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=OperationStores(folder))
        options = AutotuneOptions(pool=pool, selector=selector, progress=False)
        start = time.perf_counter()
        result = autotune(pool_work.calls(count), tuning=options)
        seconds = time.perf_counter() - start
    assert sum(entry.is_measured for entry in result.entries) == count, result.notes
    return seconds


def scaling(title: str, count: int, wrap: Any) -> dict[int, float]:
    """Seconds by the number of workers, printed."""
    found = {}
    for workers in (1, 2, 4):
        with LocalPool(workers) as pool:
            for future in [pool.submit(pool_work.awake, "") for _ in range(workers)]:
                future.result()
            found[workers] = tuned(wrap(pool), count)
        ratio = found[1] / found[workers]
        line = f"{title}, {workers} workers: {found[workers]:.2f} s, {ratio:.2f} times as fast, {ratio / workers:.2f} N"
        print(line, flush=True)
    return found


@dataclass(frozen=True)
class Costs:
    """Seconds of this process: once for a call before the first is sent, and for each that is sent and kept."""

    before: float
    each: float


def measured_costs(count: int = 200) -> Costs:
    """The seconds that this process needs for a call, without those of any worker."""
    pool_work.SLEEP_SECONDS = 0.0
    tuned(Answering(), 20)
    pool, start = Answering(), time.perf_counter()
    seconds = tuned(pool, count)
    before = pool.first - start
    return Costs(before / count, max(1e-4, (seconds - before) / count))


def simulated(
    calls: int, workers: int, costs: Costs, start_seconds: float, seed: int = 0
) -> tuple[float, float, float]:
    """Seconds of it all, the share of the workers' time that is of use, and the share of this process's time."""
    rng = random.Random(seed)
    seconds = {Key("d", f"op{n % 40}", str(n)): rng.choice(TUNINGS) * rng.uniform(0.7, 1.3) for n in range(calls)}
    # By size, not by the time of the tuning: that is not known before.
    keys = list(seconds)
    works = []
    while keys:
        together = together_for(len(keys), workers)
        works.append(Work(tuple(keys[:together]), "k"))
        del keys[:together]
    schedule = Schedule(works, workers=workers)
    now = busy = costs.before * calls
    idle, waiting = workers, []
    events: list[tuple[float, int]] = []
    warm = 0
    while schedule.is_busy:
        while (work := schedule.next(now)) is not None:
            now, busy = now + costs.each / 2, busy + costs.each / 2
            waiting.append((work, schedule.sent(work, now)))
        while waiting and idle:
            work, number = waiting.pop(0)
            idle, begin = idle - 1, 0.0 if warm >= workers else start_seconds
            warm += 1
            heapq.heappush(events, (now + begin + sum(seconds[key] for key in work.calls), number))
        at, number = heapq.heappop(events)
        now, idle = max(now, at), idle + 1
        done = schedule.came_back(number)
        if done is not None:
            now, busy = now + costs.each / 2 * len(done.calls), busy + costs.each / 2 * len(done.calls)
            schedule.answered(done, [seconds[key] for key in done.calls])
    return now, sum(seconds.values()) / (workers * now), busy / now


def simulate() -> None:
    """Prints how long 1,000 calls take on more and more workers."""
    costs = measured_costs()
    whole = sum(random.Random(0).choice(TUNINGS) for _ in range(1000))
    before, each = 1e3 * costs.before, 1e3 * costs.each
    print(f"this process: {before:.1f} ms a call before the first is sent, {each:.1f} ms for each after that")
    print(f"1,000 calls of {min(TUNINGS):g} to {max(TUNINGS):g} s, some {whole / 3600:.1f} hours on one device")
    longest = 1.3 * max(TUNINGS) + START_SECONDS
    print(f"no number of workers ends before the longest call: some {longest:.0f} s with the start of its worker")
    for workers in (1, 8, 32, 64, 128, 256, 512, 1000):
        seconds, useful, own = simulated(1000, workers, costs, start_seconds=START_SECONDS)
        print(
            f"{workers:5} workers: {seconds:8.0f} s, workers busy {useful:4.0%}, this process busy {own:4.0%}",
            flush=True,
        )


def main() -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulate", action="store_true", help="1,000 calls on up to 1,000 workers, in numbers")
    parser.add_argument("--calls", type=int, default=48, help="calls that sleep")
    if parser.parse_args().simulate:
        simulate()
        return 0
    count = parser.parse_args().calls
    asleep = scaling(f"{count} calls that sleep {pool_work.SLEEP_SECONDS:g} s", count, Sleeping)
    scaling("12 real tunings", 12, lambda pool: pool)
    worst = min(asleep[1] / asleep[n] / n for n in asleep)
    print(f"sleeping calls scale to at least {worst:.2f} N (limit {LIMIT:g} N)")
    return 0 if worst >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
