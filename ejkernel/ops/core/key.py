"""The key of a call, `(device, op_id, call_key)`, and the parts in which two calls differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Key(NamedTuple):
    """The key under which a cfg is kept: equal to, and hashed as, the plain tuple of its three strings."""

    device: str
    op_id: str
    call_key: str

    def __str__(self) -> str:
        """The key as messages spell it."""
        return f"{self.op_id} (call {self.call_key}) on {self.device}"


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The named parts in which two calls differ; None where a side has no such part."""
    names = [*one, *(name for name in other if name not in one)]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
