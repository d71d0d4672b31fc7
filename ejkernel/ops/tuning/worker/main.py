"""The process that may die: gets exported programs, checks and races them, and tells every step before it takes it."""

from __future__ import annotations

import functools
import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np

from ... import _jax
from ...core.device import default_device
from ...core.record import Objective, Record, Trial
from ...timing.inputs import draw
from ...timing.program import CompiledProgram, Staged, first_line
from ..check import CheckCase
from ..job import TuningJob
from ..journal.observer import Doing
from ..reference import ExportedReference
from ..runner import FOR_MEASURING, InProcessRunner
from .ahead_compiler import AheadCompiler
from .child_setup import set_up_child
from .delivered import Deliveries, delivery_of
from .executables import compiled, loaded
from .prepare import prepare
from .protocol import Message, Receiver, Sender, unpack

# The niceness of a worker beside an accelerator: its parent, which traces, has the processors first.
_NICE = 10


def main() -> None:
    """Serves until the parent is gone."""
    set_up_child()
    # Messages have the first output to themselves: what libraries print goes to the error stream.
    ahead, delivered = AheadCompiler(), Deliveries()
    worker = Worker(Sender(os.dup(1)), ahead, delivered)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(Receiver(os.dup(0)), inbox, ahead, delivered), daemon=True).start()
    while True:
        worker.obey(inbox.get())


def _listen(receiver: Receiver, inbox: queue.SimpleQueue[Message], ahead: AheadCompiler, delivered: Deliveries) -> None:
    while (message := receiver.receive()) is not None:
        if message.verb == "ahead":
            # A program of the next tuning: it is compiled by threads of its own, beside this tuning's work.
            ahead.give(bytes(message.parts[0]))
        elif message.verb == "prepare":
            prepare(message.head, [bytes(part) for part in message.parts], ahead)
        elif message.verb == "executable":
            # Compiling threads wait for the executable, so it goes past the queue: the main thread may be busy.
            delivered.arrive(message.head["name"], delivery_of(message.head, list(message.parts)))
        else:
            if message.verb == "tuning":
                delivered.begin()
            inbox.put(message)
    # The parent is gone: this process ends at once, with whatever still compiles or runs in it.
    os._exit(0)


def take_device(head: Mapping[str, Any]) -> jax.Device:
    """Imports what the programs need, puts the parent's settings in force, and takes the device."""
    for name in head["imports"]:
        importlib.import_module(name)
    for name, value in head["settings"].items():
        jax.config.update(name, value)
    device = jax.devices(head["platform"])[head["device"]]
    jax.config.update("jax_default_device", device)
    return device


class Worker:
    """Carries out the messages of the parent, and answers with the outcomes."""

    def __init__(self, sender: Sender, ahead: AheadCompiler, delivered: Deliveries | None = None) -> None:
        self._sender = sender
        self._ahead = ahead
        self._delivered = delivered or Deliveries()
        self._bench: WorkerBench | None = None

    def obey(self, message: Message) -> None:
        """Carries out one message."""
        head, parts = message.head, list(message.parts)
        try:
            if message.verb == "start":
                self._start(head)
            elif message.verb == "tuning":
                self._begin(head, parts)
            else:
                assert self._bench is not None
                found = self._bench.obey(message.verb, head, parts)
                if found is not None:
                    self._sender.send("done", [found.dumps().encode()])
        # Errors of candidates are outcomes. Any other error is a defect, and this process cannot be used any more.
        except Exception as error:
            self._sender.send("broken", message=first_line(error))
            raise

    def _start(self, head: dict[str, Any]) -> None:
        """Takes the device."""
        device = take_device(head)
        if device.platform != "cpu":
            # The worker's compiling threads fill all processors, beside which the parent's tracing took twice as long.
            # Being nice does not disturb the device's own clock; on a CPU it would slow the candidates.
            os.nice(_NICE)
        self._ahead.begin()
        self._sender.send("hello", kind=device.device_kind, jax=jax.__version__)

    def _begin(self, head: dict[str, Any], parts: list[bytes]) -> None:
        """Begins another tuning; nothing of the last one is kept."""
        if not head["again"]:
            self._ahead.forget()
        self._ahead.hold()
        if self._bench is not None:
            self._bench.close()
        self._bench = WorkerBench(head, parts, MessagingObserver(self._sender), self._ahead, self._delivered)


