"""Overlays: cfgs that shadow the cache for a `with` block of one thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of

from ejkernel.ops import ConfigCache, ConfigSelectorChain, current_scope, overlay_cache
from ejkernel.ops.config import cache as module

KEY = ("cpu|some processor avx2", "matmul@v2", "0123456789abcdef")
OTHER = ("cpu|some processor avx2", "matmul@v2", "fedcba9876543210")


class Traced:
    """A function that the user jitted, whose trace asks the cache; it counts its traces."""

    def __init__(self) -> None:
        self.count = 0
        self.cache = ConfigCache()
        self.cache.put(*KEY, 1.0)

        @jax.jit
        def function(x):
            self.count += 1
            cfg = self.cache.get(*KEY)
            return x * (cfg if isinstance(cfg, float) else 0.0)

        self.function = function

    def __call__(self) -> float:
        return float(self.function(jnp.float32(1)))


def get(key=KEY):
    return ConfigCache().get(*key)


def test_an_overlay_answers_in_place_of_the_cache():
    """Inside, `ConfigCache.get` gives the overlay's cfg; outside, its own."""
    cache = ConfigCache()
    cache.put(*KEY, "own")
    with overlay_cache({KEY: "overlay"}):
        inside = cache.get(*KEY)

    assert (inside, cache.get(*KEY)) == ("overlay", "own")


def test_other_keys_are_not_shadowed():
    """An overlay says nothing about keys that it does not hold."""
    cache = ConfigCache()
    cache.put(*OTHER, "own")
    with overlay_cache({KEY: "overlay"}):
        assert cache.get(*OTHER) == "own"


def test_an_overlay_leaves_the_cache_as_it_is():
    """Nothing of an overlay stays in the cache, and `size` and `keys` do not show it."""
    cache = ConfigCache()
    with overlay_cache({KEY: "overlay"}):
        cache.get(*KEY)
        seen = cache.size(), cache.keys()

    assert seen == (0, [])
    assert cache.get(*KEY) is None


def test_a_put_inside_is_found_outside():
    """`put` writes to the cache itself, so the shadowed value shows once the overlay is gone."""
    cache = ConfigCache()
    with overlay_cache({KEY: "overlay"}):
        cache.put(*KEY, "put inside")
        inside = cache.get(*KEY)

    assert (inside, cache.get(*KEY)) == ("overlay", "put inside")


def test_it_is_a_class_used_with_with():
    """`overlay_cache` is a class, and `with ... as` gives the overlay."""
    assert isinstance(overlay_cache, type)
    with overlay_cache({KEY: "cfg"}) as entered:
        assert isinstance(entered, overlay_cache)


def test_the_innermost_wins():
    """Of nested overlays the inner one answers, and the outer one for what the inner does not hold."""
    with overlay_cache({KEY: "outer", OTHER: "outer"}), overlay_cache({KEY: "inner"}):
        assert (get(), get(OTHER)) == ("inner", "outer")


def test_leaving_the_inner_restores_the_outer():
    """After the inner block the outer overlay is in force again."""
    with overlay_cache({KEY: "outer"}):
        with overlay_cache({KEY: "inner"}):
            pass
        assert get() == "outer"
    assert get() is None


def test_one_object_may_be_entered_twice():
    """An overlay entered inside itself stays in force until the outer block ends, and no longer."""
    overlay = overlay_cache({KEY: "cfg"})
    with overlay:
        with overlay:
            inner = get()
        between = get()

    assert (inner, between, get()) == ("cfg", "cfg", None)


def test_one_object_may_be_entered_again_later():
    """An overlay that was left works the next time as well."""
    overlay = overlay_cache({KEY: "cfg"})
    with overlay:
        pass
    with overlay:
        assert get() == "cfg"
    assert get() is None


def test_an_exception_restores_what_was_before():
    """A block that raises leaves no overlay behind."""
    with overlay_cache({KEY: "outer"}):
        with pytest.raises(KeyError), overlay_cache({KEY: "inner"}):
            raise KeyError
        assert get() == "outer"
    assert get() is None


def test_the_mapping_is_read_when_the_overlay_is_made():
    """Changing the dict afterwards does not change the overlay."""
    mapping = {KEY: "first"}
    overlay = overlay_cache(mapping)
    mapping[KEY] = "second"
    with overlay:
        assert get() == "first"


@pytest.mark.parametrize("key", ["a|b|c", ("dev", "op"), ("dev", "op", "key", "more"), ("dev", "op", 7), 3, None])
def test_a_key_that_is_not_three_strings_is_an_error(key):
    """A wrong key fails where it is written, and says what a key is."""
    with pytest.raises(TypeError, match="device, op_id, call_key"):
        overlay_cache({key: "cfg"})


def test_the_context_variable_is_there_for_inspection():
    """`_cache_overlay` is a context variable that is empty outside and shows the cfgs inside."""
    assert not module._cache_overlay.get()
    with overlay_cache({KEY: "cfg"}):
        assert any(layer.get(KEY) == "cfg" for layer in module._cache_overlay.get())
    assert not module._cache_overlay.get()


