"""One row: our programs and every opponent's, built, compared with ours, and raced in rounds on one device."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from library_gpu import FLOPS, TRAFFIC
from library_programs import HEURISTIC, TUNED, both_passes, lowered
from new_ops_gpu import off
from tuning_gpu import raced

from . import collected
from .clock import Foreign, HostClock, MixedClock
from .opponent import Call, Opponent
from .ours import BARE, Ours, ours
from .table import Entry

# The root mean square of a result's differences from ours, over that of ours: narrow types round by 0.4%.
AGREES = 2e-2
# Seconds of device time of a race; a way that takes so many times the best one's time runs in its first rounds alone.
RACE_SECONDS, LEAST_ROUNDS, MOST_ROUNDS, CLEARLY_SLOWER = 0.6, 10, 40, 2.0
# The most that an opponent may take to be traced, compiled or run for the first time, and compilers at a time.
PATIENCE, COMPILERS = 40.0, 8


class DeviceLost(Exception):
    """An opponent left the device in a state in which nothing runs any more in this process."""


@dataclass
class Field:
    """The programs that run, by number; names of all; and the reason for each that does not count."""

    tag: str
    names: list[str] = field(default_factory=list)
    programs: dict[int, Any] = field(default_factory=dict)
    # Programs with the same text as an earlier one's are that one: their difference would be noise.
    runs_as: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Bound:
    """A compiled program with arrays of its own."""

    def __init__(self, program: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
        self.program, self.arrays = program, arrays

    def __call__(self, *_: Any) -> Any:
        return self.program(*self.arrays)


def compare(entry: Entry, number: int, *, tune_seconds: float, store: str | None, without: tuple[str, ...]) -> Any:
    """Every way's time, as a dict that JSON can hold."""
    case = entry.case
    mine = ours(entry, tune_seconds, store)
    print(f"   tuned in {mine.tuning_s:.1f} s, without Triton in {mine.bare_tuning_s:.1f} s more", flush=True)
    given = mine.arrays[:-1] if case.backward else mine.arrays
    rivals, left_out = collected(Call(case.op, given, mine.static, case.backward), without)
    racers = Field(f"row{number}")
    start = time.perf_counter()
    _build(racers, mine, [one for one in rivals if not one.by_torch], case.backward)
    wanted = _checked(racers, mine)
    _add_torch(racers, [one for one in rivals if one.by_torch], mine.arrays, wanted)
    del wanted
    built = time.perf_counter() - start
    clock: Any = MixedClock() if jax.default_backend() == "gpu" else HostClock()
    seconds = _race(racers, mine.arrays, clock)
    return {
        "operation": case.op,
        "case": case.name,
        "passes": "forward+backward" if case.backward else "forward",
        "floor_us": max(case.flops / FLOPS, case.bytes / TRAFFIC) * 1e6,
        "us": {name: seconds[at] * 1e6 for name, at in racers.runs_as.items() if at in seconds},
        "off": racers.errors,
        "not_counted": racers.failed,
        "left_out": left_out,
        "chosen": mine.chosen,
        "candidates": mine.candidates,
        "tuning_s": mine.tuning_s,
        "not_tuned": mine.note,
        "bare_tuning_s": mine.bare_tuning_s,
        "building_s": built,
        "clock": "cuda events for torch" if clock.by_events else clock.name,
    }


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in Python code that takes longer; a compiler in C++ is left to end."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def told(error: BaseException) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _build(racers: Field, mine: Ours, rivals: list[Opponent], backward: bool) -> None:
    """Lowers one after the other, since tracing is Python's, and compiles side by side."""
    ways: dict[str, tuple[Any, Any]] = {name: (fn, None) for name, fn in {**mine.programs, **mine.ready}.items()}
    for one in rivals:
        fn = both_passes(one.fn, mine.arrays[:-1]) if backward and one.derived else one.fn
        ways[one.name] = fn, one.prepare
    texts: dict[Any, int] = {}
    waiting: dict[int, tuple[Any, Any]] = {}
    pool = concurrent.futures.ThreadPoolExecutor(COMPILERS)
    for name, (fn, prepare) in ways.items():
        at, title = len(racers.names), f"{racers.tag}_{len(racers.names)}"
        racers.names.append(name)
        try:
            with patience(PATIENCE):
                arrays = mine.arrays if prepare is None else jax.block_until_ready(jax.jit(prepare)(*mine.arrays))
                made = lowered(title, fn, arrays)
                key = made.as_text().replace(title, ""), prepare is not None and at
        # Another package's code: whatever it raises is the reason that it does not count.
        except Exception as error:
            racers.failed[name] = told(error)
            continue
        racers.runs_as[name] = texts.setdefault(key, at)
        if racers.runs_as[name] == at:
            waiting[at] = pool.submit(made.compile), arrays
    print(f"   compiling {len(waiting)} programs", flush=True)
    end = time.monotonic() + PATIENCE
    for at, (future, arrays) in waiting.items():
        try:
            racers.programs[at] = Bound(future.result(max(end - time.monotonic(), 1.0)), arrays)
        except Exception as error:
            _drop(racers, at, told(error))
    pool.shutdown(wait=False, cancel_futures=True)