class WorkerBench:
    """The programs of one tuning, by the numbers that they were sent under; compiled ones serve every run."""

    def __init__(
        self,
        head: dict[str, Any],
        parts: list[bytes],
        telling: MessagingObserver,
        ahead: AheadCompiler,
        delivered: Deliveries,
    ) -> None:
        self._head = head
        self._telling = telling
        self._ahead = ahead
        self._delivered = delivered
        self._programs: dict[int, tuple[bytes, dict[str, Any]]] = {}
        # The place of each number among the candidates of this process.
        self._places: dict[int, int] = {}
        sets, expected = ([_placed(one, parts) for one in head[name]] for name in ("sets", "expected"))
        self._cases = [CheckCase(leaves, head["tolerance"]) for leaves in sets]
        for case, known in zip(self._cases, expected, strict=False):
            case.expected = (known,)
        self._reference: Callable[..., Any] | None = None
        self._made: InProcessRunner | None = None
        # Are programs being compiled for the next run?
        self._is_open = False

    def obey(self, verb: str, head: dict[str, Any], parts: list[bytes]) -> Record | None:
        """Takes in a program, or runs those that are there and returns the record, with numbers for cfgs."""
        with _jax.clean_room():
            if verb == "run":
                return self._run(head)
            if verb == "reference":
                # As it was written, and behind it what is more exact.
                plain, *exact = (_flat(part) for part in parts)
                compilers = [functools.partial(self._reference_program, bytes(part)) for part in parts]
                self._reference = ExportedReference(plain, exact[0] if exact else None, compilers)
            else:
                self._add(head, parts[0])
            return None

    def close(self) -> None:
        """Lets everything go."""
        if self._made is not None:
            self._made.close()

    @property
    def runner(self) -> InProcessRunner:
        """The runner of this process; the reference, where there is one, has come before it is asked for."""
        if self._made is None:
            leaves = self._cases[0].leaves
            job = TuningJob(self._make_fn, leaves, {}, (), reference=self._reference, tolerance=self._head["tolerance"])
            self._made = InProcessRunner(
                job,
                seed=self._head["seed"],
                device=default_device(),
                warmup=self._head["warmup"],
                iters=self._head["iters"],
                observer=self._telling,
                builder=ImportingBuilder(
                    *(self._programs, self._ahead, self._delivered),
                    one_by_one=self._head["one_by_one"],
                    beside_others=self._head["beside_others"],
                ),
                cases=self._cases,
                told_rounds=self._tell_round,
            )
        return self._made

    def _tell_round(self, seconds: Mapping[int, float], clock: str) -> None:
        self._telling.timed({self.runner.candidates.cfg(place): s for place, s in seconds.items()}, clock)

    def _add(self, head: dict[str, Any], data: bytes) -> None:
        """Lowers a program at once, and has it compiled while further programs come."""
        self._programs[head["number"]] = data, head
        self._open()
        [place] = self.runner.candidates.enter([head["number"]])
        self._places[head["number"]] = place
        self.runner.compiler.add(place)

    def _reference_program(self, data: bytes) -> CompiledProgram:
        """The reference's program: compiled ahead, else now."""
        found = self._ahead.take(data) or compiled(data, for_speed=False)
        return CompiledProgram(
            lambda *leaves: found.executable(*leaves[: found.arguments]), "forward", "", found.executable
        )

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._delivered.wait()
            self.runner.compiler.open(self._head["count"])

    def _run(self, head: dict[str, Any]) -> Record:
        """Times all candidates that run, once the new ones among them are checked."""
        runner, seconds = self.runner, head["seconds"]
        until = math.inf if seconds is None else time.perf_counter() + seconds
        self._open()
        self._is_open = False
        needed = () if head["kept"] is None else (self._places[head["kept"]],)
        runner.compiler.until(until - FOR_MEASURING * (seconds or 0.0), needed=needed)
        runner.wait()
        runner.check(until)
        self._delivered.stop_waiting()
        self._ahead.go()
        return self._time_briefly(head, until) if head["looks"] else self._race(head, until)

    def _time_briefly(self, head: dict[str, Any], until: float) -> Record:
        runs, candidates = self._runs(head["runners"]), self.runner.candidates
        kept = next(iter(self._runs([] if head["kept"] is None else [head["kept"]])), None)
        rows = (
            self.runner.time_briefly(runs, rounds=head["looks"], kept=kept, deadline=until, seed=head["seed"])
            if runs
            else ()
        )
        trials = candidates.trials()
        found = []
        for number in head["runners"]:
            place = self._places[number]
            stands_for = candidates.runs_as(place)
            samples = tuple(row[stands_for] for row in rows if stands_for in row)
            found.append(replace(trials[place], samples_s=samples))
        return Record(trials=tuple(found))

    def _race(self, head: dict[str, Any], until: float) -> Record:
        heuristic = None if head["kept"] is None else self._places[head["kept"]]
        return self.runner.race(Record(), self._runs(head["runners"]), deadline=until, heuristic=heuristic)

    def _runs(self, numbers: Sequence[int]) -> list[int]:
        """The places of the candidates that may run."""
        candidates = self.runner.candidates
        places = dict.fromkeys(candidates.runs_as(self._places[number]) for number in numbers)
        return [place for place in places if candidates.runs(place)]

    def _make_fn(self, number: int) -> Callable[..., Any]:
        """A candidate as a function of flat arrays: its output, or its output and gradients."""
        data, about = self._programs[number]
        run = _in_parts(_flat(data), about["outputs"], about["objective"])
        return lambda *leaves: run(*leaves[: about["arguments"]])


def _in_parts(run: Callable[..., Any], outputs: int, objective: Objective) -> Callable[..., Any]:
    """The output, or the output and gradients."""

    def fn(*leaves: Any) -> Any:
        found = run(*leaves)
        return found if objective == "forward" else (found[:outputs], found[outputs:])

    return fn


