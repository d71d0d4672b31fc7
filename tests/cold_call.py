"""The files that one cold call leads through, printed as JSON: `python tests/cold_call.py`.

A fresh process, whose modules are all imported before, calls an executor with a kernel of three candidates, a store on
disk and the default tuner, on a CPU. A file of `ejkernel/ops` counts if one of its functions runs on the calling thread
between the call and its result; imports, and functions that `dataclass` writes, are in no file.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp

import ejkernel.ops
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache, Tuner

OPS = Path(ejkernel.ops.__file__).parent


class InParts(Kernel):
    """The exponential, of so many parts: each cfg is another program with the same output."""

    op_id = "cold_call"

    def run(self, x, *, cfg):
        return jnp.concatenate([jnp.exp(part) for part in jnp.split(x, cfg)])

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2, 4]


def files_of_a_cold_call(folder: str) -> dict[str, list[str]]:
    """The functions that run, by file."""
    for module in pkgutil.walk_packages([str(OPS)], "ejkernel.ops."):
        importlib.import_module(module.name)
    store = PersistentCache("cold_call", path=Path(folder) / "store.json")
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(), persistent=store))
    x = jnp.ones((64, 64))
    seen: dict[str, set[str]] = {}

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(OPS)):
            seen.setdefault(str(Path(code.co_filename).relative_to(OPS)), set()).add(code.co_qualname)

    sys.setprofile(note)
    try:
        executor(InParts(), x)
    finally:
        sys.setprofile(None)
    return {file: sorted(functions) for file, functions in sorted(seen.items())}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(files_of_a_cold_call(folder), indent=1))
