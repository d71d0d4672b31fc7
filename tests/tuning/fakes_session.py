"""Workers that say what is written down for them, and a session with such workers, without any process."""

from __future__ import annotations

import signal

import jax.numpy as jnp

from ejkernel.ops import Isolation, Record, Trial
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.tuning.candidates import CandidateSet
from ejkernel.ops.tuning.check import CheckCase
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker.export import PortableProgram
from ejkernel.ops.tuning.worker.process import WorkerGone
from ejkernel.ops.tuning.worker.protocol import Message
from ejkernel.ops.tuning.worker.session import WorkerSession


class Watching:
    """Keeps what it is told of outcomes."""

    def __init__(self):
        self.told = []

    def failed(self, trial, program):
        self.told.append(("failed", trial.cfg, trial.status))

    def lost(self, trial, program):
        self.told.append(("lost", trial.cfg, trial.status))

    def dropped(self, cfg, program, **about):
        self.told.append(("dropped", cfg, about["ratio"]))


ALL = [0, 1, 2]


class Scripted:
    """A worker that says what is written down for it, and then ends with this status; None: it hangs."""

    def __init__(self, says, status=0, memory=0, *, ahead=False, starts=False):
        self.says = list(says)
        # Does it never get ready?
        self.starts = starts
        self.compiles_ahead = ahead
        self.ended = status
        self.held = memory
        self.order = {}
        self.programs = []
        self.tuning = {}

    def send(self, verb, parts=(), **head):
        if verb == "program":
            self.programs.append(head["number"])
        elif verb == "tuning":
            self.tuning = head
        else:
            self.order = head

    def ready(self, is_too_late):
        """At once, or never."""
        while self.starts and not is_too_late():
            self.rest()
        return not self.starts

    # Done by each look that hears nothing.
    rest = staticmethod(lambda: None)

    def hear(self):
        if not self.says:
            if self.ended is None:
                self.rest()
                return None
            raise WorkerGone
        return self.says.pop(0)

    def memory(self):
        return self.held

    def kill(self):
        self.ended = -signal.SIGKILL

    def status(self):
        return self.ended

    def last_words(self):
        return f"status {self.ended}"

    def end(self):
        self.left = False

    def leave(self):
        self.left = True


def says(verb, number=None, at=0.0, **head):
    return Message({"verb": verb, "number": number, "at": at, **head})


def starts(number, doing="check"):
    return says("trying", number, doing=doing)


def back(number, doing="check", at=0.0):
    return says("back", number, at, doing=doing)


def done(*numbers, winner=0):
    record = Record(trials=tuple(Trial(n) for n in numbers), winner=winner)
    return Message({"verb": "done"}, [record.dumps().encode()])


def session(*workers, names=("a", "b", "c"), falls_back=False, **limits):
    """A session whose workers are these, one after the other, with all candidates exported; and what was told."""
    watch = Watching()
    queue = list(workers)
    candidates = CandidateSet(watch)
    for number in candidates.enter(list(names)):
        portable = PortableProgram(names[number].encode(), (), 1, None)
        candidates.advance(number, "traced", name=names[number])
        candidates.advance(number, "compiled", program=CompiledProgram(None, "forward", portable=portable))
    cases = [CheckCase((jnp.ones(2),))]
    job = TuningJob(lambda cfg: cfg, (), {}, names, heuristic_first=falls_back)
    made = WorkerSession(
        *(job, candidates, lambda: cases, lambda: queue.pop(0), Isolation(**{"memory_bytes": 1000, **limits})),
        warmup=1,
        iters=1,
        seed=0,
        observer=watch,
    )
    return made, watch


def statuses(made):
    return [trial.status for trial in made.candidates.trials()]
