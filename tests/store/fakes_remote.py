"""Stand-ins for tests of remotes: objects in memory that can be slow, dead, full, cut, corrupt or out of date."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ejkernel.ops.core.key import Key
from ejkernel.ops.store.remote import patience
from ejkernel.ops.store.remote.patience import Patience
from ejkernel.ops.store.remote.remote_store import RemoteStore, RemoteWarning

SECRET = "a secret of thirty-two characters"
OTHER_SECRET = "another secret, not the team's own"
URL = "memory://team"


class MemoryObjects:
    """Objects in a dictionary, and a log of the requests; a test sets what goes wrong."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        # Called with every request before it is served: waits, or raises what the place says.
        self.before: Callable[[str, str], None] = lambda verb, path: None
        # What becomes of an object on its way to the reader.
        self.on_the_way: Callable[[str, bytes], bytes | None] = lambda path, data: data
        # What becomes of a listing.
        self.listed: Callable[[str, list[str]], list[str]] = lambda folder, names: names
        self.unusable = ""
        # A fault that hangs waits for it.
        self.gate = threading.Event()
        self._lock = threading.Lock()

    def _asked(self, verb: str, path: str) -> None:
        self.log.append((verb, path))
        self.before(verb, path)

    def load(self) -> None:
        """Nothing is needed."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder."""
        self._asked("names", folder)
        start = f"{folder}/" if folder else ""
        with self._lock:
            found = sorted({path[len(start) :].split("/")[0] for path in self.data if path.startswith(start)})
        return self.listed(folder, found)

    def read(self, path: str, limit: int) -> bytes | None:
        """A whole object."""
        self._asked("read", path)
        with self._lock:
            data = self.data.get(path)
        return None if data is None else self.on_the_way(path, data)

    def write(self, path: str, data: bytes) -> None:
        """Writes an object; a second one of its name is an error of the code under test."""
        self._asked("write", path)
        with self._lock:
            assert path not in self.data, f"{path} is written twice"
            self.data[path] = data

    def remove(self, path: str) -> None:
        """Removes an object."""
        self._asked("remove", path)
        with self._lock:
            self.data.pop(path, None)

    def why_unusable(self) -> str:
        """As the test says."""
        self._asked("why_unusable", "")
        return self.unusable

    def verbs(self, verb: str) -> list[str]:
        """The paths of the requests of one kind."""
        return [path for name, path in self.log if name == verb]

    def entries(self) -> list[str]:
        """The paths of the entry objects."""
        return [path for path in self.data if path.startswith("entries/") and "/snapshot." not in path]


# Seconds that no request takes which is ever answered, however busy the machine is.
LONG = 60.0


def unhurried(store: RemoteStore) -> RemoteStore:
    """The same store with more patience: a machine that is busy is no remote that is slow."""
    store._patience = Patience(store._left_out, seconds=LONG)
    return store


def remote(objects: Any, *, key: str = SECRET, **more: Any) -> RemoteStore:
    """A remote over fake objects, signed unless told otherwise; it lists again for every look."""
    more.setdefault("fresh_seconds", 0.0)
    made = RemoteStore(URL, objects=objects, key=key, **more)
    return made if "patience" in more else unhurried(made)


def writing(objects: Any, **more: Any) -> RemoteStore:
    """The same, for writing."""
    return remote(objects, write=True, **more)


class Hands:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def patient(said: list[str], *, seconds: float = LONG, clock: Any = None) -> Patience:
    """Patience with requests that answer; a test with one that never does asks for less."""
    return Patience(said.append, seconds=seconds, **({} if clock is None else {"clock": clock}))


@contextmanager
def remote_warnings() -> Iterator[list[str]]:
    """The warnings of remotes inside the block; any other is an error."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Drivers leave their sockets to the garbage collector, which comes when it likes.
        warnings.simplefilter("ignore", ResourceWarning)
        yield said
    assert [warning for warning in caught if warning.category is not RemoteWarning] == []
    said.extend(str(warning.message) for warning in caught)


@contextmanager
def granted_waits() -> Iterator[list[float]]:
    """The seconds that this thread was ready to wait for each request inside the block; quick answers are none.

    What a busy machine adds to them is no wait for the remote.
    """
    granted: list[float] = []
    wait, thread = patience._Answer.wait, threading.get_ident()

    def noting(self: Any, seconds: float) -> bool:
        start = time.perf_counter()
        answered = wait(self, seconds)
        taken = min(seconds, time.perf_counter() - start)
        if threading.get_ident() == thread:
            granted.append(seconds if not answered else taken if taken > patience._QUICK else 0.0)
        return answered

    with mock.patch.object(patience._Answer, "wait", noting):
        yield granted


def key_of_call(name: object, *, device: str = "gpu|NVIDIA H200", op_id: str = "matmul@v2") -> Key:
    """A key whose last part is given."""
    return Key(device, op_id, str(name))
