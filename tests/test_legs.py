"""The environments of the check: when a leg may be skipped, and what is pinned in each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from fakes import REPOSITORY

pytestmark = pytest.mark.one_leg

LEGS = {"oldest": "0.10", "middle": "0.11", "newest": "0.12", "lowest": "0.10", "engines": "0.12"}
# What the scripts call, so that no interpreter of this machine is found beside it.
TOOLS = ("bash", "env", "dirname", "sed", "cat", "cksum", "cut", "mkdir", "cp")

# As much of an interpreter as the scripts ask for. It notes each run of pip with the constraints of that run.
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
    *ensurepip*) [[ $* == *"'VERSION'"* ]] ;;
    --version) echo Python VERSION.0 ;;
    "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip "*) echo "$PIP_CONSTRAINT" >>pip.log ;;
    "- "*) cat >/dev/null; echo "$2" ;;
    *) echo something ;;
esac
"""


class Checkout:
    """A copy of the scripts, on a machine with interpreters of these versions."""

    def __init__(self, folder, *versions):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        shutil.copytree(REPOSITORY / ".ci", folder / ".ci")
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        (folder / "bin").mkdir()
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(shutil.which(tool))
        for version in versions:
            python = folder / "bin" / f"python{version}"
            python.write_text(INTERPRETER.replace("VERSION", version))
            python.chmod(0o755)

    def env(self, *words, ci=False):
        """Runs a command on legs; the status, and what was said."""
        variables = {"PATH": str(self.folder / "bin"), **({"CI": "true"} if ci else {})}
        command = [self.folder / ".ci" / "env", *words]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    @property
    def installed(self):
        """The constraints of each environment that was made."""
        log = self.folder / "pip.log"
        return log.read_text().split() if log.exists() else []


