"""Functions that check their arguments and then call one kernel: what comes before the kernel is done once per trace.

`planned` makes such a function of one that returns a `Plan`. A call of a new kind runs that one as it is written, with
the caller's own arrays. The program that is compiled then holds it too, conversions included, so a warm call is one
look-up and JAX's dispatch. A shape, dtype or option that was not seen before is another program to JAX, for which the
function runs again and checks it. Only values are not in JAX's key: `known_good` looks at those on every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..core import invalidation
from ..timing.program import UNTRACEABLE
from .default import default_executor
from .executor import Executor
from .plan import Plan
from .short_key import ARRAY, frames_in_force, place_of, with_keywords
from .table import NeedsValues

_F = TypeVar("_F", bound=Callable[..., Any])


def planned(known_good: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None) -> Callable[[_F], _F]:
    """Makes a function that returns a `Plan`, or a result without a kernel, one that returns the result.

    `known_good(args, kwargs)` is asked before a program that is there is used again. It says whether the values of this
    call were checked; where they were not, the function itself runs, and checks them.
    """

    def declare(front: _F) -> _F:
        @functools.wraps(front)
        def call(*args: Any, **kwargs: Any) -> Any:
            for arg in args:
                if type(arg) is not ARRAY:
                    return _through(front(*args, **kwargs))
            short: Any = (front, len(args))
            leaves: Any = args
            executor = None
            if kwargs:
                if "executor" in kwargs:
                    executor = kwargs.pop("executor")
                found = with_keywords(short, args, kwargs)
                # An executor of another class may do as it likes.
                if found is None or (executor is not None and type(executor) is not Executor):
                    return _through(front(*args, **kwargs, executor=executor))
                short, leaves = found
            if executor is None:
                executor = default_executor()
            frames = frames_in_force()
            if frames:
                short = (short, frames)
            if executor.several_kinds:
                short = (short, place_of(leaves))
            entry: Any = executor.find(short)
            is_there = entry is not None and entry.epoch == invalidation.epoch
            if is_there and (known_good is None or known_good(args, kwargs)):
                entry.hot = True
                try:
                    return entry.fn(*leaves)
                # A signature that was not checked yet: it is planned first.
                except (NeedsValues, *UNTRACEABLE):
                    entry.forget_failures()
            plan = front(*args, **kwargs, executor=executor)
            if type(plan) is not Plan or plan.cfg is not None:
                return _through(plan)
            return executor.call_planned(front, plan, args, kwargs, short)

        return cast("_F", call)

    return declare


def _through(plan: Any) -> Any:
    """The result of a plan by the executor's own call, which takes tracers, arrays of numpy and any option."""
    if type(plan) is not Plan:
        return plan
    # `cfg=None` would do, but a call with a keyword of the executor's own does not take its short way.
    own = {} if plan.cfg is None else {"cfg": plan.cfg}
    return plan.then((plan.executor or default_executor())(plan.kernel, *plan.args, **plan.kwargs, **own))
