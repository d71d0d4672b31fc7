"""Stand-ins for candidates that hang, programs that are not compiled and devices that are not there."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ejkernel.ops.timing.program import CompiledProgram, Staged

_numbers = itertools.count()


class Held:
    """The identity; a program with it does not end compiling before it is released."""

    _alive: ClassVar[list[Held]] = []

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()
        self._primitive = Primitive(f"held_{next(_numbers)}")
        self._primitive.def_abstract_eval(lambda x: x)
        # By this it is known to `wait`.
        mlir.register_lowering(self._primitive, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
        self._alive.append(self)

    def __call__(self, x: Any) -> Any:
        return self._primitive.bind(x)

    @classmethod
    def wait(cls, lowered: Any) -> None:
        """What the compiler of these tests does before it begins."""
        waiting = [held for held in cls._alive if not held.release.is_set()]
        # A test may have a lowered program of its own.
        if waiting and isinstance(lowered, jax.stages.Lowered) and "optimization_barrier" in lowered.as_text():
            for held in waiting:
                held.reached.set()
                held.release.wait()


_compile = Staged.compile


def _held_compile(self: Staged, lowered: Any, **settings: Any) -> CompiledProgram:
    Held.wait(lowered)
    return _compile(self, lowered, **settings)


Staged.compile = _held_compile  # type: ignore[method-assign]


@dataclass
class Device:
    """A device of some platform, its memory full."""

    platform: str

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 0}


@dataclass
class Module:
    """What a compiled program is called."""

    name: str


@dataclass
class Executable:
    """A compiled program as far as its place and its name go."""

    name: str
    platform: str = "gpu"

    def runtime_executable(self) -> Executable:
        return self

    def local_devices(self) -> list[Device]:
        return [Device(self.platform)]

    def hlo_modules(self) -> list[Module]:
        return [Module(f"jit_{self.name}")]


def program(name: str, platform: str = "gpu", call: Any = lambda x: x) -> CompiledProgram:
    """A program that seems to be compiled for that platform."""
    return CompiledProgram(call, "forward", executable=Executable(name, platform))


@dataclass
class Rounds:
    """A clock for whole rounds: the time of each program stands in a table by its name."""

    times: dict[str, float]
    name: str = "rounds"
    seen: list[list[Any]] = field(default_factory=list)

    def round(self, runs: Any) -> dict[int, float | Exception]:
        self.seen.append(list(runs))
        for run in runs:
            for _ in range(run.calls):
                jax.block_until_ready(run.call(*run.leaves))
        return {run.number: self.times[run.name] for run in runs}
