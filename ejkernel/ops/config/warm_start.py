"""Warm starts: a search in a large space begins at what is known of the operation's other calls and devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ..core.cfg import distinct, places
from ..core.description import calls_apart
from ..core.errors import ConfigTypeError
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.request import Request, revived, why_invalid
from ..store.store import Store, StoredEntry, peek

# So many entries of a store are read, and so many cfgs are taken from the nearest of them.
_MOST_READ = 256
_MOST_ENTRIES = 6
MOST_SEEDS = 8
# How far another device or another platform is: in doublings of a size, as between calls.
_OTHER_DEVICE = 2.0
_OTHER_PLATFORM = 8.0


def warm_start_configs(stores: Sequence[Store], request: Request, candidates: Sequence[Any]) -> list[Any]:
    """The cfgs that were best for the nearest calls and on sibling devices, nearest first: to be measured."""
    found: dict[Key, StoredEntry] = {}
    # What the user's own store says of a call counts before what a pack says.
    for store in stores:
        for key in _relatives(store, request.key):
            # Another call's entry is not promoted to the user's own store.
            entry = None if key in found else peek(store, key)
            if entry is not None:
                found[key] = entry
    entries = list(found.items())
    entries.sort(key=lambda pair: (_apart(request, *pair), pair[0]))
    groups = [_cfgs(request, entry) for _, entry in entries[:_MOST_ENTRIES]]
    cfgs = distinct(in_turn(groups))
    offered = [candidates[place] for place in places(candidates, cfgs)]
    return [cfg for cfg in cfgs if places(offered, [cfg]) or _is_called_valid(request, cfg)][:MOST_SEEDS]


def in_turn(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """The best of each relative, then the second of each: one odd relative must not crowd out the others."""
    return [cfg for row in zip_longest(*groups) for cfg in row if cfg is not None]


def _relatives(store: Store, own: Key) -> list[Key]:
    keys = [Key(*key) for key in store.keys() if key[1] == own.op_id and tuple(key) != tuple(own)]
    # The same call elsewhere, and other calls here, before anything else.
    keys.sort(key=lambda key: (key.call_key != own.call_key, key.device != own.device, key))
    return keys[:_MOST_READ]


def _cfgs(request: Request, entry: StoredEntry) -> list[Any]:
    """The entry's cfg and its next best."""
    behind = entry.summary.get("next")
    found = []
    for cfg in [entry.cfg, *(behind if isinstance(behind, list) else [])]:
        try:
            found.append(revived(request, cfg))
        # Written for another version of the kernel's config: no seed, and no harm.
        except ConfigTypeError:
            continue
    return found


def _is_called_valid(request: Request, cfg: Any) -> bool:
    """Does the kernel itself say that this cfg, which is none of its candidates here, can run this call?"""
    kind = request.kernel.cfg_type
    judges = type(request.kernel).valid_cfg is not Kernel.valid_cfg and (kind is None or isinstance(cfg, kind))
    return judges and why_invalid(request.kernel, request.inv, cfg) is None


def _apart(request: Request, key: Key, entry: StoredEntry) -> float:
    distance = 0.0
    if key.device != request.key.device:
        same = key.device.split("|")[0] == request.key.device.split("|")[0]
        distance += _OTHER_DEVICE if same else _OTHER_PLATFORM
    if key.call_key == request.key.call_key:
        return distance
    return distance + calls_apart(request.call, entry.call)