def _flat(data: bytes) -> Callable[..., Any]:
    """A program of the first arrays of a case: a forward pass needs no cotangents."""
    exported = loaded(data)
    return lambda *leaves: exported.call(*leaves[: len(exported.in_avals)])


def _placed(about: Any, parts: list[bytes]) -> list[Any]:
    """Arrays on the device: those that were sent, and those that this process draws."""
    sent = [parts.pop(0) for one in about if "seed" not in one]
    found = [None if array is None else jax.device_put(array) for array in unpack(about, sent)]
    for group in dict.fromkeys(one["group"] for one in about if "seed" in one):
        places = [i for i, one in enumerate(about) if one.get("group") == group]
        like = [jax.ShapeDtypeStruct(about[i]["shape"], np.dtype(about[i]["dtype"])) for i in places]
        for i, array in zip(places, draw(like, about[places[0]]["seed"]), strict=True):
            found[i] = array
    return found


@final
@dataclass
class ImportingBuilder:
    """Makes programs of exported ones.

    The first is traced as a part of a new program, which shows the forms of the outputs. The others are traced and
    lowered where they are compiled, on threads: one after the other that took seconds, and those that were compiled
    ahead need neither.
    """

    programs: Mapping[int, tuple[bytes, dict[str, Any]]]
    ahead: AheadCompiler
    delivered: Deliveries
    # If one is made at a time, a candidate that ends the process is the only suspect.
    one_by_one: bool
    # Do other processes compile meanwhile?
    beside_others: bool = False
    is_instant: bool = False
    _has_traced: bool = False

    def ready_made(self, cfg: Any, name: str, until: float) -> Staged | None:
        """Every candidate but the first, which is traced for the forms of the outputs."""
        if not self._has_traced:
            return None
        objective = self.programs[cfg][1]["objective"]
        return Staged(name, objective, "", None, lambda executable: executable, portable=self.programs[cfg])

    def traced(self, staged: Staged, cfg: Any) -> Staged:
        """The candidate with its exported program, and the objective that this was made for."""
        self._has_traced = True
        return replace(staged, objective=self.programs[cfg][1]["objective"], portable=self.programs[cfg])

    def lower(self, staged: Staged) -> tuple[Any, str]:
        """Leaves lowering to `build`. No two programs are equal here: the parent sends one for all twins."""
        return staged, f"{staged.portable[1]['number']}"

    def compiler_timing(self, staged: Staged, lowered: Any) -> str:
        """The name that the parent found in the program's text."""
        return str(staged.portable[1]["compiler_timing"])

    def undisturbed(self) -> AbstractContextManager[None]:
        """Holds back programs of later tunings."""
        return self.ahead.held()

    def await_parts(self, staged: Staged) -> None:
        """Waits for the executable that another process makes of the program."""
        name = staged.portable[1].get("compiled_as")
        if name is not None:
            self.delivered.wait_for(name)

    def build(self, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """The program, compiled by another process, or here: while an earlier tuning was measured, or now."""
        data, about = staged.portable
        name = about.get("compiled_as")
        taken = None if name is None else self.delivered.take(name, data, for_speed=for_speed)
        taken = taken or self.ahead.take(data, for_speed=for_speed)
        found = taken or compiled(data, for_speed=for_speed, beside_others=self.beside_others)
        run = _in_parts(found.executable, about["outputs"], about["objective"])
        return CompiledProgram(
            lambda *leaves: run(*leaves[: found.arguments]),
            *(staged.objective, staged.notes or self.delivered.refused.get(name or "", ""), found.executable),
            for_speed=for_speed,
            ahead_s=0.0 if taken is None else taken.seconds,
        )


@final
@dataclass(frozen=True)
class MessagingObserver:
    """Tells the parent of every step, which hears it at the other end of the pipe."""

    sender: Sender

    def trying(self, cfg: Any, doing: Doing, program: str = "") -> None:
        """Sends the step before it is taken."""
        self.sender.send("trying", number=cfg, doing=doing, at=time.perf_counter())

    def came_back(self, cfg: Any, doing: Doing) -> None:
        """Sends that the step is over."""
        self.sender.send("back", number=cfg, doing=doing, at=time.perf_counter())

    def failed(self, trial: Trial, program: str) -> None:
        """Sends the outcome, with the reason."""
        about = {name: getattr(trial, name) for name in ("status", "message", "error", "compile_s")}
        check = None if trial.check is None else vars(trial.check)
        self.sender.send("failed", number=trial.cfg, check=check, **about)

    def lost(self, trial: Trial, program: str) -> None:
        """Sends nothing: this process would be lost with the candidate."""

    def dropped(self, cfg: Any, program: str, *, seconds: float, ratio: float, clock: str) -> None:
        """Sends the candidate's time, and its ratio to the best."""
        self.sender.send("dropped", number=cfg, seconds=seconds, ratio=ratio, clock=clock)

    def timed(self, seconds: Mapping[int, float], clock: str) -> None:
        """Sends the seconds of one round."""
        self.sender.send("timed", found=[list(pair) for pair in seconds.items()], clock=clock)
