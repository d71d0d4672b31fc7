"""Compiled programs are kept in a folder of the tree: by processes that run tests, and by those forked for them.

A third of what the suite compiles was compiled before, by another test, and nearly all of it by an earlier run. JAX
keeps programs there by their text and all else that a compiler's result depends on.
"""

from __future__ import annotations

import itertools
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


def name_alike(module: types.ModuleType, *, numbered: bool) -> None:
    """Has the programs of tunings the same names in each process: a profile tells them apart by theirs.

    A quarter of all programs that were compiled were the same but for these. `numbered`: nothing else in a name tells
    the programs of one process apart.
    """
    count = itertools.count()

    def token_hex(size: int) -> str:
        return f"{next(count) if numbered else 0:0{2 * size}x}"

    module.secrets = types.SimpleNamespace(token_hex=token_hex)  # type: ignore[attr-defined]
