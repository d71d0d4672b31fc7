"""A compiled program holds the kernel with its cfg and nothing else of ours."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Asked, Counting, Cubic, OwnCubic, Product, Running, executor_with, mesh_of
from jax.sharding import PartitionSpec as P

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Tuner

pytestmark = pytest.mark.usefixtures("own_text")

X = jnp.arange(6.0).reshape(2, 3)


def program(function, *args):
    """The compiled text without names: metadata, and the tables of files and stack frames that go with it."""
    text = jax.jit(lambda *a: function(*a)).lower(*args).compile().as_text()
    text = re.sub(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text)
    text = re.sub(r",? ?(stack_frame_id|frontend_attributes)=(\d+|\{[^{}]*\})", "", text)
    lines = text.splitlines()
    tables = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    return "\n".join(line for line in lines if not line.startswith(tables) and not re.match(r"^\d+ ", line))


class Blocked(Counting):
    """A kernel whose program depends on its cfg."""

    op_id = "blocked"

    def run(self, x, *, cfg):
        for _ in range(cfg):
            x = jnp.sin(x)
        return x @ x.T


class Prepared(Blocked):
    """The same behind a `prepare`."""

    op_id = "prepared"

    def prepare(self, x, **kwargs):
        return (x,), kwargs


KERNELS = {"plain": Blocked, "prepared": Prepared, "cubic": Cubic, "own gradient": OwnCubic}


@pytest.mark.thinned
@pytest.mark.parametrize("stamp", ["hash", "json", "none"])
@pytest.mark.parametrize("kind", KERNELS)
def test_the_program_is_that_of_run_by_hand(kind, stamp, monkeypatch):
    """Metadata stripped, the compiled text is equal, whatever the label."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    executor, kernel = Executor(Asked(3)), KERNELS[kind].fresh()()
    by_hand = program(lambda x: kernel.run(x, cfg=3), X)
    assert program(lambda x: executor(kernel, x), X) == by_hand
    assert by_hand.count("\n") > 3


def test_another_cfg_is_another_program():
    """The comparison above can tell."""
    kernel = Blocked.fresh()()
    assert program(lambda x: Executor(Asked(2))(kernel, x), X) != program(lambda x: kernel.run(x, cfg=3), X)


@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
@pytest.mark.parametrize("tuner", [Tuner(0, 1), Running()], ids=["our tuner", "a tuner of the user's own"])
def test_a_trace_that_tunes_leaves_nothing_in_the_program(tuner, recording, monkeypatch):
    """Tuning and recording while tracing do not show."""
    if recording:
        monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
    kernel = Cubic.fresh()()
    got = program(lambda x: Executor(selector)(kernel, x), X)
    assert got == program(lambda x: kernel.run(x, cfg=1), X)
    assert selector.cache.size() == 1


def test_the_program_of_a_gradient_is_that_of_a_custom_vjp_by_hand():
    """Forward and backward of an own gradient, as JAX's own custom_vjp would compile them."""
    executor, kernel = executor_with(), Product.fresh()()

    @jax.custom_vjp
    def product(a, b):
        return kernel.run(a, b, cfg=2)

    product.defvjp(
        lambda a, b: kernel.fwd_with_residuals(a, b, cfg=2),
        lambda saved, dy: kernel.vjp(saved, None, dy, None, None, cfg=2),
    )

    def grads(f):
        return jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))

    assert program(grads(lambda a, b: executor(kernel, a, b)), X, X + 1) == program(grads(product), X, X + 1)


def test_the_program_of_a_batch_is_that_of_run_by_hand():
    """Under vmap."""
    executor, kernel = Executor(Asked(2)), Blocked.fresh()()
    rows = jnp.stack([X, X + 1])
    got = program(jax.vmap(lambda x: executor(kernel, x)), rows)
    assert got == program(jax.vmap(lambda x: kernel.run(x, cfg=2)), rows)


def test_the_program_of_a_sharded_call_is_that_of_shard_map_by_hand():
    """With `method="shard_map"`."""
    executor, kernel = Executor(Asked(2)), Cubic.fresh()()
    specs = {"mesh": mesh_of(2), "in_specs": (P("i"),), "out_specs": P("i"), "check_vma": False}
    got = program(lambda x: executor(kernel, x, method="shard_map", **specs), X)
    assert got == program(jax.shard_map(lambda x: kernel.run(x, cfg=2), **specs), X)


def test_the_program_of_several_calls():
    """Three kernels in one function, two of them alike."""
    executor, one, other = Executor(Asked(2)), Blocked.fresh()(), OwnCubic.fresh()()
    got = program(lambda x: executor(one, executor(other, executor(other, x))), X)
    assert got == program(lambda x: one.run(other.run(other.run(x, cfg=2), cfg=2), cfg=2), X)


def test_a_trace_with_heuristics_alone():
    """Nothing is measured, and the program is the same."""
    executor, kernel = executor_with(policy=AutotunePolicy(allow_autotune=False)), Blocked.fresh()()
    assert program(lambda x: executor(kernel, x), X) == program(lambda x: kernel.run(x, cfg=2), X)
