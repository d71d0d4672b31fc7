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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ...core.errors import IsolationError
from ...settings import child_environment
from ..stopped import STOPPED_SECONDS, is_stopped
from .protocol import LONGEST_ANSWER, GarbageError, Message, Receiver, Sender

# Importing JAX and taking a device takes seconds, on a busy machine many.
_START_SECONDS = 120.0
# What a person, a scheduler, a terminal or the system for want of memory sends, and no program's mistake.
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
# How often one is started that is killed before it is ready.
BIRTHS = 3
# How often what cannot be heard is looked at: the memory, and whether time is up.
POLL_SECONDS = 0.05
# The end of what a dying process said is looked at, and of that what Python or XLA say when they cannot go on.
_LAST_WORDS = 1 << 16
_TELLING = re.compile(
    r"^(Fatal Python error:|F\d{4} |[\w.]+(Error|Exception): |.+: (No module named|Error while finding module spec))"
)
_LONGEST_WORDS = 300
_MISSING = re.compile(r"No module named '?([\w.]+)")


class WorkerGone(Exception):
    """The process ended; its argument says why, where it was us."""


class KilledAtBirth(IsolationError):
    """The process was killed from outside before it was ready."""


class LacksModule(IsolationError):
    """The process cannot import a module that it needs before it is ready: this package, JAX, or another one."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


def missing_module(text: str) -> str:
    """The module that is missing by the words of an exception; empty where they are about something else."""
    found = _MISSING.search(text)
    return found[1] if found else ""


class _Kept:
    """Workers by what they were started with: those that wait for another tuning, and the latest that was given out."""

    def __init__(self) -> None:
        self.spare: dict[str, WorkerProcess] = {}
        self.latest: dict[str, WorkerProcess] = {}


# None: no worker is kept.
_kept: ContextVar[_Kept | None] = ContextVar("ejkernel_kept_workers", default=None)


@contextlib.contextmanager
def kept_workers() -> Iterator[None]:
    """Keeps workers in a `with` block: one that ended a tuning well serves the next tuning of this thread."""
    kept = _Kept()
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        for worker in kept.spare.values():
            worker.end()


def worker_for(*, platform: str, device: int, settings: Mapping[str, Any], imports: Sequence[str]) -> WorkerProcess:
    """A worker for a device: one that was kept, else a new one, which may not be ready yet."""
    head = {"platform": platform, "device": device, "settings": dict(settings), "imports": list(imports)}
    kept, name = _kept.get() or _Kept(), json.dumps(head)
    worker = kept.spare.pop(name, None)
    if worker is not None and not worker.is_alive():
        worker.end()
        worker = None
    kept.latest[name] = worker = worker or WorkerProcess(head)
    return worker


def start_ahead(*, platform: str, device: int, settings: Mapping[str, Any], imports: Sequence[str]) -> None:
    """Starts the worker of the next tuning before that needs it, where workers are kept and none is there."""
    kept = _kept.get()
    head = {"platform": platform, "device": device, "settings": dict(settings), "imports": list(imports)}
    if kept is not None and json.dumps(head) not in kept.spare:
        kept.spare[json.dumps(head)] = WorkerProcess(head)


def tell_ahead(verb: str, parts: Sequence[bytes], started_with: Mapping[str, Any], **head: Any) -> None:
    """Tells the worker that will most likely serve the next tuning to compile something of it, where there is one."""
    order = ("platform", "device", "settings", "imports")
    name = json.dumps({key: started_with[key] for key in order} | {"imports": list(started_with["imports"])})
    worker = (_kept.get() or _Kept()).latest.get(name)
    if worker is not None and worker.is_alive():
        worker.compiles_ahead = True
        worker.send(verb, parts, **head)


# The module that a worker runs once it ends with its parent: it has a `main`.
_CANDIDATES = "ejkernel.ops.tuning.worker.main"


class WorkerProcess:
    """A fresh Python process that runs `worker.start`, then a module of ours, and nothing of the user's program.

    It imports JAX and takes its device while its parent goes on: what is sent meanwhile waits in a queue.
    """

    # Was it given programs of later tunings?
    compiles_ahead = False

    def __init__(
        self, head: Mapping[str, Any], *, serves: str = _CANDIDATES, variables: Mapping[str, str] | None = None
    ) -> None:
        self._head = head
        # Without a name, and gone with the process that holds it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        # The modules that are found here are found there, whatever was added to the path; the folder that the user
        # happens to be in is not searched.
        path = [os.path.abspath(place) for place in sys.path if place]
        # This end is never written to: that it is closed tells the other one that this process is gone.
        watched, life = os.pipe()
        self._life: int | None = life
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "ejkernel.ops.tuning.worker.start"),
                    *(str(watched), str(os.getpid()), serves),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**child_environment(path), **(variables or {})},
                pass_fds=(watched,),
                # A candidate's own children are in it, and end with it.
                process_group=0,
            )
        except (OSError, TypeError, ValueError) as error:
            self._errors.close()
            os.close(life)
            raise IsolationError(f"no worker process can be started with {sys.executable!r}: {error}") from error
        finally:
            os.close(watched)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Each end of a pipe has one owner, which closes it.
        self._sender = Sender(os.dup(self._process.stdin.fileno()))
        self._receiver = Receiver(os.dup(self._process.stdout.fileno()), LONGEST_ANSWER)
        self._process.stdin.close()
        self._process.stdout.close()
        self._is_ready = False
        self._is_too_late: Callable[[], bool] = lambda: False
        # Since when it is stopped, where it is.
        self._stopped_since: float | None = None
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[str, Sequence[bytes], dict[str, Any]] | None] = queue.SimpleQueue()
        for target in (self._listen, self._speak):
            threading.Thread(target=target, name="ejkernel-worker", daemon=True).start()
        self.send("start", **self._head)

    def _listen(self) -> None:
        try:
            while (message := self._receiver.receive()) is not None:
                self._inbox.put(message)
        # A candidate has written into the pipe.
        except GarbageError as error:
            self._inbox.put(Message({"verb": "broken", "message": str(error)}))
        self._receiver.close()
        self._inbox.put(None)

    def _speak(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                verb, parts, head = message
                self._sender.send(verb, parts, **head)
        # It has ended: the thread that listens says so.
        except OSError:
            pass
        self._sender.close()

    def ready(self, is_too_late: Callable[[], bool] = lambda: False) -> bool:
        """Waits until it can be used, or it is too late; an `IsolationError` where it cannot be used."""
        if not self._is_ready:
            self._is_too_late = is_too_late
            self._begin()
        return self._is_ready

    def _begin(self) -> None:
        until = time.perf_counter() + _START_SECONDS
        try:
            while (message := self.hear()) is None:
                if self._is_too_late():
                    return
                if time.perf_counter() > until:
                    raise IsolationError(f"the worker process was not ready after {_START_SECONDS:g} s")
        except WorkerGone as error:
            words = self.last_words()
            sentence = f"the worker process ended before it was ready ({words})"
            if self.status() in FROM_OUTSIDE:
                raise KilledAtBirth(sentence) from error
            if module := missing_module(words):
                raise LacksModule(sentence, module) from error
            raise IsolationError(sentence) from error
        if message.verb != "hello":
            raise IsolationError(f"the worker process cannot be used: {message.head.get('message')}")
        self._is_ready = True

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def send(self, verb: str, parts: Sequence[bytes] = (), **head: Any) -> None:
        """Tells it something; that it has ended is heard, not seen here."""
        self._outbox.put((verb, parts, head))

    def hear(self) -> Message | None:
        """The next message within a moment; None without one, `WorkerGone` once the worker has ended."""
        # Asked before the queue: what it said before its end has been heard by the time that nothing more comes.
        ended = self._has_ended()
        try:
            message = self._inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            # A child of its own may hold the pipe open.
            if ended:
                raise WorkerGone from None
            # As a kill from outside: it is no candidate's doing, the first time.
            if self._is_stuck():
                self.kill()
            return None
        if message is None:
            raise WorkerGone
        return message

    def _is_stuck(self) -> bool:
        """Has it been stopped (SIGSTOP) for some seconds? Then nothing is heard of it until it is ended."""
        if not is_stopped(self.pid):
            self._stopped_since = None
            return False
        now = time.perf_counter()
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since > STOPPED_SECONDS

    def _has_ended(self) -> bool:
        """Has it ended? Its remains are left, so that its number is no other process's."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True

    def memory(self) -> int:
        """Bytes of memory that it holds now; 0 where that is not known."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # It is gone, or this is not Linux.
        except (OSError, IndexError):
            return 0

    def kill(self) -> None:
        """Ends it at once, with every process that it has started."""
        if self._process.returncode is None:
            # It may have moved its children elsewhere, never itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()

    def status(self) -> int:
        """The worker's exit status, or minus the signal that ended it."""
        until = time.perf_counter() + 10
        while not self._has_ended() and time.perf_counter() < until:
            time.sleep(POLL_SECONDS / 10)
        # Its remains still hold its number, which is its group's too.
        self.kill()
        return self._process.wait()

    def last_words(self) -> str:
        """The way that the worker ended, and the last telling line of its error stream."""
        status = self.status()
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_WORDS))
        lines = self._errors.read().decode("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if _TELLING.search(line)]
        return f"{ended}: {said[-1][:_LONGEST_WORDS]}" if said else ended

    def is_alive(self) -> bool:
        """Has it not ended?"""
        return not self._has_ended()

    def leave(self) -> None:
        """Keeps the worker for another tuning where there may be one, else ends it."""
        kept, name = _kept.get(), json.dumps(self._head)
        # A kernel inside a kernel is tuned while the outer one's worker waits: one of the two is enough.
        if kept is None or name in kept.spare:
            self.end()
        else:
            kept.spare[name] = self

    def end(self) -> None:
        """Ends it and lets go of everything."""
        self.kill()
        self._process.wait()
        self._outbox.put(None)
        if self._life is not None:
            os.close(self._life)
            self._life = None
        self._errors.close()
