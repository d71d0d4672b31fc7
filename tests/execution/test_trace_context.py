"""What may be around a call: devices, contexts, kinds of arguments, threads, other kernels.

Covers `core/trace_context.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import (
    Asked,
    Counting,
    Cubic,
    OwnCubic,
    Picking,
    Product,
    Running,
    Times,
    close,
    executor_with,
    key_for,
    selector_with,
)

import ejkernel.ops.core.device
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner, device_fingerprint, target_device

X = jnp.arange(1.0, 5.0)


@pytest.fixture
def kernel():
    return Times.fresh()()


# Kinds of arguments.

INPUTS = {
    "array": X,
    "numpy array": np.arange(1, 5, dtype=np.float32),
    "numpy array of 64 bits": np.arange(1.0, 5.0),
    "numpy scalar": np.float32(3),
    "array scalar": jnp.float32(3),
    "empty array": jnp.zeros((0, 3)),
    "integers": np.arange(4),
    "half": X.astype(jnp.bfloat16),
    "booleans": np.array([True, False]),
    "complex": X * 1j,
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_arrays_of_every_kind(name, wrap, kernel):
    """The result is that of the bare function: value, dtype and shape."""
    x = INPUTS[name]
    got = wrap(lambda y: executor_with()(kernel, y))(x)
    expected = jax.jit(lambda y: y * 2)(x)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(got, expected)


def test_a_numpy_array_and_an_array_are_one_call(kernel):
    """The same key and one tuning."""
    tuner = Picking()
    executor = executor_with(tuner)
    executor(kernel, X)
    executor(kernel, np.asarray(X))
    assert tuner.calls == 1


def test_python_scalars_are_static(kernel):
    """A Python number reaches `run` as it is."""

    class Adds(Counting):
        op_id = "adds"

        def run(self, x, n, *, cfg):
            assert type(n) is int
            return x + n

    close(executor_with()(Adds(), X, 3), X + 3)
    close(jax.jit(lambda x: executor_with()(Adds(), x, 3))(X), X + 3)


def test_trees_as_arguments():
    """Dicts, lists, tuples, None and static values inside them."""

    class Tree(Counting):
        op_id = "tree"

        def run(self, params, *, extra, cfg):
            return params["w"] * params["n"] + extra[0] + (0 if params["b"] is None else 1)

    executor = executor_with()
    for around in (lambda f: f, jax.jit):
        got = around(lambda w, e: executor(Tree(), {"w": w, "n": 3, "b": None}, extra=(e, "name")))(X, X)
        close(got, X * 3 + X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_typed_keys(wrap):
    """Typed PRNG keys, one and many, of either implementation."""

    class Noise(Counting):
        op_id = "noise"

        def run(self, key, x, *, cfg):
            return x + jax.random.normal(key, x.shape)

    executor = executor_with(Picking())
    for impl in ("threefry2x32", "rbg"):
        key = jax.random.key(3, impl=impl)
        expected = X + jax.random.normal(key, X.shape)
        close(wrap(lambda k, x: executor(Noise(), k, x))(key, X), expected)
        keys = jax.random.split(key, 2)
        got = wrap(jax.vmap(lambda k: executor(Noise(), k, X)))(keys)
        assert got.shape == (2, 4)


def test_a_real_tuning_with_a_typed_key():
    """Keys can be measured with."""

    class Noise(Counting):
        op_id = "tuned_noise"

        def run(self, key, x, *, cfg):
            return x + jax.random.normal(key, x.shape)

    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    executor = Executor(selector)
    key = jax.random.key(3)
    close(executor(Noise(), key, X), X + jax.random.normal(key, X.shape))
    close(jax.jit(lambda k: executor(Noise(), k, X))(key), X + jax.random.normal(key, X.shape))
    assert selector.cache.size() == 1


def test_eager_integers_are_measured_with_their_own_values():
    """Cold and behind a warm short way: the tuner sees the caller's integers."""

    class Take(Counting):
        op_id = "take"

        def run(self, x, index, *, cfg):
            return x[index]

    tuner = Picking()
    executor = executor_with(tuner)
    for index in (jnp.array([3, 1]), jnp.array([2, 0, 1])):
        close(executor(Take(), X, index), X[index])
    assert tuner.integers == [[[3, 1]], [[2, 0, 1]]]


