"""One kernel class for one name: two that share a cache, a store or an executor would share their entries."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

from .errors import KernelError
from .kernel import Kernel, kernel_path, versioned


class KernelNames:
    """The classes behind the operations that were called so far in one place."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def claim(self, kernel: Kernel[Any, Any]) -> None:
        """Raises where another class has the operation's name and version; one of the same name replaces it."""
        name, path = versioned(kernel), kernel_path(kernel)
        # A cell that was edited and run again, or a module that was reloaded, defines a class of the same path.
        known = self._paths.setdefault(name, path)
        if known != path:
            raise KernelError(
                f"kernels {known} and {path} are both called {name}, so that each would run with cfgs that were tuned "
                "for the other; give one of them another op_id or version"
            )


_of_paths: dict[str, KernelNames] = {}
_of_objects: WeakKeyDictionary[Any, KernelNames] = WeakKeyDictionary()
_lock = threading.Lock()


def names_in(store: Any) -> KernelNames:
    """The names of a store: those of its path where it has one, since several objects may stand for one file."""
    path = getattr(store, "path", None) or getattr(store, "folder", None)
    with _lock:
        if isinstance(path, (str, os.PathLike)):
            return _of_paths.setdefault(os.path.realpath(path), KernelNames())
        try:
            return _of_objects.setdefault(store, KernelNames())
        # An object without an address that can be watched, or without a hash.
        except TypeError:
            return KernelNames()
