"""Tunes the library's operations on this machine and shows what that gives: `python -m ejkernel.library.demo`."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from ..ops import ConfigCache, ConfigSelectorChain, Executor, OperationStores, Tuner, device_fingerprint
from ..ops.core import formatting
from ..ops.core.record import Record
from ..ops.core.standing import Standing, standings, verdict
from ..ops.core.table import ranked
from ..ops.settings import Settings
from . import demo_step

# Each operation may take so long; with what compiling takes afterwards, nine of them stay under two minutes.
_SECONDS = 9.0


@dataclass(frozen=True)
class Case:
    """One call of one operation."""

    operation: str
    title: str
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Found:
    """The outcome of choosing for one call."""

    case: Case
    cfg: Any
    seconds: float
    from_disk: bool
    record: Record | None
    path: str


def cases() -> list[Case]:
    """A call of each operation, small enough for two cores."""
    return [
        Case("matmul", "256x512 by 512x512 bf16", lambda: (_normal((256, 512), (512, 512)), {"activation": "silu"})),
        Case("rms_norm", "2048x1024 bf16", lambda: (_normal((2048, 1024), (1024,)), {})),
        Case("layer_norm", "2048x1024 bf16", lambda: (_normal((2048, 1024), (1024,), (1024,)), {})),
        Case("softmax", "64x32768 f32", lambda: (_normal((64, 32768), dtype=jnp.float32), {})),
        Case("attention", "1x512, 8 heads, causal", lambda: (_normal(*[(1, 512, 8, 64)] * 3), {"causal": True})),
        Case("ragged_dot", "1024x256, 8 groups", _ragged),
        Case("linear_cross_entropy", "256 of 8192 words", _cross_entropy),
        Case("top_k", "50 of 16x65536 f32", lambda: ((*_normal((16, 65536), dtype=jnp.float32), 50), {})),
        Case("sample", "4x16384 words, top-p 0.9", _sample),
    ]


def _normal(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def _ragged() -> tuple[tuple[Any, ...], dict[str, Any]]:
    sizes = jnp.array([512, 16, 128, 0, 240, 64, 32, 32], jnp.int32)
    return (*_normal((1024, 256), (8, 256, 256)), sizes), {}


def _cross_entropy() -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden, weight = _normal((256, 256), (256, 8192))
    labels = jax.random.randint(jax.random.key(1), (256,), 0, 8192)
    return (hidden, weight, labels), {}


def _sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (jax.random.key(0), *_normal((4, 16384), dtype=jnp.float32)), {"top_p": 0.9}


def choose(case: Case, stores: OperationStores) -> Found:
    """One call as a new process would make it: nothing in memory, the store on disk."""
    told: list[tuple[str, dict[str, Any]]] = []
    selector: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(
        ConfigCache(),
        tuner=Tuner(seconds=_SECONDS),
        persistent=stores,
        on_event=lambda event, **data: told.append((event, data)),
    )
    function = getattr(importlib.import_module("ejkernel.library"), case.operation)
    args, kwargs = case.make()
    jax.block_until_ready(args)
    start = time.perf_counter()
    jax.block_until_ready(function(*args, executor=Executor(selector), **kwargs))
    seconds = time.perf_counter() - start
    # The call's own, which is told last; a kernel inside a kernel is tuned before it.
    event, data = next((e, d) for e, d in reversed(told) if d["op_id"].startswith("library.") and "cfg" in d)
    key = (data["device"], data["op_id"], data["call_key"])
    record = data.get("record") or stores.record(*key)
    return Found(case, data["cfg"], seconds, event == "cache_hit", record, stores.of(data["op_id"]).path)


class Paper:
    """Output of the demo: colours on a terminal, plain text in a log."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self._out = out
        self._colour = colour

    def write(self, text: str = "", style: str = "") -> None:
        """One line."""
        codes = {"title": "1", "good": "32", "dim": "2", "": ""}[style]
        print(f"\x1b[{codes}m{text}\x1b[0m" if codes and self._colour else text, file=self._out, flush=True)


def report(found: Found) -> Iterator[tuple[str, str]]:
    """The lines of one operation, with their styles."""
    yield f"{found.case.operation:<22}{found.case.title}", "title"
    record = found.record
    if record is None or record.winner is None:
        yield f"  {formatting.short(found.cfg)}: nothing was measured, the heuristic choice serves", ""
        return
    shown = standings(record)
    if record.heuristic is not None and record.heuristic != record.winner:
        yield f"  heuristic  {_timed(record, record.heuristic, shown)}", ""
    yield f"  tuned      {_timed(record, record.winner, shown)}", ""
    said = verdict(record)
    for number, line in enumerate(textwrap.wrap(said.text, 67)):
        yield f"  {'' if number else 'gain':<11}{line}", "good" if said.kind == "faster" else ""
    others = [place for place in ranked(record) if place not in (record.heuristic, record.winner)]
    if others:
        yield _fitted("  also ran   ", [_timed(record, place, shown) for place in others]), "dim"
    if found.from_disk:
        yield f"  from disk  in {formatting.seconds(found.seconds)}, compiling included; nothing was measured", ""
    else:
        late = ", until the time was up" if record.stop == "deadline" else ""
        yield f"  measured   {len(record.trials)} candidates in {formatting.duration(found.seconds)}{late}", ""
    yield f"  kept in    {shortened(found.path)}", "dim"


