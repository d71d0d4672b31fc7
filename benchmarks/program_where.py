"""Tells where a tuning's time goes in the thread that asked for it: samples of its stack, at next to no cost."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from sampling import Sampling

import ejkernel

_HOME = str(Path(ejkernel.__file__).parent)


class Where(Sampling):
    """Counts, inside a `with` block, which function of the project the thread is in, the innermost one."""

    interval = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._latest = time.perf_counter()

    def look(self) -> None:
        """Adds the time since the last sample to the function that the thread is in now."""
        frame = sys._current_frames().get(self._thread)
        now = time.perf_counter()
        # The lock may have been held for long: what is seen then took all of that time.
        self.seconds[_innermost(frame)] += now - self._latest
        self._latest = now

    def table(self, most: int = 15) -> str:
        """The largest, a line each."""
        return "\n".join(f"   {seconds:6.2f} s  {name}" for name, seconds in self.seconds.most_common(most))


def _innermost(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_HOME):
            return f"{Path(code.co_filename).relative_to(_HOME)}:{code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"
