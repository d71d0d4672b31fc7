"""Dask as a pool: a `distributed.Client` has futures that call back, and needs to be told that a tuning is no value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from ...core.errors import SettingError
from .by_name import call, name_of, places
from .engines import engine

# A scheduler that is there answers at once; one that starts needs some seconds.
_CONNECT_SECONDS = 30.0


@final
class DaskPool:
    """A client of a Dask cluster; its scheduler and its workers are the user's.

    Dask takes a function of the same text for the same value: asked again, it gives the first answer, or waits for the
    worker that hangs. Here each submission is a new one.
    """

    def __init__(self, client: Any) -> None:
        if getattr(client, "asynchronous", False):
            raise SettingError(
                "this Client is asynchronous, and its futures are awaited; give a Client(address) without asynchronous"
            )
        self.client = client

    @property
    def workers(self) -> int:
        """Threads of the workers that are there now; one where there is none yet."""
        threads: dict[str, int] = self.client.nthreads()
        return max(1, sum(threads.values()))

    def submit(self, function: Callable[..., Any], /, *texts: Any, **more: Any) -> Any:
        """Submits a function of text as one that may give another answer each time."""
        name = name_of(function, texts, more)
        return self.client.submit(call, name, list(texts), places(), pure=False)


def adapted(client: Any) -> Any:
    """A client as a pool; anything else of the package has a `submit` of its own."""
    return DaskPool(client) if callable(getattr(client, "nthreads", None)) else client


@contextlib.contextmanager
def opened(address: str) -> Iterator[DaskPool]:
    """A pool on the cluster at an address, `tcp://host:8786` or that of a scheduler's file."""
    if not address:
        raise SettingError(
            "pool 'dask' lacks the address of a scheduler: write dask:tcp://host:8786, or processes:4 for processes "
            "of this machine"
        )
    distributed = engine("distributed", "dask")
    where = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
    try:
        client = distributed.Client(**where, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`"
        ) from error
    with client:
        yield DaskPool(client)
