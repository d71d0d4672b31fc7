"""What the environment says, read in one place."""

from __future__ import annotations

import dataclasses
import os

import pytest

from ejkernel.ops import OpsError
from ejkernel.ops.settings import Settings, device_variables, hardware_number


@pytest.fixture
def read(monkeypatch):
    """Reads the settings with some variables set."""

    def reading(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Settings.read()

    return reading


def test_an_empty_environment_has_the_defaults(monkeypatch):
    """Nothing set: tuning is on and unbounded, agreement on, nothing recorded, labels are hashes, the user's folder."""
    monkeypatch.delenv("EJKERNEL_PERSISTENT_CACHE_DIR")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Settings.read()
    assert dataclasses.asdict(found) == {
        "cache_dir": None,
        "autotune": True,
        "tune_seconds": None,
        "record": None,
        "stamp": "hash",
        "progress": "auto",
        "lock_file": None,
        "packs": (),
        "remote": None,
        "remote_write": False,
        "remote_key": None,
        "agree": True,
        "agree_seconds": 120.0,
        "triton": True,
        "tracers": None,
        "no_color": False,
    }


def test_settings_are_frozen():
    """Settings are a value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings.read().autotune = False


def test_settings_are_read_anew(read):
    """Each reading looks at the environment as it is then."""
    assert read(EJKERNEL_OPS_STAMP="none").stamp == "none"
    assert read(EJKERNEL_OPS_STAMP="json").stamp == "json"


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", " no "])
def test_autotuning_can_be_turned_off(read, word):
    """`EJKERNEL_OPS_AUTOTUNE=off`, and the usual spellings of it, turn tuning off."""
    assert read(EJKERNEL_OPS_AUTOTUNE=word).autotune is False


@pytest.mark.parametrize("word", ["", "on", "1", "True", "yes"])
def test_autotuning_is_on_otherwise(read, word):
    """Empty or on: tuning is on."""
    assert read(EJKERNEL_OPS_AUTOTUNE=word).autotune is True


def test_tuning_can_be_bounded(read):
    """`EJKERNEL_OPS_TUNE_SECONDS` is a number of seconds, zero included."""
    assert read(EJKERNEL_OPS_TUNE_SECONDS="2.5").tune_seconds == 2.5
    assert read(EJKERNEL_OPS_TUNE_SECONDS="0").tune_seconds == 0
    assert read(EJKERNEL_OPS_TUNE_SECONDS="").tune_seconds is None


def test_recording_can_be_turned_on(read):
    """`EJKERNEL_OPS_RECORD=1` records; empty, 0 and off do not."""
    assert read(EJKERNEL_OPS_RECORD="1").record
    for word in ("", "0", "off"):
        assert not read(EJKERNEL_OPS_RECORD=word).record


@pytest.mark.parametrize("word", ["hash", "json", "none"])
def test_labels_have_three_formats(read, word):
    """`EJKERNEL_OPS_STAMP` is hash, json or none."""
    assert read(EJKERNEL_OPS_STAMP=word).stamp == word
    assert read(EJKERNEL_OPS_STAMP=word.upper()).stamp == word


def test_the_cache_folder_can_be_set(read, tmp_path):
    """`EJKERNEL_PERSISTENT_CACHE_DIR` is the folder; empty means none."""
    assert read(EJKERNEL_PERSISTENT_CACHE_DIR=str(tmp_path)).cache_dir == str(tmp_path)
    assert read(EJKERNEL_PERSISTENT_CACHE_DIR="").cache_dir is None


def test_a_lock_can_be_set(read):
    """`EJKERNEL_OPS_LOCK` is a path; empty or off means none."""
    assert read(EJKERNEL_OPS_LOCK="step.lock.json").lock_file == "step.lock.json"
    assert read(EJKERNEL_OPS_LOCK=" ").lock_file is None
    assert read(EJKERNEL_OPS_LOCK="off").lock_file is None


def test_packs_can_be_set_and_turned_off(read):
    """`EJKERNEL_OPS_PACKS` is a list of paths, as PATH is one; off means none at all."""
    assert read(EJKERNEL_OPS_PACKS=os.pathsep.join(["a.json", "", "packs"])).packs == ("a.json", "packs")
    assert read(EJKERNEL_OPS_PACKS="").packs == ()
    assert read(EJKERNEL_OPS_PACKS="off").packs is None


def test_packs_may_be_urls(read):
    """The colons of a URL and of its port separate nothing."""
    urls = ("s3://team/pack.json", "packs", "https://host:8443/a.json", "/b.json")
    assert read(EJKERNEL_OPS_PACKS=os.pathsep.join(urls)).packs == urls


def test_a_remote_can_be_set_and_is_read_only_unless_told(read):
    """`EJKERNEL_OPS_REMOTE` is a URL, `_WRITE` a switch, `_KEY` a secret that is never printed."""
    assert read(EJKERNEL_OPS_REMOTE="off").remote is None
    found = read(EJKERNEL_OPS_REMOTE="s3://team/ejkernel", EJKERNEL_OPS_REMOTE_KEY=" secret ")
    assert (found.remote, found.remote_write, found.remote_key) == ("s3://team/ejkernel", False, "secret")
    assert "secret" not in repr(found)
    assert read(EJKERNEL_OPS_REMOTE_WRITE="on").remote_write is True


def test_agreement_can_be_turned_off_and_bounded(read):
    """`EJKERNEL_OPS_AGREE` is a switch, `EJKERNEL_OPS_AGREE_SECONDS` the longest wait."""
    assert read(EJKERNEL_OPS_AGREE="off").agree is False
    assert read(EJKERNEL_OPS_AGREE_SECONDS="0.5").agree_seconds == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EJKERNEL_OPS_AUTOTUNE", "maybe"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "soon"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "-1"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "nan"),
        ("EJKERNEL_OPS_STAMP", "yaml"),
        ("EJKERNEL_OPS_REMOTE_WRITE", "sometimes"),
        ("EJKERNEL_OPS_AGREE", "perhaps"),
        ("EJKERNEL_OPS_AGREE_SECONDS", "0"),
        ("EJKERNEL_OPS_AGREE_SECONDS", "-5"),
        ("EJKERNEL_OPS_AGREE_SECONDS", "inf"),
        ("EJKERNEL_OPS_AGREE_SECONDS", "later"),
    ],
)
def test_a_value_that_means_nothing_is_named(read, name, value):
    """A value that means nothing is a ValueError that names the variable, the value and what to use."""
    with pytest.raises(ValueError, match=rf"{name}=.*{value}.*use ") as caught:
        read(**{name: value})
    assert isinstance(caught.value, OpsError)


@pytest.mark.parametrize(
    ("platform", "variable"),
    [("gpu", "CUDA_VISIBLE_DEVICES"), ("gpu", "HIP_VISIBLE_DEVICES"), ("tpu", "TPU_VISIBLE_CHIPS")],
)
def test_a_device_is_counted_among_those_that_this_process_sees(monkeypatch, platform, variable):
    """A worker gets the device that its parent means, by the number that the machine has for it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "2, 3")
    assert device_variables(platform, 1)[variable] == hardware_number(platform, 1) == "3"
    monkeypatch.delenv(variable)
    assert device_variables(platform, 1)[variable] == hardware_number(platform, 1) == "1"
