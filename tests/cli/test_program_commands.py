"""record, tune, freeze, explain and pack, against real programs and real tunings.

Covers `cli/explain.py`, `cli/freeze.py`, `cli/pack.py`, `cli/program.py`, `cli/record.py` and `cli/tune.py`.
"""

from __future__ import annotations

import errno
import json
import os
import sys

import jax.numpy as jnp
import pytest
from fakes_cli import HERE, piped, raw, write_store

from ejkernel.ops import AutotunePolicy, AutotuningResult, ConfigCache, ConfigSelectorChain, Executor

RUN = "import tuned_program; tuned_program.program()"


def test_a_program_is_recorded_tuned_explained_frozen_and_packed(shell, tmp_path, monkeypatch):
    """Each command takes what the one before it left."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parent.parent}:{HERE}")
    done = shell("record", "--", sys.executable, "-c", RUN)
    assert done.status == 0
    assert "2 new calls recorded, 2 in recorded.json" in done.err
    assert "0 new calls" in shell("record", "--", sys.executable, "-c", RUN).err

    (before, _) = shell("explain", "recorded.json", "--json").data
    assert before["tier"] == "autotune"

    tuned = shell("tune", "recorded.json", "-o", "result.json")
    assert tuned.status == 0, tuned.err
    assert tuned.out.splitlines()[0].split()[:3] == ["operation", "call", "cfg"]
    assert "2 of 2: cli.row_sum@v1" in tuned.err
    assert len(AutotuningResult.load("result.json").entries) == 2
    again = shell("tune", "recorded.json", "--json")
    assert {call["from"] for call in again.data["calls"]} == {"persistent"}
    assert len(shell("cache", "list", "--json").data) == 2

    assert shell("freeze", "recorded.json", "-o", "calls.lock.json").status == 0
    assert shell("freeze", "result.json", "-o", "result.lock.json").status == 0
    assert shell("freeze", "-o", "everything.lock.json", "--json").data["path"].endswith("everything.lock.json")
    names = ["calls", "result", "everything"]
    keys = [set(json.loads((tmp_path / f"{name}.lock.json").read_text())) for name in names]
    assert keys[0] == keys[1] == keys[2]

    assert "2 entries in" in shell("pack", "create", "team.json", "--name", "team").out
    checked = shell("pack", "verify", "team.json", "--calls", "recorded.json")
    assert checked.status == 0
    assert "2 compared with their kernels" in checked.out
    assert shell("pack", "list").err.startswith("no pack is installed")


@pytest.mark.parametrize("words", [("tune",), ("explain",), ("freeze",), ("pack", "verify", "p.json", "--calls")])
def test_a_recording_that_others_may_write_imports_nothing_unless_it_is_trusted(shell, tmp_path, monkeypatch, words):
    """It names modules, and the current folder is searched first: the command asks for --trust."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planted.py").write_text("open('imported', 'w').close()\n")
    from ejkernel.ops.core.device import device_fingerprint

    call = {"device": device_fingerprint(), "op_id": "k@v0", "call_key": "1", "kernel": "planted:K"}
    whole = {"kind": "ejkernel.ops recorded calls", "version": 1, "calls": [call]}
    (tmp_path / "recorded.json").write_text(json.dumps(whole))
    (tmp_path / "recorded.json").chmod(0o666)
    done = shell(*words, "recorded.json")

    assert done.status != 0
    assert "--trust" in done.err
    assert not (tmp_path / "imported").exists()
    assert "--trust" not in shell(*words, "recorded.json", "--trust").err
    assert (tmp_path / "imported").exists()
    (tmp_path / "recorded.json").chmod(0o644)
    assert "--trust" not in shell(*words, "recorded.json").err


