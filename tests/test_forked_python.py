"""A process that was forked from a prepared one is as one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import forked_python
import pytest

LOOK = """
import json, os, sys, warnings
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "main": __name__, "folder": os.getcwd(), "variable": os.environ.get("SEEN"),
    "home": os.environ.get("XDG_CACHE_HOME"), "input": sys.stdin.read(), "flags": os.environ.get("XLA_FLAGS"),
    "first": [str(part) for part in warnings.filters[0]],
    "ours": sorted(name for name in sys.modules if name.startswith("ejkernel")),
}))
"""


@pytest.mark.parametrize("where", ["code", "file"])
def test_it_sees_what_a_fresh_process_sees(where, tmp_path):
    """Arguments, path, variables, folder, streams and filters; nothing of ours is imported."""
    script = tmp_path / "script.py"
    script.write_text(LOOK, encoding="utf-8")
    words = ["-c", LOOK] if where == "code" else [str(script)]
    command = [sys.executable, "-W", "error", *words, "one", "two"]
    env = {**os.environ, "PYTHONPATH": f"/some{os.pathsep}/places", "SEEN": "yes"}

    done = forked_python.run(command, env=env, cwd=tmp_path, timeout=300)
    fresh = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(fresh.stdout)


def test_it_counts_devices_and_chooses_a_platform_as_its_variables_say():
    """No backend was started before."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(jax.device_count(), jax.config.jax_platforms)"
    assert forked_python.run([sys.executable, "-c", code], env=env, timeout=300).stdout == "3 cpu\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('it broke')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_a_process_does(code, status):
    """With its status, or a signal; an error is told."""
    done = forked_python.run([sys.executable, "-c", code], env=dict(os.environ), timeout=300)
    assert done.returncode == status
    assert ("it broke" in done.stderr) is ("it broke" in code)


def test_what_waits_for_its_end_is_done():
    """Functions that a process runs when it ends are run."""
    code = "import atexit; atexit.register(print, 'ended')"
    assert forked_python.run([sys.executable, "-c", code], env=dict(os.environ), timeout=300).stdout == "ended\n"


def test_a_process_that_hangs_is_killed():
    """The time that it may take is kept, and nothing is left of it."""
    with pytest.raises(subprocess.TimeoutExpired):
        forked_python.run([sys.executable, "-c", "import time; time.sleep(1000)"], env=dict(os.environ), timeout=0.1)


def test_a_variable_that_python_reads_when_it_starts_gives_a_fresh_process():
    """A fork has its parent's hash seed."""
    env = {**os.environ, "PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", "print(hash('word'))"]
    fresh = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert forked_python.run(command, env=env, timeout=300).stdout == fresh.stdout


def test_pipes_lead_to_it_and_back():
    """A line is answered while the process goes on."""
    process = forked_python.piped([sys.executable, "-c", "print(input(), flush=True); input()"], env=dict(os.environ))
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "hello\n"
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_package_of_our_name_that_lies_elsewhere_is_that_one(tmp_path):
    """What was imported before the fork serves where the same file would be found, and no other."""
    (tmp_path / "ejkernel").mkdir()
    (tmp_path / "ejkernel" / "__init__.py").write_text("", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import ejkernel, importlib.util; print(ejkernel.__file__, importlib.util.find_spec('ejkernel.ops'))"
    done = forked_python.run([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=300)
    assert done.stdout == f"{tmp_path / 'ejkernel' / '__init__.py'} None\n"
