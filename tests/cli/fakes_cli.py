"""Running the command as a user would: in this process, in pipes and in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import forked_python

from ejkernel.cli.main import run
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.snapshot import Snapshot, line, seal, spell

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMMAND = [sys.executable, "-m", "ejkernel.cli"]
DEVICE = "gpu|NVIDIA H200"


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def data(self):
        """The output of --json."""
        return json.loads(self.out)


class Shell:
    """Runs commands in this process."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *words: str) -> Done:
        self._capsys.readouterr()
        status = run(words)
        return Done(status, *self._capsys.readouterr())


def variables(**more: str) -> dict[str, str]:
    """The environment of a process that has the package and the test programs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), **more}


def piped(*words: str) -> Done:
    """Runs a command in a process of its own, its streams being files."""
    done = forked_python.run([*COMMAND, *words], env=variables(), timeout=300)
    return Done(done.returncode, done.stdout, done.stderr)


# The terminal that Ctrl-C is typed into must be the process's own.
_ADOPT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def in_terminal(*words: str, columns: int = 80, stop_after: str = "", **more: str) -> tuple[int, str]:
    """Runs a command in a pseudo-terminal; with `stop_after`, types Ctrl-C once that was shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _ADOPT, *COMMAND, *words],
        env=variables(TERM="xterm", **more),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    typed = not stop_after
    while True:
        try:
            part = os.read(ours, 4096)
        # How a terminal says that no process is left on its other side.
        except OSError:
            part = b""
        if not part:
            break
        shown += part
        if not typed and stop_after.encode() in shown:
            os.write(ours, b"\x03")
            typed = True
    os.close(ours)
    return process.wait(timeout=300), shown.decode()


def raw(seconds=1e-5, gain=1.5, when="2026-01-02T03:04:05+00:00", cfg=None):
    """An entry as a store's line has it."""
    return {
        "cfg": {"block": 64} if cfg is None else cfg,
        "source": "autotune",
        "objective": "forward",
        "when": when,
        "by": "ejkernel-ops 0.1.0",
        "environment": {"jax": "0.10.2", "jaxlib": "0.10.2"},
        "summary": {"seconds": seconds, "gain": [gain, gain, gain], "candidates": 4, "clock": "wall"},
        "call": {"args[0]": "float32[8]"},
        "seq": 1,
        "writer": "0123456789abcdef",
    }


def write_store(path, entries, *, form=1):
    """A store's file with these entries, `{(op_id, call_key): raw}` or by whole keys."""
    lines = {}
    for place, content in entries.items():
        name = spell(Key(*place) if len(place) == 3 else Key(DEVICE, *place))
        lines[name] = line(name, seal(name, content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Snapshot(lines).text().replace('"~format": 1', f'"~format": {form}'), encoding="utf-8")
    return path
