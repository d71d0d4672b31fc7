"""Settings, read from the environment by this file alone: one frozen value, read again for each new object."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from .core.errors import SettingError

Stamp = Literal["hash", "json", "none"]
Progress = Literal["auto", "on", "off"]

_ON = {"", "on", "1", "true", "yes"}
_OFF = {"off", "0", "false", "no"}

# How long a process waits for another one's decision: eight times the longest tuning measured on an H200 (14 s).
# Beyond that an untuned kernel is the lesser evil.
AGREE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the environment variables; `Settings.read()` reads them now."""

    cache_dir: str | None = None
    autotune: bool = True
    tune_seconds: float | None = None
    record: str | None = None
    stamp: Stamp = "hash"
    progress: Progress = "auto"
    # A lock file that every call must be in.
    lock_file: str | None = None
    # Packs to look into; None turns all of them off, those of installed packages included.
    packs: tuple[str, ...] | None = ()
    # A URL with entries that are looked at after the user's own store; whether tunings are written there; its key.
    remote: str | None = None
    remote_write: bool = False
    remote_key: str | None = field(default=None, repr=False)
    agree: bool = True
    agree_seconds: float = AGREE_SECONDS
    # Do ways of the library that JAX's Triton backend compiles take part?
    triton: bool = True
    # Processes that trace candidates of a program's calls; None: as many as are worth it.
    tracers: int | None = None
    # The convention of terminals (no-color.org): any value at all means plain text.
    no_color: bool = False

    @property
    def record_file(self) -> str | None:
        """Path of the file for recorded calls; None where they stay in memory."""
        return None if self.record is None or self.record.lower() in _ON else os.path.abspath(self.record)

    @staticmethod
    def read() -> Settings:
        """The settings in force at this moment."""
        return Settings(
            cache_dir=os.environ.get("EJKERNEL_PERSISTENT_CACHE_DIR") or None,
            autotune=_switch("EJKERNEL_OPS_AUTOTUNE"),
            tune_seconds=_seconds("EJKERNEL_OPS_TUNE_SECONDS"),
            record=_recording("EJKERNEL_OPS_RECORD"),
            stamp=_stamp("EJKERNEL_OPS_STAMP"),
            progress=_progress("EJKERNEL_OPS_PROGRESS"),
            lock_file=_path("EJKERNEL_OPS_LOCK"),
            packs=_paths("EJKERNEL_OPS_PACKS"),
            remote=_path("EJKERNEL_OPS_REMOTE"),
            remote_write=_switch("EJKERNEL_OPS_REMOTE_WRITE", empty=False),
            remote_key=os.environ.get("EJKERNEL_OPS_REMOTE_KEY", "").strip() or None,
            agree=_switch("EJKERNEL_OPS_AGREE"),
            agree_seconds=_bound("EJKERNEL_OPS_AGREE_SECONDS", AGREE_SECONDS),
            triton=_switch("EJKERNEL_OPS_TRITON"),
            tracers=_count("EJKERNEL_OPS_TRACERS"),
            no_color=no_color(),
        )


def no_color() -> bool:
    """Does the user want plain text? Read apart, since it must be known where another setting is wrong."""
    return bool(os.environ.get("NO_COLOR"))


def notebook() -> str | None:
    """Path of the notebook that this process runs, where its server says so."""
    return os.environ.get("JPY_SESSION_NAME") or None


def default_folder() -> Path:
    """The folder of stores that are given no path."""
    chosen = Settings.read().cache_dir
    return Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else own_folder()


def journal_folder() -> Path:
    """The folder of the journals of tunings: beside the stores."""
    return default_folder() / "journal"


def own_folder() -> Path:
    """The cache folder of this user by the platform's convention, whatever folder the stores are in."""
    import platformdirs

    try:
        folder = Path(platformdirs.user_cache_dir("ejkernel", appauthor=False))
    # A user id without a home, as containers have; older releases answer with `~` itself.
    except RuntimeError:
        folder = Path("~")
    # As if its home were the root: never a folder named `~` in the working directory.
    return folder if folder.is_absolute() else Path(os.sep, ".cache", "ejkernel")


def variables_with(**changes: str) -> dict[str, str]:
    """The environment of a program that a command starts for the user, with these variables in it."""
    return {**os.environ, **changes}


def take_memory_as_needed() -> None:
    """Has JAX, which reads this when it starts its devices, leave their memory to other processes as well."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def child_environment(path: Sequence[str]) -> dict[str, str]:
    """The environment of a process that this one starts, with the same modules to import and memory taken as needed."""
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def device_variables(platform: str, number: int) -> dict[str, str]:
    """The variables under which a process sees this device of its platform and no other."""
    if platform == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    if platform == "tpu":
        return {
            "TPU_VISIBLE_CHIPS": _visible("TPU_VISIBLE_CHIPS", number),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }
    return {name: _visible(name, number) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}


def hardware_number(platform: str, number: int) -> str:
    """The number, or the name, of a device among all of the machine: a process may see some of them only."""
    if platform == "tpu":
        return _visible("TPU_VISIBLE_CHIPS", number)
    cuda = _visible("CUDA_VISIBLE_DEVICES", number)
    return cuda if os.environ.get("CUDA_VISIBLE_DEVICES") else _visible("HIP_VISIBLE_DEVICES", number)


def _visible(name: str, number: int) -> str:
    listed = [piece.strip() for piece in os.environ.get(name, "").split(",") if piece.strip()]
    return listed[number] if number < len(listed) else str(number)


def _switch(name: str, *, empty: bool = True) -> bool:
    word = os.environ.get(name, "").strip().lower()
    if not word:
        return empty
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


def _count(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,3}", text):
        raise SettingError(f"{name}={text!r} is not a number of processes: use a whole number, 0 for none")
    return int(text)


def _bound(name: str, default: float) -> float:
    """A wait that ends: zero would give every tuning away, and infinity would bring the hang back."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(f"{name}={text!r} is no bound for a wait: use a number of seconds over 0, such as 120")
    return seconds


def _recording(name: str) -> str | None:
    """The recording's switch or file: None for off, a word for on means memory, any other text is a path."""
    text = os.environ.get(name, "").strip()
    return None if text == "" or text.lower() in _OFF else text


def _path(name: str) -> str | None:
    text = os.environ.get(name, "").strip()
    return None if not text or text.lower() in _OFF else text


def _paths(name: str) -> tuple[str, ...] | None:
    text = os.environ.get(name, "").strip()
    if text.lower() in _OFF:
        return None
    found: list[str] = []
    for piece in text.split(os.pathsep):
        before = found[-1] if found else ""
        # The colon of a URL, and that of its port, separate nothing.
        scheme = piece.startswith("//") and before.replace("+", "").isalnum() and len(before) > 1
        port = re.fullmatch(r"[a-z0-9+]+://[^/]+", before) and re.fullmatch(r"\d+(/.*)?", piece)
        if scheme or port:
            found[-1] = before + os.pathsep + piece
        else:
            found.append(piece)
    return tuple(path for path in found if path.strip())


def _stamp(name: str) -> Stamp:
    word = os.environ.get(name, "").strip().lower() or "hash"
    if word not in ("hash", "json", "none"):
        raise SettingError(f"{name}={word!r} is not a label format: use hash, json or none")
    return cast(Stamp, word)


def _progress(name: str) -> Progress:
    word = os.environ.get(name, "").strip().lower() or "auto"
    if word not in ("auto", "on", "off"):
        raise SettingError(f"{name}={word!r} is unknown: use auto (a live line on terminals), on or off")
    return cast(Progress, word)
