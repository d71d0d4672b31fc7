"""The only file that reads the environment: one frozen value, read anew where something is made."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal, cast

from .core.errors import SettingError

Stamp = Literal["hash", "json", "none"]

_ON = {"", "on", "1", "true", "yes"}
_OFF = {"off", "0", "false", "no"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; `Settings.read()` looks now."""

    cache_dir: str | None = None
    autotune: bool = True
    tune_seconds: float | None = None
    record: str | None = None
    stamp: Stamp = "hash"
    # The convention of terminals (no-color.org): any value at all means plain text.
    no_color: bool = False

    @staticmethod
    def read() -> Settings:
        """The settings in force at this moment."""
        return Settings(
            cache_dir=os.environ.get("EJKERNEL_PERSISTENT_CACHE_DIR") or None,
            autotune=_switch("EJKERNEL_OPS_AUTOTUNE"),
            tune_seconds=_seconds("EJKERNEL_OPS_TUNE_SECONDS"),
            record=_recording("EJKERNEL_OPS_RECORD"),
            stamp=_stamp("EJKERNEL_OPS_STAMP"),
            no_color=bool(os.environ.get("NO_COLOR")),
        )


def _switch(name: str) -> bool:
    word = os.environ.get(name, "").strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise SettingError(f"{name}={os.environ[name]!r} is not a switch: use on or off")


def _seconds(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise SettingError(f"{name}={text!r} is not a number of seconds: use a number of at least 0, such as 60")
    return seconds


def _recording(name: str) -> str | None:
    """Any value but a switch that says off records, in memory."""
    text = os.environ.get(name, "").strip()
    return None if text == "" or text.lower() in _OFF else text


def _stamp(name: str) -> Stamp:
    word = os.environ.get(name, "").strip().lower() or "hash"
    if word not in ("hash", "json", "none"):
        raise SettingError(f"{name}={word!r} is not a label format: use hash, json or none")
    return cast(Stamp, word)
