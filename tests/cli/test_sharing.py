"""`ejkernel cache push`, `pull`, `sync` and `compact URL`, against a folder as remote."""

from __future__ import annotations

import pytest
from fakes_cli import DEVICE, raw, write_store
from fakes_remote import SECRET

pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")


@pytest.fixture
def team(folder, tmp_path, monkeypatch):
    """Two operations in the cache folder, a key, and the URL of an empty remote."""
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE_KEY", SECRET)
    matmul = {("matmul@v1", "aaaa000000000000"): raw(gain=1.0), ("matmul@v2", "bbbb000000000000"): raw(gain=2.0)}
    write_store(folder / "matmul.json", matmul)
    write_store(folder / "norm.json", {("norm@v1", "cccc000000000000"): raw(gain=1.2)})
    return f"file://{tmp_path}/team"


def whats(done):
    """What became of each call, by the first letter of its key."""
    return {row["call_key"][0]: row["what"] for row in done.data}


def test_push_and_pull_bring_entries_from_machine_to_machine(shell, team, tmp_path):
    """Everything goes there, and an empty machine has it afterwards."""
    assert whats(shell("cache", "push", team, "--json")) == {"a": "added", "b": "added", "c": "added"}
    done = shell("cache", "pull", str(tmp_path / "empty"), team, "--json")
    assert (done.status, whats(done)) == (0, {"a": "added", "b": "added", "c": "added"})
    listed = shell("cache", "list", "--store", str(tmp_path / "empty"), "--json")
    assert sorted(row["call_key"][0] for row in listed.data) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--op", "matmul"), "ab"),
        (("--op", "matmul@v2"), "b"),
        (("--min-gain", "1.1"), "bc"),
        (("--device", DEVICE), "abc"),
        (("--device", "tpu"), ""),
        (("--environment", "no such version"), ""),
        (("--older-than", "100y"), ""),
    ],
)
def test_filters_choose_what_is_pushed(shell, team, words, expected):
    """The same as those of the other commands, and the environment."""
    assert "".join(sorted(whats(shell("cache", "push", team, *words, "--json")))) == expected


def test_a_dry_run_says_what_would_change(shell, team, tmp_path):
    """A line for each entry with its reason, and nothing is written."""
    done = shell("cache", "push", team, "--dry-run")
    assert done.status == 0
    assert "push added    norm@v1" in done.out
    assert "not there yet" in done.out
    assert "nothing was changed" in done.err
    assert not (tmp_path / "team").exists()


def test_a_pull_without_the_key_is_refused_with_its_reason(shell, team, tmp_path, monkeypatch):
    """Status 1; the local store stays as it is."""
    shell("cache", "push", team)
    monkeypatch.delenv("EJKERNEL_OPS_REMOTE_KEY")
    done = shell("cache", "pull", str(tmp_path / "empty"), team)
    assert done.status == 1
    assert "no key is given here" in done.out
    assert "3 refused" in done.err
    assert shell("cache", "list", "--store", str(tmp_path / "empty"), "--json").status == 3


def test_sync_leaves_both_with_everything(shell, team, tmp_path):
    """Pulled first, then pushed."""
    shell("cache", "push", team, "--op", "norm")
    other = tmp_path / "other"
    write_store(other / "sum.json", {("sum@v1", "dddd000000000000"): raw(gain=1.5)})
    done = shell("cache", "sync", str(other), team, "--json")
    assert {(row["way"], row["call_key"][0], row["what"]) for row in done.data} == {
        ("pull", "c", "added"),
        ("push", "c", "kept"),
        ("push", "d", "added"),
    }


def test_compact_folds_a_remote(shell, team):
    """One line for each operation and device."""
    shell("cache", "push", team)
    done = shell("cache", "compact", team)
    assert done.status == 0
    assert done.out.count("objects folded") == 3
    assert whats(shell("cache", "push", team, "--json")) == {"a": "kept", "b": "kept", "c": "kept"}


def test_the_compilers_caches_are_exchanged_on_request(shell, team, tmp_path, monkeypatch):
    """With `--compiler`; without a key that is an error which names the setting."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "jit_f-00-cache").write_bytes(b"program")
    assert shell("cache", "push", team, "--compiler", "jax").status == 0
    assert shell("cache", "pull", team, "--compiler", "fresh").status == 0
    assert (tmp_path / "fresh" / "jit_f-00-cache").read_bytes() == b"program"
    monkeypatch.delenv("EJKERNEL_OPS_REMOTE_KEY")
    done = shell("cache", "push", team.replace("team", "other"), "--compiler", "jax")
    assert done.status == 3
    assert "EJKERNEL_OPS_REMOTE_KEY" in done.err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("push", "team"), 2, "is no URL"),
        (("push", "s3://a", "s3://b"), 2, "LOCAL is a path"),
        (("push", "oci://bucket/x"), 3, "pip install 'ocifs'"),
        (("pull", "file:///no/such/place"), 3, "is no remote: it does not exist"),
        (("compact", "team"), 2, "is no URL"),
        (("push", "nosuch://x/y"), 3, "knows no driver"),
        (("push", "file://x", "--compiler", "missing"), 3, "is no folder"),
        (("compact", "file://x", "--store", "y"), 2, "a URL or --store"),
    ],
)
def test_wrong_words_are_a_sentence(shell, team, words, status, said):
    """Each says what to give."""
    done = shell("cache", *words)
    assert (done.status, said in done.err) == (status, True), done.err
