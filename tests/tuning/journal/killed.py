"""One tuning to be killed: `python killed.py here|worker|search` prints what it found as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial

import faults
import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Isolation, Kernel, PersistentCache, Tuner
from ejkernel.ops.tuning.search.driver import SearchWarning

ABROAD = {"deadly": faults.faulty("exit"), "wrong": lambda x: faults.faulty("note")(x) * 2}
# Enough for a search, each another program.
MANY = {f"steps {n}": partial(faults.slow, steps=3000 + 40 * n) for n in range(36)}
COMMON = {"slow": faults.slow, "fast": lambda x: x * 2, "slower": lambda x: faults.slow(x, 9000)}


class Mixed(Kernel[str, jax.Array]):
    """Twice the argument, mostly; with what takes its process down where that is a worker."""

    op_id = "mixed"

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def run(self, x, *, cfg):
        return {**ABROAD, **COMMON, **MANY, "off": lambda x: x * 5}[cfg](x)

    def heuristic_cfg(self, inv):
        return "slow"

    def candidate_cfgs(self, inv):
        return self.names


class Everything:
    """A search that leaves no candidate out; what is broken comes in two batches."""

    def propose(self, space, known, count, rng):
        return [i for i in range(len(space)) if i not in known][:count]


def main(where: str) -> None:
    abroad = where != "here"
    limits = Isolation(run_seconds=30, imports=["faults"]) if abroad else None
    names = (*(ABROAD if abroad else ["off"]), *COMMON)
    if where == "search":
        names = ("deadly", *MANY, "wrong", *COMMON)
    # These cfgs are names; the strategy asks for nothing else.
    warnings.simplefilter("ignore", SearchWarning)
    tuner = Tuner(1, 3, isolate=limits, strategy=Everything(), effort="full")
    store = PersistentCache("mixed")
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
    decision = selector.decide(Invocation("mixed", (jnp.ones(1000),), {}), Mixed(names))
    # The kill may have come too late: then the answer is on disk.
    record = decision.record or store.record(*store.keys()[0])
    assert record is not None
    outcomes = {trial.cfg: trial.status for trial in record.trials}
    print(json.dumps({"cfg": decision.cfg, "tied": [record.trials[i].cfg for i in record.tied], "outcomes": outcomes}))


if __name__ == "__main__":
    main(sys.argv[1])
