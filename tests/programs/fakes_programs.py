"""Stand-ins for tests of whole programs: a tuner that reads a table, and a program of three operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from fakes_execution import Counting, Times

from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Record, Trial, Tuner
from ejkernel.ops.core.errors import OutOfTimeError, TuningError
from ejkernel.ops.core.key import Key

X = jnp.arange(1.0, 5.0)
QUIET = AutotuneOptions(progress=False)


class Timed(Tuner):
    """A tuner that reads a table by the operation: the seconds of its heuristic cfg; every other cfg takes half."""

    def __init__(self, seconds=None, stop_at=None, gain=None):
        super().__init__()
        self.table = seconds or {}
        self.gain = gain
        self.tuned = []
        self.budgets = {}
        self.stop_at = stop_at

    def tune(self, job, **around):
        op = job.about["key"]["op_id"]
        seconds = self.table.get(op, 1.0)
        cfgs = list(dict.fromkeys(job.candidates))
        if len(cfgs) > 1:
            if self.stop_at == op:
                raise KeyboardInterrupt
            self.tuned.append(op)
            self.budgets[op] = job.seconds
        if seconds == "fails":
            trials = tuple(Trial(cfg, "compile", f"no {cfg}") for cfg in cfgs)
            record = Record(**dict(job.about), trials=trials, heuristic=0, stop="failed")
            raise TuningError("no candidate can be used", [t.message for t in trials], record)
        if seconds == "late":
            trials = (Trial(cfgs[0]), Trial(cfgs[1], samples_s=(0.5,)), *(Trial(cfg, "skipped") for cfg in cfgs[2:]))
            record = Record(**dict(job.about), trials=trials, winner=1, heuristic=0, stop="deadline")
            raise OutOfTimeError("the time was up before the heuristic cfg was timed", ["late"], record)
        trials = tuple(Trial(cfg, samples_s=(seconds / (2 if i else 1),)) for i, cfg in enumerate(cfgs))
        found = {"winner": len(cfgs) - 1, "heuristic": 0, "gain": self.gain}
        return Record(**dict(job.about), objective=job.objective, trials=trials, **found)


def timed(**settings):
    """An executor whose tuner reads a table."""
    tuner = Timed(*(settings.pop(name, None) for name in ("seconds", "stop_at", "gain")))
    return Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner, **settings))


def three(executor):
    """A program of three operations, the second of which runs ten times."""
    one, two, six = [Times.fresh(op_id=name)() for name in ("one", "two", "six")]

    def fn(x):
        x = executor(one, x)
        x, _ = jax.lax.scan(lambda c, _: (executor(two, c), None), x, None, length=10)
        return executor(six, x)

    return fn


def ops(result):
    """The operations of a result."""
    return [entry.op_id_v.partition("@")[0] for entry in result.entries]


def key_of(op):
    """The key of a call that was never made."""
    return Key("cpu|x", op, "00")


class Inner(Counting):
    op_id = "inner"

    def run(self, x, *, cfg):
        return x * 2


class Outer(Counting):
    """A kernel with a kernel inside."""

    op_id = "outer"

    def __init__(self, executor):
        super().__init__()
        self.executor = executor

    def run(self, x, *, cfg):
        return self.executor(Inner(), x) + 1
