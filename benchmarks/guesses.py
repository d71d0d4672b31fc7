"""Quality of guesses at shapes that did not choose them: today's heuristics, looked up in a dataset of tunings.

Nothing is measured and no GPU is needed: the kernels are asked as for an H200, and the dataset has the times of their
candidates. Rules were chosen on one half of each operation's calls, by a fixed seed, and the other half judges them.
Exit code 1 where the mean of an operation's guesses over their best is above 1.05. `unseen_collect.py` makes datasets.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from ejkernel import library
from ejkernel.ops import Invocation
from ejkernel.ops.core import codec, device
from ejkernel.ops.core.kernel import versioned
from ejkernel.ops.core.times import read_times

DATASET = Path(__file__).parent / "data" / "unseen_gpu.jsonl.gz"
NEAR = 1.05
H200 = SimpleNamespace(device_kind="NVIDIA H200", platform="cuda", compute_capability="9.0", id=0)
KERNELS = {
    kernel.op_id: kernel
    for kernel in (
        library.Attention(),
        library.LayerNorm(),
        library.LinearCrossEntropy(),
        library.Matmul(),
        library.RaggedDot(),
        library.RmsNorm(),
        library.Softmax(),
    )
}


@dataclass(frozen=True)
class Guess:
    """One call: the guess, whether it may run and is a candidate, and its time over the best; and that of earlier."""

    operation: str
    name: str
    cfg: Any
    offered: bool
    ratio: float | None
    earlier: float | None


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The tunings of a dataset that have times."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [line for line in map(json.loads, text.splitlines()) if len(read_times(line.get("summary", {}))) > 1]


def call_of(line: dict[str, Any]) -> Invocation[Any, Any]:
    """The call of a line, with shapes for arrays, as an H200 would be asked for it."""
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for name, text in line["parts"].items():
        if place := re.fullmatch(r"args\[(\d+)\]", name):
            args[int(place[1])] = _shape(text)
        elif place := re.fullmatch(r"kwargs\['(\w+)'\]", name):
            value = json.loads(text)
            kwargs[place[1]] = float.fromhex(value[1]) if isinstance(value, list) and value[0] == "float" else value
    return Invocation(line["key"][1].split("@")[0], tuple(args[place] for place in sorted(args)), kwargs)


def _shape(text: str) -> jax.ShapeDtypeStruct:
    dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()  # type: ignore[union-attr]
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), jnp.dtype(dtype))


@contextlib.contextmanager
def an_h200() -> Iterator[None]:
    """Calls are asked for as on an H200 with cuDNN, which need not be there."""
    # A target must be a real device, so the variable behind it is set.
    token = device._target.set(H200)  # type: ignore[arg-type]
    try:
        with mock.patch.object(sys.modules["ejkernel.library.attention"], "jax_refuses_cudnn", return_value=""):
            yield
    finally:
        device._target.reset(token)


def guess(line: dict[str, Any], *, triton: bool = True) -> Guess:
    """Today's guess for the call of a line."""
    inv = call_of(line)
    kernel = KERNELS[inv.op_id]
    with an_h200():
        cfg = kernel.heuristic_cfg_gpu(inv)
        offered = kernel.valid_cfg(inv, cfg) is True and cfg in [*kernel.candidate_cfgs_gpu(inv)]
    times = [(made, us) for made, us in read_times(line["summary"]) if us is not None]
    times = [(made, us) for made, us in times if triton or made["implementation"] not in ("triton", "pallas")]
    best = min(us for _, us in times)

    def over(wanted: Any) -> float | None:
        return next((us / best for made, us in times if made == wanted), None)

    # Times of another version of a kernel say nothing about this one.
    ratio = over(codec.encode(cfg)) if versioned(kernel) == line["key"][1] else None
    return Guess(inv.op_id, line["name"], cfg, offered, ratio, over(line["heuristic"]))


def halves(guesses: Iterable[Guess]) -> tuple[list[Guess], list[Guess]]:
    """An operation's calls: those that rules were chosen on, and the others."""
    ordered = sorted(guesses, key=lambda one: one.name)
    order = list(range(len(ordered)))
    random.Random(f"halves {ordered[0].operation.removeprefix('library.')}").shuffle(order)
    return [ordered[place] for place in order[::2]], [ordered[place] for place in order[1::2]]


def figures(ratios: Sequence[float]) -> str:
    """Mean, median, and how many are over the limit."""
    if not ratios:
        return "-"
    far = sum(ratio > NEAR for ratio in ratios)
    return f"{fmean(ratios):.3f} / {median(ratios):.3f} / {far} of {len(ratios)}"


def show(by_operation: dict[str, list[Guess]]) -> bool:
    """Prints the table; is every mean within the limit?"""
    print("| operation | calls | guess without a time | before: chosen on | others | today: chosen on | others |")
    print("|" + " --- |" * 7)
    kept = True
    for name, guesses in sorted(by_operation.items()):
        cells = [name.removeprefix("library."), str(len(guesses)), str(sum(one.ratio is None for one in guesses))]
        for field in ("earlier", "ratio"):
            for half in halves(guesses):
                cells.append(figures([value for one in half if (value := getattr(one, field)) is not None]))
        print("| " + " | ".join(cells) + " |")
        ratios = [one.ratio for one in guesses if one.ratio is not None]
        kept &= fmean(ratios) <= NEAR if ratios else True
    return kept


def main() -> int:
    """Prints mean / median / number over 1.05 for each operation; 1 where a mean is above it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", nargs="?", type=Path, default=DATASET)
    parser.add_argument("--without-triton", action="store_true", help="as with EJKERNEL_OPS_TRITON=off")
    parser.add_argument("--calls", action="store_true", help="show every guess that is over 1.05, or without a time")
    options = parser.parse_args()
    if options.without_triton:
        os.environ["EJKERNEL_OPS_TRITON"] = "off"
    by_operation: dict[str, list[Guess]] = {}
    for line in lines_of(options.dataset):
        one = guess(line, triton=not options.without_triton)
        by_operation.setdefault(one.operation, []).append(one)
    every = [one for some in by_operation.values() for one in some]
    print(f"{options.dataset.name}: guess over best at {len(every)} calls, asked with jax {jax.__version__}")
    tuned = {line["key"][1] for line in lines_of(options.dataset)}
    for kernel in KERNELS.values():
        if any(name.startswith(f"{kernel.op_id}@") for name in tuned - {versioned(kernel)}):
            print(f"{versioned(kernel)} was tuned at another version: its guesses are not judged")
    kept = show(by_operation)
    wrong = [one for one in every if not one.offered]
    for one in wrong:
        print(f"not a candidate: {one.cfg} for {one.name}")
    if options.calls:
        for one in every:
            if (one.ratio or math.inf) > NEAR:
                time = "no time" if one.ratio is None else f"{one.ratio:.3f}"
                print(f"{time}  {one.name}: {one.cfg}")
    print(f"limit: a mean of {NEAR} {'kept' if kept and not wrong else 'BROKEN'}")
    return int(not kept or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
