"""`ejkernel doctor`: findings on the installation, the devices and the cache folder, and what to do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

from . import examining
from .errors import ExitStatus
from .examining import HealthFinding
from .parsing import Command, Parser
from .screen import write, write_json

_MARKS = {"ok": ("ok  ", ""), "note": ("note", "dim"), "fix": ("fix ", "bad")}
# Run in this order; each examines one thing.
CHECKS: tuple[Callable[[], Iterable[HealthFinding]], ...] = (
    examining.installation,
    examining.settings,
    examining.devices,
    examining.clock,
    examining.cache,
    examining.packs,
    examining.remote,
    examining.extras,
)


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Runs every check; status 1 when something needs fixing."""
    seen = _seen() if not options.json else list(_seen())
    findings = []
    for finding in seen:
        findings.append(finding)
        if not options.json:
            _show(finding)
    wrong = [finding for finding in findings if finding.state == "fix"]
    if options.json:
        write_json({"healthy": not wrong, "findings": [vars(finding) for finding in findings]})
    else:
        write()
        write("nothing needs fixing" if not wrong else f"{len(wrong)} to fix", "good" if not wrong else "bad")
    return ExitStatus.FOUND if wrong else ExitStatus.DONE


def _seen() -> Iterator[HealthFinding]:
    for check in CHECKS:
        yield from check()


def _show(finding: HealthFinding) -> None:
    mark, style = _MARKS[finding.state]
    write(f"{mark}  {finding.name:<14}{finding.text}", style)
    if finding.advice:
        write(f"      {'':<14}{finding.advice}")


COMMAND = Command(
    "Look at JAX, devices, the clock and its noise, the cache folder, packs, the remote and extras; say what to fix.\n"
    "Status 1 when something needs fixing.",
    ("ejkernel doctor", "ejkernel doctor --json"),
    arguments,
    run,
)
