"""The only file that touches private JAX names, and the places where JAX versions differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from .core.errors import JaxChangedError


def _private(module: str, name: str) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise JaxChangedError(
            f"jax {jax.__version__} has no {module}.{name}, which ejkernel.ops needs; "
            "install a supported JAX (>=0.10,<0.13) or report this with the version"
        ) from error


def setting(name: str) -> Any:
    """One of JAX's configuration values as it is in force here."""
    return getattr(jax.config, name)


def backend_is_up() -> bool:
    """Has this process started a JAX backend?"""
    return bool(_private("jax._src.xla_bridge", "backends_are_initialized")())


@contextlib.contextmanager
def clean_room() -> Iterator[None]:
    """Real compiling and running from inside any trace: nothing of the caller's transformations reaches in."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.core.eval_context())
        empty = jax.sharding.AbstractMesh((), ())
        stack.enter_context(jax.sharding.use_abstract_mesh(empty))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        yield