def _timed(record: Record, place: int, shown: Sequence[Standing]) -> str:
    trial, seconds = record.trials[place], shown[place].seconds
    time = formatting.seconds(seconds) if seconds else trial.status
    return f"{time:>8} {formatting.short(trial.cfg)}"


def _surely_gains(record: Record | None) -> bool:
    return record is not None and verdict(record).kind == "faster"


def _fitted(start: str, parts: Sequence[str]) -> str:
    """The line with as many parts as fit 80 columns, and the number of the others."""
    line = start + parts[0]
    for number, part in enumerate(parts[1:], 1):
        rest = f", {len(parts) - number} more"
        if len(line) + len(part) + 2 + len(rest) > 80:
            return line + rest
        line += f", {part.strip()}"
    return line


def shortened(path: str, width: int = 56) -> str:
    """A path that fits a line, the end of it being what tells."""
    path = formatting.at_home(path)
    return path if len(path) <= width else "..." + path[3 - width :]


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Tunes each operation, or finds it on disk, and says what came of it."""
    parser = argparse.ArgumentParser(prog="python -m ejkernel.library.demo", description=__doc__.partition(":")[0])
    names = sorted(_offered())
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"any of {', '.join(names)}; else all")
    chosen = parser.parse_args(arguments).operations
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"there is no {unknown[0]}; choose from {', '.join(names)}")
    out = out or sys.stdout
    paper = Paper(out, colour=out.isatty() and not Settings.read().no_color)
    stores = OperationStores()
    start = time.perf_counter()
    paper.write(f"ejkernel library on {device_fingerprint()}, jax {jax.__version__}", "title")
    paper.write("each operation is computed in several ways; the fastest that is right is kept\n", "dim")
    results = []
    for case in cases():
        if case.operation in (chosen or names):
            results.append(choose(case, stores))
            for line, style in report(results[-1]):
                paper.write(line, style)
            paper.write()
    summary(paper, results, time.perf_counter() - start)
    if not chosen:
        whole_step(paper, stores)
    return 0


def _offered() -> list[str]:
    library = importlib.import_module("ejkernel.library")
    return [case.operation for case in cases() if case.operation in library.__all__]


def summary(paper: Paper, results: Sequence[Found], seconds: float) -> None:
    """The last lines."""
    disk = sum(found.from_disk for found in results)
    faster = [found for found in results if _surely_gains(found.record)]
    taken = formatting.duration(seconds, 0)
    paper.write(f"{len(results)} operations in {taken}, {disk} of them answered from disk", "title")
    noisy = [found for found in results if found.record is not None and verdict(found.record).kind == "noisy"]
    unsure = f"{len(noisy)} are too noisy to tell; " if noisy else ""
    gains = f"{len(faster)} gain surely by tuning; {unsure}for the others the heuristic choice is as good"
    for line in textwrap.wrap(gains, 80):
        paper.write(line)
    if disk < len(results):
        paper.write("run it again: everything is answered from disk then")


def whole_step(paper: Paper, stores: OperationStores) -> None:
    """A training step with several of the operations in it, tuned by one command and run before and after."""
    paper.write("\na training step: two layers of a transformer, gradients and update", "title")
    start = time.perf_counter()
    result = demo_step.tuned(stores)
    measured = [entry for entry in result.entries if entry.is_measured]
    for entry in measured:
        gain = "" if entry.record is None or entry.record.gain is None else f", {entry.record.gain[0]:.2f}x alone"
        name = entry.op_id_v.partition("@")[0].removeprefix("library.")
        paper.write(f"  {name:<21}{formatting.short(entry.cfg)}{gain}")
    for line in textwrap.wrap(str(result.confirmation), 78, subsequent_indent="  "):
        paper.write(f"  {line}", "good" if result.confirmation and result.confirmation.gain[1] > 1 else "")
    taken = time.perf_counter() - start
    done = formatting.duration(taken, 0)
    paper.write(f"  {len(measured)} of {len(result.entries)} calls have several ways; done in {done}", "dim")


if __name__ == "__main__":
    sys.exit(main())
