"""The operation's name of a tunable function: what its entries are kept under."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

from ..core.errors import KernelError
from ..core.kernel_code import function_code
from ..core.source import unwrapped
from ..core.stable import short_hash
from ..settings import notebook

# Digits of functions that were typed in, by name: a cell that is edited and run again keeps its entries as seeds.
_first: dict[str, str] = {}


def operation_name(function: Any, name: str) -> str:
    """Module and name. A script or a notebook goes by its file's name, so that two of them do not share entries."""
    if name == "<lambda>":
        raise KernelError("a lambda has no name to keep its configurations under; give @tunable an op_id")
    module = getattr(function, "__module__", None) or "function"
    qualified = getattr(function, "__qualname__", name).replace(".<locals>", "")
    if module == "__main__":
        module = _program() or f"__main__-{_digits(function, qualified)}"
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in f"{module}.{qualified}")


def _program() -> str:
    """The name of the script, the module or the notebook that runs as `__main__`; empty where it has none."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec:
        return str(spec.name)
    # Editors that run notebooks without a server leave the path among the names of the notebook.
    path = file or getattr(main, "__vsc_ipynb_file__", None) or notebook()
    return Path(path).stem if path else ""


def _digits(function: Any, qualified: str) -> str:
    """Digits of the code that the function had when this process first saw it."""
    if qualified not in _first:
        plain = unwrapped(function)
        code = function_code([function]) or short_hash(repr(plain and _instructions(plain.__code__)))
        _first[qualified] = code[:8]
    return _first[qualified]


def _instructions(code: types.CodeType) -> Any:
    inner = [_instructions(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts]
    return code.co_code, code.co_names, inner
