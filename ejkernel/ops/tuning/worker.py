"""The process that may die: gets exported programs, checks and races them, and tells every step before it takes it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, final

import jax

from ..core.errors import TuningError
from ..core.record import Objective, Trial
from ..timing.program import Program, Staged, first_line
from .job import Job
from .tuner import Tuner
from .wire import Message, Sender, receive, unpack
from .witness import Doing, NoPast, Rounds, Timed

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until the other side is gone."""
    _die_with_parent()
    # What libraries print must not get between the messages.
    sender = Sender(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, inbox), daemon=True).start()
    while True:
        message = inbox.get()
        try:
            _VERBS[message.verb](message, sender)
        # Not a candidate's fault, those are outcomes: then nothing here can be trusted any more.
        except Exception as error:
            sender.send("broken", message=first_line(error))
            raise


def _listen(stream: BinaryIO, inbox: queue.SimpleQueue[Message]) -> None:
    while (message := receive(stream)) is not None:
        inbox.put(message)
    # Whatever still compiles or runs goes with it, without a word.
    os._exit(0)


def _die_with_parent() -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first to go when memory ends, instead of who started it. Elsewhere than on Linux there is no such file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    if sys.platform == "linux":
        # The end of the pipe ends this process too, but not while a candidate holds Python's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start(message: Message, sender: Sender) -> None:
    """Imports what the programs need and takes the device."""
    head = message.head
    for name in head["imports"]:
        importlib.import_module(name)
    for name, value in head["settings"].items():
        jax.config.update(name, value)
    device = jax.devices(head["platform"])[head["device"]]
    jax.config.update("jax_default_device", device)
    sender.send("hello", kind=device.device_kind, jax=jax.__version__)


def _tune(message: Message, sender: Sender) -> None:
    """Checks and races programs; the outcome is a record whose cfgs are the numbers that they were sent under."""
    head, parts = message.head, list(message.parts)
    programs = [parts.pop(0) for _ in range(head["programs"])]
    sets, expected = ([_placed(one, parts) for one in head[name]] for name in ("sets", "expected"))
    bench = Bench(programs, dict(zip(head["numbers"], head["which"], strict=True)), head["outputs"], head["objective"])
    draws = iter([*sets, sets[-1]])
    tuner = Tuner[int](head["warmup"], head["iters"], seed=head["seed"], isolate=False)
    job = Job(
        bench.make_fn,
        sets[0],
        {},
        head["numbers"],
        expected=expected,
        tolerance=head["tolerance"],
        heuristic_first=head["heuristic_first"],
        example=lambda rng: (next(draws), {}),
        seconds=head["seconds"],
        witness=Telling(sender),
        past=NoPast(Rounds(head["clock"], head["rounds"])),
        workshop=replace(bench, one_by_one=head["one_by_one"]),
    )
    try:
        record = tuner.tune(job)
    except TuningError:
        assert tuner.record is not None
        record = tuner.record
    sender.send("done", [record.dumps().encode()])


def _placed(about: Any, parts: list[bytes]) -> list[Any]:
    return [jax.device_put(array) for array in unpack(about, [parts.pop(0) for _ in about])]


_VERBS: dict[str, Callable[[Message, Sender], None]] = {"start": _start, "tune": _tune}


@final
@dataclass(frozen=True)
class Bench:
    """Exported programs on their way back to running ones."""

    programs: Sequence[bytes]
    # Several numbers may have one program.
    which: dict[int, int]
    outputs: int
    objective: Objective
    # Then whoever takes the process down is the only one that can have done it.
    one_by_one: bool = False

    def make_fn(self, number: int) -> Callable[..., Any]:
        """A candidate as a function of flat arrays: its output, or its output and gradients."""
        exported = jax.export.deserialize(bytearray(self.programs[self.which[number]]))

        def fn(*leaves: Any) -> Any:
            found = exported.call(*leaves)
            return found if self.objective == "forward" else (found[: self.outputs], found[self.outputs :])

        return fn

    def traced(self, staged: Staged) -> Staged:
        """As it is."""
        return staged

    def build(self, staged: Staged, lowered: Any) -> Program:
        """Compiled; what it gives in two parts is known as such."""
        return replace(staged.compile(lowered), objective=self.objective)


@final
@dataclass(frozen=True)
class Telling:
    """A witness at the other end of the pipe."""

    sender: Sender

    def starts(self, cfg: Any, doing: Doing) -> None:
        """Told before it is done."""
        self.sender.send("starts", number=cfg, doing=doing)

    def ends(self, cfg: Any, program: str = "") -> None:
        """Told."""
        self.sender.send("ends", number=cfg)

    def failed(self, trial: Trial, program: str) -> None:
        """Told, with the reason."""
        about = {name: getattr(trial, name) for name in ("status", "message", "error", "compile_s")}
        self.sender.send("failed", number=trial.cfg, **about)

    def lost(self, trial: Trial, program: str) -> None:
        """Never: who is lost cannot tell."""

    def timed(self, found: Timed, clock: str) -> None:
        """Told."""
        self.sender.send("timed", found=[list(pair) for pair in found], clock=clock)


if __name__ == "__main__":
    main()
