"""The code that processes must have in common to agree on a key: package, kernel version and candidates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._version import __version__
from ..core import codec
from ..core.errors import ConfigTypeError
from ..core.kernel import key_builder_of
from ..core.request import Request, candidates
from ..core.stable import type_name

# Candidates with more JSON than this together are compared by their digest alone.
_LISTED = 16 * 1024


@dataclass(frozen=True)
class Manifest:
    """One process's code, as far as a decision depends on it."""

    package: str
    kernel: str
    # Hash of the candidates in their order; empty where the kernel has a key builder: calls that share a key then
    # need not share their candidates.
    digest: str
    count: int
    listed: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        return asdict(self)

    @staticmethod
    def of(data: dict[str, Any]) -> Manifest:
        """The manifest that `plain` gave."""
        return Manifest(**{**data, "listed": tuple(data["listed"])})


def manifest_of(request: Request) -> Manifest:
    """The manifest of this process for one call."""
    texts = [] if key_builder_of(request.kernel) is not None else _texts(request)
    joined = "\n".join(texts)
    return Manifest(
        package=__version__,
        kernel=request.key.op_id,
        digest=hashlib.sha256(joined.encode()).hexdigest()[:16] if texts else "",
        count=len(texts),
        listed=tuple(texts) if len(joined) <= _LISTED else (),
    )


def difference(one: Manifest, other: Manifest, names: tuple[str, str]) -> str:
    """The differences between two processes, in words; empty where there are none."""
    found = []
    if one.package != other.package:
        found.append(_versions("ejkernel-ops", one.package, other.package, names))
    if one.kernel != other.kernel:
        found.append(_versions("kernel", one.kernel, other.kernel, names))
    elif one.digest != other.digest:
        found.append(_candidates_differ(one, other, names))
    return "; ".join(found)


def _versions(what: str, one: str, other: str, names: tuple[str, str]) -> str:
    return f"{what} {one} in {names[0]}, {other} in {names[1]}"


def _candidates_differ(one: Manifest, other: Manifest, names: tuple[str, str]) -> str:
    counts = f"{one.count} candidates in {names[0]}, {other.count} in {names[1]}"
    if not (one.listed and other.listed):
        return f"{counts}, which differ"
    only_one = [text for text in one.listed if text not in other.listed]
    only_other = [text for text in other.listed if text not in one.listed]
    if not (only_one or only_other):
        return f"{counts}, in another order"
    return f"{counts}; only in {names[0]}: {_few(only_one)}; only in {names[1]}: {_few(only_other)}"


def _few(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:3]) or "none"
    return f"{shown} and {len(texts) - 3} more" if len(texts) > 3 else shown


def _texts(request: Request) -> list[str]:
    try:
        cfgs = candidates(request)
    # A kernel's exception reaches the user where its candidates are needed; a stored cfg needs none of them.
    except Exception as error:
        return [type_name(type(error))]
    # The heuristic cfg is usually one of the candidates.
    return list(dict.fromkeys(_text(cfg) for cfg in cfgs))


def _text(cfg: Any) -> str:
    try:
        return json.dumps(codec.encode(cfg), sort_keys=True, ensure_ascii=False)
    # Such a cfg has no text that is the same in every process.
    except ConfigTypeError:
        return type_name(type(cfg))
