"""Python processes that need not import JAX: a process that has imported it, and started no backend, is forked.

Importing JAX takes most of a short process, and importing the package most of what is left: both are done before, the
package where no process sees it until it imports it itself. `run` stands in for `subprocess.run` where a test is not
about how a process starts: what runs has its own streams, variables, folder, arguments and `__main__`, and ends as a
process of its own. A test that changes how Python or JAX start (a hash seed, a variable of JAX) gets a fresh process.

`fork_workers` has workers of tunings started so, too, each as a child of the process that starts it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What these say is read while Python, numpy or JAX start.
_AT_START = ("PYTHON", "JAX_", "OPENBLAS_", "LD_")
_FOLLOWED = {"PYTHONPATH", "JAX_PLATFORMS"}
_WORKER = ["-P", "-m", "ejkernel.ops.tuning.worker.start"]
# The modules that give programs of tunings names of their own; has a name a number besides?
_NAMING = {"tuning.compile": True, "tuning.worker.executables": False}
_OURS = ("ejkernel.ops.tuning.worker.main", "ejkernel.ops", "ejkernel.library")
_EXECUTABLE = sys.executable
_PR_SET_CHILD_SUBREAPER = 36
# Above every descriptor that a process here is passed by number.
_UNUSED = 500


class Process:
    """One process that was forked: as much of `subprocess.Popen` as tests of several processes use."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(100))
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self.returncode is None and not select.select([self._answers], [], [], 0)[0]:
            return None
        return self.wait()

    def communicate(self, words: str = "", timeout: float | None = None) -> tuple[str, None]:
        """Writes to it, waits for its end, and has what it wrote."""
        assert self.stdin is not None
        assert self.stdout is not None
        # It may have ended already, or have been told so.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.stdin.write(words)
            self.stdin.close()
        # What waits in the pipe is read afterwards: a process that may hang writes little.
        if timeout is not None:
            self.wait(timeout)
        written = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self.wait()
        return written, None

    def kill(self) -> None:
        """Ends it where it still runs."""
        if self.poll() is None:
            # It may end this very moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The process that is forked; it ends with this one."""

    def __init__(self, ours: socket.socket | None = None) -> None:
        self._started_by = os.getpid()
        self._turn = threading.Lock()
        self.variables = dict(os.environ)
        # One that was forked already, for a process that was itself forked.
        if ours is not None:
            self._ours = ours
            return
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        # A fork of the process that runs tests has another server's end, which it leaves alone.
        if os.getpid() == self._started_by:
            self._ours.close()
            self._process.wait()

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> Process:
        """Has it fork, and the fork do what was asked for."""
        ours = self._asked(request, streams)
        return Process(int(ours.recv(100)), ours)

    def adopt(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The same, as a child of this process: its parent ends at once, and this process takes it over."""
        with self._turn:
            _take_over_children(True)
            try:
                with self._asked({**request, "parent": os.getpid()}, streams) as answers:
                    return int(answers.recv(100))
            finally:
                _take_over_children(False)

    def _asked(self, request: Mapping[str, Any], streams: Sequence[int]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file:
            # A message has a limit that a script may exceed.
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._ours, [b"start"], [file.fileno(), theirs.fileno(), *streams])
        return ours


def _take_over_children(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


_servers: dict[int, _Server] = {}


def _server_for(env: Mapping[str, str]) -> _Server | None:
    # A process that cannot be forked, or with other variables than it started with, does not serve.
    if sys.platform != "linux":
        return None
    server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), _Server())
    differ = {name for name in {*env, *server.variables} if env.get(name) != server.variables.get(name)}
    return None if any(name.startswith(_AT_START) for name in differ - _FOLLOWED) else server


def start(
    command: Sequence[str], *, env: Mapping[str, str], stdout: int, stderr: int, cwd: str | os.PathLike[str] = "."
) -> Process | subprocess.Popen[bytes]:
    """Starts `python [-W filter] (-c code | -m module | file) ...` with these streams."""
    server = _server_for(env)
    if server is None:
        return subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    with open(os.devnull, "rb") as nothing:
        return server.start(_request(command, env, cwd), [nothing.fileno(), stdout, stderr])


def piped(command: Sequence[str], *, env: Mapping[str, str]) -> Process | subprocess.Popen[str]:
    """Starts such a command with pipes to its input and from its output."""
    server = _server_for(env)
    if server is None:
        return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    (its_input, ours), (back, its_output) = os.pipe(), os.pipe()
    process = server.start(_request(command, env), [its_input, its_output, 2])
    os.close(its_input)
    os.close(its_output)
    process.stdin = os.fdopen(ours, "w", encoding="utf-8")
    process.stdout = os.fdopen(back, encoding="utf-8")
    return process


def _request(command: Sequence[str], env: Mapping[str, str], cwd: str | os.PathLike[str] = ".") -> dict[str, Any]:
    return {"command": list(map(str, command[1:])), "env": dict(env), "cwd": str(Path(cwd).absolute())}


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    cwd: str | os.PathLike[str] = ".",
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs such a command to its end, and has what it wrote."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(command, env=env, cwd=cwd, stdout=out.fileno(), stderr=err.fileno())
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        written = []
        for file in (out, err):
            file.seek(0)
            written.append(file.read().decode())
    done = subprocess.CompletedProcess(list(command), status, *written)
    if check and status:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return done


def _serve(control: socket.socket) -> dict[str, Any]:
    """Forks for each message; returns in forks alone, with what is to be done."""
    waiting: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([control, *waiting], [], [])[0]:
            if ready is not control:
                pid, answers = waiting.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                # The test may have ended without waiting.
                with answers, contextlib.suppress(OSError):
                    answers.send(str(status).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 100, 16)
            if not message:
                os._exit(0)
            request, answer, *streams = descriptors
            with os.fdopen(request, "rb") as file:
                file.seek(0)
                wanted = json.load(file)
            pid = os.fork()
            if pid == 0:
                if "parent" in wanted and os.fork() != 0:
                    os._exit(0)
                numbers = [0, 1, 2, *wanted.get("passed", ())]
                aside = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _UNUSED) for stream in (answer, *streams)]
                for other in (control, *(socket for _, socket in waiting.values())):
                    other.close()
                for descriptor in (answer, *streams, *waiting):
                    os.close(descriptor)
                for number, stream in zip(numbers, aside[1:], strict=True):
                    os.dup2(stream, number)
                    os.close(stream)
                if "parent" in wanted:
                    _be_adopted(wanted["parent"], aside[0])
                os.close(aside[0])
                return wanted
            for stream in streams:
                os.close(stream)
            if "parent" in wanted:
                os.waitpid(pid, 0)
                os.close(answer)
                continue
            answers = socket.socket(fileno=answer)
            with contextlib.suppress(OSError):
                answers.send(str(pid).encode())
            waiting[os.pidfd_open(pid)] = pid, answers


def _be_adopted(parent: int, answer: int) -> None:
    """Waits until the parent is the one that was asked for, and tells it, as the head of a group of its own."""
    os.setpgid(0, 0)
    while os.getppid() != parent:
        time.sleep(0.0005)
    os.write(answer, str(os.getpid()).encode())


def fork_workers() -> None:
    """From here on workers of tunings are forked, where they would start with the variables of this process."""
    subprocess.Popen._execute_child = _forked_worker  # type: ignore[attr-defined]


started_afresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _forked_worker(
    self: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: Any,
    pass_fds: Any,
    cwd: Any,
    env: Any,
    *rest: Any,
) -> None:
    server = None
    if isinstance(args, list) and args[:4] == [_EXECUTABLE, *_WORKER] and env is not None:
        server = _server_for(env)
    if server is None:
        started_afresh(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        return
    ends = rest[3:9]
    its_input, _, _, its_output, _, its_errors = ends
    request = {**_request(args, env), "passed": list(pass_fds)}
    try:
        self.pid = server.adopt(request, [its_input, its_output, its_errors, *pass_fds])
        self._child_created = True
    finally:
        self._close_pipe_fds(*ends)


def _prepared() -> None:
    """Leaves a process behind that is forked for the workers of this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
        # Ctrl-C is for the process that this one waits beside.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        wanted = _serve(theirs)
        signal.signal(signal.SIGINT, before)
        _become(wanted)
        sys.exit()
    theirs.close()
    _servers[os.getpid()] = _Server(ours)
    # After all that this process registers, which may start workers.
    atexit.register(ours.close)
    fork_workers()


def _become(wanted: Mapping[str, Any]) -> None:
    """Does what the command says, as Python would."""
    os.chdir(wanted["cwd"])
    words = list(wanted["command"])
    # What the prepared process was told to search comes first there, and is not searched here.
    del sys.path[: len(_places(os.environ))]
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.modules["jax"].config.update("jax_platforms", wanted["env"].get("JAX_PLATFORMS"))
    path = _places(wanted["env"])
    sys.path[:0] = path
    here = [os.getcwd()]
    if words[0] == "-P":
        del words[0]
        here = []
    else:
        _prepared()
    while words[0] == "-W":
        _filter(words[1])
        del words[:2]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-m":
        import runpy

        sys.argv = words[1:]
        sys.path[:0] = here
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        code, sys.argv, here = compile(words[1], "<string>", "exec"), ["-c", *words[2:]], [""]
    else:
        main.__file__ = words[0]
        code, sys.argv, here = (
            compile(Path(words[0]).read_bytes(), words[0], "exec"),
            words,
            [str(Path(words[0]).parent)],
        )
    sys.path[:0] = here
    exec(code, main.__dict__)


def _places(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(place) for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]


def _filter(option: str) -> None:
    action, _, category = option.partition("::")
    kind: Any = getattr(builtins, category) if category else Warning
    warnings.simplefilter(action, kind)  # type: ignore[arg-type]


class _Aside(importlib.abc.MetaPathFinder):
    """Finds modules of ours that were imported before the fork: none counts as imported until it is asked for."""

    def __init__(self, modules: Mapping[str, types.ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A spec whose loader hands the module out, where the file of the package is the one that was imported."""
        if name not in self._modules:
            return None
        package, _, _ = name.partition(".")
        if name == package:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            is_ours = spec is not None and spec.origin == self._modules[package].__file__
        else:
            is_ours = sys.modules.get(package) is self._modules[package]
        found = self._modules[name].__spec__
        if not is_ours or found is None:
            return None
        places, loader = found.submodule_search_locations, _Given(self._modules[name])
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=loader, submodule_search_locations=places
        )


class _Given(importlib.abc.InspectLoader):
    """Hands out a module that has been run."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: Any) -> types.ModuleType:
        """The one there is."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to do."""
        module.__spec__ = self._spec

    def get_source(self, fullname: str) -> str | None:
        """For `runpy`, which runs its code as the main module."""
        return self._spec.loader.get_source(fullname)  # type: ignore[union-attr]

    def is_package(self, fullname: str) -> bool:
        """As it was found."""
        return self._spec.submodule_search_locations is not None  # type: ignore[union-attr]


def _lay_aside(kept: Any) -> None:
    """Imports what most processes need of ours, a tenth of a second, and takes it out of sight."""
    # A tree that is not installed is found by processes that are told where it is.
    with contextlib.suppress(ModuleNotFoundError):
        for name in _OURS:
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", ()):
                getattr(module, public)
        for name, has_number in _NAMING.items():
            kept.name_alike(importlib.import_module(f"ejkernel.ops.{name}"), numbered=not has_number)
    aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "ejkernel"}
    sys.meta_path.insert(0, _Aside(aside))


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    import jax.experimental.pallas
    import jax.export  # noqa: F401

    # Compiled programs are shared between these processes, with their lines. None finds the module that sees to that.
    sys.path.append(str(Path(__file__).parent))
    kept = importlib.import_module("kept_programs")
    sys.path.pop()
    del sys.modules["kept_programs"]
    kept.keep_programs()
    _lay_aside(kept)
    # What is imported is not looked at again by each collection of garbage in each fork, nor are its pages copied.
    gc.collect()
    gc.freeze()
    _become(_serve(control))


if __name__ == "__main__":
    _main()
