"""`ejkernel freeze`: writes decisions to a lock file, for review and for `EJKERNEL_OPS_LOCK`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .errors import CommandError, ExitStatus
from .parsing import Command, Parser
from .program import add_device, add_trust, call, function_at, is_function, kind_of, on_device, pair, program_at
from .screen import write, write_json


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "target", nargs="?", help="module:function, a recording, or a result of `tune -o`; else all that is kept"
    )
    parser.add_argument("-o", "--output", default="ejkernel.lock.json", metavar="FILE", help="(ejkernel.lock.json)")
    add_trust(parser)
    add_device(parser)
    parser.add_argument(
        "--store", metavar="FOLDER", help="the stores to read, for all but a function; else the cache folder"
    )
    parser.add_argument("--json", action="store_true", help="the path and the calls, for scripts")


def run(options: argparse.Namespace) -> int:
    """Writes the lock file."""
    with on_device(options.device):
        lock_file = _frozen(options)
    if options.json:
        write_json({"path": lock_file.path, "calls": [key._asdict() for key in sorted(lock_file.entries)]})
    else:
        guesses = sum(entry.source == "guess" for entry in lock_file.entries.values())
        write(
            f"{len(lock_file.entries)} decisions in {lock_file.path}"
            + (f", {guesses} of them guesses" if guesses else "")
        )
        write(f"review it, then run the program with EJKERNEL_OPS_LOCK={options.output}", "dim")
    return ExitStatus.DONE


def _frozen(options: argparse.Namespace) -> Any:
    from ..ops import calls_made, freeze

    target = options.target
    if target is None:
        return freeze(options.output, _selector(options))
    if not is_function(target):
        return freeze(options.output, _decided(target, options))
    function = function_at(target)
    with calls_made() as calls:
        given = pair(call(target, function))
    if given is None:
        return freeze(options.output, calls)
    fn, args, kwargs = given
    return call(target, lambda: freeze(options.output, fn, *args, **kwargs))


def _decided(target: str, options: argparse.Namespace) -> Any:
    """The decisions of a result, or those that are made now for the calls of a recording."""
    from ..ops import AutotuningResult, calls_made
    from ..ops.programs import result_file

    if kind_of(target) == result_file.KIND:
        return AutotuningResult.load(target)
    program = program_at(target, _selector(options), trust=options.trust)
    if program.notes:
        raise CommandError(f"not every call of {target} can be frozen here: {'; '.join(program.notes)}")
    with calls_made() as calls:
        for asked in program.calls:
            with asked.restored():
                asked.selectors[0].decide(asked.inv, asked.kernel)
    return calls


def _selector(options: argparse.Namespace) -> Any:
    from ..ops import ConfigCache, ConfigSelectorChain, OperationStores

    if options.store and not os.path.isdir(options.store):
        raise CommandError(
            f"there is no folder of stores at {options.store}; `ejkernel cache path` says where yours is"
        )
    return ConfigSelectorChain[Any, Any](ConfigCache(), persistent=OperationStores(options.store))


COMMAND = Command(
    "Write the decisions of a program, a recording or a store to a lock file that a program can be held to.\n"
    "What is not known yet is tuned first, unless EJKERNEL_OPS_AUTOTUNE=off.",
    (
        "ejkernel freeze train:step -o step.lock.json",
        "ejkernel freeze recorded.json",
        "EJKERNEL_OPS_LOCK=step.lock.json python train.py",
    ),
    arguments,
    run,
)
