"""Candidates that take a process down from inside a compiled program, as a broken kernel does.

Each is a native function that an XLA program calls. A worker process imports this module, as it would one that
registers foreign functions of the user's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A program calls (output buffer, input buffers).
_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# Over what the tests allow, well under what the machine has.
_HOG_BYTES = 3 << 29
_hoard: list[bytearray] = []


def _mark(name: str, out: Any) -> None:
    """Leaves a line in the file that a test names, and a zero as the output."""
    if "EJK_TEST_MARKS" in os.environ:
        with open(os.environ["EJK_TEST_MARKS"], "a", encoding="ascii") as file:
            file.write(f"{name}\n")
    ctypes.memset(out, 0, 4)


def _exit(out: Any, inputs: Any) -> None:
    _mark("exit", out)
    os._exit(3)


def _hog(*buffers: Any) -> None:
    _hoard.extend(bytearray(b"x") * (1 << 24) for _ in range(_HOG_BYTES >> 24))
    time.sleep(3600)


def _leave_a_child(out: Any, inputs: Any) -> None:
    # The child has every descriptor of this process, the pipe to the parent included.
    child = os.fork()
    if child == 0:
        time.sleep(3600)
        os._exit(0)
    _mark(str(child), out)
    os._exit(3)


def _garbage(out: Any, inputs: Any) -> None:
    for descriptor in range(3, 256):
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"no message at all " * 8)
        # It is not open, or not for writing.
        except OSError:
            continue
    ctypes.memset(out, 0, 4)


FAULTS: dict[str, Callable[..., Any]] = {
    "child": _leave_a_child,
    "garbage": _garbage,
    "note": lambda out, inputs: _mark("note", out),
    "exit": _exit,
    "segfault": lambda *buffers: ctypes.string_at(0),
    "abort": lambda *buffers: os.abort(),
    "killed": lambda *buffers: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda *buffers: time.sleep(3600),
    "hog": _hog,
}
# Held for as long as the process lives: the program has only their addresses.
_functions = {name: _NATIVE(function) for name, function in FAULTS.items()}
for _name, _function in _functions.items():
    _address = ctypes.cast(_function, ctypes.c_void_p)
    jax.ffi.register_ffi_target(
        f"ejk_test_{_name}", _capsule(_address, b"xla._CUSTOM_CALL_TARGET", None), platform="cpu", api_version=0
    )


def faulty(name: str) -> Callable[[Any], Any]:
    """Twice the argument, after the fault."""

    def fn(x: Any) -> Any:
        zero = jax.ShapeDtypeStruct((1,), x.dtype)
        return x * 2 + jax.ffi.ffi_call(f"ejk_test_{name}", zero, custom_call_api_version=1)(x)

    return fn


def endless(x: Any) -> Any:
    """A loop of the compiled program itself that never ends."""
    return jax.lax.while_loop(lambda y: jnp.all(y < 9.0), lambda y: jnp.sin(y) + 1.0, x)


def slow(x: Any, steps: int = 3000) -> Any:
    """Twice the argument, after work that cannot be left out."""
    return x * 2 + 0.0 * jax.lax.fori_loop(0, steps, lambda i, y: jnp.sin(y), x)
