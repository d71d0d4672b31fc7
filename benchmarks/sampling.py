"""A thread that looks at something again and again while a `with` block runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Sampling:
    """Calls `look` every `interval` seconds inside a `with` block, and once more at its end."""

    interval = 1.0

    def __init__(self) -> None:
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def look(self) -> None:
        """Takes one sample."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._over.wait(self.interval):
            self.look()
        self.look()
