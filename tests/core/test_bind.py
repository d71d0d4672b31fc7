"""A kernel with its cfg as a plain function: variants and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Invocation, Kernel
from ejkernel.ops.core.bind import bind

X = jnp.arange(8.0)


class Scale(Kernel):
    """y = cfg * x."""

    op_id = "scale"

    def run(self, x, *, cfg, shift=0.0):
        return cfg * x + shift

    def heuristic_cfg(self, inv):
        return 1


@pytest.fixture
def mesh():
    """Four devices in a row."""
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


def sharded(kernel, cfg, *args, mesh, **kwargs):
    """The kernel's function for a call that is sharded over the axis x."""
    fields = {"method": "shard_map", "mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    return bind(kernel, cfg, Invocation(kernel.op_id, args, kwargs, **fields), "cpu")


def test_the_cfg_is_bound():
    """The function runs the kernel with that cfg."""
    assert np.allclose(bind(Scale(), 3, Invocation("scale", (X,), {}), "cpu")(X), 3 * X)


def test_keywords_reach_the_kernel():
    """Keywords of the call are passed on."""
    assert np.allclose(bind(Scale(), 3, Invocation("scale", (X,), {}), "cpu")(X, shift=1.0), 3 * X + 1)


def test_the_variant_of_the_platform_runs():
    """`run_gpu` runs on a GPU and nowhere else."""

    class Own(Scale):
        def run_gpu(self, x, *, cfg):
            return -x

    inv = Invocation("scale", (X,), {})
    assert np.allclose(bind(Own(), 3, inv, "gpu")(X), -X)
    assert np.allclose(bind(Own(), 3, inv, "cpu")(X), 3 * X)


def test_a_kernel_without_a_wrapper_runs_under_plain_shard_map(mesh):
    """Its `run` sees the local part, and the parts are put together by the specs."""
    seen = []

    class Own(Scale):
        def run(self, x, *, cfg):
            seen.append(x.shape)
            return cfg * x

    assert np.allclose(sharded(Own(), 3, X, mesh=mesh)(X), 3 * X)
    assert seen == [(2,)]


def test_keywords_reach_a_sharded_kernel(mesh):
    """Static keywords are passed on, and keywords of positional parameters take their places for the specs."""

    class Own(Scale):
        def run(self, x, *, cfg, shift=0.0):
            return cfg * x + shift

    assert np.allclose(sharded(Own(), 3, X, mesh=mesh)(x=X, shift=1.0), 3 * X + 1)


def test_gradients_agree_under_shard_map(mesh):
    """The gradient of a sharded call is that of the plain one."""
    fn = sharded(Scale(), 3, X, mesh=mesh)
    assert np.allclose(jax.jit(jax.grad(lambda x: jnp.sum(fn(x) ** 2)))(X), 18 * X)


def test_an_own_gradient_is_used_under_shard_map(mesh):
    """The sharded level's own gradient is used for a sharded call."""

    class Own(Scale):
        def fwd_with_residuals_shard_map(self, x, *, cfg):
            return cfg * x, None

        def vjp_shard_map(self, residuals, y, dy, x, *, cfg):
            return (100 * dy,)

    fn = sharded(Own(), 3, X, mesh=mesh)
    assert np.allclose(jax.grad(lambda x: jnp.sum(fn(x)))(X), 100.0)


def test_an_own_wrapper_says_how_to_run_sharded(mesh):
    """The wrapper gets the cfg, mesh and specs, and its function runs on its arguments."""
    seen = {}

    class Own(Scale):
        def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma, shift=0.0):
            seen.update(cfg=cfg, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, shift=shift)
            return (lambda a: a + 1), (10 * x,)

    assert np.allclose(sharded(Own(), 3, X, mesh=mesh)(X, shift=2.0), 10 * X + 1)
    assert seen == {
        "cfg": 3,
        "mesh": mesh,
        "in_specs": P("x"),
        "out_specs": P("x"),
        "check_vma": False,
        "shift": 2.0,
    }


def test_the_callback_of_a_wrapper_gets_outputs_and_cfg(mesh):
    """A third part of the wrapper is called with the outputs and `cfg=`, and its result is the call's."""

    class Own(Scale):
        def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma):
            return (lambda a: 2 * a), (x,), (lambda outs, cfg: outs + cfg)

    assert np.allclose(sharded(Own(), 3, X, mesh=mesh)(X), 2 * X + 3)


@pytest.mark.parametrize("made", [None, (1,), (1, 2, 3, 4), "fn"])
def test_a_wrapper_that_returns_something_else_is_named(mesh, made):
    """Anything but two or three parts is a TypeError that names the kernel."""

    class Own(Scale):
        def create_shard_map_wrapper(self, x, **kwargs):
            return made

    with pytest.raises(TypeError, match=r"create_shard_map_wrapper.*scale@v0"):
        sharded(Own(), 3, X, mesh=mesh)(X)


@pytest.mark.parametrize("missing", ["mesh", "in_specs", "out_specs"])
def test_a_sharded_call_without_what_it_needs_is_named(mesh, missing):
    """What is missing for shard_map is named with the kernel."""
    fields = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), missing: None}
    with pytest.raises(ValueError, match=rf"scale@v0.*{missing}"):
        bind(Scale(), 3, Invocation("scale", (X,), {}, method="shard_map", **fields), "cpu")(X)


def test_an_unknown_method_is_refused():
    """An unknown method is an error that names the kernel and the method."""
    with pytest.raises(TypeError, match=r"'magic'.*scale@v0"):
        bind(Scale(), 3, Invocation("scale", (X,), {}, method="magic"), "cpu")(X)
