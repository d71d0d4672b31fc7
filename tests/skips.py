"""Which tests may be skipped where `CI=true`: any other skip fails the run, so that no run passes for want of a tool.

A plugin of pytest: `conftest.py` registers it. `.ci/env` says in `LEG` which leg runs, and so which extras are there.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Why a test may be skipped, and what the reason of its skip says.
ALLOWED = {
    "a leg has one version of JAX and of Python": r"\bthis (JAX|Python)\b|\b(JAX|jaxlib|Python) \d",
    "most machines have no accelerator, or another one": r"there is (no|a) GPU|needs an accelerator|a CPU's trace",
    "measured search spaces are no part of the repository": r"EJKERNEL_DATASETS names their folder",
    "not every system has a browser, or a C compiler, to install": r"needs (Chromium|a C compiler)",
    "another operating system": r"the convention of Linux|threads have no priority here|the system has no /dev/full",
    "a case of a product that does not exist": r"the user's choice, and followed",
}
# An extra may be missing on a leg that does not install it.
EXTRA = re.compile(r"\bthe extra `?(\w+)")
_REFUSED = pytest.StashKey[list[str]]()


@functools.cache
def extras_of(leg: str) -> frozenset[str]:
    """The extras that a leg installs, with those that these bring; none where the leg is not known."""
    if not leg:
        return frozenset()
    script = ["bash", "-c", 'source .ci/legs && extras_of "$1"', "-", leg]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip().split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in found:
        brought = [re.match(r"ejkernel-ops\[([\w,]+)\]", line) for line in extras[extra]]
        found += [name for names in brought if names for name in names[1].split(",") if name not in found]
    return frozenset(found)


def is_allowed(reason: str, leg: str = "") -> bool:
    """May a test be skipped for this reason on this leg?"""
    extra = EXTRA.search(reason)
    if extra:
        return extra[1] not in extras_of(leg)
    return any(re.search(said, reason) for said in ALLOWED.values())


def refused(reports: Iterable[pytest.TestReport], leg: str) -> list[str]:
    """The skips that are not allowed, each with its place and its reason."""
    found = []
    for report in reports:
        path, line, reason = report.longrepr if isinstance(report.longrepr, tuple) else (report.nodeid, "", "")
        if not is_allowed(reason, leg):
            found.append(f"{path}:{line}: {reason}")
    return sorted(set(found))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that would have passed; with several processes, in the one that collects their reports."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None or hasattr(session.config, "workerinput"):
        return
    found = refused(reporter.stats.get("skipped", ()), os.environ.get("LEG", ""))
    session.config.stash[_REFUSED] = found
    if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which skips failed the run."""
    found = config.stash.get(_REFUSED, [])
    if found:
        terminalreporter.section("skips that tests/skips.py does not allow where CI=true", red=True, bold=True)
        for line in found:
            terminalreporter.line(line)
