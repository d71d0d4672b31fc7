"""Functions on their way to a worker: by the name to import them by, with text for arguments; no code is sent."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import SettingError


def name_of(function: Callable[..., Any], texts: Sequence[Any], more: Mapping[str, Any]) -> str:
    """The name of a function of a module; an error where it or its arguments cannot be sent."""
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or name.startswith("__main__:") or more or not all(isinstance(text, str) for text in texts):
        raise SettingError(f"{name} cannot be sent to a process: give a function of a module, and texts alone")
    return name


def named(name: str) -> Callable[..., str]:
    """The function behind a name."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def places() -> list[str]:
    """The folders in which this process finds modules."""
    return [os.path.abspath(place) for place in sys.path if place]


def call(name: str, texts: Sequence[str], searched: Sequence[str]) -> str:
    """Calls a function by its name in a worker of an engine, which looks for modules where its sender does, too.

    What the worker finds by itself comes first: on another machine these folders may not exist, or hold other code.
    """
    sys.path += [place for place in searched if place not in sys.path and os.path.isdir(place)]
    return named(name)(*texts)
