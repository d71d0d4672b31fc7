"""Compiled programs are kept in a folder of the tree: by processes that run tests, and by those that are forked.

A third of what the suite compiles was compiled before, by another test, and nearly all of it by an earlier run. JAX
keeps programs there by their text and all else that a compiler's result depends on.
"""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path
from typing import Any

import jax
from jax._src.lru_cache import LRUCache

PROGRAMS = Path(__file__).parent.parent / ".compiled"


def keep_programs() -> bool:
    """From here on programs are kept; False where the tree cannot be written to, and JAX would warn of each one."""
    if not os.access(PROGRAMS.parent, os.W_OK):
        return False
    LRUCache.put = _put_at_once
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS / f"jax-{jax.__version__}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    return True


def _put_at_once(cache: Any, key: str, value: bytes) -> None:
    """Keeps a program; another process reads the whole file or none. JAX writes in place, and then warns readers."""
    path = cache.path / f"{key}-cache"
    if not path.exists():
        beside = cache.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
        beside.write_bytes(value)
        beside.replace(path)


def name_alike(*modules: types.ModuleType) -> None:
    """Has the programs of tunings the same names each time: a profile tells them apart by names that nothing else has.

    A quarter of all programs that were compiled were the same but for these.
    """
    for module in modules:
        module.secrets = types.SimpleNamespace(token_hex=lambda size: "0" * (2 * size))  # type: ignore[attr-defined]
