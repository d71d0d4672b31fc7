"""Single files behind URLs: locks and packs, read within a bound and by their hash where the URL has one. No JAX here.

`https://host/pack.json#sha256=<64 hex digits>` is taken only if it is that very text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re

from ...core.errors import SettingError
from ..files import Content
from .objects import FsspecObjects, is_url, shown
from .patience import Patience, said, within

# A lock must be read, and a command waits: longer than a program's choice of a cfg does.
_SECONDS = 30.0
_PIN = re.compile(r"sha256=([0-9a-f]{64})")


def located(path: str | os.PathLike[str]) -> str:
    """An absolute path, or a URL as it is."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.abspath(os.path.expanduser(text))


def read(url: str, limit: int, *, hasty: bool = False) -> Content | None:
    """The file behind a URL, None where there is none; an OSError where it cannot be read in time.

    `hasty` is for programs at work: two seconds for all URLs together, as with a remote.
    """
    place, pin = _pinned(url)
    folder, _, name = place.rpartition("/")
    objects = FsspecObjects(folder)
    try:
        data = _patience().call(lambda: objects.read(name, limit)) if hasty else _read(objects, name, limit)
    except OSError:
        raise
    # A driver may raise errors of its own libraries.
    except Exception as error:
        raise OSError(f"{shown(place)}: {said(error)}") from error
    if data is None:
        return None
    if pin and hashlib.sha256(data).hexdigest() != pin:
        raise OSError(f"{shown(place)} has another text than its #sha256 says; review it, and take its new hash")
    # Not this user's file: what it says is checked as a stranger's.
    return Content(b"" if len(data) > limit else data, (), -1)


def write(url: str, data: bytes) -> None:
    """Writes the file behind a URL, over an older one."""
    place, pin = _pinned(url)
    if pin:
        raise SettingError(f"{shown(place)} is written without #sha256, which belongs behind the URL of a reader")
    folder, _, name = place.rpartition("/")
    objects = FsspecObjects(folder)
    try:
        within(_SECONDS, lambda: objects.write(name, data))
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{shown(place)}: {said(error)}") from error


def _read(objects: FsspecObjects, name: str, limit: int) -> bytes | None:
    return within(_SECONDS, lambda: objects.read(name, limit))


def _pinned(url: str) -> tuple[str, str]:
    place, found, fragment = url.partition("#")
    match = _PIN.fullmatch(fragment)
    if found and match is None:
        raise SettingError(f"{shown(place)}#{fragment[:20]}: behind # stands sha256= and 64 hex digits, or nothing")
    return place, "" if match is None else match[1]


@functools.cache
def _patience() -> Patience:
    return Patience(lambda reason: None)