def test_a_recording_that_is_exchanged_after_it_was_found_to_be_ones_own_imports_nothing(shell, tmp_path, monkeypatch):
    """What is imported is named by the very bytes that were judged, not by what lies there a moment later."""
    from ejkernel.ops.core.device import device_fingerprint
    from ejkernel.ops.store import files

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planted.py").write_text("open('imported', 'w').close()\n")
    call = {"device": device_fingerprint(), "op_id": "k@v0", "call_key": "1", "kernel": "planted:K"}
    whole = {"kind": "ejkernel.ops recorded calls", "version": 1, "calls": []}
    recording = tmp_path / "recorded.json"
    recording.write_text(json.dumps(whole))
    real = files.read

    def read(path, *limit):
        content = real(path, *limit)
        if path == str(recording):
            recording.write_text(json.dumps({**whole, "calls": [call]}))
            recording.chmod(0o666)
        return content

    monkeypatch.setattr(files, "read", read)
    shell("tune", "recorded.json")

    assert not (tmp_path / "imported").exists()
    assert recording.stat().st_mode & 0o777 == 0o666


def test_a_recorded_call_is_tuned_for_what_its_program_asked(shell, tmp_path, monkeypatch):
    """Forward and backward together, with no option of the command's."""
    from tuned_program import RowSum

    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(tmp_path / "recorded.json"))
    policy = AutotunePolicy(allow_autotune=False, validate_backward=True)
    Executor(ConfigSelectorChain(ConfigCache(), policy))(RowSum(), jnp.ones((8, 16)))
    assert shell("tune", "recorded.json").status == 0
    assert [row["objective"] for row in shell("cache", "list", "--json").data] == ["forward+backward"]


def test_a_function_that_runs_the_program_is_looked_through(shell):
    """It is run once without tuning; then each call is tuned into the program's own store. Its prints are no output."""
    done = shell("tune", "tuned_program:program", "--json")
    assert done.status == 0, done.err
    assert [call["from"] for call in done.data["calls"]] == ["autotune"] * 2
    assert "the program speaks" in done.err
    assert len(shell("cache", "list", "--json").data) == 2


def test_a_function_that_returns_a_function_and_its_arguments_has_it_traced(shell):
    """And never run without confirming; the command's own selector tunes where an effort or a store is given."""
    words = ("--store", "elsewhere", "--effort", "quick", "--quiet", "--json", "--no-confirm")
    done = shell("tune", "tuned_program:pair", *words)
    assert done.status == 0, done.err
    assert done.data["confirmation"] is None
    assert done.err == ""
    assert len(done.data["calls"]) == 2
    assert shell("cache", "list", "--json").data == []
    assert len(shell("cache", "list", "--json", "--store", "elsewhere").data) == 2


@pytest.mark.parametrize("function", ["program", "pair"])
def test_a_function_is_explained_and_frozen(shell, function):
    """By the calls that it makes; explaining leaves nothing behind."""
    done = shell("explain", f"tuned_program:{function}")
    assert done.out.count("would be tuned: 2 candidates") == 2
    assert shell("cache", "list", "--json").data == []
    none = shell("explain", f"tuned_program:{function}", "--op", "other")
    assert none.status == 3
    assert "its kernel calls are: cli.row_sum@v1" in none.err
    frozen = shell("freeze", f"tuned_program:{function}")
    assert frozen.status == 0, frozen.err
    assert "2 decisions in" in frozen.out


def test_a_device_can_be_chosen(shell):
    """By platform and number; one that is not there is named with those that are."""
    done = shell("explain", "tuned_program:pair", "--device", "cpu:1", "--json")
    assert done.data[0]["key"]["device"].startswith("cpu|")
    for name in ("cpu:99", "gpu:x", "nonsense"):
        refused = shell("tune", "tuned_program:pair", "--device", name)
        assert refused.status == 3
        assert f"there is no device {name}; there are cpu:0" in refused.err


