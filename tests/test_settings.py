"""What the environment says, read in one place."""

from __future__ import annotations

import dataclasses

import pytest

from ejkernel.ops import OpsError
from ejkernel.ops.settings import Settings


@pytest.fixture
def read(monkeypatch):
    """Reads the settings with some variables set."""

    def reading(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Settings.read()

    return reading


def test_an_empty_environment_has_the_defaults(monkeypatch):
    """Nothing set: tuning is on and unbounded, nothing is recorded, labels are hashes, the folder is the user's."""
    monkeypatch.delenv("EJKERNEL_PERSISTENT_CACHE_DIR")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Settings.read()
    assert dataclasses.asdict(found) == {
        "cache_dir": None,
        "autotune": True,
        "tune_seconds": None,
        "record": None,
        "stamp": "hash",
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EJKERNEL_OPS_AUTOTUNE", "maybe"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "soon"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "-1"),
        ("EJKERNEL_OPS_TUNE_SECONDS", "nan"),
        ("EJKERNEL_OPS_STAMP", "yaml"),
    ],
)
def test_a_value_that_means_nothing_is_named(read, name, value):
    """A value that means nothing is a ValueError that names the variable, the value and what to use."""
    with pytest.raises(ValueError, match=rf"{name}=.*{value}.*use ") as caught:
        read(**{name: value})
    assert isinstance(caught.value, OpsError)
