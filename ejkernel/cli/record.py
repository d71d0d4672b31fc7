"""`ejkernel record`: runs a program and writes down the kernel calls that it makes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess

from ..ops.settings import variables_with
from .errors import CommandError, ExitStatus, UsageError
from .parsing import Command, Parser
from .screen import say


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("-o", "--output", default="recorded.json", metavar="FILE", help="where to (recorded.json)")
    parser.add_argument(
        "--tune", action="store_true", help="let the program tune as it goes; else it uses what is known"
    )
    parser.add_argument("command", nargs="*", metavar="-- command", help="the program and its arguments, behind --")


def run(options: argparse.Namespace) -> int:
    """Runs the program, and returns its exit status."""
    if not options.command:
        raise UsageError("record needs a program behind --, such as `ejkernel record -- python train.py`")
    # A file that cannot be used is an error before the program runs for an hour.
    before = _keys(options.output)
    variables = {"EJKERNEL_OPS_RECORD": os.path.abspath(options.output)}
    status = _run(options.command, variables if options.tune else {**variables, "EJKERNEL_OPS_AUTOTUNE": "off"})
    calls = _keys(options.output)
    fresh = len(set(calls) - set(before))
    say(f"{fresh} new calls recorded, {len(calls)} in {options.output}")
    if calls:
        say(f"tune them with: ejkernel tune {options.output}")
    elif not status:
        say("nothing was recorded: the program traced no kernel call, or a warning above says why not")
        return ExitStatus.FOUND
    return status


def _keys(path: str) -> list[object]:
    if not os.path.exists(path):
        return []
    from ..ops.programs.recorded import recorded_keys

    return [*recorded_keys(path)]


def _run(command: list[str], variables: dict[str, str]) -> int:
    # Ctrl-C reaches the program as well, which ends as it likes; we stay to say what was recorded. Not SIG_IGN, which
    # the program would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.Popen(command, env=variables_with(**variables)).wait()
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run: {error.strerror}; give a program behind --") from error
    finally:
        signal.signal(signal.SIGINT, before)
    # The status by which shells report a signal.
    return status if status >= 0 else 128 - status


COMMAND = Command(
    "Run a program and write down its kernel calls (shapes, dtypes, static values; no data), for `ejkernel tune`.\n"
    "The program runs as always, without tuning. Its exit status is the command's.",
    (
        "ejkernel record -- python train.py",
        "ejkernel record -o calls.json -- python -m my_project.train --steps 1",
    ),
    arguments,
    run,
    usage="[-o FILE] [--tune] [--traceback] -- command ...",
)