def pins(leg):
    lines = (REPOSITORY / ".ci" / "constraints" / f"{leg}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


# A leg that cannot run.


@pytest.mark.parametrize("scope", ["every", "newest", "middle"])
def test_a_leg_without_an_interpreter_is_skipped_and_named(tmp_path, scope):
    """A developer has what is there, and the last line says what was not run."""
    status, said = Checkout(tmp_path, "3.11").env(scope, "true")
    assert status == 0
    assert f"skipped: {'middle' if scope == 'middle' else 'newest'}" in said.splitlines()[-1]


@pytest.mark.parametrize("scope", ["every", "newest", "middle"])
def test_in_ci_a_skipped_leg_is_a_failure(tmp_path, scope):
    """Also where another leg stood in for it."""
    status, said = Checkout(tmp_path, "3.11").env(scope, "true", ci=True)
    assert status == 1
    assert "no Python 3.1" in said
    assert "CI=true" in said.splitlines()[-1]


@pytest.mark.parametrize("scope", ["every", *LEGS])
def test_in_ci_legs_that_all_run_pass(tmp_path, scope):
    """Nothing is skipped where every interpreter is there."""
    assert Checkout(tmp_path, "3.11", "3.12", "3.13").env(scope, "true", ci=True)[0] == 0


@pytest.mark.parametrize("scope", ["every", *LEGS])
def test_a_command_that_fails_fails_its_leg(tmp_path, scope):
    """The status is a failure, and the leg is named."""
    status, said = Checkout(tmp_path, "3.11", "3.12", "3.13").env(scope, "false")
    assert status == 1
    assert re.search(rf"failed: {'oldest, newest' if scope == 'every' else scope}", said)


# What a leg runs with.


def test_the_second_leg_is_told_of_the_first(tmp_path):
    """Tests of what no version changes run once; with one leg alone, all of them do."""
    told = ["sh", "-c", 'echo "$EARLIER_LEG." >>told']
    both, one = (Checkout(tmp_path / name, *versions) for name, versions in (("a", ("3.11", "3.13")), ("b", ("3.13",))))
    for checkout in (both, one):
        (checkout.folder / "bin" / "sh").symlink_to(shutil.which("sh"))
        assert checkout.env("every", *told)[0] == 0

    assert [len(line) > 1 for line in (both.folder / "told").read_text().split("\n") if line] == [False, True]
    assert (one.folder / "told").read_text() == ".\n"


@pytest.mark.parametrize(("earlier", "left"), [("", True), ("oldest", False)])
def test_a_later_leg_leaves_out_the_tests_of_one_leg(earlier, left):
    """Without an earlier one, as when pytest is called by itself, they are there."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_rooms.py"]
    variables = {**os.environ, "EARLIER_LEG": earlier}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=300)

    assert ("tests/test_rooms.py::" in done.stdout) == left, done.stdout + done.stderr
    assert done.returncode == (0 if left else 5)


def test_a_later_leg_runs_the_first_case_where_only_sizes_are_of_one_leg(tmp_path):
    """One that the default suite leaves out is not the first."""
    test = tmp_path / "test_cases.py"
    test.write_text(
        "import pytest\n"
        "LONG = pytest.param(1, marks=pytest.mark.slow(at_length=True))\n"
        "@pytest.mark.one_leg(but_first=True)\n"
        "@pytest.mark.parametrize('size', [LONG, 2, 3])\n"
        "def test_sizes(size): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(test)]
    command += ["-c", str(REPOSITORY / "pyproject.toml"), "-p", "conftest", "--rootdir", str(tmp_path)]
    found = []
    for earlier in ("", "oldest"):
        variables = {**os.environ, "EARLIER_LEG": earlier, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
        done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(re.findall(r"test_sizes\[(\d)\]", done.stdout))

    assert found == [["2", "3"], ["2"]]


@pytest.mark.parametrize("leg", LEGS)
def test_an_environment_is_made_once_from_the_pins_of_its_leg(tmp_path, leg):
    """And once more when they change."""
    checkout = Checkout(tmp_path, "3.11", "3.12", "3.13")
    own = tmp_path / ".ci" / "constraints" / f"{leg}.txt"
    for _ in range(2):
        checkout.env(leg, "true")
    assert checkout.installed == [os.path.relpath(own, tmp_path)]

    own.write_text(own.read_text() + "another==1.0\n")
    checkout.env(leg, "true")
    assert len(checkout.installed) == 2


@pytest.mark.parametrize("leg", LEGS)
def test_the_pins_of_a_leg_are_plain(leg):
    """One name and one version a line, in order, with the JAX that the leg is for."""
    text = (REPOSITORY / ".ci" / "constraints" / f"{leg}.txt").read_text(encoding="utf-8")
    names = [re.fullmatch(r"([a-z0-9.-]+)==[\w.!+]+", line).group(1) for line in text.splitlines()[1:]]
    assert names == sorted(set(names))
    assert pins(leg)["jax"].startswith(f"{LEGS[leg]}.")


def requirements(*groups):
    """What the project asks for: names with their lower bounds."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = [line for group in groups for line in asked[group] if not line.startswith("ejkernel-ops")]
    return dict(re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups() for line in lines)


def test_everything_that_is_asked_for_is_pinned():
    """Linter, type checker, tests, documentation and frameworks on each leg that has them."""
    for leg in ("oldest", "middle", "newest"):
        assert requirements("", "docs", "frameworks", "plot", "pydantic", "test", "dev").keys() <= pins(leg).keys()
    assert requirements("", "mosaic", "plot", "pydantic", "remote", "test").keys() <= pins("lowest").keys()
    for extra in ("dask", "mpi", "notebooks", "pools", "ray", "servers", "slurm"):
        assert requirements(extra).keys() <= pins("engines").keys()


def test_the_lowest_leg_has_the_lower_bounds():
    """Of all that users install, but Triton and the engines for pools."""
    found = pins("lowest")
    for name, bound in requirements("", "mosaic", "plot", "pydantic", "remote").items():
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", found[name]), (name, bound, found[name])
