"""Which calls share a program, which must not, and what reaches a program that was compiled before.

Covers `execution/short_key.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_recorded,
    device_fingerprint,
    pmap_with_config,
)
from ejkernel.ops.tuning.device_lock import lock_path

X2, X3 = jnp.arange(2.0), jnp.arange(3.0)


def untuned(**settings):
    """A selector that only guesses, and its executor."""
    selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False), **settings)
    return selector, Executor(selector)


class Times(Kernel):
    """The argument times an attribute and the cfg."""

    op_id = "times"

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def run(self, a, *, cfg):
        return a * self.factor * cfg

    def heuristic_cfg(self, inv):
        return 1


def key_of(kernel, *args):
    return (device_fingerprint(), f"{kernel.op_id}@v{kernel.version}", Invocation(kernel.op_id, args, {}).call_key)


@pytest.mark.parametrize("first", [1, 2])
def test_an_optional_array_may_be_given_or_not(first):
    """Calls of one kernel with another number of arrays are other programs, in any order."""

    class Plus(Kernel):
        op_id = "plus"

        def run(self, a, b=None, *, cfg):
            return a if b is None else a + b

        def heuristic_cfg(self, inv):
            return 1

    _, executor = untuned()
    for count in (first, 3 - first, first):
        np.testing.assert_allclose(executor(Plus(), *[X2] * count), X2 * count)


def test_a_kernel_that_is_changed_later_does_not_change_its_equals():
    """What was compiled for some attributes is traced again with those attributes."""
    _, executor = untuned()
    kernel = Times(2.0)
    executor(kernel, X2)
    kernel.factor = 3.0

    np.testing.assert_allclose(executor(kernel, X2), X2 * 3)
    np.testing.assert_allclose(executor(Times(2.0), X3), X3 * 2)


def test_one_odd_attribute_does_not_hide_the_others():
    """An attribute that is known by its address alone leaves the rest comparable."""
    _, executor = untuned()
    kernel = Times(2.0)
    kernel.odd = SimpleNamespace(c=1)
    executor(kernel, X2)
    kernel.factor = 3.0

    np.testing.assert_allclose(executor(kernel, X2), X2 * 3)


@dataclasses.dataclass
class Weights:
    """A plain dataclass that holds an array."""

    w: Any


@pytest.mark.parametrize("wrap", [lambda w: w, Weights, lambda w: [w], lambda w: {"w": w}], ids=range(4))
def test_arrays_inside_an_attribute_are_told_apart(wrap):
    """Two kernels with other weights are two kernels, however the weights are held."""

    class Weighted(Times):
        op_id = "weighted"

        def run(self, a, *, cfg):
            return a * jax.tree_util.tree_leaves(getattr(self.factor, "w", self.factor))[0]

    _, executor = untuned()
    for value in (1.0, 5.0):
        weights = np.full(2, value, np.float32)
        np.testing.assert_allclose(executor(Weighted(wrap(weights)), X2), X2 * value)


def test_an_array_attribute_that_is_replaced_again_and_again():
    """An address that Python uses again does not make two arrays one."""

    class First(Times):
        op_id = "first"

        def run(self, a, *, cfg):
            return a * float(self.factor[0])

    _, executor = untuned()
    kernel = First()
    for i in range(40):
        kernel.factor = None
        kernel.factor = np.full(2, i, np.float32)
        np.testing.assert_allclose(executor(kernel, X2), X2 * i)


def test_a_kernel_with_slots_is_refused():
    """`vars()` does not show what is in slots, so such kernels could not be told apart."""

    @dataclasses.dataclass(slots=True)
    class Slotted(Kernel):
        n: float = 1.0

        def run(self, a, *, cfg):
            return a * self.n

        def heuristic_cfg(self, inv):
            return 1

    with pytest.raises(TypeError, match="__slots__"):
        untuned()[1](Slotted(), X2)


def test_a_keyword_array_of_a_pmap_may_change():
    """Arrays by keyword are arguments of the mapped function."""

    class Shift(Kernel):
        op_id = "shift"

        def run(self, a, *, w, cfg):
            return a + w

        def heuristic_cfg(self, inv):
            return 1

    mapped = pmap_with_config(untuned()[1], Shift())
    w = np.ones(2, np.float32)
    x = jnp.zeros((4, 2))
    np.testing.assert_allclose(mapped(x, w=w), x + 1)
    w[:] = 5
    np.testing.assert_allclose(mapped(x, w=w), x + 5)


def test_a_cfg_that_is_changed_after_the_call_is_not_used_again():
    """A dict given as `cfg=` counts as it was."""

    class Dict(Times):
        op_id = "dict"

        def run(self, a, *, cfg):
            return a * cfg["b"]

        def heuristic_cfg(self, inv):
            return {"b": 1}

    _, executor = untuned()
    cfg = {"b": 2}
    executor(Dict(), X2, cfg=cfg)
    cfg["b"] = 4

    np.testing.assert_allclose(executor(Dict(), X3, cfg={"b": 2}), X3 * 2)


def test_a_cfg_with_an_array_that_is_changed_later_is_not_used_again():
    """At any depth: an equal cfg with another shape is traced with the array as it was."""

    class Table(Times):
        op_id = "table"

        def run(self, a, *, cfg):
            return a * float(cfg["rows"][0])

        def heuristic_cfg(self, inv):
            return {"rows": np.ones(2)}

    _, executor = untuned()
    cfg = {"rows": np.full(2, 2.0)}
    executor(Table(), X2, cfg=cfg)
    cfg["rows"][:] = 4.0

    np.testing.assert_allclose(executor(Table(), X3, cfg={"rows": np.full(2, 2.0)}), X3 * 2)


def test_a_put_for_a_kernel_inside_a_kernel_reaches_the_outer_one():
    """An eager call of the outer kernel runs the inner one with its new cfg."""
    selector, executor = untuned()

    class Outer(Times):
        op_id = "outer"

        def run(self, a, *, cfg):
            return executor(Times(), a)

    np.testing.assert_allclose(executor(Outer(), X2), X2)
    selector.cache.put(*key_of(Times(), X2), 10)

    np.testing.assert_allclose(executor(Outer(), X2), X2 * 10)


def test_a_put_into_another_cache_does_not_undo_mine():
    """The last put of a key anywhere is not the last put of it here."""
    mine, executor = untuned()
    other, _ = untuned()
    key = key_of(Times(), X2)
    mine.cache.put(*key, 1)
    executor(Times(), X2)
    mine.cache.put(*key, 2)
    other.cache.put(*key, 1)

    np.testing.assert_allclose(executor(Times(), X2), X2 * 2)


def test_threads_call_while_others_put():
    """No call fails, and the last one has the last cfg."""
    selector, executor = untuned()
    key = key_of(Times(), X2)
    failures = []

    def call():
        try:
            for _ in range(60):
                executor(Times(), X2)
        except Exception as error:
            failures.append(error)

    def put():
        for i in range(60):
            selector.cache.put(*key, i % 7 + 1)

    threads = [threading.Thread(target=call) for _ in range(4)] + [threading.Thread(target=put)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    selector.cache.put(*key, 9)

    assert failures == []
    np.testing.assert_allclose(executor(Times(), X2), X2 * 9)


def test_offline_tuning_keeps_what_is_known_where_it_cannot_measure(monkeypatch):
    """Shapes of integers are not measured; the tuned cfg stays in the result."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")

    class Whole(Times):
        op_id = "whole"

        def candidate_cfgs(self, inv):
            return [1, 2]

    selector = ConfigSelectorChain(ConfigCache())
    executor = Executor(selector)
    executor(Whole(), jnp.arange(4))
    selector.cache.put(*selector.cache.keys()[0], 2)

    assert [entry.cfg for entry in autotune_recorded(selector).entries] == [2]


