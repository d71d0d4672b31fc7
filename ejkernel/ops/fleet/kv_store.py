"""The key-value service of a `jax.distributed` program: the verbs that agreement needs, each with a time limit."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import Any

import jax

from .._jax import check_client
from ..core.errors import AgreementError

# An answer takes under a millisecond; a coordinator that is silent for this long is stopped or cut off. JAX itself
# ends a program when its coordinator died, but waits without bound for one that hangs.
PATIENCE = 30.0

# The service takes 100 MB and more, but every process of the program reads what one of them wrote.
LARGEST = 64 * 1024


class KeyValueStore:
    """The service, through the client of this process."""

    def __init__(self, client: Any, address: str, patience: float = PATIENCE) -> None:
        check_client(client)
        self._client = client
        self._address = address
        self._patience = patience

    def set_once(self, key: str, value: str) -> bool:
        """Sets a value that is not set yet; False where another process has set it."""
        try:
            self._ask("key_value_set", key, value)
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "ALREADY_EXISTS":
                raise self._gone(error) from error
            return False
        return True

    def set(self, key: str, value: str) -> None:
        """Sets a value, over the one that is there."""
        try:
            self._ask("key_value_set", key, value, True)
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(error) from error

    def get(self, key: str) -> str | None:
        """The value that is there now."""
        try:
            return str(self._ask("key_value_try_get", key))
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "NOT_FOUND":
                raise self._gone(error) from error
            return None

    def wait(self, key: str, seconds: float) -> str | None:
        """The value once it is there, or None after so many seconds."""
        try:
            # This verb alone has a time limit of its own.
            return str(self._client.blocking_key_value_get(key, max(1, math.ceil(1e3 * seconds))))
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "DEADLINE_EXCEEDED":
                raise self._gone(error) from error
            return None

    def under(self, folder: str) -> dict[str, str]:
        """Every value in a folder, by its name there."""
        try:
            found = self._ask("key_value_dir_get", folder)
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(error) from error
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def remove(self, key: str) -> None:
        """Takes a value away, if it is there."""
        try:
            self._ask("key_value_delete", key)
        except jax.errors.JaxRuntimeError as error:
            raise self._gone(error) from error

    def _ask(self, verb: str, *args: Any) -> Any:
        answer: Future[Any] = Future()

        def call() -> None:
            try:
                answer.set_result(getattr(self._client, verb)(*args))
            # Raised in the thread that asked.
            except BaseException as error:
                answer.set_exception(error)

        # A thread, since these verbs cannot be given a time limit; a daemon, since one that hangs must not keep the
        # process from ending.
        threading.Thread(target=call, daemon=True, name="ejkernel-agreement").start()
        try:
            return answer.result(self._patience)
        except TimeoutError as error:
            raise self._gone(f"no answer within {self._patience:g} s") from error

    def _gone(self, why: object) -> AgreementError:
        return AgreementError(
            f"the coordinator of jax.distributed at {self._address} does not answer, so this process cannot agree with "
            f"the others on a cfg: {str(why).splitlines()[0]}. Restart the program; EJKERNEL_OPS_AGREE=off on all "
            "processes does without agreement"
        )


def _status(error: Exception) -> str:
    return str(error).partition(":")[0]