def test_a_deleted_array_is_jax_s_error(kernel):
    """And the next call works."""
    executor = executor_with()
    gone = jnp.ones(4)
    gone.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        executor(kernel, gone)
    close(executor(kernel, X), X * 2)


def test_donated_arguments(kernel):
    """A user's jit may donate what it gives to a kernel."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(kernel, x), donate_argnums=0)
    x = jnp.arange(4.0)
    close(step(x), jnp.arange(4.0) * 2)
    assert x.is_deleted()


# Where a call is measured.


WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x[None])[1][0],
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > -1e6, f, jnp.zeros_like, x),
    "eval_shape": lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape) + f(x),
}


@pytest.mark.parametrize("around", WRAPS)
def test_a_call_is_measured_outside_the_trace(around):
    """Candidates really run, on arrays with values, while the caller is being traced."""
    ran = []

    class Notes(Counting):
        op_id = "notes"

        def run(self, x, *, cfg):
            jax.debug.callback(lambda y: ran.append(np.asarray(y).tolist()), x)
            return x * 2.0

    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    executor = Executor(selector)
    seen = []

    def step(x):
        out = executor(Notes(), x)
        jax.effects_barrier()
        seen.append(len(ran))
        return out

    with contextlib.suppress(NotImplementedError):
        # Effects inside a checkpoint or cond are not always supported by JAX itself; the measuring came before.
        WRAPS[around](step)(X)
    assert selector.cache.size() == 1
    # Three candidates ran at least once before the call itself could.
    assert seen[0] >= 3
    assert all(np.isfinite(values).all() for values in ran)


@pytest.mark.parametrize("around", ["eager", "jit", "grad", "scan", "checkpoint", "cond"])
def test_a_tuner_of_the_user_s_own_gets_no_tracers(around, kernel):
    """Measuring happens outside the trace: what it is given can be run."""
    tuner = Picking()
    executor = executor_with(tuner)
    WRAPS[around](lambda x: executor(kernel, x))(X)
    assert tuner.calls == 1
    assert tuner.traced == [False]


@pytest.mark.parametrize("around", WRAPS)
def test_a_tuner_of_the_user_s_own_may_run_the_candidates(around):
    """A simple tuner that calls them works from inside any trace, and leaves nothing in the program."""
    tuner, kernel = Running(), Cubic.fresh()()
    executor = executor_with(tuner)
    got = WRAPS[around](lambda x: executor(kernel, x))(X)
    close(got, WRAPS[around](lambda x: x * x * x * 0.5 + x)(X))
    assert tuner.calls == 1


def test_a_tuner_of_the_user_s_own_leaves_nothing_in_the_program(kernel):
    """The jaxpr of a step whose trace tuned holds one multiplication."""
    executor = executor_with(Running())
    jaxpr = jax.make_jaxpr(lambda x: executor(kernel, x))(X)
    assert [str(equation.primitive) for equation in jaxpr.jaxpr.eqns] == ["mul"]


# Devices.


def test_an_array_on_another_device_than_the_default(kernel):
    """The result lies where the argument does, cold and warm."""
    executor = executor_with(Picking())
    for device in (jax.devices()[2], jax.devices()[0], jax.devices()[2]):
        x = jax.device_put(X, device)
        out = executor(kernel, x)
        close(out, X * 5)
        assert out.devices() == {device}


def test_a_default_device_in_force(kernel):
    """Uncommitted arrays run on it."""
    executor = executor_with(Picking())
    for device in (jax.devices()[1], jax.devices()[3]):
        with jax.default_device(device):
            out = executor(kernel, jnp.ones(4))
            assert out.devices() == {device}


def test_committed_and_uncommitted_arrays_together():
    """The committed one says where."""
    executor, kernel = executor_with(Picking()), Product.fresh()()
    committed = jax.device_put(X, jax.devices()[1])
    for args in ((X, committed), (committed, X)):
        out = executor(kernel, *args)
        close(out, X * X)
        assert out.devices() == {jax.devices()[1]}


def test_arrays_committed_to_two_devices_are_jax_s_error(kernel):
    """As for the bare function; the executor works afterwards."""
    executor, product = executor_with(), Product.fresh()()
    one, other = (jax.device_put(X, d) for d in jax.devices()[:2])
    with pytest.raises(ValueError, match=r"(?i)device"):
        executor(product, one, other)
    close(executor(product, X, X), X * X)


class Pretending:
    """Gives some devices another fingerprint, as a process with two kinds of hardware would have."""

    def __init__(self, monkeypatch, *others):
        original = ejkernel.ops.core.device.device_kind
        kind = lambda dev=None: "other" if dev in others else original(dev)  # noqa: E731
        monkeypatch.setattr(ejkernel.ops.core.device, "device_kind", kind)


def test_two_kinds_of_device_in_one_process_have_keys_of_their_own(monkeypatch, kernel):
    """An eager call is chosen for its own array's device, cold and warm."""
    one, other = jax.devices()[:2]
    Pretending(monkeypatch, other)
    executor = executor_with()
    key = key_for(kernel, X)[2]
    executor.chooser.cache.put(device_fingerprint(one), "times@v0", key, 7)
    executor.chooser.cache.put(device_fingerprint(other), "times@v0", key, 8)
    assert device_fingerprint(one) != device_fingerprint(other)
    for _ in range(3):
        close(executor(kernel, jax.device_put(X, one)), X * 7)
        close(executor(kernel, jax.device_put(X, other)), X * 8)
        with jax.default_device(other):
            close(executor(kernel, jnp.arange(1.0, 5.0)), X * 8)
        close(executor(kernel, X), X * 7)


