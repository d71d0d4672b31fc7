"""The process that may die: gets exported programs, checks and races them, and tells every step before it takes it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import math
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, final

import jax

from ... import _jax
from ...core.device import default_device
from ...core.record import Objective, Record, Trial
from ...timing.program import CompiledProgram, Staged, first_line
from ..candidates import CandidateSet
from ..job import TuningJob
from ..journal.observer import Doing, NoPriorResults, Rounds, Timed
from ..runner import FOR_MEASURING, InProcessRunner
from .protocol import Message, Sender, receive, unpack

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until the other side is gone."""
    _die_with_parent()
    # What libraries print must not get between the messages.
    worker = Worker(Sender(os.fdopen(os.dup(1), "wb")))
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, inbox), daemon=True).start()
    while True:
        worker.obey(inbox.get())


def _listen(stream: BinaryIO, inbox: queue.SimpleQueue[Message]) -> None:
    while (message := receive(stream)) is not None:
        inbox.put(message)
    # Whatever still compiles or runs goes with it, without a word.
    os._exit(0)


def _die_with_parent() -> None:
    faulthandler.enable()
    # A terminal's Ctrl-C reaches every process that it started: whether that is the end is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first to go when memory ends, instead of who started it. Elsewhere than on Linux there is no such file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    if sys.platform == "linux":
        # The end of the pipe ends this process too, but not while a candidate holds Python's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Worker:
    """Does what it is told, and tells what came of it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._bench: WorkerBench | None = None

    def obey(self, message: Message) -> None:
        """One message."""
        do = {"start": self._start, "field": self._field, "run": self._run}[message.verb]
        try:
            do(message.head, list(message.parts))
        # Not a candidate's fault, those are outcomes: then nothing here can be trusted any more.
        except Exception as error:
            self._sender.send("broken", message=first_line(error))
            raise

    def _start(self, head: dict[str, Any], parts: list[bytes]) -> None:
        """Imports what the programs need and takes the device."""
        for name in head["imports"]:
            importlib.import_module(name)
        for name, value in head["settings"].items():
            jax.config.update(name, value)
        device = jax.devices(head["platform"])[head["device"]]
        jax.config.update("jax_default_device", device)
        self._sender.send("hello", kind=device.device_kind, jax=jax.__version__)

    def _field(self, head: dict[str, Any], parts: list[bytes]) -> None:
        """Another tuning: nothing of the last one is kept."""
        if self._bench is not None:
            self._bench.track.close()
        self._bench = WorkerBench(head, parts, MessagingObserver(self._sender))

    def _run(self, head: dict[str, Any], parts: list[bytes]) -> None:
        """Checks and times programs; the outcome is a record whose cfgs are the numbers that they were sent under."""
        assert self._bench is not None
        self._sender.send("done", [self._bench.run(head, parts).dumps().encode()])


class WorkerBench:
    """The programs of one tuning, by the numbers that they were sent under; compiled ones serve every run."""

    def __init__(self, head: dict[str, Any], parts: list[bytes], telling: MessagingObserver) -> None:
        self._outputs = head["outputs"]
        self._objective: Objective = head["objective"]
        self._programs: dict[int, bytes] = {}
        # Where each stands in the field of this process.
        self._places: dict[int, int] = {}
        sets, expected = ([_placed(one, parts) for one in head[name]] for name in ("sets", "expected"))
        draws = iter([*sets, sets[-1]])
        job = TuningJob(
            self._make_fn,
            sets[0],
            {},
            (),
            expected=expected,
            tolerance=head["tolerance"],
            example=lambda rng: (next(draws), {}),
            witness=telling,
        )
        field = CandidateSet(job, (), seed=head["seed"], device=default_device(), twice=len(sets) > 1)
        self.track = InProcessRunner(field, clock=None, warmup=head["warmup"], iters=head["iters"])

    def run(self, head: dict[str, Any], parts: list[bytes]) -> Record:
        """Newcomers are compiled and checked; then all runners are timed."""
        field, seconds = self.track.field, head["seconds"]
        until = math.inf if seconds is None else time.perf_counter() + seconds
        past = NoPriorResults(Rounds(head["clock"], head["rounds"]))
        field.job = replace(field.job, past=past, workshop=ImportingBuilder(self._objective, head["one_by_one"]))
        self._programs.update(zip(head["numbers"], (parts[i] for i in head["which"]), strict=True))
        self._places.update(zip(head["numbers"], field.enter(head["numbers"]), strict=True))
        with _jax.clean_room():
            self.track.compile(until - FOR_MEASURING * (seconds or 0.0))
            self.track.check(until)
            return self._look(head, until) if head["looks"] else self._race(head, until)

    def _look(self, head: dict[str, Any], until: float) -> Record:
        runs, trials = self._runs(head["runners"]), self.track.field.trials
        kept = next(iter(self._runs([] if head["kept"] is None else [head["kept"]])), None)
        rows = self.track.look(runs, rounds=head["looks"], kept=kept, deadline=until, seed=head["seed"]) if runs else ()
        found = []
        for number in head["runners"]:
            place = self._places[number]
            stands_for = self.track.field.runs_as(place)
            samples = tuple(row[stands_for] for row in rows if stands_for in row)
            found.append(replace(trials[stands_for], cfg=trials[place].cfg, samples_s=samples))
        return Record(trials=tuple(found))

    def _race(self, head: dict[str, Any], until: float) -> Record:
        heuristic = None if head["kept"] is None else self._places[head["kept"]]
        return self.track.race(Record(), self._runs(head["runners"]), deadline=until, heuristic=heuristic)

    def _runs(self, numbers: Sequence[int]) -> list[int]:
        """The places of those that may run."""
        field = self.track.field
        places = dict.fromkeys(field.runs_as(self._places[number]) for number in numbers)
        return [place for place in places if place in field.programs]

    def _make_fn(self, number: int) -> Callable[..., Any]:
        """A candidate as a function of flat arrays: its output, or its output and gradients."""
        exported = jax.export.deserialize(bytearray(self._programs[number]))

        def fn(*leaves: Any) -> Any:
            found = exported.call(*leaves)
            return found if self._objective == "forward" else (found[: self._outputs], found[self._outputs :])

        return fn


def _placed(about: Any, parts: list[bytes]) -> list[Any]:
    return [jax.device_put(array) for array in unpack(about, [parts.pop(0) for _ in about])]


@final
@dataclass(frozen=True)
class ImportingBuilder:
    """A workshop of exported programs on their way back to running ones."""

    objective: Objective
    # Then whoever takes the process down is the only one that can have done it.
    one_by_one: bool

    def traced(self, staged: Staged) -> Staged:
        """As it is."""
        return staged

    def build(self, staged: Staged, lowered: Any) -> CompiledProgram:
        """Compiled; what it gives in two parts is known as such."""
        return replace(staged.compile(lowered), objective=self.objective)


@final
@dataclass(frozen=True)
class MessagingObserver:
    """A witness at the other end of the pipe."""

    sender: Sender

    def starts(self, cfg: Any, doing: Doing) -> None:
        """Told before it is done."""
        self.sender.send("starts", number=cfg, doing=doing, at=time.perf_counter())

    def ends(self, cfg: Any, program: str = "") -> None:
        """Told."""
        self.sender.send("ends", number=cfg, at=time.perf_counter())

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
