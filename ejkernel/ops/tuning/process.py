"""One worker process: started, spoken to, looked after and ended."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import IsolationError
from ..settings import child_environment
from .wire import Message, Sender, receive

# Importing JAX and taking a device takes seconds, on a busy machine many.
_START_SECONDS = 120.0
# How often what cannot be heard is looked at: the memory, and whether time is up.
LOOK_SECONDS = 0.05
# The end of what a dying process said is looked at, and of that what Python or XLA say when they cannot go on.
_LAST_WORDS = 1 << 16
_TELLING = re.compile(r"^(Fatal Python error:|F\d{4} |[\w.]+(Error|Exception): )")


class Gone(Exception):
    """The process ended; its argument says why, where it was us."""


class WorkerProcess:
    """A fresh Python process that runs `worker.py` and nothing of the user's program."""

    def __init__(self, *, platform: str, device: int, settings: Mapping[str, Any], imports: Sequence[str] = ()) -> None:
        # Without a name, and gone with the process that holds it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        # The modules that are found here are found there, whatever was added to the path; the folder that the user
        # happens to be in is not searched.
        path = [os.path.abspath(place) for place in sys.path if place]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ejkernel.ops.tuning.worker"],
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
            self._begin(platform=platform, device=device, settings=dict(settings), imports=list(imports))
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

    def _begin(self, **head: Any) -> None:
        until = time.perf_counter() + _START_SECONDS
        try:
            self.send("start", **head)
            while (message := self.hear()) is None:
                if time.perf_counter() > until:
                    raise IsolationError(f"the worker process was not ready after {_START_SECONDS:g} s")
        except Gone as error:
            raise IsolationError(f"the worker process ended before it was ready ({self.last_words()})") from error
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
            raise Gone from error

    def hear(self) -> Message | None:
        """What it says within a moment; None for nothing, `Gone` once it has ended."""
        try:
            message = self._inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None
        if message is None:
            raise Gone
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

    def end(self) -> None:
        """Ends it and lets go of everything."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._errors.close()
