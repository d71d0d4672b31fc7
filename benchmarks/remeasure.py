"""The time of `ejkernel remeasure` for a store: `python benchmarks/remeasure.py [entries]`, 500 unless told.

The entries are calls of a small kernel with as many shapes, kept as a tuning would keep them, with a heuristic and a
runner-up each; the kept cfg is the fastest, but for each twentieth, which takes about a tenth longer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Kernel, OperationStores, Record, Trial
from ejkernel.ops.core.device import device_fingerprint, environment
from ejkernel.ops.core.kernel import kernel_path, versioned
from ejkernel.ops.core.key import Key
from ejkernel.ops.programs.remeasure import remeasure, summary_line


@dataclass(frozen=True)
class Turns:
    """The number of times that the work is done."""

    turns: int


class Work(Kernel[Turns, jax.Array]):
    """A kernel with one result after more or less work."""

    op_id = "benchmark.work"
    version = "1"
    cfg_type = Turns

    def run(self, x, *, cfg):
        return jax.lax.fori_loop(0, cfg.turns, lambda _, y: jnp.tanh(y) / jnp.tanh(y) * x, x)

    def heuristic_cfg(self, inv):
        return Turns(12)

    def candidate_cfgs(self, inv):
        return [Turns(10), Turns(11), Turns(12)]


def keep(store: OperationStores, number: int) -> None:
    """One entry, as a tuning leaves it."""
    kernel = Work()
    inv = Invocation(kernel.op_id, (jax.ShapeDtypeStruct((64, 64 + number), jnp.float32),), {})
    key = Key(device_fingerprint(), versioned(kernel), inv.call_key)
    best = Turns(11 if number % 20 == 0 else 10)
    rest = [cfg for cfg in (Turns(12), Turns(10), Turns(11)) if cfg != best]
    trials = tuple(Trial(cfg, samples_s=(1e-4,) * 3) for cfg in (best, *rest))
    record = Record(
        key={**key._asdict(), **{f"call.{name}": text for name, text in inv.parts.items()}},
        kernel=kernel_path(kernel),
        environment=environment(jax.local_devices()[0]),
        trials=trials,
        winner=0,
        heuristic=1,
        runner_up=2,
        gain=(1.2, 1.1, 1.3),
    )
    ConfigSelectorChain(ConfigCache(), persistent=store).adopt(inv, kernel, record)


def main(entries: str = "500") -> None:
    """Fills a store, and measures it again."""
    with tempfile.TemporaryDirectory() as folder:
        store = OperationStores(folder)
        for number in range(int(entries)):
            keep(store, number)
        start = time.perf_counter()
        done = remeasure(store)
        taken = time.perf_counter() - start
        print(f"{summary_line(done)} in {taken:.0f} s, {taken / len(done):.2f} s each")
        planted = [one for one in done if one.cfg == Turns(11)]
        print("planted:", dict(Counter(one.state for one in planted)))
        print("others:", dict(Counter(one.state for one in done if one.cfg != Turns(11))))


if __name__ == "__main__":
    main(*sys.argv[1:])
