"""Campaigns that fork, kill and count, each run in an interpreter of its own by the tests of processes."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes_store import Disk, cfgs, forked, keep, kill_myself, store, value

from ejkernel.ops.core import plain_file
from ejkernel.ops.store import entry_reader, files
from ejkernel.ops.store.persistent import PersistentCache


def start(work: Callable[[], None]) -> int:
    """A forked process that runs on its own."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    """How a process ended: 0, or the signal as a negative number."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def acknowledgements(pid: int, pipe: int) -> tuple[list[Any], int]:
    """Every line that a process wrote before it ended, and how it ended."""
    with os.fdopen(pipe) as lines:
        found = [json.loads(text) for text in lines if text.endswith("\n")]
    return found, end_of(pid)


def acknowledging(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Starts a process that acknowledges over a pipe."""
    reading, writing = os.pipe()

    def run() -> None:
        os.close(reading)
        work(lambda what: os.write(writing, (json.dumps(what) + "\n").encode()))

    pid = start(run)
    os.close(writing)
    return pid, reading


def put_and_tell(cache: PersistentCache[Any], name: str, cfg: Any, tell: Callable[[Any], None]) -> None:
    keep(cache, name, cfg)
    if cache.status == "read-write":
        tell([name, cfg])


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=os.environ["CAMPAIGN_FOLDER"]))


def lost_of(place: Path, acknowledged: list[Any]) -> int:
    """How many acknowledged puts (each of another key) a fresh cache does not find."""
    fresh = store(place)
    return sum(value(fresh, name) != cfg for name, cfg in acknowledged)


def together(processes: int, puts: int, *, one_key: bool, large: bool = False) -> dict[str, Any]:
    """Processes that put at the same time."""
    place = folder()
    if large:
        entry_reader.SMALL = -1
    ready, go = os.pipe()

    def work(who: int) -> Callable[[Callable[[Any], None]], None]:
        def run(tell: Callable[[Any], None]) -> None:
            os.close(go)
            cache = store(place)
            os.read(ready, 1)
            for number in range(puts):
                put_and_tell(cache, "same" if one_key else f"{who}-{number}", [who, number], tell)
                found = value(cache, "same") if one_key else [who, number]
                assert found[0] != who or found[1] >= number, "an older put of our own came back"
            cache.close()

        return run

    started = [acknowledging(work(who)) for who in range(processes)]
    os.close(go)
    ended = [acknowledgements(*each) for each in started]
    told = [each for found, _ in ended for each in found]
    fresh = store(place)
    if one_key:
        # Whose put it is, it is that process's last one: each had seen its own.
        winner = value(fresh, "same")
        lost = int(winner is None or winner[1] != puts - 1)
    else:
        lost = lost_of(place, told)
    fresh.fold()
    in_file = len(cfgs(place / "ops.json"))
    return {
        "processes": processes,
        "acknowledged": len(told),
        "lost": lost,
        "in file": in_file,
        "ended well": sum(code == 0 for _, code in ended),
    }


def forks(puts: int) -> dict[str, Any]:
    """A process that forks while its threads put; the children put into the cache that they were born with."""
    place = folder()
    cache = store(place)
    told: list[Any] = []
    stop = threading.Event()

    def work(who: int) -> None:
        number = 0
        while not stop.is_set():
            put_and_tell(cache, f"thread{who}-{number}", number, told.append)
            number += 1

    threads = [threading.Thread(target=work, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()

    def child(who: int) -> Callable[[Callable[[Any], None]], None]:
        def run(tell: Callable[[Any], None]) -> None:
            for number in range(puts):
                put_and_tell(cache, f"child{who}-{number}", number, tell)

        return run

    children = []
    for who in range(8):
        children.append(acknowledging(child(who)))
        put_and_tell(cache, f"parent-{who}", who, told.append)
    ended = [acknowledgements(*each) for each in children]
    stop.set()
    for thread in threads:
        thread.join()
    born = [each for found, _ in ended for each in found]
    cache.close()
    return {
        "acknowledged by threads": len(told),
        "acknowledged by children": len(born),
        "lost": lost_of(place, told + born),
        "in file": len(cfgs(cache.path)) - len(told) - len(born),
        "ended well": sum(code == 0 for _, code in ended),
    }


def armed(number: int, act: Callable[[], None], *, late: bool) -> Disk:
    """A disk that acts at one operation, counted from here."""
    disk = Disk()

    def at(now: int) -> None:
        if now == number:
            act()

    if late:
        disk.after = at
    else:
        disk.before = at
    files.os = plain_file.os = disk
    return disk


def kills(kind: str, *, late: bool, before: int = 3) -> dict[str, Any]:
    """kill -9 at each file operation of a put, or of a fold, one round for each until there is none left."""
    if kind != "put into a small store":
        entry_reader.SMALL = -1
    rounds = lost = broken = 0
    while True:
        place = folder()
        number = rounds + 1

        def work(tell: Callable[[Any], None], place: Path = place, number: int = number) -> None:
            cache = store(place)
            for name in range(before):
                put_and_tell(cache, f"before{name}", name, tell)
            if kind == "fold":
                cache.fold()
                for name in range(before):
                    put_and_tell(cache, f"waiting{name}", name, tell)
            disk = armed(number, kill_myself, late=late)
            if kind == "fold":
                cache.fold()
            else:
                put_and_tell(cache, "last", "last", tell)
            assert disk.count < number
            os._exit(17)

        told, code = acknowledgements(*acknowledging(work))
        if code == 17:
            return {"kind": kind, "late": late, "rounds": rounds, "lost": lost, "broken": broken}
        assert code == -signal.SIGKILL, code
        rounds += 1
        lost += lost_of(place, told)
        # The next process finds a file that loads, and everything goes on.
        fresh = store(place)
        keep(fresh, "after", "after")
        broken += not fresh.fold()
        broken += not {"after", *(name for name, _ in told)} <= set(cfgs(fresh.path))
        broken += len(told) < before


def random_kills(rounds: int, seed: int) -> dict[str, Any]:
    """kill -9 from outside, at any moment, of a process that puts and folds as fast as it can."""
    entry_reader.SMALL = -1
    dice = random.Random(seed)
    lost = acknowledged = broken = 0
    place = folder()
    for turn in range(rounds):

        def work(tell: Callable[[Any], None], turn: int = turn) -> None:
            cache = store(place)
            number = 0
            while True:
                put_and_tell(cache, f"{turn}-{number}", number, tell)
                number += 1
                if number % 5 == 0:
                    cache.fold()

        pid, pipe = acknowledging(work)
        wanted, seen = dice.randint(1, 25), b""
        while seen.count(b"\n") < wanted:
            seen += os.read(pipe, 100)
        # A moment that is no round number of acknowledgements: some turns of an empty loop.
        for _ in range(dice.randint(0, 20000)):
            pass
        os.kill(pid, signal.SIGKILL)
        with os.fdopen(pipe, "rb") as rest:
            seen += rest.read()
        end_of(pid)
        told = [json.loads(text) for text in seen.decode().split("\n")[:-1]]
        acknowledged += len(told)
        lost += lost_of(place, told)
        if turn % 20 == 19:
            fresh = store(place)
            broken += not fresh.fold()
            broken += len(cfgs(fresh.path)) < acknowledged
    return {"rounds": rounds, "acknowledged": acknowledged, "lost": lost, "broken": broken}


def puts_during_a_fold() -> dict[str, Any]:
    """At each file operation of a fold, in turn, a second process puts, to the end, before the fold goes on."""
    entry_reader.SMALL = -1
    rounds = lost = 0
    while True:
        place = folder()
        cache = store(place)
        for name in range(3):
            keep(cache, f"before{name}", name)

        def other(place: Path = place) -> None:
            files.os = plain_file.os = os
            second = store(place)
            for name in ("during", "before1"):
                keep(second, name, "second")
            assert second.status == "read-write"

        disk = armed(rounds + 1, lambda other=other: _must(forked(other) == 0), late=False)
        cache.fold()
        reached = disk.count > rounds
        files.os = plain_file.os = os
        if not reached:
            return {"rounds": rounds, "lost": lost}
        rounds += 1
        expected = {"before0": 0, "before1": "second", "before2": 2, "during": "second"}
        for reader in (store(place), cache):
            lost += sum(value(reader, name) != cfg for name, cfg in expected.items())
        cache.fold()
        lost += cfgs(cache.path) != expected


def folds_and_puts(puts: int, *, folding: int = 1) -> dict[str, Any]:
    """One process or several fold without a break while two others put."""
    entry_reader.SMALL = -1
    place = folder()

    def putting(who: int) -> Callable[[Callable[[Any], None]], None]:
        def run(tell: Callable[[Any], None]) -> None:
            cache = store(place)
            for number in range(puts):
                put_and_tell(cache, f"{who}-{number}", number, tell)

        return run

    def folding_on() -> None:
        cache = store(place)
        while not (place / "done").exists():
            cache.fold()

    started = [acknowledging(putting(who)) for who in range(2)]
    others = [start(folding_on) for _ in range(folding - 1)]
    folder_cache = store(place)
    folds = 0

    def fold_on() -> None:
        nonlocal folds
        while not done.is_set():
            folds += folder_cache.fold()

    done = threading.Event()
    thread = threading.Thread(target=fold_on)
    thread.start()
    ended = [acknowledgements(*each) for each in started]
    done.set()
    thread.join()
    (place / "done").touch()
    _must(not any(map(end_of, others)))
    told = [each for found, _ in ended for each in found]
    folder_cache.fold()
    return {
        "folds": folds,
        "acknowledged": len(told),
        "lost": lost_of(place, told),
        "in file": len(cfgs(place / "ops.json")),
    }


def spawned(path: str, who: int, puts: int) -> None:
    """For multiprocessing: a fresh interpreter that puts."""
    cache = PersistentCache[Any]("ops", path)
    for number in range(puts):
        keep(cache, f"{who}-{number}", number)
    assert cache.status == "read-write"
    cache.close()


def _must(fine: bool) -> None:
    if not fine:
        raise AssertionError("another process failed")
