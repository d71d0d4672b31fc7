"""Stand-ins for tests of stores: a disk that fails or kills on request, small and large files, other processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked_python
import pytest

from ejkernel.ops.core import plain_file
from ejkernel.ops.core.key import Key
from ejkernel.ops.store import entry_reader, files
from ejkernel.ops.store.entry_files import ENTRY_NAME
from ejkernel.ops.store.persistent import PersistentCache, StoreWarning
from ejkernel.ops.store.snapshot import Snapshot, line, seal, spell
from ejkernel.ops.store.store import StoredEntry

DEV, OP = "gpu|NVIDIA H200", "matmul@v2"
TESTS = Path(__file__).resolve().parent.parent

# What a disk can say.
ERRORS = tuple(getattr(errno, name) for name in ("EIO", "ENOSPC", "EROFS", "EACCES", "ESTALE", "EBUSY"))


def key(name: object) -> Key:
    """A key whose last part is given."""
    return Key(DEV, OP, str(name))


def keep(cache: Any, name: object, cfg: Any) -> None:
    """A put that asks nothing about devices, so that it is quick and small."""
    cache.keep(key(name), StoredEntry(cfg))


def value(cache: Any, name: object) -> Any:
    """The cfg of a key whose last part is given."""
    return cache.get(*key(name))


def store(folder: Path, **more: Any) -> PersistentCache[Any]:
    """The store that most tests use."""
    return PersistentCache("ops", folder / "ops.json", **more)


def entries(path: str | Path) -> dict[str, Any]:
    """What `json.load` finds, without what describes the file itself."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return {name: raw for name, raw in found.items() if isinstance(raw, dict)}


def cfgs(path: str | Path) -> dict[str, Any]:
    """The cfgs in the file at `path` by the last part of their key."""
    return {name.rsplit("|", 1)[1]: raw["cfg"] for name, raw in entries(path).items()}


def filler(number: int) -> Key:
    """A key of the entries that make a file large."""
    return Key(DEV, "filler@v1", f"{number:016x}")


def write_large(path: Path, count: int = 400) -> None:
    """A snapshot beyond the size up to which every put rewrites it."""
    lines = {}
    for number in range(count):
        name = spell(filler(number))
        raw = {"cfg": {"n": number}, "source": "autotune", "environment": {"jaxlib": "0.12.0"}, "summary": {}}
        lines[name] = line(name, seal(name, {**raw, "when": "2026-01-01T00:00:00+00:00", "seq": 1, "writer": "0"}))
    files.write(str(path), Snapshot(lines).text().encode(), durable=False)
    assert os.path.getsize(path) > entry_reader.SMALL


@contextmanager
def told() -> Iterator[list[str]]:
    """What stores warn about inside, filled when the block ends; any other warning is an error."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    assert [warning for warning in caught if warning.category is not StoreWarning] == []
    said.extend(str(warning.message) for warning in caught)


def never_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store counts as large: entries stay in their files until a process folds."""
    monkeypatch.setattr(entry_reader, "SMALL", -1)


def entry_files(path: str | Path) -> list[Path]:
    """The entry files of a store that are not folded yet."""
    folder = Path(f"{path}.d")
    return sorted(p for p in folder.iterdir() if ENTRY_NAME.fullmatch(p.name)) if folder.is_dir() else []


_OPERATIONS = {
    *("open", "read", "write", "close", "fsync", "fstat", "stat", "fchmod", "utime"),
    *("rename", "unlink", "listdir", "mkdir", "chmod"),
}


class Disk:
    """Stands in for `os` in the one file that touches the disk: counts its operations and acts at chosen ones."""

    def __init__(self) -> None:
        self.count = 0
        self.log: list[str] = []
        # Called before (or after) each operation with its number, from 1; what it raises is what the disk says.
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int], None] = lambda number: None

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _OPERATIONS:
            return real

        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.log.append(name)
            number = self.count
            try:
                self.before(number)
            except OSError:
                # A close that fails has closed all the same.
                if name == "close":
                    real(*args, **kwargs)
                raise
            try:
                done = real(*args, **kwargs)
            except OSError:
                self.after(number)
                raise
            try:
                self.after(number)
            except OSError:
                if name == "open":
                    os.close(done)
                raise
            return done

        return operation

    def fail_at(self, number: int, code: int, *, stays: bool = False, late: bool = False) -> None:
        """Has one operation fail, or all from there on; a late failure comes after the deed."""
        start = self.count

        def act(now: int) -> None:
            if now - start == number or (stays and now - start > number):
                raise OSError(code, os.strerror(code))

        self.before, self.after = (lambda now: None, act) if late else (act, lambda now: None)

    def heal(self) -> None:
        """Everything works again."""
        self.before = self.after = lambda number: None


@contextmanager
def on(disk: Disk) -> Iterator[Disk]:
    """File operations of stores go to this disk inside."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "os", disk)
        patched.setattr(plain_file, "os", disk)
        yield disk


def run_script(code: str, *argv: str, timeout: float = 600) -> Any:
    """What another Python process prints as JSON in its last line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "store")])}
    done = forked_python.run(
        [sys.executable, "-W", "ignore", "-c", code, *argv], env=environment, timeout=timeout, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def forked(work: Callable[[], None]) -> int:
    """Runs work in a forked process and says how that ended: 0, or the signal as a negative number. For scripts."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_myself() -> None:
    """As kill -9 from outside, at a chosen moment."""
    os.kill(os.getpid(), signal.SIGKILL)
