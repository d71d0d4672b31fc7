"""One worker process: started, spoken to, looked after and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ...core.errors import IsolationError
from ...settings import child_environment
from .protocol import Message, Sender, receive

# Importing JAX and taking a device takes seconds, on a busy machine many.
_START_SECONDS = 120.0
# What a person, a scheduler, a terminal or the system for want of memory sends, and no program's mistake.
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
# How often one is started anew that was killed before it was ready.
_BIRTHS = 3
# How often what cannot be heard is looked at: the memory, and whether time is up.
LOOK_SECONDS = 0.05
# The end of what a dying process said is looked at, and of that what Python or XLA say when they cannot go on.
_LAST_WORDS = 1 << 16
_TELLING = re.compile(r"^(Fatal Python error:|F\d{4} |[\w.]+(Error|Exception): )")


class WorkerGone(Exception):
    """The process ended; its argument says why, where it was us."""


class _KilledAtBirth(IsolationError):
    """Somebody killed the process before it was ready."""


# Workers that wait for another tuning, by what they were started with; None: nobody is kept waiting.
_spare: ContextVar[dict[str, WorkerProcess] | None] = ContextVar("ejkernel_spare_workers", default=None)


@contextlib.contextmanager
def kept_workers() -> Iterator[None]:
    """Inside, a worker that ended one tuning well serves the next one of this thread."""
    spare: dict[str, WorkerProcess] = {}
    token = _spare.set(spare)
    try:
        yield
    finally:
        _spare.reset(token)
        for worker in spare.values():
            worker.end()


def worker_for(*, platform: str, device: int, settings: Mapping[str, Any], imports: Sequence[str]) -> WorkerProcess:
    """A worker for a device: one that was kept, else a new one."""
    head = {"platform": platform, "device": device, "settings": dict(settings), "imports": list(imports)}
    kept = (_spare.get() or {}).pop(json.dumps(head), None)
    if kept is not None:
        if kept.is_alive():
            return kept
        kept.end()
    for _ in range(_BIRTHS - 1):
        # A kill from outside says nothing about the next one.
        with contextlib.suppress(_KilledAtBirth):
            return WorkerProcess(head)
    return WorkerProcess(head)


class WorkerProcess:
    """A fresh Python process that runs `worker.py` and nothing of the user's program."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = head
        # Without a name, and gone with the process that holds it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        # The modules that are found here are found there, whatever was added to the path; the folder that the user
        # happens to be in is not searched.
        path = [os.path.abspath(place) for place in sys.path if place]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ejkernel.ops.tuning.worker.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=child_environment(path),
            )
        except (OSError, TypeError, ValueError) as error:
            self._errors.close()
            raise IsolationError(f"no worker process can be started with {sys.executable!r}: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._sender = Sender(self._input)  # type: ignore[arg-type]
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="ejkernel-worker", daemon=True).start()
        try:
            self._begin()
        except BaseException:
            self.end()
            raise

    def _listen(self) -> None:
        try:
            while (message := receive(self._output)) is not None:  # type: ignore[arg-type]
                self._inbox.put(message)
        finally:
            self._output.close()
            self._inbox.put(None)

    def _begin(self) -> None:
        until = time.perf_counter() + _START_SECONDS
        try:
            self.send("start", **self._head)
            while (message := self.hear()) is None:
                if time.perf_counter() > until:
                    raise IsolationError(f"the worker process was not ready after {_START_SECONDS:g} s")
        except WorkerGone as error:
            kind = _KilledAtBirth if self.status() in FROM_OUTSIDE else IsolationError
            raise kind(f"the worker process ended before it was ready ({self.last_words()})") from error
        if message.verb != "hello":
            raise IsolationError(f"the worker process cannot be used: {message.head.get('message')}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, verb: str, parts: Sequence[bytes] = (), **head: Any) -> None:
        """Tells it something; `Gone` where nobody listens."""
        try:
            self._sender.send(verb, parts, **head)
        except (BrokenPipeError, ValueError) as error:
            raise WorkerGone from error

    def hear(self) -> Message | None:
        """What it says within a moment; None for nothing, `Gone` once it has ended."""
        try:
            message = self._inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None
        if message is None:
            raise WorkerGone
        return message

    def memory(self) -> int:
        """Bytes of memory that it holds now; 0 where that is not known."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # It is gone, or this is not Linux.
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def status(self) -> int:
        """How it ended: an exit status, or minus the signal."""
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def last_words(self) -> str:
        """How it ended, and what it said of that."""
        status = self.status()
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_WORDS))
        lines = self._errors.read().decode("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if _TELLING.search(line)]
        return f"{ended}: {said[-1][:200]}" if said else ended

    def is_alive(self) -> bool:
        """Has it not ended?"""
        return self._process.poll() is None

    def leave(self) -> None:
        """Done with it: kept for another tuning where there may be one, else ended."""
        spare, name = _spare.get(), json.dumps(self._head)
        # A kernel inside a kernel is tuned while the outer one's worker waits: one of the two is enough.
        if spare is None or name in spare:
            self.end()
        else:
            spare[name] = self

    def end(self) -> None:
        """Ends it and lets go of everything."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._errors.close()