# The selector.


def test_the_selector_answers_from_the_overlay():
    """An overlay comes before memory and tuning, and its event is `overlay_hit`."""
    kernel, tuner, listener = Doubling(), TableTuner(), Listener()
    inv = call_of(kernel)
    key = key_of(kernel, inv)
    cache = ConfigCache()
    cache.put(*key, Blocks(2))
    selector = ConfigSelectorChain(cache, tuner=tuner, on_event=listener)
    with overlay_cache({key: Blocks(4)}):
        assert selector.choose(inv, kernel) == Blocks(4)
    assert selector.choose(inv, kernel) == Blocks(2)
    assert listener.names == ["overlay_hit", "cache_hit"]
    assert tuner.calls == 0


# Functions that the user jitted.


def test_a_jitted_function_is_traced_again_inside():
    """A program compiled outside is not used inside: the overlay's cfg takes effect."""
    traced = Traced()
    outside = traced()
    with overlay_cache({KEY: 5.0}):
        inside = traced()

    assert (outside, inside, traced.count) == (1.0, 5.0, 2)


def test_a_jitted_function_reuses_its_old_program_outside():
    """After the block the program from before it runs, without a trace."""
    traced = Traced()
    traced()
    with overlay_cache({KEY: 5.0}):
        traced()

    assert (traced(), traced.count) == (1.0, 2)


def test_a_function_first_jitted_inside_is_traced_again_outside():
    """The overlay's cfg does not stay in a program that is used outside."""
    traced = Traced()
    with overlay_cache({KEY: 5.0}):
        inside = traced()

    assert (inside, traced(), traced.count) == (5.0, 1.0, 2)


def test_entering_one_overlay_twice_leaves_jitted_functions_right():
    """A function called inside a doubly entered overlay and then outside has the outside's cfg."""
    traced = Traced()
    overlay = overlay_cache({KEY: 5.0})
    with overlay, overlay:
        traced()

    assert traced() == 1.0


def test_equal_overlays_share_programs():
    """Two overlays with equal content need one trace between them."""
    traced = Traced()
    for _ in range(3):
        with overlay_cache({KEY: 5.0}):
            traced()

    assert traced.count == 1


def test_equal_overlays_of_dicts_share_programs():
    """Cfgs that cannot be hashed are compared by content as well."""
    traced = Traced()
    for _ in range(2):
        with overlay_cache({KEY: {"block": [64, {"warps": 4}]}}):
            traced()

    assert traced.count == 1


def test_an_overlay_nested_in_an_equal_one_shares_its_program():
    """What is in force counts, not how many overlays made it."""
    traced = Traced()
    with overlay_cache({KEY: 5.0}):
        traced()
        with overlay_cache({KEY: 5.0}):
            traced()

    assert traced.count == 1


def test_different_overlays_do_not_share_programs():
    """Another cfg is another program."""
    traced = Traced()
    with overlay_cache({KEY: 5.0}):
        first = traced()
    with overlay_cache({KEY: 6.0}):
        second = traced()

    assert (first, second) == (5.0, 6.0)


def test_an_empty_overlay_traces_nothing_again():
    """An overlay without entries changes nothing, so no function is compiled again for it."""
    traced = Traced()
    traced()
    with overlay_cache({}):
        traced()

    assert traced.count == 1


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), ((1, 2), [1, 2]), ({"a": 1}, {"a": True})])
def test_overlays_that_only_compare_equal_keep_their_own_cfgs(one, other):
    """1, 1.0 and True are three cfgs: an overlay gives what it was made with, whatever was in force before."""
    traced = Traced()
    with overlay_cache({KEY: one}):
        traced()
    with overlay_cache({KEY: other}):
        found = get()

    assert (type(found), found) == (type(other), other)


def test_overlays_of_arrays_are_told_apart_by_their_values():
    """A cfg that holds an array is another one when the array's values are."""
    traced = Traced()
    with overlay_cache({KEY: {"table": np.array([1, 2])}}):
        traced()
    with overlay_cache({KEY: {"table": np.array([3, 4])}}):
        assert get()["table"].tolist() == [3, 4]


def test_a_cfg_changed_after_its_overlay_does_not_reach_an_equal_overlay():
    """An overlay gives the content that it was made with, whatever became of an equal one's cfg meanwhile."""
    traced = Traced()
    cfg = {"block": 1}
    with overlay_cache({KEY: cfg}):
        traced()
    cfg["block"] = 2
    with overlay_cache({KEY: {"block": 1}}):
        assert get() == {"block": 1}


def test_an_overlay_inside_a_trace_counts_for_what_is_traced_in_it():
    """An overlay entered while a function is traced answers there and is gone after it."""

    def function(x):
        with overlay_cache({KEY: "inside"}):
            return x, get()

    shapes: list[object] = []
    jax.eval_shape(lambda x: shapes.append(function(x)[1]) or x, jnp.ones(3))

    assert (shapes, get()) == (["inside"], None)


