"""`ejkernel explain`: which config each call of a program gets, and why."""

from __future__ import annotations

import argparse

from .entries import EntryRow
from .errors import CommandError, ExitStatus
from .filters import Filter
from .parsing import Command, Parser
from .program import TARGET, add_device, add_trust, is_function, on_device, program_at
from .screen import say, write, write_json


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", help=TARGET)
    add_trust(parser)
    parser.add_argument("--op", metavar="NAME", help="one operation alone; * stands for anything")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Explains each call; nothing is tuned, kept or changed."""
    from ..ops import default_selector
    from ..ops.reporting.explain import explain_call

    wanted = Filter(op=options.op)
    with on_device(options.device):
        selector = None if is_function(options.target) else default_selector()
        program = program_at(options.target, selector, trust=options.trust)
        calls = [call for call in program.calls if wanted.fits(EntryRow(call.key, {}, ""))]
        if not calls:
            held = ", ".join(sorted({call.key.op_id for call in program.calls})) or "none that a selector answers"
            raise CommandError(f"no call of {options.target} fits; its kernel calls are: {held}")
        seen = [explain_call(call) for call in calls]
    if options.json:
        write_json([one.as_dict() for one in seen])
    else:
        write("\n\n".join(map(str, seen)))
    for note in program.notes:
        say(note)
    return ExitStatus.FOUND if program.notes else ExitStatus.DONE


COMMAND = Command(
    "Say which tier answers each kernel call of a program, why the earlier ones do not, and what is known of it.",
    (
        "ejkernel explain recorded.json",
        "ejkernel explain train:step --op attention --json",
    ),
    arguments,
    run,
)
