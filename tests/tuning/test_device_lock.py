"""One tuning at a time on a device, and how much of it a process has done.

Covers `tuning/stopped.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ejkernel.ops.config import tuning_budget
from ejkernel.ops.tuning import device_lock as locks
from ejkernel.ops.tuning.device_lock import device_lock, lock_path


@pytest.mark.parametrize("folder", [True, False], ids=["with a folder", "without"])
def test_threads_take_turns(folder, tmp_path):
    """Of eight threads on one device never two are inside at once."""
    start = threading.Barrier(8)
    inside, most = [], []

    def work(number):
        start.wait()
        for _ in range(5):
            with device_lock("cpu|one", tmp_path if folder else None):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    assert len(most) == 40
    assert max(most) == 1


def test_another_device_does_not_wait(tmp_path):
    """While one device is busy, another one's turn comes at once."""

    def other():
        with device_lock("cpu|two", tmp_path):
            return True

    with device_lock("cpu|one", tmp_path), ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result(60)


def test_machines_that_share_a_folder_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """They have devices of one kind, but not the same ones; processes of one machine do wait."""
    here = lock_path(tmp_path, "cpu|one")
    assert lock_path(tmp_path, "cpu|one") == here

    monkeypatch.setattr("platform.node", lambda: "another-machine")

    assert lock_path(tmp_path, "cpu|one") != here


def test_a_second_thread_waits_until_the_first_is_out(tmp_path):
    """The order of events shows that it came in afterwards."""
    acts = []
    waiting = threading.Event()

    def second():
        waiting.set()
        with device_lock("cpu|one", tmp_path):
            acts.append("second in")

    with ThreadPoolExecutor(1) as pool:
        with device_lock("cpu|one", tmp_path):
            later = pool.submit(second)
            waiting.wait(60)
            acts.append("first out")
        later.result(60)

    assert acts == ["first out", "second in"]


@pytest.mark.parametrize("folder", [True, False], ids=["with a folder", "without"])
def test_after_the_wait_one_goes_on_without_its_turn(folder, tmp_path):
    """A deadline is a deadline; the holder of the turn keeps it, and the next one still waits."""
    place = tmp_path if folder else None

    def hurried():
        with device_lock("cpu|busy", place, 0.0):
            return "measured"

    with ThreadPoolExecutor(1) as pool:
        with device_lock("cpu|busy", place):
            assert pool.submit(hurried).result(60) == "measured"
            assert pool.submit(hurried).result(60) == "measured"
        assert pool.submit(hurried).result(60) == "measured"


@pytest.mark.parametrize("folder", [True, False], ids=["with a folder", "without"])
def test_a_turn_may_be_taken_again_inside(folder, tmp_path):
    """A tuning inside a tuning of the same thread does not wait for itself."""
    done = threading.Event()
    place = tmp_path if folder else None

    def nested():
        with device_lock(f"cpu|nested {place}", place), device_lock(f"cpu|nested {place}", place):
            done.set()

    # A daemon, so that a thread that waits for itself does not keep the suite from ending.
    threading.Thread(target=nested, daemon=True).start()

    assert done.wait(60)


def test_an_exception_ends_a_turn(tmp_path):
    """The next one gets in."""
    with pytest.raises(KeyError), device_lock("cpu|one", tmp_path):
        raise KeyError

    def next_one():
        with device_lock("cpu|one", tmp_path):
            return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(next_one).result(60)


def test_a_folder_that_cannot_be_made_does_not_stop_a_tuning(tmp_path):
    """Without a place for the lock there is still a turn among the threads of this process."""
    (tmp_path / "file").write_text("in the way")
    with device_lock("cpu|one", tmp_path / "file" / "locks"):
        pass


HOLDER = """
import os, sys, threading
from pathlib import Path
from ejkernel.ops.settings import own_folder
from ejkernel.ops.tuning.device_lock import device_lock
# Imported while every file can be read: Python itself may lie where another user cannot look.
own_folder()
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with device_lock("cpu|one", Path(sys.argv[1])):
    print("held", flush=True)
    threading.Event().wait()
"""


