"""Every case of every operation that the library has: collected from the files under `cases/`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cases.case import Case

import ejkernel.library


def operations(platform: str | None = None) -> list[str]:
    """The operations that have cases, or cases for a platform, and exist, in order."""
    files = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))
    found = [name for name in files if name in ejkernel.library.__all__]
    return [name for name in found if platform is None or collected(platform, [name])]


def collected(platform: str, only: list[str] | None = None) -> list[Case]:
    """The cases for "gpu" or "cpu", or those for the "check", which are a CPU's where an operation has none.

    Operations that `new_ops_gpu.py` measures have cases for a CPU alone.
    """
    found: list[Case] = []
    for name in operations():
        if not only or name in only:
            cases = importlib.import_module(f"cases.{name}").CASES
            mine = [case for case in cases if case.platform == platform]
            if platform == "check" and not mine and any(case.platform == "gpu" for case in cases):
                mine = [case for case in cases if case.platform == "cpu"]
            found += mine
    return found


def make(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arrays of a case, always the same ones, and its static keywords."""
    return case.make(np.random.default_rng(0))
