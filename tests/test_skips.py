"""Skips where `CI=true`: a run passes with those that are allowed alone, and says which were not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import skips
from fakes import REPOSITORY

pytestmark = pytest.mark.one_leg

MISSING = "needs mpiexec: pip install mpich"
NO_GPU = "there is no GPU here"


def run(folder, *options, ci="true", leg="newest", **tests):
    """Runs files of tests with the plugin; the status, and what was written."""
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\ndef test_that_passes(): pass\n{text}\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "skips", "-c", str(REPOSITORY / "pyproject.toml")]
    # Plugins of frameworks take longer to import than these tests to run.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables = {**os.environ, **plugins, "CI": ci, "LEG": leg, "PYTHONPATH": str(REPOSITORY / "tests")}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def skipping(reason):
    """A test that is skipped when it runs."""
    return f"def test_skipped(): pytest.skip({reason!r})"


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_skip_that_is_not_allowed_fails_the_run_and_is_named(tmp_path, options):
    """Also one of a whole file, whether one process runs the tests or several."""
    whole = f"pytest.skip({'needs root'!r}, allow_module_level=True)"
    status, said = run(tmp_path, *options, one=skipping(MISSING), two=whole, three=skipping(NO_GPU))
    assert status == 1, said
    section = said.partition("skips that tests/skips.py does not allow")[2].partition("short test summary")[0]
    assert MISSING in section
    assert "needs root" in section
    assert NO_GPU not in section


def test_skips_that_are_allowed_do_not_fail_a_run(tmp_path):
    """Nothing is said of them but what pytest says."""
    status, said = run(tmp_path, one=skipping(NO_GPU))
    assert status == 0, said
    assert "does not allow" not in said


def test_a_developer_may_lack_a_tool(tmp_path):
    """Without `CI=true` a skip is a skip."""
    status, said = run(tmp_path, ci="", one=skipping(MISSING))
    assert status == 0, said


@pytest.mark.parametrize(
    "reason",
    [
        NO_GPU,
        "there is no GPU of capability 9 here",
        "needs an accelerator beside the CPU",
        "needs Chromium: apt install chromium",
        "needs measured search spaces; EJKERNEL_DATASETS names their folder (CONTRIBUTING.md)",
        "this JAX interprets no loops over references",
        "these rules were measured with JAX 0.11",
        "jaxlib 0.12 ends beside a compiler that runs",
        "Mosaic GPU of this JAX has no instructions of our own",
    ],
)
def test_what_no_machine_can_be_asked_for_is_allowed(reason):
    """A version, an accelerator, a browser, data that is no part of the repository."""
    assert all(skips.is_allowed(reason, leg) for leg in ("oldest", "newest", "engines"))


@pytest.mark.parametrize(
    "reason",
    [
        MISSING,
        "needs root, to act as two users",
        "needs a folder for temporary files that every user may enter; looked at []",
        "could not import 'ejkernel.library.mosaic.ragged_dot': No module named 'absl'",
        "",
    ],
)
def test_what_a_machine_can_have_is_not_allowed(reason):
    """A tool, a user, or an import that fails for no stated reason."""
    assert not any(skips.is_allowed(reason, leg) for leg in ("", "oldest", "newest", "engines"))


@pytest.mark.parametrize(
    ("extra", "legs"),
    [
        ("dask", {"engines"}),
        ("frameworks", {"oldest", "middle", "newest", "engines"}),
        ("mosaic", {"oldest", "middle", "newest", "lowest", "engines"}),
        ("notebooks", {"newest", "engines"}),
        ("plot", {"oldest", "middle", "newest", "lowest", "engines"}),
        ("servers", {"newest", "engines"}),
        ("triton", set()),
    ],
)
def test_an_extra_may_be_missing_where_the_leg_does_not_install_it(extra, legs):
    """What an extra brings counts as well; a run of pytest by itself is on no leg."""
    reason = f"needs the extra `{extra}`: pip install 'ejkernel-ops[{extra}]'"
    known = ("oldest", "middle", "newest", "lowest", "engines")
    assert {leg for leg in known if not skips.is_allowed(reason, leg)} == legs
    assert skips.is_allowed(reason)


def test_an_extra_is_found_beside_a_version_of_jax():
    """The extra is what is missing there."""
    assert not skips.is_allowed("Mosaic GPU of this JAX needs absl-py, the extra `mosaic`", "oldest")