# Threads and contexts.


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_another_thread_does_not_see_it():
    """An overlay belongs to the thread that entered it."""
    with overlay_cache({KEY: "cfg"}):
        assert in_thread(get) is None


def test_another_thread_does_not_compile_it():
    """A jitted function called by another thread meanwhile has the cfg of outside."""
    traced = Traced()
    with overlay_cache({KEY: 5.0}):
        assert in_thread(traced) == 1.0
        assert traced() == 5.0


def test_current_scope_takes_the_overlay_to_another_thread():
    """A scope made here and entered there answers there, until that block ends."""

    def work(scope):
        with scope:
            inside = get()
        return inside, get()

    with overlay_cache({KEY: "outer", OTHER: "outer"}), overlay_cache({KEY: "inner"}):
        scope = current_scope()

    assert in_thread(lambda: work(scope)) == ("inner", None)


def test_current_scope_shares_the_programs_of_its_overlay():
    """A thread that opted in runs the program that the overlay's own thread compiled."""
    traced = Traced()

    def work(scope):
        with scope:
            return traced()

    with overlay_cache({KEY: 5.0}):
        traced()
        scope = current_scope()
        assert in_thread(lambda: work(scope)) == 5.0
    assert traced.count == 1


def test_current_scope_without_an_overlay_does_nothing():
    """Where no overlay is in force there is nothing to take along."""
    traced = Traced()
    traced()
    with current_scope():
        assert get() is None
        traced()

    assert traced.count == 1


def test_a_copied_context_does_not_opt_in():
    """`asyncio.to_thread` copies the context; its thread sees the overlay only inside `with current_scope()`."""

    def work():
        plain = get()
        with current_scope():
            opted_in = get()
        return plain, opted_in, get()

    async def main():
        return await asyncio.to_thread(work)

    with overlay_cache({KEY: "cfg"}):
        assert asyncio.run(main()) == (None, "cfg", None)


def test_many_threads_have_their_own_overlays():
    """Overlays of threads that run at the same time do not mix."""
    start = threading.Barrier(6)
    traced = Traced()

    def work(number):
        start.wait()
        for _ in range(20):
            with overlay_cache({KEY: float(number)}):
                if get() != float(number) or traced() != float(number):
                    return False
        return get() is None

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


# Leaving in another order.


def test_leaving_in_another_order_is_an_error():
    """The outer overlay cannot be left before the inner one."""
    outer, inner = overlay_cache({KEY: "outer"}), overlay_cache({KEY: "inner"})
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)

    assert get() is None


def test_leaving_in_another_thread_is_an_error():
    """An overlay is left where it was entered."""
    overlay = overlay_cache({KEY: "cfg"})
    with overlay:
        with pytest.raises(RuntimeError, match="thread"):
            in_thread(lambda: overlay.__exit__(None, None, None))
        assert get() == "cfg"
    assert get() is None


def test_leaving_what_was_never_entered_is_an_error():
    """`__exit__` without `__enter__` is refused, and changes nothing."""
    with overlay_cache({KEY: "cfg"}):
        with pytest.raises(RuntimeError):
            overlay_cache({KEY: "cfg"}).__exit__(None, None, None)
        assert get() == "cfg"


def interleaved():
    """Two tasks that await inside their overlays, the first leaving first; their outcomes."""

    async def task(cfg, entered, leave):
        with overlay_cache({KEY: cfg}):
            entered.set()
            await leave.wait()

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(task("first", events[0], events[1]))
        await events[0].wait()
        second = asyncio.create_task(task("second", events[2], events[3]))
        await events[2].wait()
        events[1].set()
        await asyncio.wait([first])
        events[3].set()
        return await asyncio.gather(first, second, return_exceptions=True)

    return in_thread(lambda: (asyncio.run(main()), get(), usable()))


def usable():
    with overlay_cache({KEY: "fresh"}):
        return get()


def test_awaiting_inside_is_an_error():
    """Tasks that interleave leave in another order, and the one that does is told."""
    outcomes, _, _ = interleaved()

    assert any(isinstance(outcome, RuntimeError) for outcome in outcomes)


def test_overlays_work_after_tasks_interleaved():
    """After that error a new overlay of the same thread answers as ever."""
    assert interleaved()[2] == "fresh"


def test_no_overlay_stays_after_tasks_interleaved():
    """Once both tasks are over, the thread has no overlay in force."""
    assert interleaved()[1] is None


def test_a_generator_left_open_does_not_break_later_overlays():
    """A generator that yields inside an overlay leaves out of order; the next overlay works all the same."""

    def generator():
        with overlay_cache({KEY: "generator"}):
            yield

    def work():
        running = generator()
        next(running)
        with overlay_cache({KEY: "later"}):
            with pytest.raises(RuntimeError):
                running.close()
            inside = get()
        return inside, usable()

    assert in_thread(work) == ("later", "fresh")
