"""Cases of a benchmark in processes of their own: all compile at once, and take turns on the device."""

from __future__ import annotations

import argparse
import fcntl
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax


@contextmanager
def turn(path: str) -> Iterator[None]:
    """The device, for one process at a time."""
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def asked_for(parser: argparse.ArgumentParser, *, seconds: float) -> argparse.Namespace:
    """The command line, with what a process of a case is told."""
    parser.add_argument("--seconds", type=float, default=seconds, help="most that all may take")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help="a file by which several of these benchmarks take turns")
    return parser.parse_args()


def run(
    options: argparse.Namespace, cases: Iterable[object], study: Callable[[str, str], bool], words: Sequence[str] = ()
) -> int:
    """The exit code of all cases, each of which prints its lines as it ends; `study` gets a case and the lock.

    `words` are those of the command line that each process needs as well.
    """
    if options.here is not None:
        warnings.simplefilter("ignore")
        if jax.default_backend() != "gpu":
            print("this benchmark needs a GPU; nothing was measured")
            return 0
        return int(not study(options.here, options.lock))
    end, status = time.monotonic() + options.seconds, 0
    with tempfile.NamedTemporaryFile() as lock:
        command = [sys.executable, sys.argv[0], *words, "--lock", options.lock or lock.name, "--here"]
        children = {str(case): subprocess.Popen([*command, str(case)]) for case in cases}
        for case, child in children.items():
            try:
                status |= child.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                print(f"{case}: stopped after {options.seconds:.0f} s", flush=True)
                status = 1
    return int(status != 0)
