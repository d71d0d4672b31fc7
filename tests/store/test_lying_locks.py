"""A file system whose locks do not lock, as NFS with `nolock` and Lustre with `localflock`: nothing is lost."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from fakes_store import run_script

pytestmark = pytest.mark.one_leg

# Every lock is given to every process that asks.
LIE = "int flock(int descriptor, int operation) { (void)descriptor; (void)operation; return 0; }\n"

LOCKED_TWICE = """
import fcntl, json, sys
held = [open(sys.argv[1], "w") for _ in range(2)]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(json.dumps(True))
"""


@pytest.fixture
def lying(tmp_path, monkeypatch):
    """Runs a campaign with a library that makes every lock a lie."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a library that replaces flock")
    source, library = tmp_path / "lie.c", tmp_path / "lie.so"
    source.write_text(LIE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CAMPAIGN_FOLDER", str(tmp_path))
    # Two descriptors of one process lock the same file: then locks are lies here.
    assert run_script(LOCKED_TWICE, str(tmp_path / "lock"))

    def run(call):
        found = run_script(f"import campaigns, json\nprint(json.dumps(campaigns.{call}))")
        print(f"\nlocks that lie, {call}: {found}")
        return found

    return run


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_processes_without_locks_lose_nothing(lying, large):
    """Four processes put at once and fold at once, and every put is found by a process that opens the store later."""
    found = lying(f"together(4, 25, one_key=False, large={large})")

    assert (found["acknowledged"], found["lost"], found["in file"], found["ended well"]) == (100, 0, 100, 4)


def test_folds_without_locks_beside_puts_lose_nothing(lying):
    """Three processes fold without a break while two others put."""
    found = lying("folds_and_puts(60, folding=3)")

    assert (found["acknowledged"], found["lost"], found["in file"]) == (120, 0, 120)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_four_processes_with_300_puts_each_lose_nothing_without_locks(lying, large, turn, count):
    """The same at length."""
    puts = count(300, short=50)
    found = lying(f"together(4, {puts}, one_key=False, large={large})")

    assert (found["acknowledged"], found["lost"], found["in file"]) == (4 * puts, 0, 4 * puts)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_many_folds_without_locks_lose_nothing(lying, turn, count):
    """The same at length, with maintenance running."""
    puts = count(800, short=80)
    found = lying(f"folds_and_puts({puts}, folding=4)")

    assert (found["acknowledged"], found["lost"], found["in file"]) == (2 * puts, 0, 2 * puts)