def test_what_could_not_be_tuned_is_said_and_has_status_1(shell, tmp_path):
    """A recording of another device has nothing for this one."""
    call = {"device": "gpu|NVIDIA H200", "op_id": "x@v1", "call_key": "00"}
    recording = {"kind": "ejkernel.ops recorded calls", "version": 1, "calls": [call]}
    (tmp_path / "far.json").write_text(json.dumps(recording))
    done = shell("tune", "far.json")
    assert done.status == 1
    assert "recorded on another kind of device" in done.out
    assert "1 call was not tuned" in done.err


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("nowhere.json", "there is no recording nowhere.json; make one with `ejkernel record"),
        ("no_such_module:f", "there is no module no_such_module; run the command in the folder that holds it"),
        ("tuned_program:progam", "tuned_program has no progam (did you mean program?)"),
        ("tuned_program:NUMBER", "tuned_program:NUMBER is a int; name a function"),
        ("tuned_program:wanting", "takes x; name a function without arguments, which returns (fn, args)"),
        ("tuned_program:failing", "raised an error: ValueError: no luck; --traceback shows where"),
        ("tuned_program:without_kernels", "makes no kernel call that a selector answers"),
        ("broken_module:f", "broken_module cannot be imported: RuntimeError: not today; --traceback shows where"),
        ("leaving_module:f", "leaving_module cannot be imported: SystemExit: 5"),
        ("needing_module:f", "needing_module needs the module absent_library, which is not installed"),
        ("script.py", "script.py is a program; name a function in it, script:main"),
        ("text.json", "is no file of recorded calls"),
        ("future.json", "has version 9 of recorded calls"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(shell, tmp_path, target, advice):
    """With what to do, and the status for it."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('not today')")
    (tmp_path / "leaving_module.py").write_text("raise SystemExit(5)")
    (tmp_path / "needing_module.py").write_text("import absent_library")
    (tmp_path / "script.py").write_text("pass")
    (tmp_path / "text.json").write_text("[1]")
    (tmp_path / "future.json").write_text('{"kind": "ejkernel.ops recorded calls", "version": 9, "calls": []}')
    done = shell("tune", target)
    assert done.status == 3
    assert advice in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_traceback_is_shown_to_who_asks(shell):
    """Down to the line of the user's own."""
    assert "in failing" in shell("tune", "tuned_program:failing", "--traceback").err


def test_tuning_that_is_forbidden_is_said(shell, monkeypatch):
    """Rather than done without effect."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    done = shell("tune", "tuned_program:pair")
    assert done.status == 3
    assert "EJKERNEL_OPS_AUTOTUNE=off forbids every tuning" in done.err


def test_a_store_that_is_full_does_not_pass_for_done(shell, tmp_path, monkeypatch):
    """What was tuned is shown, and that it is not kept is said."""
    from ejkernel.ops.store import files

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    done = shell("tune", "tuned_program:pair", "--store", "plain", "--quiet")
    assert done.status == 3
    assert "cli.row_sum@v1" in done.out
    assert "not everything that was tuned is kept" in done.err


@pytest.mark.parametrize("shard", [(), ("--shard", "1/2")])
@pytest.mark.parametrize("store", ["plain/inside/it", "/proc", "link"])
def test_a_store_that_cannot_be_written_is_an_error_before_tuning(shell, tmp_path, monkeypatch, store, shard):
    """Each job of an array would else tune for hours and keep nothing; the target is not even read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    (tmp_path / "link").symlink_to("/no/such/place")
    done = shell("tune", "recorded.json", "--store", store, *shard)
    assert done.status == 3
    assert done.out == ""
    assert f"--store {store} cannot be written" in done.err
    assert "nothing was tuned" in done.err


def test_what_is_to_be_written_is_looked_at_before_tuning(shell, tmp_path, monkeypatch):
    """A file for a store, and the folder of a result; a store that is not there yet is left so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    assert "--store takes a folder" in shell("tune", "tuned_program:pair", "--store", "plain").err
    early = shell("tune", "tuned_program:pair", "-o", "no/such/result.json")
    assert early.status == 3
    assert "its folder does not exist" in early.err
    assert shell("tune", "nothing.json", "--store", "new/store").status == 3
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["import numpy\n", '{"calls": 1}', b"\xff\xfe"])
def test_a_result_is_not_written_over_something_else(shell, tmp_path, content):
    """A module, a recording or any other file stays as it is, and that is said before tuning."""
    other = tmp_path / "other"
    other.write_bytes(content.encode() if isinstance(content, str) else content)
    before = other.read_bytes()
    done = shell("tune", "tuned_program:pair", "-o", "other")
    assert done.status == 3
    assert "other exists and is no result of a tuning; give another path, or remove it" in done.err
    assert other.read_bytes() == before
    assert "is a folder" in shell("tune", "tuned_program:pair", "-o", str(tmp_path)).err
    assert shell("freeze", "--store", "nowhere").status == 3


def test_the_efforts_are_the_tuners_own():
    """Help names them without importing JAX."""
    from ejkernel.cli.tune import EFFORTS
    from ejkernel.ops.tuning.search import effort

    assert tuple(effort.EFFORTS) == EFFORTS


def test_record_gives_the_status_of_the_program(shell):
    """Also that of one that a signal ended; a program that cannot be started is one sentence."""
    leave = "import sys; sys.exit(7)"
    assert shell("record", "--", sys.executable, "-c", leave).status == 7
    kill = "import os; os.kill(os.getpid(), 15)"
    assert shell("record", "--", sys.executable, "-c", kill).status == 143
    quiet = shell("record", "--", sys.executable, "-c", "pass")
    assert quiet.status == 1
    assert "nothing was recorded" in quiet.err
    missing = shell("record", "--", "no-such-program")
    assert missing.status == 3
    assert "no-such-program cannot be run: No such file or directory" in missing.err


def test_record_refuses_a_file_of_something_else_before_it_runs_anything(shell, tmp_path):
    """The program would have run for nothing."""
    (tmp_path / "notes.json").write_text("{}")
    done = shell("record", "-o", "notes.json", "--", sys.executable, "-c", "open('ran', 'w')")
    assert done.status == 3
    assert "is no file of recorded calls" in done.err
    assert not (tmp_path / "ran").exists()


def test_packs_are_installed_found_and_checked(shell, folder, tmp_path):
    """An installed pack answers; another one of its name is refused; a damaged one is named by list and verify."""
    from ejkernel.ops.store.packs import forget_packs

    shell("tune", "tuned_program:pair", "--store", "theirs", "--quiet")
    refused = shell("pack", "create", "team.json", "--store", "nowhere")
    assert refused.status == 3
    assert shell("pack", "create", "team.json", "--store", "theirs").status == 0
    assert shell("pack", "install", "team.json").status == 0
    assert shell("pack", "install", "team.json").status == 0, "the same pack again"
    forget_packs()
    (row,) = shell("pack", "list", "--json").data
    assert (row["name"], row["entries"]) == ("team", 2)
    assert row["path"] == str(folder / "packs" / "team.json")
    assert "from the pack" in shell("explain", "tuned_program:pair").out

    write_store(tmp_path / "other.json", {("op@v1", "aaaa"): raw()})
    assert shell("pack", "create", "team.json", "--store", "other.json").status == 0
    other = shell("pack", "install", "team.json")
    assert other.status == 3
    assert "is another pack; remove it, rename yours, or use --force" in other.err
    assert shell("pack", "install", "team.json", "--force").status == 0

    path = folder / "packs" / "team.json"
    path.write_text(path.read_text().replace('"block": 64', '"block": 65', 1))
    forget_packs()
    for words in (("list",), ("verify", str(path))):
        bad = shell("pack", *words)
        assert bad.status == 1
        assert "does not fit its checksum" in bad.out + bad.err
    assert shell("pack", "install", str(tmp_path / "nothing.json")).status == 3


def test_a_command_that_tuned_ends_with_its_status():
    """In a process of its own, whatever its compiler threads still do."""
    done = piped("tune", "tuned_program:pair", "--quiet")
    assert done.status == 0, done.err
    assert "cli.row_sum@v1" in done.out
    # The function came with its arguments, so the program was run before and after, or no cfg changed.
    assert "the program takes" in done.out or "every call kept the cfg that it had" in done.out
