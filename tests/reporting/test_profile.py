"""Profiles: the time of a trace by kernel call, with its cfg, its state and what tuning would be worth.

Covers `reporting/xplane.py`.
"""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import AutotunePolicy, OpsError, attribute, default_selector, freeze, locked, report, tunable
from ejkernel.ops.core.key import Key
from ejkernel.ops.reporting.xplane import TracedProgram, _Event, _programs_of, trace_files
from ejkernel.ops.store.layered import MemoryStore
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.usefixtures("own_text")


@tunable(turns=[1, 4], op_id="profiled.turns", version="1")
def turned(x, *, turns):
    """A product, some times over."""
    return jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ x), x)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace of a program with two calls and work of its own, run three times."""
    folder = tmp_path_factory.mktemp("trace")
    selector = default_selector()
    selector.policy = AutotunePolicy(allow_autotune=False)

    @jax.jit
    def step(x):
        return turned(x).sum() + turned(x[:64, :64]).sum() + jnp.sin(x).sum()

    x = jnp.ones((192, 192)) / 192
    step(x).block_until_ready()
    # Without the calls of Python functions, which are most of a trace, and are read past.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for _ in range(3):
            step(x).block_until_ready()
    return folder


def test_the_time_of_a_trace_goes_to_its_kernel_calls(trace):
    """Each call has its own, the costliest first, and what has no label is the rest."""
    found = attribute(trace)
    assert found.platform == "cpu"
    assert [one.op_id for one in found.calls] == ["profiled.turns@v1"] * 2
    assert found.calls[0].seconds > found.calls[1].seconds > 0
    assert [one.runs for one in found.calls] == [3, 3]
    assert sum(one.seconds for one in found.calls) + found.unlabelled_s == pytest.approx(found.total_s)
    assert found.unlabelled_s > 0


def test_a_call_is_tuned_guessed_or_locked(trace, tmp_path):
    """By what the store and the lock file in force say; a guess is worth what other calls of the operation gained."""
    large, small = attribute(trace).calls
    assert (large.state, large.worth) == ("guessed", None)
    store = MemoryStore()
    summary = {"seconds": 1e-3, "gain": [2.0, 1.9, 2.1]}
    entry = StoredEntry({"turns": 4}, source="autotune", summary=summary, call={"args[0]": "float32[192,192]"})
    store.keep(Key("cpu|any", large.op_id, large.call_key), entry)
    tuned, guessed = attribute(trace, store=store).calls
    assert (tuned.state, tuned.cfg, tuned.name) == ("tuned", {"turns": 4}, "profiled.turns@v1(float32[192,192])")
    assert (guessed.state, guessed.worth) == ("guessed", pytest.approx(small.seconds / 2))
    with locked(freeze(tmp_path / "lock.json", turned, jnp.ones((64, 64))).path):
        assert {one.state for one in attribute(trace).calls} == {"guessed", "locked"}


def test_it_is_a_table_a_line_and_data(trace):
    """For terminals, notebooks and scripts."""
    found = attribute(trace)
    assert "profiled.turns@v1" in str(found)
    assert "2 kernel calls in" in str(found).splitlines()[-1]
    assert len(repr(found)) < 200
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.as_dict()))["calls"][0]["state"] == "guessed"


def test_a_page_has_the_profile_too(trace, tmp_path):
    """Beside what was tuned."""
    page = report(MemoryStore(), tmp_path / "page.html", profile=attribute(trace)).read_text(encoding="utf-8")
    assert "Time by kernel call" in page
    assert "profiled.turns@v1" in page


def test_a_trace_of_something_else_is_a_sentence(trace, tmp_path):
    """No folder, no trace in it, a file of another kind, half a trace."""
    with pytest.raises(OpsError, match=r"there is nothing at .*nowhere"):
        attribute(tmp_path / "nowhere")
    with pytest.raises(OpsError, match="there is no trace in"):
        attribute(tmp_path)
    (tmp_path / "other.xplane.pb").write_bytes(b"\xff" * 100)
    with pytest.raises(OpsError, match=r"is no trace of jax\.profiler that can be read"):
        attribute(tmp_path / "other.xplane.pb")
    (file,) = trace_files(trace)
    with open(file, "rb") as whole:
        (tmp_path / "half.xplane.pb").write_bytes(whole.read()[:5000])
    with pytest.raises(OpsError, match=r"is no trace of jax\.profiler that can be read"):
        attribute(tmp_path / "half.xplane.pb")


def test_a_pipe_or_a_huge_file_among_traces_is_a_sentence(tmp_path):
    """Neither is waited for or read: any user may have put it into a shared folder."""
    os.mkfifo(tmp_path / "pipe.xplane.pb")
    with pytest.raises(OpsError, match="it is not a plain file"):
        attribute(tmp_path)
    os.unlink(tmp_path / "pipe.xplane.pb")
    with open(tmp_path / "huge.xplane.pb", "wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(OpsError, match="may have"):
        attribute(tmp_path)


def test_a_trace_without_a_program_says_what_to_do(tmp_path):
    """Nothing ran inside it."""
    with jax.profiler.trace(str(tmp_path)):
        pass
    with pytest.raises(OpsError, match="holds no operation of a JAX program; call the program"):
        attribute(tmp_path)


def test_programs_of_one_name_are_told_apart_by_their_operations():
    """JAX's compilation cache gives a program another number in the times than in the list of programs."""
    mine = TracedProgram(frozenset({"dot.1", "tanh.2", "reduce.3"}), {"dot.1": "mine"})
    other = TracedProgram(frozenset({"reduce.3", "sine.4"}), {"reduce.3": "other"})
    events = [_Event(0.0, 1.0, op, "jit_step", "7") for op in ("dot.1", "tanh.2", "reduce.3")]
    for programs in ({"14": mine, "11": other}, {"14": mine, "7": other}, {"7": mine, "8": mine}):
        assert _programs_of({"jit_step": programs}, events)["jit_step", "7"].labels == mine.labels
    assert _programs_of({}, events)["jit_step", "7"].labels == {}
    alike = TracedProgram(mine.names, {"dot.1": "another"})
    assert _programs_of({"jit_step": {"1": mine, "2": alike}}, events)["jit_step", "7"].labels == {}


def test_the_latest_of_several_traces_counts(trace, tmp_path):
    """A folder keeps them all."""
    for stamp in ("2026_01_01_00_00_00", "2026_01_02_00_00_00"):
        folder = tmp_path / "plugins" / "profile" / stamp
        folder.mkdir(parents=True)
        (folder / "host.xplane.pb").write_bytes(b"")
    (file,) = trace_files(tmp_path)
    assert "2026_01_02" in file
