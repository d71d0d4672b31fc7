"""The target of a command: a file of recorded calls, or a function of the user's."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ops.core import codec
from ..ops.store import files
from .errors import CommandError
from .parsing import Parser, nearest

TARGET = (
    "recorded.json, or module:function; the function takes no arguments and runs the program, or returns (fn, args)"
)


@dataclass(frozen=True)
class NamedProgram:
    """The kernel calls of a program; a function with its arguments where the user gave one to be traced."""

    calls: Sequence[Any] = ()
    # The calls that were left out, with the reasons.
    notes: Sequence[str] = ()
    fn: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def is_function(target: str) -> bool:
    """Is this `module:function` rather than a file?"""
    return ":" in target and not os.path.exists(target)


def add_trust(parser: Parser) -> None:
    """Adds the option that allows the modules of another user's recording."""
    parser.add_argument(
        "--trust", action="store_true", help="import what a recording names that is not a file of your own: it may run"
    )


def program_at(target: str, selector: Any, *, trust: bool = False, elsewhere: bool = False) -> NamedProgram:
    """The program at a target. `selector` chooses for the calls of a recording; a function has selectors of its own.

    `elsewhere` takes the calls of a recording that were made on other devices too.
    """
    if is_function(target):
        return _looked_through(target)
    if not os.path.isfile(target):
        raise CommandError(
            f"there is no recording {target}; make one with `ejkernel record -o {target} -- python ...`, "
            "or name a function as module:function"
        )
    if target.endswith(".py"):
        stem = os.path.basename(target).removesuffix(".py")
        raise CommandError(f"{target} is a program; name a function in it, {stem}:main, or record it first")
    from ..ops.execution.recording import ForeignFileError
    from ..ops.programs.recorded import read_calls

    _importable()
    try:
        calls, left_out = read_calls(target, selector, elsewhere=elsewhere, only_own=not trust)
    except ForeignFileError as error:
        raise CommandError(
            f"{target} names modules that this command would import and run, and it is not a file that you alone may "
            "write; read it, then add --trust"
        ) from error
    return NamedProgram(tuple(calls), tuple(left_out))


def _looked_through(target: str) -> NamedProgram:
    from ..ops.programs.find import find, find_while

    function = function_at(target)
    found, made = find_while(lambda: call(target, function))
    given = pair(made)
    if given is None:
        unseen = f"calls of an executor with a chooser of its own: {found.unseen}" if found.unseen else ""
        return NamedProgram(found.calls, (unseen,) if unseen else ())
    fn, args, kwargs = given
    return NamedProgram(call(target, lambda: find(fn, args, kwargs)).calls, (), fn, args, kwargs)


def pair(made: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """`(fn, args)` or `(fn, args, kwargs)`, if that is what a function returned."""
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        return None
    fn, args, kwargs = (*made, {})[:3]
    return (fn, tuple(args), dict(kwargs)) if isinstance(args, (tuple, list)) and isinstance(kwargs, dict) else None


def function_at(target: str) -> Callable[[], Any]:
    """The function of `module:function`."""
    name, _, path = target.partition(":")
    found: Any = _module(name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise CommandError(
                f"{name} has no {path}{nearest(part, vars(found) if hasattr(found, '__dict__') else ())}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise CommandError(f"{target} is a {type(found).__name__}; name a function without arguments")
    wanted = [
        p.name for p in _parameters(found) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if wanted:
        raise CommandError(
            f"{target} takes {', '.join(wanted)}; name a function without arguments, which returns (fn, args) for it"
        )
    return found  # type: ignore[no-any-return]


def _parameters(function: Any) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    # Some built-in callables have no signature; calling them tells.
    except ValueError:
        return ()


def _module(name: str) -> Any:
    _importable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            hint = "run the command in the folder that holds it, or set PYTHONPATH"
            raise CommandError(f"there is no module {error.name}; {hint}") from error
        raise CommandError(f"{name} needs the module {error.name}, which is not installed") from error
    # Any exception of the module's import becomes one sentence.
    except (Exception, SystemExit) as error:
        raise CommandError(_failed(f"{name} cannot be imported", error)) from error


def _importable() -> None:
    # As `python train.py` would find the modules beside it; a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def call(target: str, function: Callable[[], Any]) -> Any:
    """Runs a function of the user's; what it prints goes to the error stream, since the output is ours."""
    from ..ops.core.errors import OpsError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except OpsError:
        raise
    # Any exception of the user's program becomes one sentence.
    except (Exception, SystemExit) as error:
        raise CommandError(_failed(f"{target} raised an error", error)) from error


def _failed(what: str, error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{what}: {type(error).__name__}: {first}; --traceback shows where"


def add_device(parser: Parser) -> None:
    """Adds the option that names a device."""
    parser.add_argument("--device", metavar="NAME", help="cpu, gpu or tpu, and which one: gpu:1; else JAX's default")


@contextlib.contextmanager
def on_device(name: str | None) -> Iterator[None]:
    """Runs everything in a `with` block on a device."""
    if name is None:
        yield
        return
    import jax

    from ..ops.core.device import target_device

    platform, _, number = name.partition(":")
    try:
        device = jax.local_devices(backend=platform)[int(number or 0)]
    # RuntimeError: JAX knows no such platform, or finds none of it here.
    except (RuntimeError, ValueError, IndexError) as error:
        there = ", ".join(f"{d.platform}:{d.id}" for d in jax.local_devices())
        raise CommandError(f"there is no device {name}; there are {there}") from error
    with jax.default_device(device), target_device(device):
        yield


def kind_of(path: str) -> str:
    """The kind that a JSON file of ours names; empty for any other file."""
    try:
        content = files.read(files.resolved(path), files.LARGEST_RECORD)
        data = None if content is None else codec.loads(content.data)
    # Not a file, or not JSON: the command that reads the file says so.
    except (OSError, ValueError):
        return ""
    return str(data.get("kind", "")) if isinstance(data, dict) else ""
