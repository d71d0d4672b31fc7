"""One program, four ways to bring its decisions along: a result, a store, a lock file, a pack."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Picking, mesh_of

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    PersistentCache,
    device_fingerprint,
    find_labels_in_lowered,
    freeze,
    locked,
    make_pack,
    overlay_cache,
)
from ejkernel.ops.store import packs

pytestmark = pytest.mark.usefixtures("own_text")

LAYERS, WIDTH, ROWS = 3, 16, 32


class Norm(Kernel[tuple, jax.Array]):
    """Root mean square over the last axis; the cfg shows in the program."""

    op_id = "norm"

    def run(self, x, *, cfg):
        blocks, _ = cfg
        rows = x.reshape(blocks, -1, x.shape[-1])
        return (rows * jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + 1e-6)).reshape(x.shape)

    def heuristic_cfg(self, inv):
        return (1, "rows")

    def candidate_cfgs(self, inv):
        return [(1, "rows"), (2, "rows"), (4, "rows")]


class Product(Kernel[int, jax.Array]):
    """A matrix product by blocks of rows, with a gradient of its own."""

    op_id = "matmul"
    version = "2"

    def run(self, a, b, *, cfg):
        return jnp.concatenate([part @ b for part in jnp.split(a, cfg)])

    def fwd_with_residuals(self, a, b, *, cfg):
        return self.run(a, b, cfg=cfg), (a, b)

    def vjp(self, residuals, y, dy, a, b, *, cfg):
        return self.run(dy, residuals[1].T, cfg=cfg), residuals[0].T @ dy

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2, 4]


def program(executor):
    """A training step over three layers: forward, backward and update, scanned, sharded over four devices."""
    mesh = mesh_of(4, names="i")
    rows = jax.sharding.PartitionSpec("i")

    def layer(x, w):
        return x + executor(Product(), executor(Norm(), x), w), None

    def loss(ws, x):
        sharded = jax.shard_map(
            lambda ws, x: jax.lax.scan(layer, x, ws)[0],
            mesh=mesh,
            in_specs=(jax.sharding.PartitionSpec(), rows),
            out_specs=rows,
        )
        return jnp.mean(sharded(ws, x) ** 2)

    def step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return value, ws - 0.1 * grads

    return step


WEIGHTS = np.full((LAYERS, WIDTH, WIDTH), 0.01, np.float32)
BATCH = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


class Texts:
    """What JAX makes of the program: lowered, with labels, and compiled."""

    def __init__(self, executor):
        self._lowered = jax.jit(program(executor)).lower(WEIGHTS, BATCH)
        self.lowered = self._lowered.as_text()
        self.labels = find_labels_in_lowered(self._lowered)

    def compiled(self):
        """The instructions, without the lines of Python behind each: those are the test's own."""
        lines = self._lowered.compile().as_text().splitlines()
        instructions = [line for line in lines if re.match(r"\s*(%|ROOT|ENTRY|})", line)]
        assert len(instructions) > 50
        return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in instructions]


def untuned(**settings):
    """An executor that knows nothing and never measures."""
    policy = AutotunePolicy(allow_autotune=False)
    return Executor(ConfigSelectorChain(ConfigCache(), policy=policy, **settings))


@pytest.fixture
def tuned(tmp_path):
    """The program tuned once: its store, and its selector."""
    packs.forget_packs()
    store = PersistentCache("ops", tmp_path / "ops.json")
    selector = ConfigSelectorChain(ConfigCache(), tuner=Picking(), persistent=store)
    texts = Texts(Executor(selector))
    assert selector.tuner.calls == len(store) == 2
    yield selector, store, texts
    packs.forget_packs()


def test_the_compiled_program_is_the_same_under_a_result_a_store_a_lock_and_a_pack(tuned, tmp_path, monkeypatch):
    """Lowered and compiled text are identical, and differ from what heuristics alone would give."""
    selector, store, expected = tuned
    entries = [Entry(op_id, call_key, selector.cache.get(d, op_id, call_key)) for d, op_id, call_key in store.keys()]
    with AutotuningResult(device_fingerprint(), entries):
        under_result = Texts(untuned())
    under_store = Texts(untuned(persistent=PersistentCache("ops", store.path)))
    lock = freeze(tmp_path / "step.lock.json", program(Executor(selector)), WEIGHTS, BATCH)
    with locked(lock.path):
        under_lock = Texts(untuned())
    monkeypatch.setenv("EJKERNEL_OPS_PACKS", make_pack(tmp_path / "pack.json", store).path)
    under_pack = Texts(untuned())
    monkeypatch.delenv("EJKERNEL_OPS_PACKS")

    for found in (under_result, under_store, under_lock, under_pack):
        assert found.labels == expected.labels
        assert found.lowered == expected.lowered
    # Equal text is compiled to equal programs; shown for the two that travel.
    assert under_lock.compiled() == under_pack.compiled() == expected.compiled()
    assert Texts(untuned()).lowered != expected.lowered
    assert len(lock) == 2


def test_the_setting_gives_the_same_program(tuned, tmp_path, monkeypatch):
    """`EJKERNEL_OPS_LOCK` for a process is as good as `locked` around the program."""
    selector, _, expected = tuned
    freeze(tmp_path / "step.lock.json", selector)
    monkeypatch.setenv("EJKERNEL_OPS_LOCK", str(tmp_path / "step.lock.json"))
    assert Texts(untuned()).lowered == expected.lowered


def test_a_changed_program_is_refused_before_it_is_compiled(tuned, tmp_path):
    """Another batch is another call: the lock names the nearest one and the shape that differs."""
    selector, _, _ = tuned
    freeze(tmp_path / "step.lock.json", selector)
    step = jax.jit(program(untuned()))
    with locked(tmp_path / "step.lock.json"), pytest.raises(RuntimeError, match=r"norm@v0") as caught:
        step.lower(WEIGHTS, BATCH[:16])
    assert "float32[8,16]" in str(caught.value)
    assert "float32[4,16]" in str(caught.value)


def test_the_frozen_step_runs_and_learns(tuned, tmp_path):
    """Under its lock the step gives the values of the untuned one."""
    selector, _, _ = tuned
    freeze(tmp_path / "step.lock.json", selector)
    expected = jax.jit(program(untuned()))(WEIGHTS, BATCH)
    with locked(tmp_path / "step.lock.json"):
        found = jax.jit(program(untuned()))(WEIGHTS, BATCH)
    jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_a_reviewers_overlay_inside_a_lock_reaches_the_program(tuned, tmp_path):
    """Trying another cfg for one call does not lift the lock from the rest."""
    selector, store, expected = tuned
    freeze(tmp_path / "step.lock.json", selector)
    key = next(key for key in store.keys() if key[1] == "matmul@v2")
    with locked(tmp_path / "step.lock.json"), overlay_cache({key: 1}):
        tried = Texts(untuned())
    assert tried.lowered != expected.lowered
