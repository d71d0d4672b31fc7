"""Sharded calls: `method="shard_map"`, calls inside a shard_map, arrays that lie on several devices."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Cubic, OwnCubic, Picking, Times, close, executor_with, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner

X = jnp.arange(8.0).reshape(4, 2) / 4


def sharded(mesh=None, **changes):
    """The keywords of a sharded call, split over four devices."""
    return {
        "method": "shard_map",
        "mesh": mesh or mesh_of(4),
        "in_specs": (P("i"),),
        "out_specs": P("i"),
        **changes,
    }


class Local(Counting):
    """Adds the sum of the local part, so that the result shows how the array was split."""

    op_id = "local"

    def run(self, x, *, cfg):
        self.log.append(tuple(x.shape))
        return x + x.sum()


def locally(parts):
    """The same by hand, for so many parts."""
    return jnp.concatenate([part + part.sum() for part in jnp.split(X, parts)])


@pytest.mark.thinned
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_kernel_without_a_wrapper_runs_in_a_plain_shard_map(parts, check_vma, wrap):
    """Each device runs `run` on its part."""
    executor, kernel = executor_with(), Local.fresh()()
    keywords = sharded(mesh_of(parts), check_vma=check_vma)
    close(wrap(lambda x: executor(kernel, x, **keywords))(X), locally(parts))
    assert set(kernel.log) == {(4 // parts, 2)}


def test_specs_may_be_one_for_all_arguments():
    """A single spec stands for every argument, as in `jax.shard_map`."""
    executor, kernel = executor_with(), Local.fresh()()
    close(executor(kernel, X, **sharded(in_specs=P("i"))), locally(4))


def test_two_mesh_axes():
    """Rows over one axis, columns over the other."""
    executor, kernel = executor_with(), Local.fresh()()
    out = executor(kernel, X, **sharded(mesh_of(2, 2), in_specs=(P("i", "j"),), out_specs=P("i", "j")))
    expected = np.block([[b + b.sum() for b in np.split(r, 2, axis=1)] for r in np.split(np.asarray(X), 2)])
    close(out, expected)


class Weighted(Counting):
    """A replicated weight beside a sharded array; gradients of both."""

    op_id = "weighted"

    def run(self, x, w, *, cfg):
        return x * w


class OwnWeighted(Weighted):
    """The same with a gradient of its own."""

    op_id = "own_weighted"

    def fwd_with_residuals(self, x, w, *, cfg):
        return x * w, (x, w)

    def vjp(self, residuals, y, dy, x, w, *, cfg):
        rx, rw = residuals
        return dy * rw, (dy * rx).sum(0)


W = jnp.array([2.0, -1.0])


@pytest.mark.thinned
@pytest.mark.parametrize("kernel", [Weighted, OwnWeighted], ids=["plain", "own gradient"])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_gradients_of_a_sharded_call(kernel, check_vma, wrap):
    """Gradients of sharded and of replicated arguments are those of the whole."""
    executor, fresh = executor_with(), kernel.fresh()()
    keywords = sharded(in_specs=(P("i"), P()), check_vma=check_vma)
    got = jax.grad(wrap(lambda x, w: (executor(fresh, x, w, **keywords) ** 2).sum()), (0, 1))(X, W)
    close(got, jax.grad(lambda x, w: ((x * w) ** 2).sum(), (0, 1))(X, W))


@pytest.mark.parametrize("kernel", [Weighted, OwnWeighted], ids=["plain", "own gradient"])
def test_keywords_of_positional_parameters_have_their_specs(kernel):
    """An array by keyword takes the spec of its place."""
    executor, fresh = executor_with(), kernel.fresh()()
    keywords = sharded(in_specs=(P("i"), P()))
    got = jax.grad(lambda x, w: executor(fresh, w=w, x=x, **keywords).sum(), (0, 1))(X, W)
    close(got, jax.grad(lambda x, w: (x * w).sum(), (0, 1))(X, W))


def test_static_keywords_reach_a_sharded_run():
    """They have no spec and are the same everywhere."""

    class Powered(Counting):
        op_id = "powered"

        def run(self, x, *, n, cfg):
            return x**n

    close(executor_with()(Powered(), X, n=3, **sharded()), X**3)


class Wrapped(Local):
    """A wrapper of the kernel's own, which records what it was given."""

    op_id = "wrapped"
    given: list

    def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma, **kwargs):
        self.given.append((cfg, mesh, in_specs, out_specs, check_vma, kwargs))
        run = jax.shard_map(
            lambda part: self.run(part, cfg=cfg),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
        return run, (x + 1,)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_kernel_s_own_wrapper_of_two_values(wrap):
    """`(fn, args)`: the function is called with those arguments."""
    executor, kernel = executor_with(), Wrapped.fresh(given=[])()
    out = wrap(lambda x: executor(kernel, x, **sharded(), scale=3))(X)
    close(out, locally(4) + 1 + 2)
    keywords = sharded()
    expected = (2, keywords["mesh"], keywords["in_specs"], keywords["out_specs"], False, {"scale": 3})
    assert kernel.given == [expected]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_kernel_s_own_wrapper_of_three_values(wrap):
    """`(fn, args, callback)`: the callback has the outputs and the cfg, by keyword."""

    class Called(Wrapped.fresh(given=[])):
        op_id = "called"

        def create_shard_map_wrapper(self, *args, **kwargs):
            return *super().create_shard_map_wrapper(*args, **kwargs), lambda outs, *, cfg: {"outs": outs * cfg}

    out = wrap(lambda x: executor_with()(Called(), x, **sharded()))(X)
    close(out, {"outs": (locally(4) + 3) * 2})


def test_gradients_through_a_kernel_s_own_wrapper():
    """They are those of what it computes."""
    executor, kernel = executor_with(), Wrapped.fresh(given=[])()
    got = jax.grad(lambda x: (executor(kernel, x, **sharded()) ** 2).sum())(X)
    close(got, jax.grad(lambda x: sum(((p + 1 + (p + 1).sum()) ** 2).sum() for p in jnp.split(x, 4)))(X))


def test_an_own_gradient_with_a_wrapper_of_its_own():
    """A `run` that JAX can't differentiate has its own gradient in a sharded call too."""

    class Loop(Counting):
        op_id = "loop"

        def run(self, x, *, cfg):
            return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]

        def fwd_with_residuals(self, x, *, cfg):
            return self.run(x, cfg=cfg), ()

        def vjp(self, residuals, y, dy, x, *, cfg):
            return (dy * 4,)

        def create_shard_map_wrapper(self, x, *, cfg, mesh, in_specs, out_specs, check_vma):
            specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
            return jax.shard_map(lambda part: self.run(part, cfg=cfg), **specs), (x,)

    executor = executor_with()
    close(jax.grad(lambda x: executor(Loop(), x, **sharded()).sum())(X), jnp.full_like(X, 4.0))


