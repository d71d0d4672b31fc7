"""What a call is tuned for: what the program runs of it, unless the options say otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fakes import TableTuner
from fakes_execution import Cubic, OwnCubic, executor_with, mesh_of, selector_with
from fakes_programs import QUIET, X, timed
from jax.sharding import PartitionSpec as P
from recorded_kernels import Plain

from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
    forward_autotune_only,
)

BOTH = "forward+backward"


def scanned(call, x):
    return jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0]


def sharded(call, x):
    return jax.shard_map(call, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))(x)


DIFFERENTIATED = {
    "plain": lambda call, x: call(x),
    "scan": scanned,
    "checkpoint": lambda call, x: jax.checkpoint(call)(x),
    "checkpoint in a scan": lambda call, x: scanned(jax.checkpoint(call), x),
    "jit": lambda call, x: jax.jit(call)(x),
    "jit in a scan": lambda call, x: scanned(jax.jit(call), x),
    "vmap": lambda call, x: jax.vmap(call)(x[None]),
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, call, lambda y: y, x),
    "shard_map": sharded,
}
# A call whose result a program uses, and whose gradient it does not.
NOT_DIFFERENTIATED = {
    "stop_gradient behind": lambda call, x: x * jax.lax.stop_gradient(call(x)),
    "stop_gradient before": lambda call, x: x * call(jax.lax.stop_gradient(x)),
    "a constant": lambda call, x: x * call(X),
    "stop_gradient in a checkpoint": lambda call, x: jax.checkpoint(
        lambda y: jnp.sin(y) * call(jax.lax.stop_gradient(y))
    )(x),
}


def gradient(build, call):
    """The gradient of a program of one call."""
    return jax.grad(lambda x: build(call, x).sum())


def objectives(result):
    """What each entry was tuned for, by operation."""
    return {entry.op_id_v.partition("@")[0]: entry.record.objective for entry in result.entries}


def tuned_for(fn, **options):
    """What the only call of a program is tuned for."""
    (found,) = objectives(autotune(fn, X, tuning=AutotuneOptions(progress=False, **options))).values()
    return found


def called(executor, kind=Cubic):
    kernel = kind.fresh()()
    return lambda x: executor(kernel, x)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [Cubic, OwnCubic])
@pytest.mark.parametrize("build", DIFFERENTIATED)
def test_a_call_under_a_gradient_is_tuned_forward_and_backward(build, kind):
    """Without being told, whatever is around it, with a gradient of its own or JAX's."""
    assert tuned_for(gradient(DIFFERENTIATED[build], called(timed(), kind))) == BOTH


@pytest.mark.parametrize("kind", [Cubic, OwnCubic])
@pytest.mark.parametrize("build", DIFFERENTIATED)
def test_a_call_without_a_gradient_is_tuned_forward(build, kind):
    """A backward pass that never runs says nothing about the program."""
    call = called(timed(), kind)
    assert tuned_for(lambda x: DIFFERENTIATED[build](call, x)) == "forward"


@pytest.mark.parametrize("kind", [Cubic, OwnCubic])
@pytest.mark.parametrize("build", NOT_DIFFERENTIATED)
def test_a_call_that_the_gradient_does_not_reach_is_tuned_forward(build, kind):
    """Although the program around it is differentiated."""
    assert tuned_for(gradient(NOT_DIFFERENTIATED[build], called(timed(), kind))) == "forward"


def test_a_call_in_forward_mode_is_tuned_forward():
    """A tangent is no backward pass."""
    call = called(timed())
    assert tuned_for(lambda x: jax.jvp(call, (x,), (x,))) == "forward"


def test_a_call_that_is_found_twice_is_tuned_for_the_most():
    """Once forward and once under a gradient, in either order."""
    for first in (True, False):
        call = called(timed())

        def fn(x, call=call, first=first):
            plain, both = (lambda: call(x)), (lambda: gradient(DIFFERENTIATED["plain"], call)(x))
            return plain() + both() if first else both() + plain()

        assert tuned_for(fn) == BOTH


def test_each_call_is_tuned_for_its_own():
    """One of two operations is differentiated."""
    executor = timed()
    one, other = Cubic.fresh(op_id="one")(), Cubic.fresh(op_id="other")()
    result = autotune(
        jax.grad(lambda x: (executor(one, x) * jax.lax.stop_gradient(executor(other, x))).sum()), X, tuning=QUIET
    )
    assert objectives(result) == {"one": BOTH, "other": "forward"}


@pytest.mark.parametrize("objective", ["forward", BOTH])
@pytest.mark.parametrize("differentiated", [False, True])
def test_the_options_may_say_what_is_tuned(objective, differentiated):
    """Whatever the program runs."""
    call = called(timed())
    fn = gradient(DIFFERENTIATED["plain"], call) if differentiated else call
    assert tuned_for(fn, objective=objective) == objective


