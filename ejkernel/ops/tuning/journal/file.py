"""What a tuning is about to do and what came of it, on disk: a killed tuning goes on, and no crash happens twice."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import filelock

from ...core.errors import KeyPartError
from ...core.record import Trial
from ...core.stable import short_hash, stable_json
from .observer import Doing, Timed
from .replay import JournalContent

SUFFIX = ".jsonl"
# Another one has other files: nobody reads what it does not know.
FORMAT = 2


_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# A journal with so many times the lines that it needs is written anew when it is opened.
_LONG = 4


class JournalWarning(UserWarning):
    """Tunings that cannot be resumed, because nothing can be written down."""


# Folders that cannot be written to, each said once.
_said: set[str] = set()


def cfg_id(cfg: Any) -> str | None:
    """What a cfg is called in every process; None where it has no stable form."""
    try:
        return short_hash(stable_json(cfg), 12)
    except KeyPartError:
        return None


def path_for(folder: Path, key: Mapping[str, str], objective: str, environment: Mapping[str, str]) -> Path:
    """The journal of one key in one environment: crashes of another version are no news here."""
    named = {name: key[name] for name in ("device", "op_id", "call_key")}
    whole = stable_json([FORMAT, named, objective, dict(environment)])
    # A version may hold anything; what it says stays inside the folder, and the hash tells two of them apart.
    name, mark, version = named["op_id"].partition("@v")
    return folder / f"{name}{mark}{re.sub(r'[^A-Za-z0-9_.+-]', '_', version)}-{short_hash(whole)}{SUFFIX}"


class Journal:
    """Append-only lines, each with a checksum, by the one process that holds the lock; a witness."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # What it held when it was opened.
        self.history = JournalContent()
        self._descriptor: int | None = None
        self._lock: filelock.FileLock | None = None
        self._mutex = threading.Lock()
        self._ids: dict[int, tuple[Any, str | None]] = {}

    @property
    def writable(self) -> bool:
        """Does this process hold it?"""
        return self._descriptor is not None

    def __enter__(self) -> Self:
        self.history = self._open()
        return self

    def __exit__(self, *error: object) -> None:
        # Also on an interrupt: that it was heard shows that no candidate had the process in its hands.
        self._write(left=True)
        self._close()

    def _open(self) -> JournalContent:
        """Takes the journal and reads it; where another process has it, or nothing can be written, it is only read."""
        try:
            if not self._take():
                # Its owner is at it: what it is doing now is no crash.
                return JournalContent.of(read(self.path), alone=False)
            lines = list(read(self.path))
            history = JournalContent.of(lines, alone=True)
            self._shorten(history, len(lines))
        except OSError as error:
            self._close()
            self._say(error)
            return JournalContent()
        # A line that was cut off must not spoil the next one.
        self._append(b"\n")
        return history

    def _shorten(self, history: JournalContent, lines: int) -> None:
        """Tunings that are killed, or stopped by a deadline, end without a word: what they leave must not pile up."""
        history.shorten()
        short = list(history.lines())
        if lines <= _LONG * (len(short) + 1):
            return
        try:
            self._rewrite(short)
            anew = os.open(self.path, _APPENDING, 0o666)
        # Then it stays long: nothing that is known is given up for that.
        except OSError as error:
            self._say(error)
            return
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = anew

    def _take(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{self.path}.lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            return False
        self._lock = lock
        self._descriptor = os.open(self.path, _APPENDING, 0o666)
        if os.fstat(self._descriptor).st_uid != os.getuid():
            raise PermissionError(f"{self.path} is another user's")
        return True

    def _close(self) -> None:
        with self._mutex:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self, identity: str, cfgs: Sequence[Any], *, fresh: bool) -> None:
        """A tuning of these candidates begins; a fresh one takes over nothing but crashes."""
        self._write(begin=identity, fresh=fresh, candidates=[cfg_id(cfg) for cfg in cfgs])

    def starts(self, cfg: Any, doing: Doing) -> None:
        """Named before it runs."""
        self._write(starts=self._id(cfg), doing=doing)

    def ends(self, cfg: Any, program: str = "") -> None:
        """It came back."""
        self._write(ends=self._id(cfg), program=program)

    def _id(self, cfg: Any) -> str | None:
        """Looked up, since it is asked for before every run; a tuning keeps its cfgs, so that addresses tell."""
        known = self._ids.get(id(cfg))
        if known is None or known[0] is not cfg:
            known = self._ids[id(cfg)] = cfg, cfg_id(cfg)
        return known[1]

    def failed(self, trial: Trial, program: str) -> None:
        """An outcome that need not be found again; without a program to tell it by, it has to be."""
        if program:
            self._write(failed=cfg_id(trial.cfg), program=program, trial=_about(trial))

    def lost(self, trial: Trial, program: str) -> None:
        """Never again, until somebody asks for it."""
        one = cfg_id(trial.cfg)
        line = {"lost": one, "program": program, "cfg": repr(trial.cfg)[:200], "trial": _about(trial)}
        self._write(**line)
        # Known at once: should the worker turn out to be of no use, the others run in this process.
        if one is not None:
            self.history.lost[one] = line

    def timed(self, found: Timed, clock: str) -> None:
        """A round."""
        self._write(round=[[self._id(cfg), seconds] for cfg, seconds in found], clock=clock)

    def finish(self, winner: Any, cfgs: Sequence[Any]) -> None:
        """The tuning is over: what is worth keeping is written anew, in one piece."""
        if self._descriptor is None:
            return
        # This process lives: who still compiles was left behind, and has ended nobody.
        kept = JournalContent.of(read(self.path), alone=False)
        kept.shorten()
        kept.winner, kept.candidates = cfg_id(winner), [cfg_id(cfg) for cfg in cfgs]
        try:
            self._rewrite(kept.lines())
        except OSError as error:
            self._say(error)

    def _rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        # One name is enough: who holds the lock is alone.
        temporary = self.path.with_suffix(".tmp")
        try:
            # Nor is a planted link followed: what lies there goes first.
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                file.write(b"".join(map(_line, lines)))
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _write(self, **line: Any) -> None:
        if any(line.get(name, "") is None for name in ("starts", "ends", "failed", "lost")):
            return
        self._append(_line(line))

    def _append(self, data: bytes) -> None:
        with self._mutex:
            if self._descriptor is None:
                return
            try:
                # One write for one line, with no sync: it survives the process, not the loss of power.
                if os.write(self._descriptor, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            except OSError as error:
                os.close(self._descriptor)
                self._descriptor = None
                self._say(error)

    def _say(self, error: OSError) -> None:
        folder = str(self.path.parent)
        if folder not in _said:
            _said.add(folder)
            warnings.warn(
                f"nothing can be journalled in {folder}, so a killed tuning begins anew and a crash may happen again: "
                f"{type(error).__name__}: {error}",
                JournalWarning,
                stacklevel=2,
            )


def _about(trial: Trial) -> dict[str, Any]:
    return {"status": trial.status, "message": trial.message, "error": trial.error, "compile_s": trial.compile_s}


def _line(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order; a damaged one is passed over."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        for line in file:
            check, _, text = line.rstrip(b"\n").partition(b" ")
            if len(check) == 8 and check == b"%08x" % zlib.crc32(text):
                yield json.loads(text)
