"""Every case of every operation that the library has: collected from the files under `cases/`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cases.case import Case

import ejkernel.library


def operations() -> list[str]:
    """The operations that have cases and exist, in order."""
    files = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))
    return [name for name in files if name in ejkernel.library.__all__]


def collected(kind: str, only: list[str] | None = None) -> list[Case]:
    """The cases of one kind: GPU, CPU or CHECK."""
    chosen = [name for name in operations() if not only or name in only]
    return [case for name in chosen for case in getattr(importlib.import_module(f"cases.{name}"), kind)]


def function_of(case: Case) -> Any:
    """The library's function."""
    return getattr(ejkernel.library, case.operation)
