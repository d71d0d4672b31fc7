"""Patience with a remote: at most two seconds of waiting in all, then the remote is left out for a while."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

from ...core import formatting
from ...core.errors import OpsError

T = TypeVar("T")

# In all, so that a dead remote costs a process less than two seconds with everything around the wait, such as the
# import of a driver.
SECONDS = 1.5
# Waits are forgiven slowly: a process of many hours meets a remote of another day.
_FORGIVEN_PER_SECOND = SECONDS / 3600
# A request that answers faster than this is not counted: it replaces a tuning that takes longer.
_QUICK = 0.25
# So many failures in a row, however quick, are a remote that does not work.
_FAILURES = 3
# After the first failure, then twice as long each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 600.0
# With less than this a request has no chance.
_LEAST = 0.05


class LeftOutError(OSError):
    """A remote that is not asked, or did not answer in time."""


class UnusableError(OSError):
    """A remote that will not work however often it is asked, such as a bucket that does not exist."""


@final
class Patience:
    """The waits of one process for one remote: a request runs on a thread of its own, and is given up in time."""

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._seconds = self._left = seconds
        self._clock = clock
        self._counted_at = clock()
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._out_until = -math.inf
        self._probing = False
        self._lock = threading.Lock()
        # Why the remote is left out; empty while it is asked.
        self.reason = ""

    @property
    def left(self) -> float:
        """Seconds that may still be waited."""
        with self._lock:
            now = self._clock()
            back = (now - self._counted_at) * _FORGIVEN_PER_SECOND
            self._left, self._counted_at = min(self._seconds, self._left + back), now
            return self._left

    def call(self, request: Callable[[], T], probe: Callable[[], object] | None = None) -> T:
        """The answer to a request; a LeftOutError where the remote is left out or too slow.

        Once the pause is over, `probe` is run in the background: a remote that answers it is asked again.
        """
        if self.reason:
            self._try_again(probe)
            raise LeftOutError(self.reason)
        left = self.left
        if left < _LEAST:
            self._leave_out("it was too slow too often")
            raise LeftOutError(self.reason)
        start = self._clock()
        answer: _Answer[T] = _Answer(request)
        answered = answer.wait(left)
        self._count(self._clock() - start)
        if not answered:
            self._leave_out(f"it did not answer within {formatting.duration(left)}")
            raise LeftOutError(self.reason)
        if answer.error is None:
            self._failures = 0
            return answer.value
        self._failures += 1
        if self._failures >= _FAILURES or _is_lasting(answer.error):
            self._leave_out(said(answer.error))
        raise answer.error if isinstance(answer.error, OSError) else UnusableError(said(answer.error))

    def give_up(self, reason: str) -> None:
        """Leaves the remote out for the rest of the process."""
        self._leave_out(reason, pause=math.inf)

    def _count(self, seconds: float) -> None:
        if seconds > _QUICK:
            with self._lock:
                self._left -= seconds

    def _leave_out(self, reason: str, pause: float | None = None) -> None:
        with self._lock:
            if self.reason:
                return
            wait = self._pause if pause is None else pause
            self.reason, self._failures = reason, 0
            self._out_until, self._pause = self._clock() + wait, min(2 * self._pause, _LONGEST_PAUSE)
        self._report(reason)

    def _try_again(self, probe: Callable[[], object] | None) -> None:
        with self._lock:
            if probe is None or self._probing or self._clock() < self._out_until:
                return
            self._probing = True

        def run() -> None:
            start = self._clock()
            try:
                probe()
                works = self._clock() - start < self._seconds
            # Whatever a driver raises means that the remote does not work yet.
            except Exception:
                works = False
            with self._lock:
                self._probing = False
                if works:
                    self.reason = ""
                else:
                    self._out_until, self._pause = self._clock() + self._pause, min(2 * self._pause, _LONGEST_PAUSE)

        threading.Thread(target=run, daemon=True, name="ejkernel-remote-probe").start()


def within(seconds: float, request: Callable[[], T]) -> T:
    """The answer to a request; a LeftOutError where it does not come in time."""
    answer: _Answer[T] = _Answer(request)
    if not answer.wait(seconds):
        raise LeftOutError(f"no answer within {seconds:g} s")
    if answer.error is not None:
        raise answer.error
    return answer.value


class _Answer(Generic[T]):
    """A request on a thread of its own, which ends with the process where no answer ever comes."""

    value: T

    def __init__(self, request: Callable[[], T]) -> None:
        self.error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(request,), daemon=True, name="ejkernel-remote").start()

    def wait(self, seconds: float) -> bool:
        """Waits for the answer; False where it did not come in time."""
        return self._done.wait(seconds)

    def _run(self, request: Callable[[], T]) -> None:
        try:
            self.value = request()
        # A driver may raise anything; the thread that waits is told.
        except Exception as error:
            self.error = error
        finally:
            self._done.set()


def _is_lasting(error: Exception) -> bool:
    # Trying again does not help: a missing driver, wrong credentials, a signing command that does not run.
    words = ("credential", "denied", "forbidden", "unauthorized", "authentication", "permission", "not authorized")
    return isinstance(error, (ImportError, PermissionError, UnusableError)) or any(
        word in str(error).lower() for word in words
    )


def said(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, (LeftOutError, UnusableError, OpsError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
