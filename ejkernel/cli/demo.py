"""`ejkernel demo`: the library's operations tuned on this machine."""

from __future__ import annotations

import argparse

from .errors import UsageError
from .parsing import Command, Parser, nearest


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("operations", nargs="*", metavar="operation", help="such as matmul or attention; else all")


def run(options: argparse.Namespace) -> int:
    """Runs the demo."""
    from ..library import demo

    names = [case.operation for case in demo.cases()]
    for name in options.operations:
        if name not in names:
            raise UsageError(f"the demo has no {name}{nearest(name, names)}; it has {', '.join(names)}")
    return demo.main(options.operations)


COMMAND = Command(
    "Tune the library's operations on this machine and show what that gives; the second time all is on disk.",
    ("ejkernel demo", "ejkernel demo matmul softmax"),
    arguments,
    run,
)
