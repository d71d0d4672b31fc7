"""One kernel class for one name: two of them with one `op_id` are an error where they would share entries."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from fakes import Doubling, call_of

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache, tunable

X = jnp.arange(4.0)
UNTUNED = AutotunePolicy(allow_autotune=False)


def made(name="Twin", **attributes):
    """A kernel class with a name of its own and an operation's name that others have too."""
    members = {"op_id": "twin", "run": lambda self, x, *, cfg: x * cfg, "heuristic_cfg": lambda self, inv: 2}
    return type(name, (Kernel,), {**members, "__module__": "kernels", "__qualname__": name, **attributes})


def untuned(**settings):
    return ConfigSelectorChain(ConfigCache(), UNTUNED, **settings)


def test_a_second_class_of_one_name_is_an_error_at_its_first_call():
    """The error names both, and says what to do; the first one goes on."""
    executor = Executor(untuned())
    first, second = made("First")(), made("Second")()
    executor(first, X)
    with pytest.raises(TypeError, match=r"kernels:First and kernels:Second are both called twin@v0.*op_id or version"):
        executor(second, X)
    executor(first, jnp.ones(3))


def test_classes_with_versions_of_their_own_share_a_name():
    """A key has the version in it."""
    executor = Executor(untuned())
    executor(made("First")(), X)
    executor(made("Second", version="1")(), X)


def test_a_call_with_its_own_cfg_shares_nothing():
    """A variant of a kernel can be tried by hand beside it: no entry is looked up or kept."""
    executor = Executor(untuned())
    executor(made("First")(), X)
    assert float(executor(made("Second")(), X, cfg=5)[1]) == 5.0


def test_a_class_that_is_defined_again_replaces_the_older():
    """Module and qualified name are equal, as after a reload or a cell that was run again."""
    executor = Executor(untuned())
    executor(made()(), X)
    assert float(executor(made(heuristic_cfg=lambda self, inv: 3)(), X)[1]) == 3.0


def test_a_subclass_needs_a_name_of_its_own():
    """It inherits the `op_id`, and computes something else."""

    class Tripling(Doubling):
        def run(self, x, *, cfg):
            return x * 3.0

    selector = untuned()
    selector.choose(call_of(Doubling()), Doubling())
    with pytest.raises(TypeError, match=r"fakes:Doubling and .*Tripling are both called doubling@v3"):
        selector.choose(call_of(Tripling()), Tripling())


def test_two_functions_of_one_name_are_an_error():
    """A tunable function's kernel is a class too."""
    executor = Executor(untuned())

    @tunable(rows=[1, 2], op_id="rows", executor=executor)
    def first(x, *, rows):
        return x

    @tunable(rows=[1, 2], op_id="rows", executor=executor)
    def second(x, *, rows):
        return x

    first(X)
    with pytest.raises(TypeError, match=r"first.*second.*are both called rows@v0"):
        second(X)


def test_a_chooser_of_the_users_own_does_not_hide_it():
    """The executor looks, where no selector does."""

    class Chooser:
        def choose(self, inv, kernel):
            return 2

    executor = Executor(Chooser())
    executor(made("First")(), X)
    with pytest.raises(TypeError, match="are both called twin@v0"):
        executor(made("Second")(), X)


def test_selectors_over_one_file_share_its_names(tmp_path):
    """Each would read what the other keeps; stores apart have nothing in common."""
    untuned(persistent=PersistentCache("twin", tmp_path / "a.json")).choose(call_of(made("First")()), made("First")())
    second = made("Second")()
    with pytest.raises(TypeError, match="are both called twin@v0"):
        untuned(persistent=PersistentCache("twin", tmp_path / "a.json")).choose(call_of(second), second)
    untuned(persistent=PersistentCache("twin", tmp_path / "b.json")).choose(call_of(second), second)


def test_an_emptied_cache_has_no_names():
    """What would be shared is gone."""
    selector = untuned()
    selector.choose(call_of(made("First")()), made("First")())
    selector.cache.clear()
    selector.choose(call_of(made("Second")()), made("Second")())
