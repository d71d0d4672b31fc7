"""Static floats that cost tunings: which are warned of, once, and what the warning says."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest
from fakes import Blocks, TableTuner, call_of

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, tunable

X = jnp.ones(8)


class Scaled(Kernel):
    """The argument times a number."""

    op_id = "static_floats.scaled"

    def run(self, x, scale, *, cfg, shift=0.0):
        return x * scale + shift

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return [Blocks(1), Blocks(2)]


def selector():
    return ConfigSelectorChain(ConfigCache(), tuner=TableTuner())


def said(selector, *calls):
    """What tuning these calls says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args, kwargs in calls:
            selector.choose(call_of(Scaled(), *args, **kwargs), Scaled())
    return [str(warning.message) for warning in caught]


def test_a_third_value_of_a_static_float_is_warned_of_once():
    """The warning names the argument, its values, and what to do."""
    chooser = selector()
    assert said(chooser, ((X, 0.5), {}), ((X, 0.25), {}), ((X, 0.5), {})) == []
    [text] = said(chooser, ((X, 2.0), {}), ((X, 3.0), {}), ((X, 4.0), {}))
    assert "scale (args[1]) of kernel static_floats.scaled@v0" in text
    assert "0.25, 0.5, 2.0 so far" in text
    assert "jnp.asarray(value)" in text
    assert "traced=" in text


def test_a_keyword_is_named_as_it_is_passed():
    """And a float that stays the same is not blamed."""
    [text] = said(selector(), *(((X, 1.0), {"shift": float(value)}) for value in range(4)))
    assert text.startswith("shift of kernel static_floats.scaled@v0")


def test_floats_that_go_with_shapes_are_no_reason_to_warn():
    """Every shape is tuned anyway."""
    assert said(selector(), *(((jnp.ones(size), 1 / size), {}) for size in (2, 4, 8, 16))) == []


def test_integers_and_arrays_are_no_reason_to_warn():
    """An integer is a size or a count; an array is what the warning asks for."""
    assert said(selector(), *(((X, size), {}) for size in range(4))) == []
    assert said(selector(), *(((X, jnp.asarray(size / 2)), {}) for size in range(4))) == []


def test_what_costs_no_tuning_is_no_reason_to_warn():
    """Where nothing is measured a new value costs nothing here; the executor counts programs."""
    chooser = selector()
    chooser.tuner.broken = True
    known = [call_of(Scaled(), X, value) for value in (1.0, 2.0, 3.0)]
    for inv in known:
        chooser.cache.put(*chooser.preview(inv, Scaled()).request.key, Blocks(1))
    assert said(chooser, ((X, 1.0), {}), ((X, 2.0), {}), ((X, 3.0), {})) == []


def test_the_traced_parameter_of_a_tunable_function_is_what_the_warning_asks_for():
    """With it the values are tuned once, and nothing is said."""

    def scaled(x, scale, *, size):
        return x * scale

    executor = Executor(selector())
    plain = tunable(size=[1, 2], op_id="plain", executor=executor)(scaled)
    plain(X, 0.5)
    plain(X, 0.25)
    with pytest.warns(UserWarning, match=r"scale \(args\[1\]\) of kernel plain@v0.*traced="):
        plain(X, 0.125)
    traced = tunable(size=[1, 2], op_id="traced", executor=executor, traced=("scale",))(scaled)
    for value in (0.5, 0.25, 0.125):
        traced(X, value)
    assert executor.chooser.tuner.calls == 4
