"""Stored entries, measured again: rebuilt from their records, judged by paired rounds, tuned again where stale.

Covers `programs/rebuilt.py` and `cli/remeasure.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks

from ejkernel.cli.main import run
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Kernel, OperationStores, Record, Trial
from ejkernel.ops.core.description import readable
from ejkernel.ops.core.device import device_fingerprint
from ejkernel.ops.core.errors import SignatureError
from ejkernel.ops.core.kernel import versioned
from ejkernel.ops.core.key import Key
from ejkernel.ops.programs import rebuilt
from ejkernel.ops.programs.rebuilt import rebuilt_call
from ejkernel.ops.programs.remeasure import remeasure, summary_line
from ejkernel.ops.timing.sampler import RoundSampler


class Turned(Kernel[Blocks, jax.Array]):
    """A product, with as many turns as the cfg says, all of which give the same."""

    op_id = "remeasured.turned"
    version = "1"
    cfg_type = Blocks

    def run(self, x, y=None, *, scale=1.0, cfg):
        for _ in range(cfg.size):
            x = jnp.sort(x, axis=-1)
        return x * scale

    def heuristic_cfg(self, inv):
        return Blocks(2)

    def candidate_cfgs(self, inv):
        return [Blocks(1), Blocks(2), Blocks(8)]


SAMPLED = RoundSampler.__init__
SHAPE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


class Table:
    """A clock that reads a table: seconds by the number of turns in a program."""

    name = "table"

    def __init__(self, seconds):
        self.seconds = seconds

    def round(self, runs):
        return {run.number: self.seconds[run.number] for run in runs}


@pytest.fixture
def store(tmp_path):
    """A folder of stores."""
    return OperationStores(tmp_path / "stores")


def keep(store, size, *, kernel=None, runner_up=None, args=(SHAPE,), **kwargs):
    """An entry as a tuning leaves it, with this winner."""
    kernel = kernel or Turned()
    inv = Invocation(kernel.op_id, args, kwargs)
    key = Key(device_fingerprint(), versioned(kernel), inv.call_key)
    parts = {f"call.{name}": text for name, text in inv.parts.items()}
    sizes = [size, 2] + ([runner_up] if runner_up else [])
    trials = tuple(Trial(Blocks(n), samples_s=(1e-3, 1e-3)) for n in sizes)
    record = Record(
        key={**key._asdict(), **parts},
        kernel=f"{type(kernel).__module__}:{type(kernel).__qualname__}",
        trials=trials,
        winner=0,
        heuristic=1,
        runner_up=2 if runner_up else 1,
        gain=(1.2, 1.1, 1.3),
    )
    selector = ConfigSelectorChain(ConfigCache(), persistent=store)
    selector.adopt(inv, kernel, record)
    return key, record


def timed(monkeypatch, seconds):
    """Rounds by a table instead of a clock; the kept cfg is the first program, rivals follow."""

    def with_table(self, clock, *args, **options):
        SAMPLED(self, Table(seconds), *args, **options)

    monkeypatch.setattr(RoundSampler, "__init__", with_table)


def test_an_entry_that_is_still_the_fastest_is_fine(store, monkeypatch):
    """Against its heuristic and its runner-up."""
    keep(store, 1, runner_up=8)
    timed(monkeypatch, [1.0, 1.02])
    (found,) = remeasure(store)
    assert (found.state, found.cfg) == ("fine", Blocks(1))


def test_an_entry_that_lost_is_stale(store, monkeypatch):
    """Its heuristic is 3% faster now: both cfgs and the loss are named."""
    keep(store, 8)
    timed(monkeypatch, [1.03, 1.0])
    (found,) = remeasure(store)
    assert (found.state, found.rival) == ("stale", Blocks(2))
    assert found.loss[0] == pytest.approx(1.03)
    assert "size=8 takes 1.030 times as long as size=2" in str(found)
    assert summary_line([found]) == "1 entries: 0 as before, 1 stale"


def test_an_entry_that_fails_now_is_broken(store, monkeypatch):
    """The reason is its own."""
    keep(store, 1)
    monkeypatch.setattr(Turned, "run", lambda self, x, *, cfg: x[5:] if cfg.size == 1 else x)
    (found,) = remeasure(store)
    assert found.state == "broken"
    assert "its cfg is wrong now" in found.why


def test_entries_of_other_devices_and_of_no_kernel_are_left(store):
    """What cannot be rebuilt is named, with what to do."""
    key, _ = keep(store, 1)
    store.put("gpu|other", key.op_id, "aa", Blocks(1))
    store.put(key.device, "unknown@v1", "bb", Blocks(1))
    found = {one.key.op_id: one for one in remeasure(store)}
    assert set(found) == {key.op_id, "unknown@v1"}
    assert found["unknown@v1"].state == "skipped"
    assert "name the program or a recording with --calls" in found["unknown@v1"].why


def test_a_sample_takes_those_that_are_worth_most_and_a_budget_ends(store, monkeypatch):
    """Seconds that are saved in each call decide."""
    keep(store, 1)
    key, _ = keep(store, 1, args=(jax.ShapeDtypeStruct((64, 64), jnp.float32),))
    entry = store.lookup(key)
    store.keep(key, dataclasses.replace(entry, summary={"seconds": 5.0, "gain": [2.0, 2.0, 2.0]}))
    (found,) = remeasure(store, sample=1, seconds=1e-9)
    assert (found.key, found.state, found.why) == (key, "skipped", "the time was up")


def test_a_call_is_rebuilt_with_all_its_arguments(store):
    """Nested containers, numbers, dtypes, strings, None and functions come back under the same key."""
    shape = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    tree = ({"w": shape, "b": [shape, 3]}, 2.5, None, "text", jnp.dtype("float32"), (1, True), jnp.tanh)
    key, record = keep(store, 1, args=tree, scale=3)
    call = rebuilt_call(key, record, None)
    assert call.inv.call_key == key.call_key
    assert call.inv.args[0]["b"][1] == 3
    assert call.inv.args[6] is jnp.tanh
    assert call.inv.kwargs == {"scale": 3}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kernel": ""}, "does not name the kernel"),
        ({"kernel": "no.such.module:Thing"}, "cannot be imported"),
        ({"key": {}}, "does not describe the call"),
    ],
)
def test_a_call_that_cannot_be_rebuilt_says_why(store, change, why):
    """Never a wrong call."""
    key, record = keep(store, 1)
    with pytest.raises(SignatureError, match=why):
        rebuilt_call(key, dataclasses.replace(record, **change), None)


HOSTILE = ["[" * 100_000, '["float", "no number"]', '["float", "0x1p99999"]', "9" * 5000]


@pytest.mark.parametrize("text", HOSTILE, ids=len)
def test_a_part_that_no_writer_makes_is_a_sentence_and_shown_as_it_stands(store, text):
    """A hand or an enemy wrote the record: no crash, neither where the call is rebuilt nor where it is shown."""
    key, record = keep(store, 1)
    changed = dataclasses.replace(record, key={**record.key, "call.args[0]": text})
    with pytest.raises(SignatureError, match="cannot be made again"):
        rebuilt_call(key, changed, None)
    assert readable(text) == text


@pytest.mark.parametrize("change", ["another user owns it", "others may write it"])
def test_nothing_is_imported_that_another_users_record_names(store, tmp_path, monkeypatch, change):
    """The entry is this user's own, but its record is not: it is skipped, and the reason names --calls."""
    if change == "another user owns it" and os.getuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    (tmp_path / "planted_kernel.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    _, record = keep(store, 1, runner_up=8)
    (path,) = (tmp_path / "stores").glob("*.json.d/records/*.json")
    path.write_text(path.read_text().replace(record.kernel, "planted_kernel:Kernel"))
    if change == "another user owns it":
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o666)

    (found,) = remeasure(store)

    assert (found.state, "planted_kernel" in sys.modules) == ("skipped", False)
    assert "another user's" in found.why
    assert "--calls" in found.why