@pytest.mark.parametrize("made", [None, (1,), (1, 2, 3, 4)], ids=str)
def test_a_wrapper_that_returns_something_else_is_named(made):
    """Two or three values, or a clear error."""

    class Odd(Local.fresh()):
        op_id = "odd"

        def create_shard_map_wrapper(self, *args, **kwargs):
            return made

    with pytest.raises(TypeError, match=r"create_shard_map_wrapper of kernel odd@v0"):
        executor_with()(Odd(), X, **sharded())


@pytest.mark.parametrize("tuner", [None, Picking()], ids=["untuned", "tuned"])
@pytest.mark.parametrize("name", ["mesh", "in_specs", "out_specs"])
def test_a_missing_part_is_named(name, tuner):
    """Without mesh or specs: an error that names the kernel and what is missing."""
    with pytest.raises((ValueError, TypeError), match=rf"(?s)local@v0.*{name}"):
        executor_with(tuner)(Local.fresh()(), X, **{**sharded(), name: None})


def test_all_missing_parts_are_named_at_once():
    """The message lists them all."""
    with pytest.raises((ValueError, TypeError), match=r"mesh, in_specs, out_specs"):
        executor_with()(Local.fresh()(), X, method="shard_map")


def test_a_sharded_call_is_chosen_by_its_global_shapes_and_specs():
    """With `method=` the invocation holds the whole arrays, the mesh and the specs, and another mesh is another key."""
    chooser, kernel = Asked(2), Local.fresh()()
    executor = Executor(chooser)
    executor(kernel, X, **sharded())
    executor(kernel, X, **sharded(mesh_of(2)))
    executor(kernel, X)
    assert [question.shapes for question in chooser.questions] == [((4, 2),)] * 3
    assert len({question.call_key for question in chooser.questions}) == 3