@contextlib.contextmanager
def holder(folder, *user):
    """A process that has its turn on the device, with a cache folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), *map(str, user)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            # A process that is stopped would be waited for without an end.
            process.kill()


@pytest.fixture
def turns(monkeypatch):
    """Says for each lock whether a turn got it."""
    got = []
    real = locks._turn

    def turn(path, end):
        lock = real(path, end)
        got.append(lock is not None)
        return lock

    monkeypatch.setattr(locks, "_turn", turn)
    return got


def test_two_cache_folders_of_one_user_take_turns(tmp_path, turns):
    """A process with another folder has no turn while the first one has its; then it gets it."""
    with holder(tmp_path / "one"), device_lock("cpu|one", tmp_path / "two", 0.01):
        pass
    with device_lock("cpu|one", tmp_path / "two"):
        pass

    assert turns == [False, True, True, True]


@pytest.mark.parametrize("spelling", ["as it is", "a link"])
def test_the_users_own_folder_as_cache_folder_is_locked_once(tmp_path, monkeypatch, turns, spelling):
    """One folder by two names: a process does not wait for itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "ejkernel" / "locks"
    if spelling == "a link":
        folder.mkdir(parents=True)
        (tmp_path / "linked").symlink_to(tmp_path / "home" / "ejkernel")
        folder = tmp_path / "linked" / "locks"
    for _ in range(2):
        with device_lock("cpu|one", folder):
            pass

    assert turns == [True, True]


def test_a_home_that_cannot_be_written_leaves_the_turn_in_the_cache_folder(tmp_path, monkeypatch, turns):
    """Containers have users without a home: their processes take turns in the folder that they share."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with holder(tmp_path / "one"), device_lock("cpu|one", tmp_path / "one", 0.01):
        pass

    assert turns == [False]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as two users")
@pytest.mark.parametrize(("folder", "expected"), [("shared", [True, False]), ("mine", [True, True])])
def test_two_users_take_turns_in_a_folder_that_they_share_and_only_there(turns, monkeypatch, folder, expected):
    """What the documentation says of two users: each has a folder of its own besides, and nothing waits there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        for name, mode in (("shared", 0o1777), ("theirs", 0o777), ("mine", 0o755)):
            os.mkdir(f"{place}/{name}")
            os.chmod(f"{place}/{name}", mode)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/theirs")
        with holder(f"{place}/{'shared' if folder == 'shared' else 'theirs'}", 65534):
            monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/mine")
            with device_lock("cpu|one", Path(place, folder), 0.01):
                pass

    assert turns == expected


def test_a_stopped_holder_is_not_waited_for(tmp_path, monkeypatch):
    """After some seconds the tuning goes on without its turn, and one warning names the process."""
    monkeypatch.setattr(locks, "STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(locks, "_POLL_SECONDS", 0.1)
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        turn = device_lock("cpu|one", tmp_path)
        with pytest.warns(locks.DeviceLockWarning, match=f"kill -CONT {process.pid}"):
            turn.__enter__()
        turn.__exit__(None, None, None)


def test_a_turn_that_was_not_had_is_not_waited_for_at_the_second_lock(tmp_path, monkeypatch):
    """A stopped process may hold both: the seconds for it are spent once."""
    left = []
    monkeypatch.setattr(locks, "_turn", lambda path, end: left.append(end - time.perf_counter()))
    with device_lock("cpu|one", tmp_path):
        pass

    assert [seconds > 0 for seconds in left] == [True, False]


@pytest.mark.parametrize("text", ["", "x", "-1", "9" * 400, str(2**40)], ids=len)
def test_what_a_lock_file_says_of_its_holder_is_not_believed_blindly(tmp_path, text):
    """Any user of the folder may have written it: it is a number of a process that is looked at, or nothing."""
    (tmp_path / "device.lock").write_text(text)
    holder = locks._holder(str(tmp_path / "device.lock"))

    assert holder in (None, 2**40)


class Hands:
    """A clock that is set by hand, one for each thread."""

    def __init__(self):
        self.mine = threading.local()

    def set(self, seconds):
        self.mine.now = seconds

    def __call__(self):
        return getattr(self.mine, "now", 0.0)


@pytest.fixture
def hands(monkeypatch):
    hands = Hands()
    monkeypatch.setattr(tuning_budget, "_spent", 0.0)
    monkeypatch.setattr(tuning_budget.time, "perf_counter", hands)
    return hands


def test_what_is_spent_adds_up(hands):
    """Two tunings one after the other count both."""
    for end in (3.0, 5.0):
        hands.set(0.0)
        with tuning_budget.spending():
            hands.set(end)

    assert tuning_budget.seconds_spent() == 8.0


def test_a_tuning_inside_a_tuning_counts_once(hands):
    """Seconds are not counted for the inner one as well."""
    with tuning_budget.spending():
        with tuning_budget.spending():
            hands.set(4.0)
        hands.set(6.0)

    assert tuning_budget.seconds_spent() == 6.0


def test_a_tuning_that_fails_counts(hands):
    """Seconds spent in vain are spent."""

    def fail():
        with tuning_budget.spending():
            hands.set(2.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert tuning_budget.seconds_spent() == 2.0


def test_threads_count_together(hands):
    """What every thread spends is the process's."""
    start = threading.Barrier(8)

    def work(_):
        hands.set(0.0)
        start.wait()
        with tuning_budget.spending():
            hands.set(1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    assert tuning_budget.seconds_spent() == 8.0
