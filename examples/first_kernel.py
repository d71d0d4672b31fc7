"""A first kernel: tuned on this machine, kept on disk, answered from there the next time."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache


@dataclass(frozen=True)
class NearestConfig:
    """How the distances are computed, and for how many points at a time."""

    way: str
    rows: int


class Nearest(Kernel[NearestConfig, jax.Array]):
    """The squared distance from each point to the nearest of some others."""

    op_id = "nearest"
    version = "1"
    cfg_type = NearestConfig

    def run(self, points, others, *, cfg):
        """The distances, block by block."""
        by_products = cfg.way == "products"

        def block(some):
            if by_products:  # |a - b|^2 = |a|^2 - 2ab + |b|^2: a matrix product does most of it
                squares = jnp.sum(some * some, -1)[:, None] + jnp.sum(others * others, -1)
                return jnp.min(squares - 2 * some @ others.T, -1)
            return jnp.min(jnp.sum((some[:, None] - others) ** 2, -1), -1)

        blocks = points.reshape(-1, cfg.rows, points.shape[1])
        return jax.lax.map(block, blocks).reshape(-1)

    def heuristic_cfg(self, inv):
        """What anybody would write first, in blocks that fit a cache."""
        return NearestConfig("differences", min(128, inv.args[0].shape[0]))

    def candidate_cfgs(self, inv):
        """Both ways, in blocks that divide the points."""
        sizes = [r for r in (8, 32, 128, 512) if inv.args[0].shape[0] % r == 0]
        return [NearestConfig(way, rows) for way in ("differences", "products") for rows in sizes]


def choose(points, others):
    """One choice as a new process would make it: nothing in memory, the store on disk."""
    told = []
    store = PersistentCache("nearest", cfg_type=NearestConfig)
    selector = ConfigSelectorChain(
        ConfigCache(), persistent=store, on_event=lambda event, **data: told.append((event, data))
    )
    start = time.perf_counter()
    cfg = Executor(selector).choose_config(Nearest(), points, others)
    return selector, cfg, time.perf_counter() - start, told


def main():
    """Chooses twice and shows what happened."""
    points, others = (jax.random.normal(jax.random.key(seed), (2048, 64)) for seed in (0, 1))
    selector, cfg, seconds, told = choose(points, others)
    device, path = told[0][1]["device"], selector.persistent.path
    print(f"nearest neighbours of 2048 points among 2048, 64 dimensions, on {device}\n")
    record = next((data["record"] for event, data in told if event == "autotune_finish"), None)
    if record is None:
        print(f"first call:  {cfg} from {path} in {seconds * 1e3:.0f} ms; delete that file to see a tuning\n")
    else:
        for trial in sorted(record.trials, key=lambda t: t.seconds or 1e9):
            print(
                f"  {trial.seconds * 1e3:8.2f} ms  {trial.cfg}" if trial.seconds else f"  {trial.status}  {trial.cfg}"
            )
        gain, low, high = record.gain
        print(f"\nfirst call:  tuned {len(record.trials)} candidates in {seconds:.1f} s")
        print(f"             chose {cfg}")
        print(f"             {gain:.2f} times as fast as the heuristic config (between {low:.2f} and {high:.2f})")
    _, again, seconds, told = choose(points, others)
    print(f"second call: {again} from {told[0][0]} ({told[0][1].get('level')}) in {seconds * 1e3:.1f} ms")
    print(f"kept in:     {path}")

    result = Executor(selector)(Nearest(), points, others)
    expected = jnp.min(jnp.sum((points[:8, None] - others) ** 2, -1), -1)
    print(f"\nrun with it: {result[:3]}, as plain JAX says: {bool(jnp.allclose(result[:8], expected, rtol=1e-3))}")


if __name__ == "__main__":
    main()