def test_a_sharded_call_is_really_measured_on_its_mesh():
    """A real tuning runs the whole sharded call, collectives included."""

    class Summed(Counting):
        op_id = "summed"

        def run(self, x, *, cfg):
            return x + jax.lax.psum(x.sum(), "i")

    for around in (lambda f: f, jax.jit):
        selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
        executor = Executor(selector)
        close(around(lambda x: executor(Summed(), x, **sharded()))(X), X + X.sum())  # noqa: B023
        assert selector.cache.size() == 1


class Collective(Counting):
    """A kernel that talks to the other shards of the axis around it."""

    op_id = "collective"

    def run(self, x, *, cfg):
        self.log.append(tuple(x.shape))
        return x + jax.lax.psum(x, "i")


def in_shard_map(f, mesh=None):
    return jax.shard_map(f, mesh=mesh or mesh_of(4), in_specs=P("i"), out_specs=P("i"))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_inside_shard_map_local_shapes_are_chosen_for_and_measured(wrap):
    """The key is that of one shard's shapes, and a real tuning runs the kernel with its collectives, once."""
    events = []
    selector = ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(0, 1), on_event=lambda event, **data: events.append((event, data))
    )
    executor, kernel = Executor(selector), Collective.fresh()()
    call = wrap(in_shard_map(lambda x: executor(kernel, x)))
    close(call(X), X + X.sum(0))
    close(call(X), X + X.sum(0))
    assert [event for event, _ in events if event == "autotune_start"] == ["autotune_start"]
    assert set(kernel.log) == {(1, 2)}
    [finished] = [data for event, data in events if event == "autotune_finish"]
    assert all(trial.status == "ok" for trial in finished["record"].trials)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("kernel", [Cubic, OwnCubic], ids=["plain", "own gradient"])
def test_inside_shard_map_the_chooser_sees_local_shapes(kernel, wrap):
    """A shard of a four-row array over four devices has one row."""
    chooser, fresh = Asked(2), kernel.fresh()()
    executor = Executor(chooser)
    close(wrap(in_shard_map(lambda x: executor(fresh, x)))(X), X * X * X * 0.5 + X)
    assert {question.shapes for question in chooser.questions} == {((1, 2),)}
    assert {question.method for question in chooser.questions} == {None}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_own_gradients_inside_shard_map(wrap, check_vma):
    """Arguments that vary over the mesh and ones that don't have right gradients, under either check."""
    executor, kernel = executor_with(), OwnWeighted.fresh()()
    call = jax.shard_map(
        lambda x, w: executor(kernel, x, w),
        mesh=mesh_of(4),
        in_specs=(P("i"), P()),
        out_specs=P("i"),
        check_vma=check_vma,
    )
    got = jax.grad(wrap(lambda x, w: (call(x, w) ** 2).sum()), (0, 1))(X, W)
    close(got, jax.grad(lambda x, w: ((x * w) ** 2).sum(), (0, 1))(X, W))


def test_a_constant_inside_shard_map():
    """A kernel call on an array from outside runs inside an eager shard_map."""
    executor, kernel = executor_with(), Times.fresh()()
    close(in_shard_map(lambda x: x + executor(kernel, W))(X), X + W * 2)