def test_a_trace_is_for_the_target_device(monkeypatch, kernel):
    """Inside `target_device` a traced call is looked up for that one, an eager one for its own."""
    other = jax.devices()[1]
    Pretending(monkeypatch, other)
    executor = executor_with()
    key = key_for(kernel, X)[2]
    executor.chooser.cache.put(device_fingerprint(other), "times@v0", key, 8)
    with target_device(other):
        lowered = jax.jit(lambda x: executor(kernel, x)).lower(X)
        close(executor(kernel, jax.device_put(X, jax.devices()[0])), X * 2)
    close(lowered.compile()(X), X * 8)
    close(jax.jit(lambda x: executor(kernel, x) + 0)(X), X * 2)


def test_a_jitted_function_keeps_the_first_device_s_config(monkeypatch, kernel):
    """A trace has no device of its own."""
    other = jax.devices()[1]
    Pretending(monkeypatch, other)
    executor = executor_with()
    key = key_for(kernel, X)[2]
    executor.chooser.cache.put(device_fingerprint(other), "times@v0", key, 8)
    step = jax.jit(lambda x: executor(kernel, x))
    close(step(X), X * 2)
    with target_device(other):
        close(step(X), X * 2)


def test_target_device_wants_a_device():
    """A name is not one."""
    with pytest.raises((TypeError, ValueError), match="device"), target_device("cpu"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an accelerator beside the CPU")
def test_two_platforms_in_one_process(kernel):
    """Arrays of two platforms run side by side, each with a cfg of its own."""
    tuner = Picking()
    executor = executor_with(tuner)
    devices = [jax.devices()[0], jax.devices("cpu")[0]]
    for device in devices:
        found = executor(kernel, jax.device_put(X, device))
        assert found.devices() == {device}
        close(found, np.asarray(X) * 5)

    assert sorted(key[0] for key in executor.chooser.cache.keys()) == sorted(map(device_fingerprint, devices))


# Contexts.


@pytest.mark.parametrize("kind", [Times, OwnCubic], ids=["plain", "own gradient"])
def test_disable_jit(kind):
    """Values and gradients without jit, cold and after a jitted call."""
    fresh, executor = kind.fresh()(), executor_with(Picking())
    function = {"times": lambda x: x * 5, "own_cubic": lambda x: x * x * x * 0.5 + x}[fresh.op_id]
    for _ in range(2):
        with jax.disable_jit():
            close(executor(fresh, X), function(X))
            close(jax.grad(lambda x: executor(fresh, x).sum())(X), jax.grad(lambda x: function(x).sum())(X))
            close(jax.vmap(lambda x: executor(fresh, x))(X[None]), function(X)[None])
        close(executor(fresh, X), function(X))


def test_ensure_compile_time_eval(kernel):
    """A kernel call on constants inside a trace has its value at once."""
    executor = executor_with(Picking())
    seen = []

    @jax.jit
    def step(x):
        with jax.ensure_compile_time_eval():
            table = executor(kernel, jnp.arange(4.0))
            seen.append(float(table.sum()))
        return x + table

    close(step(X), X + jnp.arange(4.0) * 5)
    assert seen == [30.0]


def test_a_constant_inside_jit(kernel):
    """A call whose arrays are constants of the trace, with other traced values around it."""
    executor = executor_with(Picking())
    constant = jnp.arange(4.0)
    close(jax.jit(lambda x: x + executor(kernel, constant))(X), X + constant * 5)
    close(executor(kernel, constant), constant * 5)
    close(jax.grad(lambda x: (x * executor(kernel, constant)).sum())(X), constant * 5)


def test_a_constant_beside_a_traced_argument():
    """Arrays from outside and tracers in one call."""
    executor, kernel = executor_with(), Product.fresh()()
    for around in (lambda f: f, jax.jit):
        close(around(jax.grad(lambda x: executor(kernel, x, X + 1).sum()))(X), X + 1)
        close(around(lambda x: executor(kernel, X + 1, x))(X), X * (X + 1))


def test_eval_shape(kernel):
    """Shapes in, shapes out, and the cfg is chosen."""
    chooser = Asked(2)
    out = jax.eval_shape(lambda x: Executor(chooser)(kernel, x), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert (out.shape, out.dtype) == ((4,), jnp.float32)
    assert chooser.count == 1


def test_make_jaxpr_holds_the_kernel_and_nothing_else(kernel):
    """No call, no callback, no copy of ours."""
    jaxpr = jax.make_jaxpr(lambda x: executor_with()(kernel, x))(X)
    assert [str(equation.primitive) for equation in jaxpr.jaxpr.eqns] == ["mul"]


@pytest.mark.parametrize("kind", [Times, OwnCubic], ids=["plain", "own gradient"])
def test_export(kind):
    """An exported program runs with its cfg, and its gradient too."""
    fresh, executor = kind.fresh()(), executor_with()
    exported = jax.export.export(jax.jit(lambda x: executor(fresh, x)))(X)
    close(exported.call(X), executor(fresh, X))
    close(jax.grad(lambda x: exported.call(x).sum())(X), jax.grad(lambda x: executor(fresh, x).sum())(X))


def test_export_with_symbolic_shapes(kernel):
    """Never measured: heuristics, with the reason."""
    tuner, events = Picking(), []
    executor = executor_with(tuner, on_event=lambda event, **data: events.append((event, data)))
    [n] = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: executor(kernel, x)))(jax.ShapeDtypeStruct((n,), jnp.float32))
    close(exported.call(X), X * 2)
    close(exported.call(X[:2]), X[:2] * 2)
    assert tuner.calls == 0
    assert [event for event, _ in events] == ["heuristics"]
    assert "symbolic" in events[0][1]["reason"]


