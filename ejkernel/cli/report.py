"""`ejkernel report`: a page about a result, a record or a store, as one HTML file."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from .entries import EntryRow
from .errors import CommandError, ExitStatus
from .filters import Filter
from .parsing import Command, Parser
from .screen import write, write_json


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "source",
        nargs="?",
        help="a result of `tune -o`, a record, a pack, a store or a folder of stores; else the cache",
    )
    parser.add_argument("-o", "--output", default="ejkernel.html", metavar="FILE", help="(ejkernel.html)")
    parser.add_argument("--against", metavar="SOURCE", help="an earlier run: the page says what differs")
    parser.add_argument("--trace", metavar="FOLDER", help="a trace of jax.profiler: the page says where its time went")
    parser.add_argument("--op", metavar="NAME", help="one operation alone; * stands for anything")
    parser.add_argument("--title", default="", help="the title of the page")
    parser.add_argument("--json", action="store_true", help="the path, the size and the calls, for scripts")


def run(options: argparse.Namespace) -> int:
    """Writes the page."""
    from ..ops.reporting.gather import subject_of
    from ..ops.reporting.page import report
    from ..ops.settings import default_folder

    source = options.source or str(default_folder())
    if not options.source and not os.path.isdir(source):
        raise CommandError(f"nothing is kept in {source} yet; run `ejkernel demo`, or a program that tunes")
    if not os.path.isdir(os.path.dirname(os.path.abspath(options.output))):
        raise CommandError(f"{options.output} cannot be written: its folder does not exist")
    subject, wanted = subject_of(source, options.title), Filter(op=options.op)
    calls = tuple(one for one in subject.calls if wanted.fits(EntryRow(one.key, {}, "")))
    if options.op and not calls:
        held = ", ".join(sorted({one.key.op_id for one in subject.calls})) or "none"
        raise CommandError(f"no call of {source} fits --op {options.op}; its operations are: {held}")
    profile = None
    if options.trace:
        from ..ops.reporting.profile import attribute

        profile = attribute(options.trace)
    against = None if options.against is None else subject_of(options.against)
    path = report(replace(subject, calls=calls), options.output, against=against, profile=profile)
    size = os.path.getsize(path)
    if options.json:
        write_json({"path": str(path), "bytes": size, "calls": [one.key._asdict() for one in calls]})
    else:
        count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
        write(f"{count} in {path}, {size / 1e3:.0f} kB; open it in a browser")
    return ExitStatus.DONE


COMMAND = Command(
    "Make a page of tunings: what was chosen and what it gains, every race, parameters, floors, failures, origin.\n"
    "One HTML file that needs no network and can be sent to others.",
    (
        "ejkernel report",
        "ejkernel report step.json -o step.html",
        "ejkernel report step.json --against last_week.json",
    ),
    arguments,
    run,
)
