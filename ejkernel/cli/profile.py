"""`ejkernel profile`: the time of a profiler's trace by kernel call."""

from __future__ import annotations

import argparse

from .entries import add_store, target
from .errors import ExitStatus
from .parsing import Command, Parser
from .screen import write, write_json


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("trace", help="the folder that jax.profiler.trace wrote into, or an .xplane.pb file")
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Shows the calls, the costliest first."""
    from ..ops.reporting.profile import attribute

    found = attribute(options.trace, store=target(options.store) if options.store else None)
    if options.json:
        write_json(found.as_dict())
        return ExitStatus.DONE
    write(found.table())
    if not found.calls:
        write("no operation has a label: run kernels through an executor, with EJKERNEL_OPS_STAMP as it is by default,")
        write("and block_until_ready before the trace ends")
    return ExitStatus.DONE


COMMAND = Command(
    "Say which kernel calls the time of a profiler's trace went into, with their configs, whether each was tuned,\n"
    "guessed or locked, and what tuning would be worth.",
    ("ejkernel profile /tmp/trace", "ejkernel profile /tmp/trace --json"),
    arguments,
    run,
)