def test_64_bits(kernel):
    """Inside `enable_x64` arrays of 64 bits keep them, have a key of their own, and 32 bits work as before."""
    chooser = Asked(2)
    executor = Executor(chooser)
    wide = np.arange(1.0, 5.0)
    for _ in range(2):
        assert executor(kernel, wide).dtype == jnp.float32
        with jax.enable_x64(True):
            out = executor(kernel, wide)
            assert out.dtype == jnp.float64
            np.testing.assert_array_equal(out, wide * 2)
            assert executor(kernel, X).dtype == jnp.float32
    assert len({question.call_key for question in chooser.questions}) == 2


def test_a_matmul_precision_in_force():
    """It is part of the key, and each setting has its own program."""

    class Matmul(Counting):
        op_id = "matmul"

        def run(self, a, b, *, cfg):
            self.log.append(jax.config.jax_default_matmul_precision)
            return a @ b

    chooser, fresh = Asked(2), Matmul.fresh()()
    executor = Executor(chooser)
    a = jnp.ones((2, 2))
    for _ in range(2):
        executor(fresh, a, a)
        with jax.default_matmul_precision("highest"):
            executor(fresh, a, a)
    assert fresh.log == [None, "highest"]
    assert len({question.call_key for question in chooser.questions}) == 2


def test_transfer_guards(kernel):
    """A call of device arrays moves nothing, and its tuning is not the caller's business."""
    executor = executor_with(Tuner(0, 1))
    with jax.transfer_guard("disallow"):
        out = executor(Cubic.fresh()(), X)
    close(out, X * X * X * 0.5 + X)


