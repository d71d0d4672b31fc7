"""One call of a kernel, as a frozen value, and the batch around it: found where the call is made, and put around the
function that is measured.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

import jax

from .. import _jax
from . import stable
from .description import described, one_line
from .errors import KernelError, KeyPartError
from .shown import Shown
from .stable import is_array, jax_dtype
from .typevars import Cfg as Cfg
from .typevars import Out as Out

# A change of how parts are written changes every key: then this number moves too.
_SCHEME = "1"


@dataclass(frozen=True, eq=False, repr=False)
class Invocation(Shown, Generic[Cfg, Out]):
    """One call of an operation; `call_key` stands for everything in it that can change the best cfg."""

    op_id: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_axes: Any = None
    override_cfg: Cfg | None = None
    stamp: bool = True
    method: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    check_vma: bool = False

    def in_short(self) -> str:
        """The call as a line."""
        return one_line(self.op_id, described(self))

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """The named parts of the key, in order, so that a miss can be explained by the ones that differ."""
        parts = {"scheme": _SCHEME}
        for index, value in enumerate(self.args):
            _add(parts, f"args[{index}]", value)
        for name in sorted(self.kwargs):
            _add(parts, f"kwargs[{name!r}]", self.kwargs[name])
        for name in ("batch_axes", "method", "mesh", "in_specs", "out_specs"):
            value = getattr(self, name)
            if value is not None:
                parts[name] = _text(stable.form(value, name))
        # Set by a context or a flag, this changes what a matmul inside the kernel costs.
        precision = _jax.setting("jax_default_matmul_precision")
        if precision is not None:
            parts["matmul_precision"] = str(precision)
        return parts

    @cached_property
    def call_key(self) -> str:
        """Sixteen hexadecimal digits: equal for equal calls, in every process and on every machine."""
        return _digest(tuple(self.parts.items()))

    def make_key(self, key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None) -> str:
        """The call key, or the key that the builder makes of this call."""
        if key_builder is None:
            return self.call_key
        key = key_builder(self)
        if not isinstance(key, str):
            raise KernelError(f"the key_builder of {self.op_id} returned {key!r}; it must return a string")
        return key


def _add(parts: dict[str, str], name: str, value: Any, depth: int = 0) -> None:
    if depth > stable.DEEPEST:
        raise KeyPartError(f"{name[:40]}... is nested deeper than {stable.DEEPEST} levels, or contains itself")
    # Containers are opened, so that a difference is named by its place; structure that holds nothing is kept as such.
    # A leaf that JAX cannot open is a static value.
    if stable.is_array(value):
        parts[name] = stable.array_form(value, name)
        return
    if type(value) in (list, tuple) and value:
        parts[name] = f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            _add(parts, f"{name}[{index}]", item, depth + 1)
        return
    if type(value) is dict and value and all(isinstance(key, str) for key in value):
        parts[name] = f"dict of {len(value)}"
        for key in sorted(value):
            _add(parts, f"{name}[{key!r}]", value[key], depth + 1)
        return
    parts[name] = _plain_text(value.__class__, value) if type(value) in _PLAIN else _text(stable.form(value, name))


# Type and equality say everything of these: their text is remembered, since one program makes the same calls often.
_PLAIN = frozenset((int, bool, str, type(None)))


@functools.lru_cache(maxsize=4096)
def _plain_text(kind: Any, value: Any) -> str:
    return _text(stable.form(value))


@functools.lru_cache(maxsize=4096)
def _digest(parts: tuple[tuple[str, str], ...]) -> str:
    return stable.short_hash(_text(dict(parts)))


def _text(form: Any) -> str:
    return json.dumps(form, separators=(",", ":"), ensure_ascii=True)


# (size, the axis of each array leaf or None), innermost vmap first; a third item is the name of a vmap that has one.
BatchAxes = tuple[tuple[Any, ...], ...]


def find_batch(leaves: Sequence[Any]) -> BatchAxes | None:
    """The vmaps around these arrays, as far as their tracers show them."""
    peeled = [_jax.peel(leaf).batches for leaf in leaves]
    if not any(peeled):
        return None
    order = _in_order([[batch[0] for batch in batches] for batches in peeled])
    levels: list[tuple[Any, ...]] = []
    for tag in order:
        found = [next((batch for batch in batches if batch[0] is tag), None) for batches in peeled]
        _, size, name, _ = next(hit for hit in found if hit)
        axes = tuple(hit[3] if hit else None for hit in found)
        levels.append((size, axes) if name is None else (size, axes, name))
    return tuple(levels) or None


def _in_order(chains: Sequence[list[Any]]) -> list[Any]:
    """Merges the orders of nesting that single arrays show into one."""
    order: list[Any] = []
    for chain in chains:
        place = 0
        for tag in chain:
            if any(tag is known for known in order):
                place = next(i for i, known in enumerate(order) if known is tag) + 1
            else:
                order.insert(place, tag)
                place += 1
    return order


def batched_shape(shape: Sequence[int], axes: Sequence[tuple[int, int | None]]) -> tuple[int, ...]:
    """Shape of the whole batch: one example's shape with each batch size at its axis."""
    whole = list(shape)
    for size, axis in axes:
        if axis is not None:
            whole.insert(axis, size)
    return tuple(whole)


def batched_leaves(leaves: Sequence[Any], batch: BatchAxes | None) -> list[Any]:
    """Shapes of the whole batch from the arrays of one example; without a batch the arrays themselves."""
    if not batch:
        return list(leaves)
    return [
        jax.ShapeDtypeStruct(
            batched_shape(leaf.shape, [(level[0], level[1][i]) for level in batch]), jax_dtype(leaf.dtype)
        )
        for i, leaf in enumerate(leaves)
    ]


def over_batch(fn: Callable[..., Any], batch: BatchAxes | None) -> Callable[..., Any]:
    """A function of array leaves, mapped over the batch."""
    for _, axes, *name in batch or ():
        fn = jax.vmap(fn, in_axes=axes, axis_name=name[0] if name else None)
    return fn


def array_leaves(args: Any, kwargs: Any) -> list[Any]:
    """The arrays of a call in order."""
    return [leaf for leaf in jax.tree_util.tree_leaves((tuple(args), dict(kwargs))) if is_array(leaf)]
