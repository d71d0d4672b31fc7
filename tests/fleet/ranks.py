"""Real processes of one `jax.distributed` program on this machine: how tests start them and what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import forked_python

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
REPOSITORY = TESTS.parent

# Far beyond any wait that the programs make, also on a machine that is busy for a while; only a hang gets here.
_HANGS = 600.0


class Ranks:
    """The processes of one program, and what each wrote about each scenario."""

    def __init__(self, program: str, count: int, folder: Path, *, devices: int = 1, **settings: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")},
            **settings,
            "PYTHONPATH": os.pathsep.join(
                map(str, (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "store", HERE))
            ),
            # Programs run once or twice: they are not optimised.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "EJKERNEL_PERSISTENT_CACHE_DIR": str(folder / "cache"),
            "RANKS": str(count),
            "FOLDER": str(folder),
            "PORT": str(_free_port()),
            "SECOND_PORT": str(_free_port()),
        }
        code = f"import rank_programs; rank_programs.main({program!r})"
        self.processes = []
        for rank in range(count):
            command = [sys.executable, "-W", "error::UserWarning", "-c", code]
            own = {**environment, "RANK": str(rank)}
            with (folder / f"out-{rank}").open("w") as out:
                self.processes.append(forked_python.start(command, env=own, stdout=out.fileno(), stderr=out.fileno()))

    def until(self, flag: str) -> None:
        """Waits until a process has raised a flag."""
        wait_for(lambda: (self.folder / f"flag-{flag}").exists() or self._ended(), flag)
        assert (self.folder / f"flag-{flag}").exists(), self.output()

    def raise_flag(self, flag: str) -> None:
        """Raises one itself."""
        (self.folder / f"flag-{flag}").touch()

    def end(self) -> list[int]:
        """Waits for all of them; their exit codes."""
        deadline = time.monotonic() + _HANGS
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"a process hangs:\n{self.output()}") from error
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def said(self) -> dict[str, dict[int, Any]]:
        """What each process wrote, by scenario and rank."""
        found: dict[str, dict[int, Any]] = {}
        for rank in range(len(self.processes)):
            path = self.folder / f"said-{rank}"
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                data = json.loads(line)
                found.setdefault(data.pop("scenario"), {})[rank] = data
        return found

    def output(self) -> str:
        """Everything that they printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("out-*")))

    def _ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + _HANGS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def run_program(program: str, count: int, folder: Path, **options: Any) -> dict[str, dict[int, Any]]:
    """Runs a program to its end; once more where another process took its port meanwhile."""
    for attempt in range(3):
        ranks = Ranks(program, count, folder / str(attempt), **options)
        codes = ranks.end()
        if codes == [0] * count:
            return ranks.said()
        if "ddress already in use" not in ranks.output() and "Failed to start RPC server" not in ranks.output():
            break
    raise AssertionError(f"exit codes {codes}:\n{ranks.output()}")


def once(folder: Path, name: str, make: Callable[[], Any]) -> Any:
    """The same result for all workers of a test run: the first one makes it."""
    # A worker's folder lies in the one of the whole run.
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = folder / f"{name}.json"
    with filelock.FileLock(folder / f"{name}.lock"):
        if not path.exists():
            path.write_text(json.dumps(make()), encoding="utf-8")
        found = json.loads(path.read_text(encoding="utf-8"))
    return {scenario: {int(rank): data for rank, data in by_rank.items()} for scenario, by_rank in found.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
