"""Each kind of part is added by one new file: here a class or a function, and at most one line elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import forked_python
import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, Doubling, call_of
from test_project import declared

import ejkernel
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner
from ejkernel.ops.store.store import StoredEntry
from ejkernel.ops.timing.race import Rules

X = jnp.arange(1.0, 9.0)


class Counter:
    """A clock of a device that times a whole round at once, and says by which rules it is judged."""

    name = "counter"
    rules = Rules(quantile=0.5, tie=0.001)

    def __init__(self, seconds):
        self.seconds = seconds
        self.rounds = 0

    def round(self, runs):
        """Seconds of each, from a table."""
        self.rounds += 1
        for run in runs:
            jax.block_until_ready(run.call(*run.leaves))
        return {run.number: self.seconds[run.number] for run in runs}


def test_a_clock_for_devices_is_one_class():
    """It is given to the tuner, and times rounds of candidates by its own rules."""
    clock = Counter([3.0, 1.0, 2.0])
    functions = {"a": lambda x: x * 2, "b": lambda x: x + x, "c": lambda x: 2 * x + 0}
    tuner = Tuner(clock=clock, isolate=False)
    assert tuner.autotune(functions.get, (X,), {}, list(functions)) == "b"
    assert clock.rounds >= 3
    assert tuner.record.clock == "counter"


class FromTheEnd:
    """A search strategy that proposes what was not measured yet, the last config first."""

    def propose(self, space, known, count, rng):
        """The numbers of some configs."""
        return [i for i in reversed(range(len(space))) if i not in known][:count]


def test_a_search_strategy_is_one_class():
    """It is given to the tuner, and decides what is measured."""
    asked = []

    class Noted(FromTheEnd):
        def propose(self, space, known, count, rng):
            asked.append(super().propose(space, known, count, rng))
            return asked[-1]

    tuner = Tuner(strategy=Noted(), isolate=False, effort="quick", seconds=20)
    functions = {n: (lambda x, n=n: x * 2 + 0 * n) for n in range(200)}
    tuner.autotune(lambda cfg: functions[cfg["n"]], (X,), {}, [{"n": n} for n in range(200)])
    assert any(199 in numbers for numbers in asked)


class Shelf:
    """A store that keeps entries in a dictionary."""

    def __init__(self):
        self.entries: dict[tuple[str, str, str], StoredEntry] = {}

    def get(self, *key):
        """The cfg of a key."""
        found = self.lookup(key)
        return None if found is None else found.cfg

    def put(self, device, op_id, call_key, cfg):
        """Keeps a cfg."""
        self.keep((device, op_id, call_key), StoredEntry(cfg))

    def lookup(self, key):
        """The entry of a key."""
        return self.entries.get(tuple(key))

    def keep(self, key, entry):
        """Keeps an entry."""
        self.entries[tuple(key)] = entry

    def keys(self):
        """Every key."""
        return sorted(self.entries)


def test_a_store_is_one_class():
    """The selector writes what it tuned there, and another one finds it."""
    shelf, kernel = Shelf(), Doubling()
    clock_free = ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=False), persistent=shelf)
    chosen = clock_free.choose(call_of(kernel, X), kernel)
    assert [entry.cfg for entry in shelf.entries.values()] == [chosen]
    assert isinstance(shelf.entries, Mapping)
    again = ConfigSelectorChain(ConfigCache(), tuner=None, persistent=shelf)
    assert again.decide(call_of(kernel, X), kernel).tier == "persistent"


class Halves(Kernel[Blocks, jax.Array]):
    """An operation of a library: a kernel, and the function that users call."""

    op_id = "additions.halves"

    def run(self, x, *, cfg):
        return x / 2

    def heuristic_cfg(self, inv):
        return Blocks(8)

    def candidate_cfgs(self, inv):
        return [Blocks(8), Blocks(16)]


def halves(x, *, cfg=None, executor):
    """Half of the argument, by the fastest way."""
    return executor(Halves(), x, cfg=cfg)


def test_a_library_operation_is_one_class_and_one_function():
    """It is tuned, differentiated and compiled like the others, and no other file knows it."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=False)))
    assert jnp.allclose(halves(X, executor=executor), X / 2)
    slope = jax.jit(jax.grad(lambda x: halves(x, executor=executor).sum()))(X)
    assert jnp.allclose(slope, 0.5)


HALVES = '''"""Half of an array."""

from dataclasses import dataclass

from ..ops import Kernel, default_executor


@dataclass(frozen=True)
class HalvesConfig:
    """How many elements a block has."""

    block: int


class Halves(Kernel[HalvesConfig, object]):
    """Half of an array, by blocks."""

    op_id = "library.halves"

    def run(self, x, *, cfg):
        return x / 2

    def heuristic_cfg(self, inv):
        return HalvesConfig(8)


def halves(x, *, cfg=None):
    """Half of the argument."""
    return default_executor()(Halves(), x, cfg=cfg)
'''
LISTED = "from .halves import Halves as Halves, HalvesConfig as HalvesConfig, halves as halves"
USED = """
import sys
import ejkernel.library as library
assert "ejkernel.library.halves" not in sys.modules and "ejkernel.library.softmax" not in sys.modules
from ejkernel.library import Halves, HalvesConfig, halves, softmax
import ejkernel.library.halves
assert library.halves is halves and {"Halves", "HalvesConfig", "halves"} < {*library.__all__} & {*dir(library)}
print(library.__file__, halves(8.0), halves(8.0, cfg=HalvesConfig(4)), Halves.op_id, callable(softmax))
"""


@pytest.fixture
def library(tmp_path):
    """A copy of the package with an operation in a new file of its library, and one line more in its list."""
    shutil.copytree(Path(ejkernel.__file__).parent, tmp_path / "ejkernel")
    folder = tmp_path / "ejkernel" / "library"
    (folder / "halves.py").write_text(HALVES)
    file = folder / "__init__.py"
    text = file.read_text(encoding="utf-8")
    before = "    from .layer_norm import "
    assert text.count(before) == 1
    file.write_text(text.replace(before, f"    {LISTED}\n{before}"), encoding="utf-8")
    return file


@pytest.mark.one_leg
def test_an_operation_of_the_library_is_one_file_and_one_line(library, tmp_path):
    """Programs find its names in `ejkernel.library`, which imports it when it is used."""
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = forked_python.run([sys.executable, "-c", USED], env=variables, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(library), "4.0", "4.0", "library.halves", "True"]


def test_type_checkers_see_an_operation_by_the_same_line(library):
    """The line is an import of each name as itself, which is how a typed package says that a name is public."""
    found = declared(library)
    assert {name: found[name] for name in ("Halves", "HalvesConfig", "halves")} == dict.fromkeys(
        ("Halves", "HalvesConfig", "halves"), ".halves"
    )