def _drop(racers: Field, at: int, why: str) -> None:
    racers.programs.pop(at, None)
    for name in [name for name, same in racers.runs_as.items() if same == at]:
        del racers.runs_as[name]
        racers.failed[name] = why


def _checked(racers: Field, mine: Ours) -> Any:
    """Runs each program once, ours first, and keeps those that agree with it; returns our result."""
    if TUNED not in racers.runs_as:
        raise RuntimeError(f"our own choice {mine.chosen[TUNED]} cannot run: {racers.failed.get(TUNED)}")
    first = racers.runs_as[TUNED]
    wanted = jax.block_until_ready(racers.programs[first]())
    for at in list(racers.programs):
        if at != first:
            _try(racers, at, lambda at=at: jax.block_until_ready(racers.programs[at]()), wanted)
    return wanted


def _add_torch(racers: Field, rivals: list[Opponent], arrays: tuple[Any, ...], wanted: Any) -> None:
    """Gives torch the same memory, and keeps what agrees with ours."""
    if not rivals:
        return
    import torch

    for one in rivals:
        at = len(racers.names)
        racers.names.append(one.name)
        racers.runs_as[one.name] = at
        try:
            tensors = tuple(torch.from_dlpack(array) for array in arrays)
            program = Foreign(torch, one.fn, one.prepare(*tensors) if one.prepare else tensors)
        except Exception as error:
            _drop(racers, at, told(error))
            continue
        racers.programs[at] = program

        def run(program: Foreign = program) -> Any:
            out = program().block_until_ready().out
            return jax.tree.map(lambda t: jax.dlpack.from_dlpack(t.detach().contiguous()), out)

        _try(racers, at, run, wanted)


def _try(racers: Field, at: int, run: Callable[[], Any], wanted: Any) -> None:
    # Should the process die or hang in it, this line says in which.
    print(f"   trying {racers.names[at]}", flush=True)
    try:
        with patience(PATIENCE):
            error = off(run(), wanted)
    except Exception as failure:
        _drop(racers, at, told(failure))
        _look_at_the_device(racers.names[at])
        return
    if not error <= AGREES:
        _drop(racers, at, f"WRONG: differs from ours by {error:.3g} of its root mean square")
        return
    for name, same in racers.runs_as.items():
        if same == at:
            racers.errors[name] = error


def _look_at_the_device(name: str) -> None:
    try:
        jax.block_until_ready(jnp.arange(8) + 1)
    except Exception as error:
        raise DeviceLost(f"nothing runs after {name}: {told(error)}") from error


def _race(racers: Field, arrays: tuple[Any, ...], clock: Any) -> dict[int, float]:
    """Seconds of each: three rounds of all, and many of those that are near the best."""
    print("   racing", flush=True)
    first = raced(racers.programs, arrays, racers.tag, rounds=3, clock=clock)
    for at in set(racers.programs) - set(first):
        _drop(racers, at, "failed in the race")
    mine = {racers.runs_as[name] for name in (HEURISTIC, TUNED, BARE) if name in racers.runs_as}
    best = min(first.values())
    near = {at: racers.programs[at] for at, s in first.items() if at in mine or s <= CLEARLY_SLOWER * best}
    rounds = int(RACE_SECONDS / max(3 * sum(first[at] for at in near), 1e-9))
    return first | raced(near, arrays, racers.tag, rounds=min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS), clock=clock)
