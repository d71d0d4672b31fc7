"""`ejkernel doctor`: what it finds, and what it says to do.

Covers `cli/examining.py`.
"""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from fakes_cli import ROOT, in_terminal, raw, write_store

from ejkernel.cli import examining


@pytest.fixture
def without_clock(monkeypatch):
    """Measuring takes a second, and is looked at in a test of its own."""
    monkeypatch.setattr("ejkernel.cli.doctor.CHECKS", [c for c in _checks() if c is not examining.clock])


def _checks():
    from ejkernel.cli.doctor import CHECKS

    return CHECKS


@pytest.fixture
def alone(monkeypatch):
    """No other package of that name, whatever is installed where the tests run."""
    known = examining._version
    monkeypatch.setattr(examining, "_version", lambda name: None if name == "ejkernel" else known(name))


def found(done, name):
    """The findings about one thing."""
    return [one for one in done.data["findings"] if one["name"] == name]


def test_a_healthy_machine_needs_no_fixing(shell, alone):
    """Versions, devices, the clock with its noise, the folder and the extras are named."""
    done = shell("doctor")
    assert done.status == 0, done.out
    assert done.out.endswith("nothing needs fixing\n")
    for name in ("ejkernel-ops", "jax", "devices", "clock", "cache", "extra"):
        assert re.search(rf"^(ok|note) +{name} ", done.out, re.MULTILINE), name
    assert re.search(r"wall on cpu\|.*; equal programs differ by [\d.]+% now, samples by \d+%", done.out)


def test_a_second_package_of_the_name_is_to_be_removed(shell, monkeypatch, without_clock):
    """Their files lie over each other."""
    monkeypatch.setattr(metadata, "version", lambda name: {"ejkernel": "0.0.80"}.get(name, "0.10.2"))
    done = shell("doctor", "--json")
    assert done.status == 1
    assert done.data["healthy"] is False
    (finding,) = found(done, "ejkernel")
    assert finding["state"] == "fix"
    assert finding["advice"].startswith("pip uninstall ejkernel ejkernel-ops")


def test_a_damaged_store_a_damaged_pack_and_a_wrong_setting_are_to_be_fixed(
    shell, folder, monkeypatch, without_clock, alone
):
    """Each with its own line, and what to do."""
    path = write_store(folder / "op.json", {("op@v1", "aaaa"): raw(), ("op@v1", "bbbb"): raw()})
    path.write_text(path.read_text().replace('"block": 64', '"block": 65', 1))
    write_store(folder / "next.json", {("next@v1", "aaaa"): raw()}, form=9)
    (folder / "packs").mkdir()
    (folder / "packs" / "bad.json").write_text("{}")
    done = shell("doctor", "--json")
    assert done.status == 1
    fixes = [one["text"] for one in done.data["findings"] if one["state"] == "fix"]
    assert any("op.json: the line of" in text for text in fixes)
    assert any("next.json: it has format 9" in text for text in fixes)
    assert any("bad.json is no pack" in text for text in fixes)

    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "maybe")
    done = shell("doctor", "--json")
    assert any("EJKERNEL_OPS_AUTOTUNE='maybe'" in one["text"] for one in found(done, "settings"))


def test_a_wrong_setting_is_reported_on_a_terminal_too():
    """Colours must not depend on the setting that is wrong."""
    status, text = in_terminal("doctor", EJKERNEL_OPS_STAMP="wrong")
    assert status == 1
    assert "EJKERNEL_OPS_STAMP='wrong'" in text
    assert "to fix" in text


def test_a_folder_that_is_none_is_to_be_fixed(shell, folder, without_clock, alone):
    """A file lies there."""
    folder.write_text("")
    done = shell("doctor", "--json")
    assert done.status == 1
    assert "is not a folder that can be read" in found(done, "cache")[0]["text"]


def test_an_unsupported_jax_is_to_be_fixed(monkeypatch):
    """With the range that is supported, which is the project's own."""
    monkeypatch.setattr(examining, "_version", lambda name: "0.13.1" if name.startswith("jax") else None)
    (jax,) = [one for one in examining.installation() if one.name == "jax"]
    assert jax.state == "fix"
    assert "at least 0.10 and below 0.13" in jax.advice
    low, high = (".".join(map(str, version)) for version in examining.SUPPORTED_JAX)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"jax>={low},<{high}"' in text


DEVELOPERS = {"dev", "docs", "frameworks", "notebooks", "pools", "servers", "test"}


def test_every_extra_for_users_is_looked_for():
    """Those for developers are not."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) - DEVELOPERS == set(examining.EXTRAS)


def test_what_is_set_is_noted(shell, monkeypatch, without_clock, alone, tmp_path):
    """A switch that was forgotten explains much; a lock that is not there is to be fixed."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    monkeypatch.setenv("EJKERNEL_OPS_LOCK", str(tmp_path / "nowhere.json"))
    done = shell("doctor", "--json")
    assert done.status == 1
    assert [one["state"] for one in found(done, "settings")] == ["note", "fix"]


def test_a_remote_is_looked_at(shell, monkeypatch, without_clock, alone, tmp_path):
    """One that answers is fine, without a key that is noted; one that is not there is to be fixed."""
    pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")
    (tmp_path / "team").mkdir()
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE", f"file://{tmp_path}/team")
    assert [one["state"] for one in found(shell("doctor", "--json"), "remote")] == ["ok", "note"]
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE_KEY", "k" * 32)
    assert [one["state"] for one in found(shell("doctor", "--json"), "remote")] == ["ok"]
    monkeypatch.setenv("EJKERNEL_OPS_REMOTE", f"file://{tmp_path}/nowhere")
    (finding,) = found(shell("doctor", "--json"), "remote")
    assert finding["state"] == "fix"
    assert "it does not exist" in finding["text"]