def test_leak_checking(kernel):
    """Nothing of a trace outlives it."""
    executor, own = executor_with(Picking()), OwnCubic.fresh()()
    with jax.checking_leaks():
        close(jax.jit(lambda x: executor(kernel, x))(X), X * 5)
        close(jax.jit(jax.grad(lambda x: executor(own, x).sum()))(X), 1.5 * X * X + 1)
        close(jax.jit(jax.vmap(lambda x: executor(own, x)))(X[None])[0], X * X * X * 0.5 + X)


def test_debug_nans(kernel):
    """A NaN of the kernel is JAX's error; measuring is not disturbed."""
    executor = executor_with(Tuner(0, 1))

    class Root(Counting):
        op_id = "root"

        def run(self, x, *, cfg):
            return jnp.sqrt(x)

    with jax.debug_nans(True):
        # Random inputs of the tuning are negative here and there.
        close(executor(Root(), X), jnp.sqrt(X))
        with pytest.raises(FloatingPointError):
            executor(Root(), -X)


# Threads and tasks.


def in_threads(count, function):
    """What each of some threads found, all let go at once."""
    barrier, found = threading.Barrier(count), []

    def run(i):
        barrier.wait()
        try:
            found.append(function(i))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [f for f in found if isinstance(f, BaseException)]
    if errors:
        raise errors[0]
    return found


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_ten_threads_one_tuning(wrap, kernel):
    """Ten first calls of one key: one tuning, ten right answers."""
    tuner = Picking()
    executor = executor_with(tuner)
    for out in in_threads(10, lambda i: wrap(lambda x: executor(kernel, x))(X)):
        close(out, X * 5)
    assert tuner.calls == 1


def test_threads_with_different_calls():
    """Shapes, static values and kernels of several threads do not mix."""

    class Powers(Counting):
        op_id = "powers"

        def run(self, x, *, n, cfg):
            return x**n

    executor = executor_with(Picking())

    def work(i):
        for _ in range(5):
            x = jnp.full(1 + i % 3, 2.0)
            close(executor(Powers(), x, n=1 + i), x ** (1 + i))
        return True

    assert all(in_threads(8, work))


def test_tasks(kernel):
    """Kernels called from tasks of one loop, also from a thread pool."""
    executor = executor_with(Picking())

    async def one(i):
        await asyncio.sleep(0)
        inside = executor(kernel, X + i)
        pooled = await asyncio.to_thread(executor, kernel, X + i)
        return inside, pooled

    async def everyone():
        return await asyncio.gather(*(one(i) for i in range(4)))

    for i, (inside, pooled) in enumerate(asyncio.run(everyone())):
        close(inside, (X + i) * 5)
        close(pooled, (X + i) * 5)


# Kernels inside kernels.


def nested(executor, inner):
    class Outer(Counting):
        op_id = "outer"

        def run(self, x, *, cfg):
            return executor(inner, x) + 1.0

    return Outer()


