"""Finds the command, runs it, and turns any error into a sentence and a status."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .errors import CommandError, ExitStatus, UsageError
from .parsing import Command, Group, listing, pick
from .screen import close_output, plain_warnings, print_anything, say, write

# Each is a module of this package, imported when it is called: help must not wait for JAX.
COMMANDS = {
    "demo": "tune the library on this machine and show what that gives",
    "doctor": "look for what keeps tuning from working well here",
    "record": "run a program and write down its kernel calls",
    "tune": "tune a recording or a function of yours",
    "freeze": "write a program's decisions to a lock file",
    "explain": "say which config a call gets, and why",
    "report": "make a page of tunings, one HTML file",
    "profile": "say which kernel calls a profiler's trace went into",
    "remeasure": "say whether what was tuned is still the fastest",
    "cache": "list, show, check and look after what was tuned",
    "pack": "make, check and install packs of tuned configs",
}
_ABOUT = "The best configuration for every JAX kernel call: measured once, kept on disk."
_EXAMPLES = (
    "ejkernel doctor",
    "ejkernel record -- python train.py",
    "ejkernel tune recorded.json --seconds 300",
    "ejkernel cache list --min-gain 1.1",
)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and ends the process with its status."""
    print_anything()
    status = run(sys.argv[1:] if words is None else words)
    if _may_have_tuned():
        from ..ops.timing.compile_pool import leave_process

        # A compiler that still runs would abort the end of the interpreter.
        leave_process(status)
    sys.exit(status)


def _may_have_tuned() -> bool:
    return "ejkernel.ops.timing.compile_pool" in sys.modules


def run(words: Sequence[str]) -> int:
    """Runs a command line; gives its status."""
    try:
        with plain_warnings():
            status = _run(list(words))
            if sys.stdout is not None:
                sys.stdout.flush()
    # The parser ends --help this way.
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else ExitStatus.DONE
    except KeyboardInterrupt:
        tuned = "; what was measured is kept, and the same command goes on from there" if _may_have_tuned() else ""
        say(f"ejkernel: interrupted{tuned}")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        return ExitStatus.BROKEN_PIPE
    # The last place before the user: any error becomes a sentence, and with --traceback a traceback as well.
    except Exception as error:
        return _told(error, words)
    finally:
        close_output()
    return int(status)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        write(listing("ejkernel", _ABOUT, COMMANDS, _EXAMPLES))
        return ExitStatus.DONE if words else ExitStatus.USAGE
    if words[0] == "--version":
        from ..ops._version import __version__

        write(f"ejkernel-ops {__version__}")
        return ExitStatus.DONE
    first, *rest = words
    pick("ejkernel", first, {**COMMANDS, "--help": "", "--version": ""})
    found: Command | Group = importlib.import_module(f"{__package__}.{first}").COMMAND
    prog = f"ejkernel {first}"
    if isinstance(found, Group):
        if not rest or rest[0] in ("-h", "--help"):
            write(listing(prog, found.about, {name: command.about for name, command in found.commands.items()}))
            return ExitStatus.DONE if rest else ExitStatus.USAGE
        command: Command = pick(prog, rest[0], found.commands)
        return command.run(command.parser(f"{prog} {rest[0]}").read(rest[1:]))
    return found.run(found.parser(prog).read(rest))


def _told(error: Exception, words: Sequence[str]) -> ExitStatus:
    from ..ops.core.errors import OpsError

    # Behind `--` stands the command line of the user's program.
    own = words[: words.index("--")] if "--" in words else words
    if "--traceback" in own:
        say(traceback.format_exc().rstrip())
    if isinstance(error, UsageError):
        say(f"ejkernel: {error}")
        return error.status
    # An OpsError says what to do by itself; an OSError names the file.
    if isinstance(error, (CommandError, OpsError, OSError)):
        say(f"ejkernel: {_sentence(error)}")
        return ExitStatus.UNUSABLE
    say(f"ejkernel: {type(error).__name__}: {_sentence(error)}; --traceback shows where this comes from")
    return ExitStatus.UNEXPECTED


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, CommandError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot use{where or ' the output'}: {error.strerror}; make room, or give another path"
    return str(error) or type(error).__name__
