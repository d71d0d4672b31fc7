"""Static floats that cost tunings: a number that changes from call to call should be an array."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ..core.description import readable
from ..core.errors import KeyPartError
from ..core.kernel import Kernel
from ..core.request import Request
from .tuning_job import TuningWarning

# Two values may be two uses, such as training and serving; a third is a number that changes.
_MOST = 2
_FLOAT = '["float",'


class StaticFloats:
    """The floats of the calls that were tuned, by operation and by the rest of the call."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], set[str]] = {}
        self._said: set[tuple[str, str]] = set()

    def tuned(self, request: Request) -> None:
        """Counts the floats of a call that is about to be tuned, and warns of the argument with too many, once."""
        try:
            parts = request.inv.parts
        # A kernel with its own key builder may have arguments that no key can be made of.
        except KeyPartError:
            return
        floats = {name: text for name, text in parts.items() if text.startswith(_FLOAT)}
        # The scale of an attention goes with its width: only calls that are alike but for their floats count.
        rest = tuple((name, text) for name, text in parts.items() if name not in floats)
        for name, text in floats.items():
            values = self._values.setdefault((request.key.device, request.key.op_id, name, rest), set())
            values.add(text)
            said = (request.key.op_id, name)
            if len(values) > _MOST and said not in self._said:
                self._said.add(said)
                self._warn(request, name, values)

    def _warn(self, request: Request, name: str, values: set[str]) -> None:
        title = _argument(request.kernel, name)
        shown = ", ".join(sorted(map(readable, values), key=float))
        warnings.warn(
            f"{title} of kernel {request.key.op_id} is a static float, and each of its values costs a tuning: "
            f"{shown} so far. Pass an array, such as jnp.asarray(value), or name it in tunable(..., traced=(...))",
            TuningWarning,
            stacklevel=2,
        )


def _argument(kernel: Kernel[Any, Any], part: str) -> str:
    """A part of a key by the argument's name, where the kernel's `run` has one for it."""
    keyword = re.fullmatch(r"kwargs\['(\w+)'\](.*)", part)
    if keyword:
        return keyword[1] + keyword[2]
    place = re.fullmatch(r"args\[(\d+)\](.*)", part)
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(kernel.run).parameters
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    known = place is not None and int(place[1]) < len(names)
    return f"{names[int(place[1])]}{place[2]} ({part})" if known and place is not None else part
