"""Every candidate of a call, compared as a tuning would."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from ejkernel.ops import Kernel, check

X = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)


class Powers(Kernel):
    """The square, by several ways, some of them wrong."""

    op_id = "powers"
    ways = ("times", "power")

    def run(self, x, *, cfg):
        if cfg == "raises":
            raise ValueError("not this way")
        if cfg == "one row":
            return (x * x).at[1].set(0.0)
        return x * x if cfg == "times" else x**2

    def heuristic_cfg(self, inv):
        return "times"

    def candidate_cfgs(self, inv):
        return self.ways


def test_candidates_that_agree_are_ok():
    """Each has its status, the heuristic first."""
    found = check(Powers(), X)
    assert [(trial.cfg, trial.status) for trial in found] == [("times", "ok"), ("power", "ok")]


@pytest.mark.parametrize(("way", "status"), [("raises", "compile"), ("one row", "wrong")])
def test_a_candidate_that_does_not_is_named(way, status):
    """It has its reason, and the others stay ok."""

    class Wrong(Powers):
        ways = ("times", way, "power")

    found = {trial.cfg: trial for trial in check(Wrong(), X)}
    assert (found["times"].status, found["power"].status) == ("ok", "ok")
    assert found[way].status == status
    assert found[way].message


def test_gradients_are_compared():
    """A candidate whose output is right and whose gradient is not is wrong."""

    class Gradient(Powers):
        def fwd_with_residuals(self, x, *, cfg):
            return x * x, ()

        def vjp(self, residuals, y, dy, x, *, cfg):
            return (2 * x * dy if cfg == "times" else x * dy,)

    found = {trial.cfg: trial.status for trial in check(Gradient(), X)}
    assert found == {"times": "ok", "power": "wrong"}


def test_a_reference_says_what_is_right():
    """Then the heuristic cfg can be wrong as well."""

    class Referred(Powers):
        def reference(self, x):
            return x * x + 1

    assert {trial.status for trial in check(Referred(), X)} == {"wrong"}


def test_keywords_reach_the_kernel():
    """The call is made as the executor would make it."""

    class Scaled(Powers):
        def run(self, x, *, cfg, scale):
            return x * x * scale

    assert all(trial.status == "ok" for trial in check(Scaled(), X, scale=2.0))