def test_a_kernel_that_looks_at_values_for_some_shapes_alone():
    """A shape that can be jitted does not keep another one from running without."""

    class Small(Times):
        op_id = "small"

        def run(self, a, *, cfg):
            return a * 2 if a.size > 2 or float(a.sum()) > 0 else a

    _, executor = untuned()
    executor(Small(), X3)
    with pytest.warns(UserWarning, match="looks at values"):
        np.testing.assert_allclose(executor(Small(), X2), X2 * 2)


def test_a_put_reaches_a_kernel_that_runs_unjitted():
    """It chooses at every call."""

    class Looks(Times):
        op_id = "looks.unjitted"

        def run(self, a, *, cfg):
            return a * cfg if float(a.sum()) > 0 else a

    selector, executor = untuned()
    with pytest.warns(UserWarning, match="looks at values"):
        executor(Looks(), X2)
    selector.cache.put(*key_of(Looks(), X2), 3)

    np.testing.assert_allclose(executor(Looks(), X2), X2 * 3)


def test_a_key_builder_serves_arguments_that_have_no_stable_form():
    """Such a call is tuned like any other; only its record lacks the parts."""

    class Own(Times):
        op_id = "own.key"
        key_builder = staticmethod(lambda inv: "mine")

        def run(self, a, *, cfg, odd):
            return a * odd.value

        def candidate_cfgs(self, inv):
            return [1, 2]

    class Odd:
        value = 3.0

    selector = ConfigSelectorChain(ConfigCache())
    np.testing.assert_allclose(Executor(selector)(Own(), X2, odd=Odd()), X2 * 3)
    assert selector.cache.keys()[0][2] == "mine"


def test_an_own_gradient_of_another_platform_does_not_refuse_forward_mode():
    """Here the kernel has none."""

    class Elsewhere(Times):
        op_id = "elsewhere"

        def fwd_with_residuals_gpu(self, a, *, cfg):
            return a, ()

        def vjp_gpu(self, residuals, y, dy, a, *, cfg):
            return (dy,)

    _, executor = untuned()
    _, tangent = jax.jvp(lambda a: executor(Elsewhere(), a), (X2,), (X2,))
    np.testing.assert_allclose(tangent, X2)


