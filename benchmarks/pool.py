"""Tuning on many processes: how it scales, and where it would saturate.

`python benchmarks/pool.py` tunes 48 calls that sleep instead of computing, and some that compute, on 1, 2 and 4
processes of this machine. Exit code 1 where sleeping calls scale to less than 0.9 N. `--simulate` runs the schedule of
the code with 1,000 calls on up to 1,024 workers, on a clock that is a number, by what this process needs for a call and
for each turn of the schedule (both measured here) and what tunings took on an H200; it says where that saturates.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

# This process has a turn at least so often.
POLL_SECONDS = 0.5
# Saturated: twice as many workers are not even so many times as fast.
WORTH = 1.4


class Sleeping:
    """A pool that runs tunings which sleep."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.workers = pool.workers

    def submit(self, function: Any, text: str) -> Any:
        """Submits the task to a worker that sleeps."""
        return self.pool.submit(pool_work.sleeping, text)


class Counted:
    """A pool of threads that sleep: what the thread of the tuner computes is the work of this process."""

    workers = 4
    # The seconds that this thread had computed when the first task came.
    first = 0.0

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.workers)

    def submit(self, function: Any, text: str) -> Any:
        """Submits the task to a thread that sleeps."""
        self.first = self.first or time.thread_time()
        return self.threads.submit(pool_work.sleeping, text)


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
    """Seconds of this process for a call, estimates of those that wait included: the least of three runs."""
    pool_work.SLEEP_SECONDS = 0.1
    tuned(Counted(), 20)
    found = []
    for _ in range(3):
        pool, start = Counted(), time.thread_time()
        tuned(pool, count)
        found.append(((pool.first - start) / count, (time.thread_time() - pool.first) / count))
    return Costs(*map(min, zip(*found, strict=True)))


@dataclass(frozen=True)
class Simulated:
    """A run on workers that are numbers."""

    workers: int
    seconds: float
    # Seconds of all calls together, of the longest with the start of its worker, and of this process.
    calls: float
    longest: float
    own: float
    # Seconds of this process that went into the schedule's code.
    schedule: float

    @property
    def useful(self) -> float:
        """The share of the workers' time that is of use."""
        return self.calls / (self.workers * self.seconds)

    @property
    def limit(self) -> str:
        """The name of the bound that no run can be faster than: the greatest of three."""
        bounds = {
            "the number of workers": self.calls / self.workers,
            "the longest call": self.longest,
            "this process": self.own,
        }
        return max(bounds, key=lambda name: bounds[name])


def simulated(
    calls: int,
    workers: int,
    costs: Costs,
    start_seconds: float,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.thread_time,
) -> Simulated:
    """Runs the schedule as the tuner does, turn by turn; its own seconds, by the clock, count for this process."""
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
    now = own = costs.before * calls
    inside, idle, cold = 0.0, workers, workers
    waiting: list[tuple[Work, int]] = []
    events: list[tuple[float, int]] = []
    while schedule.is_busy:
        began = clock()
        while (work := schedule.next(now)) is not None:
            number = schedule.sent(work, now)
            waiting.append((work, number))
            now, own = now + costs.each / 2, own + costs.each / 2
        schedule.overdue(now)
        late = schedule.seconds_until_late(now)
        spent = clock() - began
        while waiting and idle:
            work, number = waiting.pop(0)
            # A process that is ended with its straggler is replaced by one that starts.
            begin, cold, idle = (start_seconds if cold else 0.0), max(0, cold - 1), idle - 1
            heapq.heappush(events, (now + begin + sum(seconds[key] for key in work.calls), number))
        if events and events[0][0] <= now + min(POLL_SECONDS, late):
            at, number = heapq.heappop(events)
            now, idle = max(now, at), idle + 1
            began = clock()
            done = schedule.came_back(number)
            if done is not None:
                now, own = now + costs.each / 2 * len(done.calls), own + costs.each / 2 * len(done.calls)
                vain = set(schedule.answered(done, [seconds[key] for key in done.calls]))
                spent += clock() - began
                running = [event for event in events if event[1] not in vain]
                idle, cold = idle + len(events) - len(running), cold + len(events) - len(running)
                events, waiting = running, [one for one in waiting if one[1] not in vain]
                heapq.heapify(events)
        else:
            now += min(POLL_SECONDS, late)
        now, own, inside = now + spent, own + spent, inside + spent
    return Simulated(workers, now, sum(seconds.values()), max(seconds.values()) + start_seconds, own, inside)


def simulate() -> None:
    """Prints how long 1,000 calls take on more and more workers, where that saturates, and why."""
    costs, count = measured_costs(), 1000
    before, each = 1e3 * costs.before, 1e3 * costs.each
    print(f"this process: {before:.1f} ms a call before the first is sent, {each:.1f} ms for each after that")
    runs = []
    for workers in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        run = simulated(count, workers, costs, start_seconds=START_SECONDS)
        runs.append(run)
        if len(runs) == 1:
            hours = f"{run.calls / 3600:.1f} hours on one device"
            print(f"{count} calls of {min(TUNINGS):g} to {max(TUNINGS):g} s, {hours}; the longest {run.longest:.0f} s")
        own, turns = run.own / run.seconds, 1e3 * run.schedule / count
        print(
            f"{workers:5} workers: {run.seconds:7.0f} s, workers busy {run.useful:4.0%}, this process busy {own:5.1%} "
            f"({turns:.2f} ms a call in the schedule); the limit is {run.limit}",
            flush=True,
        )
    for run, twice in itertools.pairwise(runs[1:]):
        gain = run.seconds / twice.seconds
        if gain < WORTH:
            more = f"{twice.workers} are {gain:.2f} times as fast"
            print(f"saturates at {run.workers} workers: {more}, and the limit is {twice.limit}")
            break
    # With calls without end, tasks are answered as fast as this process sends and keeps them.
    own = costs.each + runs[-1].schedule / count
    print(f"with many more calls this process would be the limit at {runs[0].calls / count / own:.0f} workers")


def main() -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulate", action="store_true", help="1,000 calls on up to 1,024 workers, in numbers")
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
