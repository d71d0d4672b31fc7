"""A call as people read it: its named parts, one line for all of them, and the nearest other calls. No JAX here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import KeyPartError
from .key import Key, differences

if TYPE_CHECKING:
    from .invocation import Invocation
    from .record import Record

# A call of hundreds of arrays says little to a reader, and every entry of a store carries this.
_LARGEST = 4096


def described(inv: Invocation[Any, Any]) -> dict[str, str]:
    """The parts of a call's key in readable form; empty where it has none, or too many to be read."""
    try:
        parts = inv.parts
    # A kernel with its own key builder may have arguments that no key can be made of.
    except KeyPartError:
        return {}
    return _short(parts)


def described_in(record: Record) -> dict[str, str]:
    """The readable parts of the call that a record was made for."""
    return _short({name[5:]: text for name, text in record.key.items() if name.startswith("call.")})


def _short(parts: Mapping[str, str]) -> dict[str, str]:
    found = {name: readable(text) for name, text in parts.items() if name != "scheme"}
    return found if sum(len(name) + len(text) for name, text in found.items()) <= _LARGEST else {}


def readable(text: str) -> str:
    """One part of a key as Python would write it: `float32[8,128]`, `2.0`, `'relu'`."""
    try:
        return _plain(json.loads(text))
    # Arrays and containers are written as text already; a record that a hand wrote may hold any text at all.
    except (ValueError, OverflowError, RecursionError):
        return text


def _plain(form: Any) -> str:
    match form:
        case ["int", str(digits)]:
            return digits
        case ["float", str(digits)]:
            return "nan" if digits == "nan" else repr(float.fromhex(digits))
        case ["dtype" | "function" | "type", str(name)]:
            return name
        case ["enum", str(kind), str(name)]:
            return f"{_last(kind)}.{name}"
        case ["fields", str(kind), dict(fields)]:
            return f"{_last(kind)}({', '.join(f'{name}={_plain(value)}' for name, value in fields.items())})"
        case ["builtins.tuple", list(items)]:
            return f"({', '.join(map(_plain, items))}{',' if len(items) == 1 else ''})"
        case ["builtins.list", list(items)]:
            return f"[{', '.join(map(_plain, items))}]"
        case ["mesh", list(axes)]:
            return f"mesh({', '.join(f'{name}={size}' for name, size, *_ in axes)})"
        case ["spec", list(axes), *_]:
            return f"P({', '.join('+'.join(axis) if isinstance(axis, list) else str(axis) for axis in axes)})"
        case None | bool() | str():
            return repr(form)
        case _:
            return json.dumps(form, separators=(",", ":"))


def _last(name: str) -> str:
    return name.rsplit(".", maxsplit=1)[-1]


def one_line(op_id: str, call: Mapping[str, str]) -> str:
    """A call as a line: `matmul@v2(float32[8,128], float32[128,64], scale=2.0)`."""
    if not call:
        return f"{op_id}(not described)"
    shown = []
    for name, text in call.items():
        keyword = re.fullmatch(r"kwargs\['(\w+)'\](.*)", name)
        label = keyword[1] + keyword[2] if keyword else name
        shown.append(text if re.fullmatch(r"args\[\d+\]", name) else f"{label}={text}")
    return f"{op_id}({', '.join(shown)})"


@dataclass(frozen=True)
class KnownCall:
    """A call that has a cfg somewhere."""

    key: Key
    call: Mapping[str, str]
    # The store or cache that holds it, as messages name it.
    where: str


@dataclass(frozen=True)
class Near:
    """A known call near the one that was asked for, and the fields in which they differ: (there, here)."""

    key: Key
    where: str
    fields: Mapping[str, tuple[str | None, str | None]]

    @property
    def differing(self) -> str:
        """The fields in words."""
        shown = [_difference(name, *pair) for name, pair in list(self.fields.items())[:_FIELDS]]
        more = len(self.fields) - len(shown)
        return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)

    def __str__(self) -> str:
        """The near call as messages name it."""
        return f"{self.key.op_id} (call {self.key.call_key}) in {self.where}: {self.differing}"


# More differences than this make it another call altogether.
_FIELDS = 6
# The distance of two parts that cannot be compared, in doublings of a size.
_OTHER_PART = 8.0
_NUMBER = re.compile(r"\d+")


def _difference(name: str, there: str | None, here: str | None) -> str:
    if there is None:
        return f"{name} is {here} here and not given there"
    if here is None:
        return f"{name} is {there} there and not given here"
    return f"{name} is {there} there, {here} here"


def nearest(key: Key, call: Mapping[str, str], known: Iterable[KnownCall], most: int = 3) -> tuple[Near, ...]:
    """The known calls of the same operation, in any version and on any device, that differ in the fewest fields."""
    op = _operation(key)
    found: dict[tuple[Key, str], Near] = {}
    for other in known:
        if _operation(other.key) == op and other.key != key:
            found.setdefault((other.key, other.where), Near(other.key, other.where, _fields(key, call, other)))
    return tuple(sorted(found.values(), key=lambda near: (len(near.fields), _apart(near), near.where, near.key))[:most])


def _apart(near: Near) -> float:
    there, here = ({name: pair[side] or "" for name, pair in near.fields.items()} for side in (0, 1))
    return calls_apart(here, there)


def calls_apart(one: Mapping[str, str], other: Mapping[str, str]) -> float:
    """Distance of two calls by their named parts: doublings of sizes, and a lump for parts that cannot be compared."""
    # In one order, since the sum of floats depends on it.
    return sum(_parts_apart(one.get(name, ""), str(other.get(name, ""))) for name in sorted({*one, *other}))


def _parts_apart(one: str, other: str) -> float:
    if one == other:
        return 0.0
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return _OTHER_PART
    sizes = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return sum(abs(math.log2((_size(a) + 1) / (_size(b) + 1))) for a, b in sizes)


def _size(digits: str) -> int:
    # A float holds no more, and a file may say anything.
    return int(digits[:300])


def _operation(key: Key) -> str:
    return key.op_id.partition("@v")[0]


def _fields(key: Key, call: Mapping[str, str], other: KnownCall) -> dict[str, tuple[str | None, str | None]]:
    fields: dict[str, tuple[str | None, str | None]] = {}
    if other.key.device != key.device:
        fields["device"] = (other.key.device, key.device)
    if other.key.op_id != key.op_id:
        fields["version"] = (other.key.op_id.partition("@v")[2], key.op_id.partition("@v")[2])
    if call and other.call:
        fields |= differences(other.call, call)
    # Without a description, or with a key builder that sees more than it shows.
    if other.key.call_key != key.call_key and fields.keys() <= {"device", "version"}:
        fields["call_key"] = (other.key.call_key, key.call_key)
    return fields