def test_a_call_with_another_key_now_is_refused(store):
    """Parts that were changed make another call."""
    key, record = keep(store, 1)
    parts = {**record.key, "call.args[0]": "float32[7]"}
    with pytest.raises(SignatureError, match="another key"):
        rebuilt_call(key, dataclasses.replace(record, key=parts), None)
    assert rebuilt._ARRAY.fullmatch("float32[]")


def test_the_command_says_it_in_a_line_and_a_status(store, monkeypatch, capsys):
    """Zero where all is well, one where an entry is stale, zero again once it was tuned."""
    key, _ = keep(store, 8)
    folder = str(store.folder)
    timed(monkeypatch, [1.0, 1.05, 1.1])
    assert run(["remeasure", "--store", folder]) == 0
    assert capsys.readouterr().out == "1 entries: 1 as before, 0 stale\n"
    timed(monkeypatch, [1.05, 1.0, 1.1])
    assert run(["remeasure", "--store", folder, "--quiet"]) == 1
    assert capsys.readouterr().out == "1 entries: 0 as before, 1 stale\n"
    assert run(["remeasure", "--store", folder, "--call", key.call_key[:6], "--fix"]) == 0
    assert capsys.readouterr().out.endswith("1 entries: 0 as before, 1 stale; 1 tuned again\n")
    assert run(["remeasure", "--store", folder, "--op", "other"]) == 3
    assert "no entry fits" in capsys.readouterr().err
