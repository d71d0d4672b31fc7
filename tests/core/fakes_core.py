"""Modules for tests of kernels' code: a text is written, imported, edited and imported again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCALING = '''"""A module with a kernel."""

from dataclasses import dataclass
from functools import partial

import jax
from ejkernel.ops import Kernel

BLOCKS = (1, 2)
UNUSED = 3


@dataclass(frozen=True)
class Blocks:
    size: int

    def grid(self):
        return self.size + 1


def helper(x, factor):
    """Twice."""
    return deeper(x) * factor  # a comment


def deeper(x):
    return x + 0.0


def unrelated(x):
    return x - 1


@partial(jax.custom_vjp, nondiff_argnums=())
def own(x):
    return x * 1.0


def forward(x):
    return own(x), ()


def backward(residuals, dy):
    return (dy * 1.0,)


own.defvjp(forward, backward)


class Base(Kernel):
    factor = 2.0

    def run(self, x, *, cfg):
        return helper(own(x), self.factor) + self.shift(cfg)

    def shift(self, cfg):
        return f"a{cfg.size!r:>4}" "b" == "" and 1.0 or 0.0


class Scaling(Base):
    """A kernel."""

    op_id = "scaling"
    cfg_type = Blocks

    def run(self, x, *, cfg):
        return super().run(x, cfg=cfg)

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), ()

    def vjp(self, residuals, y, dy, x, *, cfg):
        return (dy * 2.0,)

    def heuristic_cfg(self, inv):
        return Blocks(1)

    def candidate_cfgs(self, inv):
        return [Blocks(size) for size in BLOCKS]

    def reference(self, x):
        return x * 2.0
'''


def imported(folder: Path, text: str, name: str = "edited_kernels") -> ModuleType:
    """The module of a text, as if the file had just been written and a process had started."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Two texts of one length within one tick of the clock would share their compiled file.
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def replaced(text: str, old: str, new: str) -> str:
    """The text with one part replaced, which must be there once."""
    assert text.count(old) == 1, old
    return text.replace(old, new)
