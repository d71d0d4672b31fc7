"""A tuning's steps and outcomes on disk: no crash happens twice, and no failure is found out twice.

The first line of a journal is a slot of fixed size, written over in place: it names the candidate that the tuning's
thread has in its hands now, so that it is known after a death. All other lines are outcomes and are appended: what was
compiled (several candidates at once, hence not in the slot), failed, dropped, lost or won.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ...core import codec, plain_file
from ...core.errors import KeyPartError
from ...core.plain_file import FileLock, Timeout, lock_at, make_folder
from ...core.record import Record, Trial
from ...core.stable import short_hash, stable_json
from .observer import Doing
from .replay import JournalContent, fits

SUFFIX = ".jsonl"
# The version of the format; it is part of a journal's file name.
FORMAT = 3
# The version before this one: of its journals the crashes are read.
_BEFORE = 2

_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT
# Far above what the largest search writes: no tuning of ours made a larger journal, or a longer line.
_LARGEST, _LONGEST_LINE = 64 << 20, 1 << 20
# Bytes of the first line.
_SLOT = 80
# A journal with so many times the lines that it needs is written anew when it is opened.
_LONG = 4


class JournalWarning(UserWarning):
    """Tunings that cannot be resumed, because nothing can be written down."""


# Folders that cannot be written to, each said once.
_said: set[str] = set()


def cfg_id(cfg: Any) -> str | None:
    """The name of a cfg in every process; None where it has no stable form."""
    try:
        return short_hash(stable_json(cfg), 12)
    except KeyPartError:
        return None


def path_for(
    folder: Path,
    key: Mapping[str, str],
    objective: str,
    environment: Mapping[str, str],
    form: int = FORMAT,
    user: int | None = None,
) -> Path:
    """The journal of one key in one environment: crashes of another version are no news here."""
    named = {name: key[name] for name in ("device", "op_id", "call_key")}
    whole = stable_json([form, named, objective, dict(environment), *(() if user is None else (user,))])
    # A version may hold anything; what it says stays inside the folder, and the hash tells two of them apart.
    name, mark, version = named["op_id"].partition("@v")
    return folder / f"{name}{mark}{re.sub(r'[^A-Za-z0-9_.+-]', '_', version)}-{short_hash(whole)}{SUFFIX}"


def journal_for(folder: Path, key: Mapping[str, str], objective: str, environment: Mapping[str, str]) -> Journal:
    """The journal of one key; it takes over the crashes of a journal of the format before this one."""
    before = path_for(folder, key, objective, environment, _BEFORE)
    path = path_for(folder, key, objective, environment)
    # In a group's folder the first user of a call has this name, and each other one a name of its own.
    with contextlib.suppress(OSError):
        if os.lstat(path).st_uid != os.getuid():
            path = path_for(folder, key, objective, environment, user=os.getuid())
    return Journal(path, before)


class Journal:
    """Lines with checksums, written by the one process that holds the lock; an observer."""

    def __init__(self, path: Path, before: Path | None = None) -> None:
        self.path = path
        self._before = before
        # The content when the journal was opened.
        self.history = JournalContent()
        self._descriptor: int | None = None
        self._slot: int | None = None
        self._file_lock: FileLock | None = None
        self._mutex = threading.Lock()
        self._ids: dict[int, tuple[Any, str | None]] = {}
        # Names of the candidates' programs, by the candidates' ids.
        self._programs: dict[str, str] = {}

    @property
    def writable(self) -> bool:
        """Does this process hold the journal, and write it?"""
        return self._descriptor is not None

    def __enter__(self) -> Self:
        self.history = self._open()
        return self

    def __exit__(self, *error: object) -> None:
        # Also on an interrupt: Python could handle it, so no candidate was stuck in native code.
        self._write(left=True)
        self._fill_slot(None, "check")
        self._close()

    def _open(self) -> JournalContent:
        """Takes the journal and reads it; where another process has it, or nothing can be written, it is only read."""
        try:
            if not self._take():
                # Another process tunes now: the candidate in the slot is at work there, and has not crashed.
                return JournalContent.of(read(self.path), alone=False)
            lines = list(read(self.path))
            history = JournalContent.of(lines, alone=True)
            if not lines and self._before is not None:
                history.lost = JournalContent.of(read(self._before), alone=True).lost
            is_new = self._shorten(history, len(lines))
        except OSError as error:
            self._close()
            self._say(error)
            return JournalContent()
        # A line that was cut off must not spoil the next one.
        self._append(b"\n")
        if not is_new and lines and lines[0].get("slot") is not None:
            # The slot is written over from now on.
            self._write(suspects={lines[0]["slot"]: [lines[0]["doing"]]})
            self._write(crashed=True)
            self._fill_slot(None, "check")
        return history

    def _shorten(self, history: JournalContent, lines: int) -> bool:
        """Writes a journal anew that has no slot yet, or too many lines of tunings that ended without an outcome.

        Says whether it did.
        """
        history.shorten()
        short, is_new = list(history.lines()), False
        try:
            if not _has_slot(self.path) or lines > _LONG * (len(short) + 1):
                self._rewrite(short)
                is_new = True
            self._slot = plain_file.open_plain(str(self.path), os.O_WRONLY)
        # A journal that cannot be written anew stays as it is, with all its lines.
        except OSError as error:
            self._say(error)
        return is_new

    def _take(self) -> bool:
        make_folder(str(self.path.parent))
        # A tuning may be prepared by one thread and measured by another.
        file_lock = lock_at(f"{self.path}.lock", timeout=0, thread_local=False)
        try:
            file_lock.acquire()
        except Timeout:
            return False
        self._file_lock = file_lock
        self._descriptor = plain_file.open_plain(str(self.path), _APPENDING)
        found = os.fstat(self._descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o002:
            raise PermissionError(errno.EPERM, "another user may write it; remove it", str(self.path))
        if found.st_mode & 0o020:
            # A umask of 002 lets the group write: the journal is trusted this once, and closed to the group.
            os.fchmod(self._descriptor, stat.S_IMODE(found.st_mode) & ~0o020)
        return True

    def _close_files(self) -> None:
        with self._mutex:
            for descriptor in (self._descriptor, self._slot):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptor = self._slot = None

    def _close(self) -> None:
        self._close_files()
        if self._file_lock is not None:
            self._file_lock.release()
            self._file_lock = None

    def begin(self, identity: str, cfgs: Sequence[Any], *, fresh: bool) -> None:
        """Notes that a tuning of these candidates begins; a fresh one takes over nothing but crashes."""
        self._write(begin=identity, fresh=fresh, candidates=[cfg_id(cfg) for cfg in cfgs])

    def trying(self, cfg: Any, doing: Doing, program: str = "") -> None:
        """Names a candidate before its step: in the slot, or for compiling, which several do at once, in a line."""
        one = self._id(cfg)
        if doing != "compile":
            self._fill_slot(one, doing)
        elif one is not None:
            self._programs[one] = program
            self._write(trying=one, doing=doing)

    def came_back(self, cfg: Any, doing: Doing) -> None:
        """Notes that the process has survived a candidate's step."""
        one = self._id(cfg)
        if doing == "compile":
            self._write(back=one, doing=doing)
            return
        self._fill_slot(None, doing)
        # The candidate was suspected of an earlier death, and has survived the step this time.
        if one in self.history.suspects:
            self._write(back=one, doing=doing)

    def failed(self, trial: Trial, program: str) -> None:
        """Writes down a failure, so that no later tuning repeats it; without a program's name it would not be found."""
        if program:
            self._write(failed=cfg_id(trial.cfg), program=program, trial=_about(trial))

    def lost(self, trial: Trial, program: str) -> None:
        """Writes down a candidate that ended a process: it does not run again before `forget_crashes`."""
        one = cfg_id(trial.cfg)
        line = {"lost": one, "program": program, "cfg": repr(trial.cfg)[:200], "trial": _about(trial)}
        self._write(**line)
        # Also in `history`: if no worker can be used, the candidates run in this process, without this one.
        if one is not None:
            self.history.lost[one] = line

    def dropped(self, cfg: Any, program: str, *, seconds: float, ratio: float, clock: str) -> None:
        """Writes down a candidate that was timed, and is clearly slower than the best."""
        one = self._id(cfg)
        if one is not None:
            self._append(_line(_drop(one, program, seconds, ratio, clock)))

    def finish(self, record: Record, cfgs: Sequence[Any]) -> None:
        """Ends the tuning: what a later one needs is written anew, in one piece."""
        if self._descriptor is None:
            return
        self._append(b"".join(map(_line, self._losers(record))))
        # `alone=False`: a candidate that still compiles is a straggler, and no suspect, since this process lives.
        kept = JournalContent.of(read(self.path), alone=False)
        kept.shorten()
        kept.crashed = False
        for trial in record.trials:
            if trial.status == "ok" and trial.samples_s:
                kept.suspects.pop(self._id(trial.cfg) or "", None)
        kept.winner, kept.candidates = cfg_id(record.cfg), [cfg_id(cfg) for cfg in cfgs]
        try:
            self._rewrite(kept.lines())
        except OSError as error:
            self._say(error)
        self._close_files()

    def _losers(self, record: Record) -> Iterator[dict[str, Any]]:
        """Lines of the losers, which a later race of the winner and a new candidate need not time again."""
        best = record.trials[record.winner or 0].seconds
        clock = record.clock.partition(" ")[0]
        for trial in record.trials:
            one, seconds = self._id(trial.cfg), trial.seconds
            # What was dropped before the race has its line, with another ratio than that of its quick program's times.
            if trial.dropped_round == 0:
                continue
            if one is not None and trial.status == "ok" and seconds and best and one in self._programs:
                yield _drop(one, self._programs[one], seconds, seconds / best, clock)

    def _fill_slot(self, one: str | None, doing: Doing) -> None:
        with self._mutex:
            if self._slot is None:
                return
            try:
                os.pwrite(self._slot, _slot_line(one, doing), 0)
            except OSError as error:
                os.close(self._slot)
                self._slot = None
                self._say(error)

    def _id(self, cfg: Any) -> str | None:
        """The id of a cfg, kept by the cfg's address: it is needed before every run, and a tuning keeps its cfgs."""
        known = self._ids.get(id(cfg))
        if known is None or known[0] is not cfg:
            known = self._ids[id(cfg)] = cfg, cfg_id(cfg)
        return known[1]

    def _rewrite(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all lines, behind an empty slot."""
        # One temporary name is enough: only the process that holds the lock writes.
        temporary = self.path.with_suffix(".tmp")
        try:
            # A link that was planted under the temporary name is removed, not followed.
            temporary.unlink(missing_ok=True)
            with open(plain_file.open_plain(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(_slot_line(None, "check") + b"".join(map(_line, lines)))
            os.replace(temporary, self.path)
            anew = plain_file.open_plain(str(self.path), _APPENDING)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        with self._mutex:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = anew
            if self._slot is not None:
                os.close(self._slot)
                self._slot = None

    def _write(self, **line: Any) -> None:
        if all(line.get(name, "") is not None for name in ("back", "failed", "lost")):
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


def _drop(one: str, program: str, seconds: float, ratio: float, clock: str) -> dict[str, Any]:
    return {"dropped": one, "program": program, "seconds": seconds, "ratio": ratio, "clock": clock}


def _line(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _slot_line(one: str | None, doing: Doing) -> bytes:
    text = json.dumps({"slot": one, "doing": doing}).encode().ljust(_SLOT - 10)
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _has_slot(path: Path) -> bool:
    descriptor = plain_file.open_plain(str(path), os.O_RDONLY)
    try:
        first = os.read(descriptor, _SLOT)
    finally:
        os.close(descriptor)
    return len(first) == _SLOT and first[-1:] == b"\n" and first[8:].startswith(b' {"slot": ')


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of this user's journal, in order; a damaged one, or one that no tuning writes, is passed over."""
    content = plain_file.read(str(path), _LARGEST)
    # What another user says of crashes would take away good candidates, or bring back bad ones.
    if content is None or not (content.author == os.getuid() or content.is_left_open):
        return
    for line in content.data.split(b"\n"):
        check, _, text = line.partition(b" ")
        if len(text) <= _LONGEST_LINE and len(check) == 8 and check == b"%08x" % zlib.crc32(text):
            with contextlib.suppress(ValueError):
                found = codec.loads(text)
                if fits(found):
                    yield found