def test_a_policy_that_asks_for_both_is_heard():
    """A call that is not differentiated here may be elsewhere; the options stand above the policy."""
    for objective, expected in (("auto", BOTH), (BOTH, BOTH), ("forward", "forward")):
        call = called(timed(policy=AutotunePolicy(validate_backward=True)))
        assert tuned_for(call, objective=objective) == expected


def test_a_block_that_asks_for_forward_alone_is_heard_under_a_gradient():
    """The program itself says it."""
    call = called(timed())

    def fn(x):
        with forward_autotune_only():
            return gradient(DIFFERENTIATED["plain"], call)(x)

    assert tuned_for(fn) == "forward"


@pytest.mark.parametrize("objective", ["auto", "forward", BOTH])
def test_a_selector_that_is_given_tunes_for_the_same(objective):
    """The call's own selector, and another one in its place."""
    other = timed().chooser
    fn = gradient(DIFFERENTIATED["plain"], called(timed()))
    expected = "forward" if objective == "forward" else BOTH
    assert tuned_for(fn, objective=objective, selector=other) == expected
    assert [entry.objective for _, entry in other.cache.entries()] == [expected]


def test_an_entry_for_less_is_tuned_again_and_one_for_more_serves(tmp_path):
    """Forward first, then under a gradient, then forward again."""
    store = PersistentCache("p", path=tmp_path / "p.json")
    executor = timed(persistent=store)
    call = called(executor)
    both = gradient(DIFFERENTIATED["plain"], call)
    found = [autotune(fn, X, tuning=QUIET).entries[0] for fn in (call, both, both, call)]
    assert [entry.source for entry in found] == ["autotune", "autotune", "memory", "memory"]
    assert [entry.record.objective for entry in found] == ["forward", BOTH, BOTH, BOTH]
    assert len(executor.chooser.tuner.tuned) == 2


def test_a_program_takes_what_was_tuned_for_more():
    """Running it afterwards tunes nothing, forward or backward."""
    executor = timed()
    call = called(executor)
    step = jax.jit(gradient(DIFFERENTIATED["scan"], call))
    autotune(step, X, tuning=QUIET)
    step(X)
    call(X)
    assert len(executor.chooser.tuner.tuned) == 1


def test_a_tuner_of_the_users_own_is_told():
    """By the documented attribute of the functions that it gets."""

    class Told(TableTuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            self.objectives.append(make_fn(2)._ejk_validate_backward)
            return next(iter(candidates))

    tuner = Told()
    call = called(executor_with(tuner))
    autotune(call, X, tuning=QUIET)
    autotune(gradient(DIFFERENTIATED["plain"], call), X, tuning=QUIET)
    assert tuner.objectives == [False, True]


def test_the_tuner_of_the_package_times_both():
    """Forward and backward, by a real clock."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1)))
    (entry,) = autotune(gradient(DIFFERENTIATED["scan"], called(executor, OwnCubic)), X, tuning=QUIET).entries
    assert entry.record.objective == BOTH
    assert [trial.status for trial in entry.record.trials] == ["ok"] * 3


# Calls that were seen elsewhere.


@pytest.mark.parametrize("objective", ["auto", "forward", BOTH])
@pytest.mark.parametrize("recorded", ["forward", BOTH])
def test_a_recording_is_tuned_for_what_it_says(recorded, objective, tmp_path, monkeypatch):
    """A recording knows what its selector asked for; the options stand above it."""
    path = tmp_path / "calls.json"
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(path))
    policy = AutotunePolicy(allow_autotune=False, validate_backward=recorded == BOTH)
    executor_with(policy=policy)(Plain(), X)
    options = AutotuneOptions(selector=timed().chooser, objective=objective, progress=False)
    found = objectives(autotune(path, tuning=options))
    assert found == {"recorded.plain": recorded if objective == "auto" else objective}


@pytest.mark.parametrize("objective", ["auto", BOTH])
def test_the_registry_and_lowered_programs_are_tuned_for_what_is_asked(objective, monkeypatch):
    """They do not show what is differentiated: forward, or what the options say."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = executor_with()
    lowered = jax.jit(lambda x: executor(Plain(), x)).lower(X)
    expected = {"recorded.plain": "forward" if objective == "auto" else BOTH}
    options = AutotuneOptions(selector=timed().chooser, objective=objective, progress=False)
    assert objectives(autotune(lowered, tuning=options)) == expected
    assert objectives(autotune_recorded(selector_with(Tuner(iters=1)), tuning=options)) == expected
