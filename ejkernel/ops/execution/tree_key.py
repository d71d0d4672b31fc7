"""The short keys of calls with trees of arrays, such as a dict of parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from ..core.kernel import Kernel
from .arguments import RESERVED
from .short_key import is_short, of_tree, placed, with_state


def group_key(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], several_kinds: bool | None
) -> Hashable | None:
    """The short key of all calls with such trees, whatever their structure; None where there is none."""
    # The place of a call is that of its first array, for which the trees would have to be taken apart.
    if several_kinds or not RESERVED.isdisjoint(kwargs):
        return None
    try:
        state = vars(kernel)
        short = placed(with_state((type(kernel), len(args), tuple(kwargs)), state), (), several_kinds)
        hash(short)
    # An attribute that cannot be hashed, or no kernel at all.
    except TypeError:
        return None
    return short if all(map(is_short, state.values())) else None


def tree_key(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], several_kinds: bool | None
) -> tuple[Hashable, Sequence[Any]] | None:
    """The short key of a call with trees of arrays, and the arrays; None where it has none."""
    if not RESERVED.isdisjoint(kwargs):
        return None
    try:
        flat, tree = jax.tree_util.tree_flatten((args, tuple(kwargs.values())))
        found = of_tree(type(kernel), flat, tree, tuple(kwargs))
        if found is None:
            return None
        short = placed(with_state(found[0], vars(kernel)), found[1], several_kinds)
        hash(short)
    # Keys that cannot be sorted, constant data that cannot be hashed, or no kernel: the long way says so.
    except (TypeError, ValueError):
        return None
    return short, found[1]