def test_an_array_sharded_over_devices_runs_where_it_lies():
    """An eager call on a sharded array keeps its sharding, and is tuned on it."""
    tuner, kernel = Picking(), Times.fresh()()
    executor = executor_with(tuner)
    x = jax.device_put(X, NamedSharding(mesh_of(4), P("i")))
    for _ in range(2):
        out = executor(kernel, x)
        close(out, X * 5)
        assert out.sharding.is_equivalent_to(x.sharding, 2)
    assert tuner.shapes == [[(4, 2)]]


def test_a_traced_call_that_jax_shards_by_itself_is_not_tuned_and_says_so_once():
    """Stores, then heuristics, and one warning that names shard_map."""
    tuner, kernel = Picking(), Times.fresh()()
    executor = executor_with(tuner)
    x = jax.device_put(X, NamedSharding(mesh_of(4), P("i")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(jax.jit(lambda y: executor(kernel, y))(x), X * 2)
        close(jax.jit(lambda y: executor(kernel, y) + 1)(x), X * 2 + 1)
    assert tuner.calls == 0
    messages = [str(warning.message) for warning in caught]
    assert len([message for message in messages if "shard_map" in message]) == 1


def test_a_traced_call_that_jax_shards_by_itself_uses_what_is_in_the_cache():
    """Not tuned does not mean not looked up."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    x = jax.device_put(X, NamedSharding(mesh_of(4), P("i")))
    asked = Asked()
    jax.jit(lambda y: Executor(asked)(kernel, y))(x)
    from ejkernel.ops import device_fingerprint

    executor.chooser.cache.put(device_fingerprint(), "times@v0", asked.last.call_key, 7)
    close(jax.jit(lambda y: executor(kernel, y))(x), X * 7)


def test_explicitly_sharded_arrays():
    """Arrays whose type shows their sharding work eager and jitted, with gradients."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    executor, kernel = executor_with(), OwnCubic.fresh()()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("i"))
        for around in (lambda f: f, jax.jit):
            close(around(lambda y: executor(kernel, y))(x), X**3 * 0.5 + X)
            close(around(jax.grad(lambda y: executor(kernel, y).sum()))(x), 1.5 * X * X + 1)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_an_eager_call_of_plain_arrays_is_tuned_under_set_mesh(kind):
    """A mesh around changes nothing for an array on one device that is not sharded."""
    tuner, kernel = Picking(), Times.fresh()()
    executor = executor_with(tuner)
    with jax.set_mesh(jax.make_mesh((4,), ("i",), axis_types=(kind,))):
        close(executor(kernel, X), X * 5)
    assert tuner.calls == 1


def test_a_sharded_call_inside_jit_under_set_mesh():
    """`method="shard_map"` in a jitted step with a mesh in force."""
    mesh = mesh_of(4)
    executor, kernel = executor_with(), Local.fresh()()
    with jax.set_mesh(mesh):
        close(jax.jit(lambda x: executor(kernel, x, **sharded(mesh)))(X), locally(4))


def test_vmap_around_a_sharded_call():
    """A batch of sharded calls."""
    executor, kernel = executor_with(), Local.fresh()()
    batch = jnp.stack([X, X + 1])
    got = jax.vmap(lambda x: executor(kernel, x, **sharded()))(batch)
    close(got, jnp.stack([jnp.concatenate([p + p.sum() for p in jnp.split(x, 4)]) for x in batch]))


def test_a_sharded_call_with_a_real_tuner_and_an_own_gradient():
    """Forward and backward of a sharded call are measured and right."""
    from ejkernel.ops import AutotunePolicy

    selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(validate_backward=True), Tuner(0, 1))
    executor, kernel = Executor(selector), OwnWeighted.fresh()()
    keywords = sharded(in_specs=(P("i"), P()))
    got = jax.grad(lambda x, w: executor(kernel, x, w, **keywords).sum(), (0, 1))(X, W)
    close(got, jax.grad(lambda x, w: (x * w).sum(), (0, 1))(X, W))
    assert selector.cache.size() == 1
