"""The remote of the settings: `EJKERNEL_OPS_REMOTE`, and what a value that cannot be used leads to."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ...core.errors import OpsError
from ...settings import Settings

if TYPE_CHECKING:
    from .remote_store import RemoteStore


def remote_of_settings() -> RemoteStore | None:
    """The remote that the environment names; one that cannot be used is one warning, and local work goes on."""
    settings = Settings.read()
    if settings.remote is None:
        return None
    # A process without a remote imports none of it.
    from .remote_store import RemoteStore, RemoteWarning

    try:
        return RemoteStore(settings.remote, write=settings.remote_write)
    except OpsError as error:
        message = f"EJKERNEL_OPS_REMOTE is left out, and local work goes on: {error}"
        warnings.warn(message, RemoteWarning, stacklevel=3)
        return None
