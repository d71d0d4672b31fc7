"""What a training step must do in `autotune`, `freeze`, `locked` and recordings, whatever framework wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fakes_execution import Picking, executor_with, selector_with

from ejkernel.library import rms_norm
from ejkernel.ops import AutotuneOptions, Executor, Kernel, autotune, freeze, locked, overlay_cache
from ejkernel.ops.programs import confirm

NEEDS = "needs the extra `frameworks`: pip install 'ejkernel-ops[frameworks]'"
ROWS, WIDTH = 8, 16
QUIET = AutotuneOptions(progress=False)


class Chunked(Kernel[int, jax.Array]):
    """A matrix product in so many parts; the log has the cfg of each trace."""

    op_id = "frameworks.chunked"
    log: list[int] = []  # noqa: RUF012  a kernel's own attributes are part of what it is

    def run(self, x, w, *, cfg):
        self.log.append(cfg)
        return jnp.concatenate([part @ w for part in jnp.split(x, cfg)])

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2, 4]


def layer(executor: Executor, x, scale, w):
    """A layer with one kernel of the library and one of these tests."""
    return executor(Chunked(), rms_norm(x, scale, executor=executor), w)


def batch(rows: int = ROWS):
    """Inputs and targets."""
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return x, jnp.tanh(x[:, ::-1])


@dataclass(frozen=True)
class Case:
    """A training step, and how to make what it is given: a step may donate its arguments or change them."""

    fn: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    executor: Executor
    # The caller's arrays in some arguments, also where those are no pytrees.
    arrays: Callable[[Any], list[Any]] = jax.tree_util.tree_leaves


Make = Callable[[Executor], Case]


def values_of(case: Case, args: Any) -> list[Any]:
    """The values of the caller's arrays; reading one that was donated raises."""
    return [numbers(leaf).copy() for leaf in case.arrays(args) if isinstance(leaf, jax.Array)]


def numbers(leaf: jax.Array) -> np.ndarray:
    """An array's values, those of random keys included."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def check_autotune(make: Make) -> None:
    """Both calls are tuned for the backward pass as well; the step then has their cfgs, and tunes nothing itself."""
    tuner = Picking()
    case = make(executor_with(tuner))
    args = case.arguments()
    before = values_of(case, args)
    assert before

    result = autotune(case.fn, *args, tuning=QUIET)

    assert sorted(entry.op_id_v for entry in result.entries) == ["frameworks.chunked@v0", "library.rms_norm@v2"]
    assert {entry.record.objective for entry in result.entries} == {"forward+backward"}
    np.testing.assert_equal(values_of(case, args), before)
    assert tuner.calls == 2
    jax.block_until_ready(case.fn(*args))
    assert (tuner.calls, Chunked.log[-1]) == (2, 4)


def confirmed(make: Make, monkeypatch):
    """What `confirm=True` says; the caller's arrays are as they were."""
    monkeypatch.setattr(confirm, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(confirm, "_MOST_ROUNDS", 9)
    case = make(executor_with(Picking()))
    args = case.arguments()
    before = values_of(case, args)

    found = autotune(case.fn, *args, tuning=AutotuneOptions(progress=False, confirm=True)).confirmation

    np.testing.assert_equal(values_of(case, args), before)
    jax.block_until_ready(case.fn(*args))
    return found


def check_confirmed(make: Make, monkeypatch) -> None:
    """The step is run before and after."""
    found = confirmed(make, monkeypatch)
    assert found.rounds == 9, found
    assert not math.isnan(found.before_s)


def check_frozen(make: Make, path) -> None:
    """A lock holds both calls; inside `locked` it answers a step that was compiled with another cfg."""
    case = make(executor_with())
    jax.block_until_ready(case.fn(*case.arguments()))
    assert Chunked.log[-1] == 1
    args = case.arguments()
    (key,) = [key for key in freeze(path, case.fn, *args).entries if key.op_id == "frameworks.chunked@v0"]

    with overlay_cache({key: 2}):
        assert len(freeze(path, case.fn, *args).entries) == 2
    Chunked.log.clear()
    with locked(path):
        jax.block_until_ready(case.fn(*args))

    assert set(Chunked.log) == {2}


def check_recorded(make: Make, path, monkeypatch) -> None:
    """A run of the step writes both calls down; tuned from the file alone, they answer the step."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(path))
    case = make(executor_with())
    jax.block_until_ready(case.fn(*case.arguments()))

    result = autotune(path, tuning=AutotuneOptions(selector=selector_with(Picking()), progress=False))

    assert sorted(entry.op_id_v for entry in result.entries) == ["frameworks.chunked@v0", "library.rms_norm@v2"]
    assert result.notes == ()
    Chunked.log.clear()
    with result:
        jax.block_until_ready(case.fn(*case.arguments()))
    assert set(Chunked.log) == {4}
