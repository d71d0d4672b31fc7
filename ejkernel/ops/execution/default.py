"""The executor that is there without being made: one selector over the user's own store."""

from __future__ import annotations

import threading
from typing import Any, cast

from ..config.cache import ConfigCache
from ..config.selection import ConfigSelectorChain
from ..store.folder import OperationStores
from ..store.remote.setting import remote_of_settings
from .executor import Executor

_lock = threading.Lock()
_made: list[Executor[Any, Any]] = []


def default_executor() -> Executor[Any, Any]:
    """The process's own executor; the environment is read when it is first asked for."""
    if not _made:
        with _lock:
            if not _made:
                store, remote = OperationStores(), remote_of_settings()
                _made.append(Executor(ConfigSelectorChain(ConfigCache(), persistent=store, remote=remote)))
    return _made[0]


def default_selector() -> ConfigSelectorChain[Any, Any]:
    """The selector behind the default executor: its policy, cache, store and listener."""
    return cast("ConfigSelectorChain[Any, Any]", default_executor().chooser)


def forget_default() -> None:
    """The next call makes a new one, from the environment of that moment; for tests."""
    with _lock:
        _made.clear()
