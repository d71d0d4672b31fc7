"""Stand-ins for tests of pools: kernels that travel, pools without processes, and workers with troubles."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Invocation, Kernel, OperationStores, Tuner
from ejkernel.ops.core import device as devices
from ejkernel.ops.core.request import ask
from ejkernel.ops.programs.pool.client import workers_of
from ejkernel.ops.programs.pool.engines import suited
from ejkernel.ops.programs.pool.schedule import ScheduleRules
from ejkernel.ops.programs.pool.task import Reply
from ejkernel.ops.programs.pool.worker import run_task


@dataclass(frozen=True)
class Turns:
    """A cfg: how often to add."""

    turns: int


class Adding(Kernel):
    """Twice the argument, by one addition or by many."""

    op_id = "adding"
    version = "1"
    cfg_type = Turns

    def run(self, x, *, cfg):
        for _ in range(cfg.turns):
            x = x + 0.0
        return x + x

    def heuristic_cfg(self, inv):
        return Turns(2)

    def candidate_cfgs(self, inv):
        return [Turns(1), Turns(2), Turns(3)]


class Other(Adding):
    """Another operation that computes the same."""

    op_id = "other"


def calls_of(count, kernel=None, least=8):
    """So many calls of different shapes."""
    kernel = kernel or Adding()
    return [
        (kernel, Invocation(kernel.op_id, (jax.ShapeDtypeStruct((least + n,), jnp.float32),), {})) for n in range(count)
    ]


def keys_of(calls):
    """The keys of calls."""
    return {ask(inv, kernel, "forward").key for kernel, inv in calls}


def named_in(result):
    """The keys of the calls that a result names as not tuned."""
    found = [note.partition(": not tuned: ")[0] for note in result.notes]
    assert len(found) == len(set(found))
    return found


def is_running(process):
    """Is there such a process, and is it more than remains?"""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_gone(process):
    """Waits until there is no such process, or only its remains: a kill takes its time on a busy machine."""
    for _ in range(12000):
        if not is_running(process):
            return True
        time.sleep(0.01)
    return False


def selecting(folder=None, **settings):
    """A selector whose tunings are quick, with a store in a folder."""
    tuner = settings.pop("tuner", None) or Tuner(0, 1, isolate=False)
    store = None if folder is None else OperationStores(folder)
    return ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store, **settings)


def on(pool, selector, **options):
    """Options for tuning on a pool, without a word."""
    return AutotuneOptions(pool=pool, selector=selector, progress=False, **options)


class Inline:
    """A pool without threads: a task is done before `submit` returns."""

    def __init__(self, run=None):
        self.run = run
        self.texts = []

    def submit(self, function, text):
        """A future that is done."""
        self.texts.append(text)
        future = Future()
        try:
            future.set_result((self.run or function)(text))
        except BaseException as error:
            future.set_exception(error)
        return future


# Patience of seconds, for tests with workers that hang; none is given up because the machine is busy.
QUICK = ScheduleRules(straggler_seconds=3.0, silent_seconds=900.0)


class Aged:
    """A pool whose workers have another release of the package, as far as a task can tell."""

    def __init__(self, pool):
        self.pool = pool

    def submit(self, function, text):
        """Submits the task as one of another release."""
        return self.pool.submit(function, json.dumps({**json.loads(text), "version": "0.0.0"}))


class Troubled:
    """A pool whose workers have troubles, each another one: `killed@9` is for the next task after nine were tuned."""

    rules = QUICK

    def __init__(self, pool, folder, *troubles, calls_per_task=None):
        self.pool = suited(pool)
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        for trouble in troubles:
            (self.folder / f"{trouble}.wanted").touch()
        self.workers = workers_of(self.pool)
        self.calls_per_task = calls_per_task

    def submit(self, function, text):
        """Submits the task with its folder in front."""
        return self.pool.submit(run_in_trouble, f"{self.folder}\n{text}")

    def log(self):
        """The tasks that were begun, as (process, keys)."""
        lines = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.begun"))]
        return [(line["process"], [tuple(key) for key in line["keys"]]) for line in lines]


def run_in_trouble(text):
    """Has a trouble that no other process took yet, unless it had one, or does the task."""
    folder, _, text = text.partition("\n")
    folder = Path(folder)
    keys = [call["key"] for call in json.loads(text)["calls"]]
    begun = folder / f"{time.time_ns()}-{os.getpid()}.begun"
    # Whole or not at all: Python's own pool ends all its processes with one of them, wherever they are.
    half = begun.with_suffix(".half")
    half.write_text(json.dumps({"process": os.getpid(), "keys": keys}))
    half.rename(begun)
    # Tasks that were refused do not count: a worker of another device refuses many while the others start.
    tuned = len(list(folder.glob("*.tuned")))
    had_one = any(folder.glob(f"*@*.{os.getpid()}"))
    for wanted in [] if had_one else sorted(folder.glob("*.wanted")):
        if tuned < int(wanted.stem.partition("@")[2]):
            continue
        try:
            wanted.rename(wanted.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            # Another worker has it.
            continue
        _have(wanted.stem, folder)
        break
    answer = run_task(text)
    if not any(outcome.refused for outcome in Reply.loads(answer).outcomes):
        begun.with_suffix(".tuned").touch()
    return answer


def _have(trouble, folder):
    if trouble.startswith("killed"):
        # Where nothing may be lost, only once something was kept.
        while trouble.startswith("killed-late") and not (folder / "kept").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    elif trouble.startswith("hung"):
        # Until the end of the process that waits.
        time.sleep(10_000)
    elif trouble.startswith("elsewhere"):
        devices.cpu_kind = lambda: "another processor"
