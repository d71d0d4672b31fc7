"""Exported programs as executables: compiled here, or compiled by another process and handed over as bytes.

JAX compiles the Mosaic kernels of one process one after the other, and nothing that needs LLVM beside them. An
executable that another process has compiled takes 10 to 20 ms to load on an H200, where compiling it takes 1 to 3 s.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from ... import _jax
from ...core.device import default_device
from ...timing.compiler_timing import compiler_timing
from ...timing.program import compiled_for_speed, compiled_quickly


class FlatExecutable(NamedTuple):
    """A program of flat arrays."""

    executable: Any
    # How many arrays it takes.
    arguments: int
    # False: compiled quickly.
    for_speed: bool
    seconds: float


def loaded(data: bytes) -> Any:
    """The exported program behind these bytes, ready to be called."""
    # The import of Mosaic GPU registers host functions that its programs call; without them compiling fails.
    if b"mosaic_gpu" in data:
        # If a package that Mosaic GPU needs is missing, compiling the program fails, and says so.
        with contextlib.suppress(ImportError):
            importlib.import_module("jax.experimental.mosaic.gpu")
    return jax.export.deserialize(bytearray(data))


def compiled(
    data: bytes,
    *,
    for_speed: bool | None = None,
    beside_others: bool = False,
    load: Callable[[bytes], Any] = loaded,
) -> FlatExecutable:
    """Compiles a program on this thread; `beside_others`: other processes compile meanwhile.

    `for_speed=None`: for speed, unless the compiler would time its parts.
    """
    start = time.perf_counter()
    with _jax.clean_room():
        exported = load(data)

        def program(*leaves: Any) -> Any:
            return exported.call(*leaves)

        # A profiler's trace knows programs by their names.
        program.__name__ = program.__qualname__ = f"ejk_{secrets.token_hex(4)}_flat"
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        lowered = jax.jit(program).trace(*shapes).lower()
        if for_speed is None:
            for_speed = not compiler_timing(lowered.as_text())
        executable = (
            compiled_for_speed(lowered, beside_others=beside_others) if for_speed else compiled_quickly(lowered)
        )
        return FlatExecutable(executable, len(shapes), for_speed, time.perf_counter() - start)


def written_down(executable: Any) -> bytes:
    """The executable as bytes for another process with the same JAX and a device of the same kind."""
    data, _, _ = serialize_executable.serialize(executable)
    return bytes(data)


def read_back(written: bytes, data: bytes, *, for_speed: bool, seconds: float) -> FlatExecutable:
    """An executable that another process of ours has compiled from this exported program."""
    exported = loaded(data)
    count = len(exported.in_avals)
    arguments = jax.tree_util.tree_structure((tuple(range(count)), {}))
    device = default_device()
    executable = serialize_executable.deserialize_and_load(
        written, arguments, exported.out_tree, backend=device.client, execution_devices=[device]
    )
    return FlatExecutable(executable, count, for_speed, seconds)
