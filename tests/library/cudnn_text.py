"""Reads what XLA is told of a call of cuDNN, in the text of a program for CUDA."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.timing.program import has_kernel


def call_of(fn: Callable[..., Any], *given: Any, target: str = "fmhaSoftmax") -> tuple[str, Any]:
    """The call of cuDNN in a program for CUDA: its text without the config, and the config without defaults."""
    text = jax.jit(fn).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if f"custom_call @__cudnn${target}(" in line]
    assert has_kernel(text)
    config = re.search(r'backend_config = "([^"]*)"', line)
    assert config is not None
    form = line.replace(config.group(0), "").partition("{")[2]
    return form, _without_defaults(json.loads(config.group(1).replace("\\22", '"')))


def _without_defaults(value: Any) -> Any:
    """Fields of a message that its reader would not fill in by itself; a wrapped number and a map have none."""
    if not isinstance(value, dict):
        return value
    defaults = ("0", 0, 0.0, False, [], {}, "NO_MASK", "PRIMITIVE_TYPE_INVALID")
    inner = {name: one if name == "tuning_knobs" else _without_defaults(one) for name, one in value.items()}
    return {name: one for name, one in inner.items() if name == "workspace_size" or one not in defaults}
