"""The calls of a recording, read for tuning in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..config.policy import Frame
from ..core.device import default_device, device_fingerprint, get_device_platform
from ..core.errors import SignatureError, StoreError
from ..core.kernel import versioned
from ..core.key import Key
from ..execution import signatures
from ..execution.recording import BOTH, call_key_of, read_file
from .found_call import FoundCall


def recorded_keys(path: str | os.PathLike[str]) -> list[Key]:
    """The keys of the calls in a file, none where there is no file; imports nothing of what it names."""
    return sorted(read_file(os.path.abspath(path)))


def check_there(path: str | os.PathLike[str]) -> None:
    """An error where there is no file to be read."""
    if not os.path.exists(path):
        raise StoreError(f"there is no file of recorded calls at {os.fspath(path)}")


def read_calls(
    path: str | os.PathLike[str], selector: Any, *, elsewhere: bool = False, only_own: bool = False
) -> tuple[list[FoundCall], list[str]]:
    """The calls of a file that were recorded on this kind of device, and what was left out and why.

    With `elsewhere` those of other devices too, for workers that have them. With `only_own` a file that others may
    write is a `ForeignFileError`. Imports the modules that the file names: read only files that you would run.
    """
    device = default_device()
    name = device_fingerprint(device)
    check_there(path)
    calls, left_out = [], []
    for key, signature in read_file(os.path.abspath(path), only_own=only_own).items():
        if key.device != name and not elsewhere:
            left_out.append(f"{key}: not tuned: recorded on another kind of device than {name}")
            continue
        try:
            kernel, inv, trace_context = signatures.rebuilt(signature, get_device_platform(device))
            with trace_context.entered():
                found = call_key_of(kernel, inv)
            if found != key.call_key:
                raise SignatureError(f"the kernel makes another key of it now, {found}")
        except SignatureError as error:
            left_out.append(f"{key}: not tuned: {error}")
            continue
        current = Key(key.device, versioned(kernel), key.call_key)
        calls.append(FoundCall(current, kernel, inv, (selector,), device, trace_context, _frames(selector, signature)))
    return calls, left_out


def _frames(selector: Any, signature: Mapping[str, Any]) -> tuple[Frame, ...]:
    """The policy under which a recorded call is tuned: never for less than the program that made it asks."""
    return (Frame(selector, (("validate_backward", True),)),) if signature.get("objective") == BOTH else ()
