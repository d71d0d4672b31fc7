"""Two machines and a remote: the second one tunes nothing that the first one tuned, and compiles nothing either."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fakes import REPOSITORY
from fakes_remote import SECRET

pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")

pytestmark = pytest.mark.engines

PROGRAM = """
import json
import jax, jax.numpy as jnp
from ejkernel.ops import counters, default_selector, tunable

seen = []
jax.monitoring.register_event_listener(lambda event, **more: seen.append(event))

@tunable(rows=[8, 64, 512])
def softmax(x, *, rows):
    return jax.lax.map(jax.nn.softmax, x.reshape(-1, rows, x.shape[1])).reshape(x.shape)

y = jax.block_until_ready(softmax(jnp.ones((512, 64))))
remote = default_selector().remote
left = remote.flush(30.0) if remote is not None and remote.write else 0
found = counters()
misses = sum(event == "/jax/compilation_cache/cache_misses" for event in seen)
print(json.dumps([found.autotune, found.remote, found.persistent, found.heuristics, left, misses]))
"""


def machine(folder, *words, **settings):
    """What a program, or a command, leaves on a machine of its own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
    variables |= {"PYTHONPATH": str(REPOSITORY), "EJKERNEL_PERSISTENT_CACHE_DIR": str(folder), **settings}
    (folder.parent / "program.py").write_text(PROGRAM)
    command = ["-m", "ejkernel.cli", *words] if words else [str(folder.parent / "program.py")]
    done = subprocess.run(
        [sys.executable, *command], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return None if words else json.loads(done.stdout.splitlines()[-1])


def test_an_empty_machine_tunes_nothing(tmp_path):
    """Signed entries answer with tuning on or off, and the next process has them in its own store."""
    url = f"file://{tmp_path}/team"
    team = {"EJKERNEL_OPS_REMOTE": url, "EJKERNEL_OPS_REMOTE_KEY": SECRET}
    assert machine(tmp_path / "first", **team, EJKERNEL_OPS_REMOTE_WRITE="on")[:5] == [1, 0, 0, 0, 0]
    assert machine(tmp_path / "second", **team)[:4] == [0, 1, 0, 0]
    assert machine(tmp_path / "second", **team)[:4] == [0, 0, 1, 0]
    assert machine(tmp_path / "third", **team, EJKERNEL_OPS_AUTOTUNE="off")[:4] == [0, 1, 0, 0]
    # Without the key nothing is believed: it is measured, or with tuning off a guess serves.
    assert machine(tmp_path / "fourth", EJKERNEL_OPS_REMOTE=url, EJKERNEL_OPS_AUTOTUNE="off")[:4] == [0, 0, 0, 1]


def test_the_compilers_cache_comes_along(tmp_path):
    """With the first machine's files the second one compiles nothing."""
    url = f"file://{tmp_path}/team"
    settings = {"EJKERNEL_OPS_REMOTE_KEY": SECRET, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for name in ("first", "second"):
        place = [str(tmp_path / name), url, "--compiler", str(tmp_path / f"jax-{name}")]
        if name == "second":
            machine(tmp_path / name, "cache", "pull", *place, **settings)
        found = machine(tmp_path / name, **settings, JAX_COMPILATION_CACHE_DIR=str(tmp_path / f"jax-{name}"))
        if name == "first":
            assert found[0] == 1
            assert found[5] > 0
            machine(tmp_path / name, "cache", "push", *place, **settings)
    assert (found[0], found[5]) == (0, 0)
