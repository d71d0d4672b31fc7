"""One call taken apart: the executor's own keywords, arrays, static values, what makes two calls the same, and the
invocation that the call is once `prepare` has normalised it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import _jax
from ..core.errors import KernelError, StaticArgumentError
from ..core.invocation import BatchAxes, Invocation, array_leaves, batched_leaves, find_batch, over_batch
from ..core.kernel import Kernel, versioned
from ..core.stable import is_array, type_name
from ..registry import copied
from .static_values import as_it_is_now, value_key

_METHODS = (None, "shard_map")


@dataclass(frozen=True)
class Options:
    """The keywords of a call that are the executor's own."""

    cfg: Any = None
    stamp: bool = True
    method: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    check_vma: bool = False

    def key(self) -> Hashable:
        """The parts of the call that make another program."""
        cfg = None if self.cfg is None else value_key(self.cfg)
        specs = value_key(self.in_specs), value_key(self.out_specs)
        return cfg, bool(self.stamp), self.method, value_key(self.mesh), *specs, bool(self.check_vma)


PLAIN = Options()
RESERVED = frozenset(("cfg", "_cfg", "stamp", "method", "mesh", "in_specs", "out_specs", "check_vma"))


def split(kernel: Kernel[Any, Any], keywords: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The executor's keywords, and the kernel's."""
    if RESERVED.isdisjoint(keywords):
        return PLAIN, dict(keywords)
    mine = {name: value for name, value in keywords.items() if name in RESERVED}
    other_spelling = mine.pop("_cfg", None)
    if other_spelling is not None:
        if mine.get("cfg") is not None:
            raise KernelError(f"kernel {versioned(kernel)} was called with both cfg= and _cfg=; give one of them")
        mine["cfg"] = other_spelling
    # The caller may change a dict of its own afterwards.
    mine["cfg"] = as_it_is_now(copied(mine.get("cfg")))
    options = Options(**mine)
    if options.method not in _METHODS:
        raise KernelError(
            f"method={options.method!r} is unknown (kernel {versioned(kernel)}); use 'shard_map', or leave it out"
        )
    return options, {name: value for name, value in keywords.items() if name not in RESERVED}


Rebuild = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Taken:
    """A call's arrays in order, and the rest of it."""

    leaves: list[Any]
    rebuild: Rebuild
    # As `rebuild`, with static values as they are now, for what outlives the call: the caller may change its own.
    with_copied_statics: Callable[[], Rebuild]
    # Structure and static values: equal for calls that differ in arrays alone.
    shape: Hashable
    # The static values by the path to them.
    statics: tuple[tuple[str, Hashable], ...]


def take(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
    """Takes a call apart."""
    # Keywords in the order of the call: the short way passes their arrays as they come.
    names = tuple(kwargs)
    parts = (args, tuple(kwargs.values()))
    flat, tree = jax.tree_util.tree_flatten(parts)
    places = [i for i, leaf in enumerate(flat) if is_array(leaf)]
    constants = [None if is_array(leaf) else leaf for leaf in flat]
    if len(places) == len(flat):
        statics: tuple[tuple[str, Hashable], ...] = ()
    else:
        paths = [_path(path, names) for path, _ in jax.tree_util.tree_leaves_with_path(parts)]
        statics = tuple((paths[i], _static(kernel, paths[i], v)) for i, v in enumerate(flat) if not is_array(v))

    def with_constants(constants: Sequence[Any]) -> Rebuild:
        def rebuild(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            whole = list(constants)
            for place, leaf in zip(places, leaves, strict=True):
                whole[place] = leaf
            positional, by_keyword = jax.tree_util.tree_unflatten(tree, whole)
            return positional, dict(zip(names, by_keyword, strict=True))

        return rebuild

    def with_copied_statics() -> Rebuild:
        return with_constants([as_it_is_now(constant) for constant in constants])

    return Taken(
        [flat[i] for i in places], with_constants(constants), with_copied_statics, (tree, names, statics), statics
    )


def _path(path: Any, names: tuple[str, ...]) -> str:
    # [0][2]['w'] is args[2]['w'], [1][0]['w'] is the first keyword's ['w'].
    rest = jax.tree_util.keystr(path[2:])
    return f"args[{path[1].idx}]{rest}" if path[0].idx == 0 else f"{names[path[1].idx]}{rest}"


def _static(kernel: Kernel[Any, Any], path: str, value: Any) -> Hashable:
    key = value_key(value, soft=False)
    if key is None:
        raise StaticArgumentError(
            f"{path} of kernel {versioned(kernel)} is a {type_name(type(value))}, a static value that cannot be "
            "hashed; pass an array, or a hashable value such as a number, a string, a tuple or a frozen dataclass"
        )
    return key


def kernel_key(kernel: Kernel[Any, Any]) -> Hashable:
    """Two instances of one class with equal attributes are the same kernel."""
    return (type(kernel), *((name, value_key(value)) for name, value in sorted(vars(kernel).items())))


def invocation_of(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    batch: BatchAxes | None = None,
) -> Invocation[Any, Any]:
    """The invocation that a call makes, once the kernel has normalised it."""
    ready, keywords = _prepared(kernel, args, kwargs)
    if batch is None and not keywords and all(type(arg) is _jax.JaxprTracer for arg in ready):
        # A value of the program that is being written shows no batch.
        pass
    elif batch is None:
        leaves = array_leaves(ready, keywords)
        batch = find_batch(leaves) if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) else None
    elif type(kernel).prepare is not Kernel.prepare:
        batch = _batch_after_prepare(kernel, args, kwargs, batch)
    return Invocation(
        op_id=kernel.op_id,
        args=ready,
        kwargs=keywords,
        batch_axes=batch,
        override_cfg=options.cfg,
        stamp=options.stamp,
        method=options.method,
        mesh=options.mesh,
        in_specs=options.in_specs,
        out_specs=options.out_specs,
        check_vma=options.check_vma,
    )


def _prepared(kernel: Kernel[Any, Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = kernel.prepare(*args, **kwargs)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return tuple(made[0]), made[1]
    raise KernelError(
        f"prepare of kernel {versioned(kernel)} must return (args, kwargs), a tuple and a dict; got {made!r}"
    )


def _batch_after_prepare(kernel: Kernel[Any, Any], args: Any, kwargs: Any, batch: BatchAxes) -> BatchAxes | None:
    """The batch's axes once `prepare` has moved the arrays around: asked of JAX, on shapes."""
    taken = take(kernel, args, kwargs)
    found: list[BatchAxes | None] = []

    def note_batch(*leaves: Any) -> int:
        found.append(find_batch(array_leaves(*_prepared(kernel, *taken.rebuild(leaves)))))
        return 0

    with _jax.clean_room():
        jax.eval_shape(over_batch(note_batch, batch), *batched_leaves(taken.leaves, batch))
    return found[0]
