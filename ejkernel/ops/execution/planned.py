"""Functions that check their arguments and then compute: what comes before the kernel is done once per trace.

`planned` makes such a function of one that returns a `Plan`, the call of one kernel, or a `Program`, which may be of
several. A call of a new kind runs that one as it is written, with the caller's own arrays. The program that is compiled
then holds it too, conversions included, so a warm call is one look-up and JAX's dispatch. A shape, dtype or option that
was not seen before is another program to JAX, for which the function runs again and checks it. Only values are not in
JAX's key: `known_good` looks at those on every call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ..timing.program import UNTRACEABLE
from .default import default_executor
from .executor import Executor
from .plan import Plan, Program
from .short_key import ARRAY, frames_in_force, place_of, with_keywords, with_positions
from .table import NeedsValues

_F = TypeVar("_F", bound=Callable[..., Any])

# Python's numbers as arrays: those of a program that counts through them must not pile up.
_MOST_NUMBERS = 1024
_numbers: dict[float, jax.Array] = {}
_LARGEST = float(jnp.finfo(jnp.float32).max)


def planned(
    known_good: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None, *, numbers: tuple[str, ...] = ()
) -> Callable[[_F], _F]:
    """Makes a function that returns a `Plan`, a `Program` or a result one that returns the result.

    `known_good(args, kwargs)` is asked before a program that is there is used again. It says whether the values of this
    call were checked; where they were not, the function itself runs, and checks them. Of `numbers`, arguments that may
    be arrays, Python's own numbers become float32 arrays: each value would else be a program.
    """

    def declare(front: _F) -> _F:
        names = list(inspect.signature(front).parameters)
        has_executor = "executor" in names
        places = frozenset(map(names.index, numbers))

        @functools.wraps(front)
        def call(*args: Any, **kwargs: Any) -> Any:
            short: Any = (front, len(args))
            leaves: Any = args
            for arg in args:
                if type(arg) is not ARRAY:
                    given = args if not places else _with_arrays(args, places)
                    found = with_positions(short, given)
                    if found is None:
                        return _through(front(*args, **kwargs))
                    short, leaves = found
                    args = given
                    break
            executor = None
            if kwargs:
                if has_executor and "executor" in kwargs:
                    executor = kwargs.pop("executor")
                if numbers:
                    kwargs = {name: _as_array(value) if name in numbers else value for name, value in kwargs.items()}
                found = with_keywords(short, leaves, kwargs)
                # An executor of another class may do as it likes.
                if found is None or (executor is not None and type(executor) is not Executor):
                    return _through(inside(*args, **kwargs, executor=executor))
                short, leaves = found
            if executor is None:
                executor = default_executor()
            frames = frames_in_force()
            if frames:
                short = (short, frames)
            if executor.several_kinds:
                short = (short, place_of(leaves))
            entry: Any = executor.find(short)
            if entry is not None and (known_good is None or known_good(args, kwargs)):
                entry.hot = True
                try:
                    return entry.fn(*leaves)
                # A signature that was not checked yet: it is planned first.
                except (NeedsValues, *UNTRACEABLE):
                    entry.forget_failures()
            plan = inside(*args, **kwargs, executor=executor)
            return (
                executor.call_planned(inside, plan, args, kwargs, short) if _is_whole(plan, leaves) else _through(plan)
            )

        def without(*args: Any, executor: Any, **kwargs: Any) -> Any:
            return front(*args, **kwargs)

        inside = front if has_executor else without
        return cast("_F", call)

    return declare


def _with_arrays(args: tuple[Any, ...], places: frozenset[int]) -> tuple[Any, ...]:
    return tuple([_as_array(arg) if place in places else arg for place, arg in enumerate(args)])


def _as_array(value: Any) -> Any:
    """A number of Python's own as an array, the same one each time; all else as it is."""
    # What float32 does not have is for the function to refuse.
    if (type(value) is not float and type(value) is not int) or not abs(value) <= _LARGEST:
        return value
    made = _numbers.get(value)
    if made is None:
        # Also inside a trace: its values must not outlive it.
        with jax.ensure_compile_time_eval():
            made = jnp.asarray(value, jnp.float32)
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        _numbers[value] = made
    return made


def _is_whole(plan: Any, leaves: Any) -> bool:
    """Can this be one compiled program, for all calls of its kind?"""
    if type(plan) is Plan:
        return plan.cfg is None
    # Kernels inside a program of arrays on several devices would not see where these are.
    return type(plan) is Program and all(len(leaf.sharding.device_set) == 1 for leaf in leaves)


def _through(plan: Any) -> Any:
    """The result of a plan by the executor's own call, which takes tracers, arrays of numpy and any option."""
    if type(plan) is Program:
        return plan.compute(plan.executor)
    if type(plan) is not Plan:
        return plan
    # `cfg=None` would do, but a call with a keyword of the executor's own does not take its short way.
    own = {} if plan.cfg is None else {"cfg": plan.cfg}
    return plan.then((plan.executor or default_executor())(plan.kernel, *plan.args, **plan.kwargs, **own))