@pytest.mark.parametrize("kernel", [Times, None, lambda x: x], ids=["a class", "None", "a function"])
def test_what_is_no_kernel_is_named(kernel):
    """The error says what to pass."""
    with pytest.raises(TypeError, match="no kernel"):
        untuned()[1](kernel, X2)


def test_any_object_may_be_given_as_cfg():
    """An explicit cfg needs no stable form."""

    class Space(Times):
        op_id = "space"

        def run(self, a, *, cfg):
            return a * cfg.b

    np.testing.assert_allclose(untuned()[1](Space(), X2, cfg=SimpleNamespace(b=2)), X2 * 2)


def test_a_numpy_truth_is_a_verdict():
    """`valid_cfg` may answer with numpy's booleans."""

    class Judged(Times):
        op_id = "judged"

        def candidate_cfgs(self, inv):
            return [1, 2, 3]

        def valid_cfg(self, inv, cfg):
            return np.bool_(cfg != 3) or "three is too many"

    told = []
    selector = ConfigSelectorChain(ConfigCache(), on_event=lambda event, **data: told.append((event, data)))
    selector.choose(Invocation("judged", (X2,), {}), Judged())
    assert [event for event, _ in told] == ["autotune_start", "autotune_finish"]
    assert told[0][1]["candidates"] == 3


def test_a_tuple_comes_back_from_a_store_as_a_tuple(tmp_path):
    """The kernel's heuristic cfg says what its cfgs are."""

    class Pair(Times):
        op_id = "pair"

        def run(self, a, *, cfg):
            return a * cfg[0]

        def heuristic_cfg(self, inv):
            return (1, (2, 3))

    store = PersistentCache("pair", tmp_path / "pair.json")
    store.put(*key_of(Pair(), X2), (4, (5, 6)))
    selector, _ = untuned(persistent=PersistentCache("pair", tmp_path / "pair.json"))

    assert selector.choose(Invocation("pair", (X2,), {}), Pair()) == (4, (5, 6))


def test_a_result_can_be_copied_and_taken_apart():
    """It is a value."""
    result = AutotuningResult("cpu|x", (Entry("op@v1", "key", 1),))
    assert copy.deepcopy(result) == result
    assert dataclasses.asdict(result)["device"] == "cpu|x"


def test_the_only_candidate_is_told():
    """Where heuristics may not answer, the sole candidate does, and the listener hears of it."""
    told = []
    policy = AutotunePolicy(allow_heuristics=False)
    selector = ConfigSelectorChain(ConfigCache(), policy, on_event=lambda event, **data: told.append(event))
    assert selector.choose(Invocation("times", (X2,), {}), Times()) == 1
    assert told == ["heuristics"]


def test_a_call_that_fails_does_not_cost_the_others_their_programs():
    """A bad shape between good ones leaves what was compiled."""
    traces = []

    class Picky(Times):
        op_id = "picky"

        def run(self, a, *, cfg):
            traces.append(a.shape)
            if a.shape == (3,):
                raise ValueError("not three")
            return a

    _, executor = untuned()
    for _ in range(3):
        executor(Picky(), X2)
        with pytest.raises(ValueError, match="not three"):
            executor(Picky(), X3)
    assert traces.count((2,)) == 1


def test_an_interrupted_tuning_leaves_no_threads():
    """Ctrl-C while candidates are traced lets the compile threads go."""

    class Interrupted(Times):
        op_id = "interrupted"

        def run(self, a, *, cfg):
            if cfg == 3:
                raise KeyboardInterrupt
            return a * cfg / cfg

        def candidate_cfgs(self, inv):
            return [1, 2, 3]

    # Other tests leave compilations behind that never end.
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        ConfigSelectorChain(ConfigCache()).choose(Invocation("interrupted", (X2,), {}), Interrupted())
    started = [t for t in threading.enumerate() if t.name == "ejkernel-compile" and t not in before]
    for thread in started:
        thread.join(120)
    assert not [t for t in started if t.is_alive()]


def test_a_deadline_is_kept_while_another_process_has_the_device(monkeypatch, tmp_path):
    """The wait for a turn ends with the budget, and a cfg is served."""

    class Slow(Times):
        op_id = "slow"

        def candidate_cfgs(self, inv):
            return [1, 2]

    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path))
    (tmp_path / "locks").mkdir()
    lock = filelock.FileLock(lock_path(tmp_path / "locks", device_fingerprint()))
    done = threading.Event()
    # A daemon, so that a wait without end does not keep the suite from ending.
    with lock:
        selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(seconds=0.2))
        work = threading.Thread(
            target=lambda: (selector.choose(Invocation("slow", (X2,), {}), Slow()), done.set()), daemon=True
        )
        work.start()
        assert done.wait(240)