@pytest.mark.parametrize("around", WRAPS)
def test_a_kernel_inside_a_kernel(around):
    """Right values and gradients, both tuned once."""
    tuner, inner = Picking(), OwnCubic.fresh()()
    executor = executor_with(tuner)
    outer = nested(executor, inner)
    got = WRAPS[around](lambda x: executor(outer, x))(X)
    close(got, WRAPS[around](lambda x: x * x * x * 0.5 + x + 1.0)(X))
    assert tuner.calls == 2
    assert executor.chooser.cache.size() == 2


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_a_real_tuning_of_a_kernel_inside_a_kernel(wrap):
    """The inner one is tuned while the outer one's candidates are compiled."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    executor = Executor(selector)
    outer = nested(executor, Cubic.fresh()())
    close(wrap(lambda x: executor(outer, x))(X), X * X * X * 0.5 + X + 1)
    assert {op for _, op, _ in selector.cache.keys()} == {"outer@v0", "cubic@v0"}


def test_a_kernel_inside_a_kernel_with_a_tuner_that_runs_both(monkeypatch):
    """A tuning inside a tuning of the same thread does not wait for itself."""
    waits = []
    monkeypatch.setattr("ejkernel.ops.tuning.device_lock._WAIT_SECONDS", 2.0)
    import filelock

    original = filelock.FileLock.acquire

    def acquire(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except filelock.Timeout:
            waits.append(self.lock_file)
            raise

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    tuner = Running()
    executor = executor_with(tuner)
    outer = nested(executor, Cubic.fresh()())
    close(executor(outer, X), X * X * X * 0.5 + X + 1)
    assert tuner.calls == 2
    assert waits == []


# What can't be traced.


class Looks(Counting):
    """A `run` that needs values."""

    op_id = "looks"

    def run(self, x, *, cfg):
        self.log.append(cfg)
        return x * 2.0 if float(x.sum()) > 0 else x * -2.0


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = function()
    return out, [warning for warning in caught if "looks" in str(warning.message)]


def test_a_run_that_looks_at_values_runs_unjitted_after_one_warning():
    """Right results for every value and shape, and one warning that names the kernel, at the caller's line."""
    kernel, executor = Looks.fresh()(), executor_with()
    out, caught = warned(lambda: [executor(kernel, x) for x in (X, -X, X[:2], -X[:2], X)])
    close(out, [X * 2, X * 2, X[:2] * 2, X[:2] * 2, X * 2])
    [warning] = caught
    assert "looks@v0" in str(warning.message)
    assert warning.filename == __file__


def test_a_run_that_looks_at_values_can_be_tuned():
    """A real tuner times it as it is."""
    kernel, executor = Looks.fresh()(), executor_with(Tuner(0, 1))
    out, _ = warned(lambda: executor(kernel, X))
    close(out, X * 2)
    assert executor.chooser.cache.size() == 1


def test_a_run_that_looks_at_values_in_an_eager_gradient():
    """JAX differentiates it without jit, and so it is here, whether or not it was called before."""

    class Branches(Counting):
        op_id = "branches"

        def run(self, x, *, cfg):
            return x * 2.0 if x.sum() > 0 else x * -2.0

    for called_before in (False, True):
        kernel, executor = Branches.fresh()(), executor_with()
        if called_before:
            warned(lambda: executor(kernel, X))  # noqa: B023
        grad, _ = warned(lambda: jax.grad(lambda x: executor(kernel, x).sum())(X))  # noqa: B023
        close(grad, jnp.full(4, 2.0))


def test_a_run_that_looks_at_values_with_numpy():
    """Converting to numpy is looking at values too."""

    class Numpy(Counting):
        op_id = "looks_numpy"

        def run(self, x, *, cfg):
            return jnp.asarray(np.sort(np.asarray(x)))

    executor = executor_with()
    out, caught = warned(lambda: [executor(Numpy(), -X), executor(Numpy(), X)])
    close(out, [jnp.sort(-X), X])
    assert len(caught) == 1


def test_a_run_that_looks_at_values_under_jit_is_jax_s_error():
    """There are no values there: JAX says so, and names the tracer."""
    executor, kernel = executor_with(), Looks.fresh()()
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: executor(kernel, x))(X)


def test_a_prepare_that_looks_at_values():
    """The same for `prepare`: said once, then it works."""

    class Trims(Counting):
        op_id = "looks_trims"

        def prepare(self, x, n):
            return (x[: int(n)],), {}

        def run(self, x, *, cfg):
            return x * 2

    executor = executor_with()
    out, caught = warned(lambda: [executor(Trims(), X, jnp.int32(2)), executor(Trims(), X, jnp.int32(3))])
    close(out, [X[:2] * 2, X[:3] * 2])
    assert len(caught) == 1


def test_an_executor_starts_no_backend():
    """`import ejkernel.ops` and making an executor leave `jax.distributed.initialize` possible."""
    import subprocess
    import sys

    code = (
        "import ejkernel.ops as ops\n"
        "ops.Executor(ops.ConfigSelectorChain(ops.ConfigCache()))\n"
        "import jax._src.xla_bridge as bridge\n"
        "print(bridge.backends_are_initialized())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_two_selectors_do_not_share_what_they_know(kernel):
    """A put into one cache does not reach another executor."""
    one, other = Executor(selector_with()), Executor(selector_with())
    one.chooser.cache.put(*key_for(kernel, X), 7)
    close(one(kernel, X), X * 7)
    close(other(kernel, X), X * 2)
