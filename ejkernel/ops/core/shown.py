"""Values at a prompt and in a notebook: a short line, and HTML where a value has no table of its own. No JAX here."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

# What a prompt shows at a glance.
_LONGEST = 190


class Shown:
    """A value with a short form; a dataclass must leave its own `repr` out."""

    __slots__ = ()

    def in_short(self) -> str:
        """The value in a few words, without its type."""
        return changed_fields(self)

    def __repr__(self) -> str:
        """One line of bounded length."""
        line = " ".join(f"{type(self).__name__}: {self.in_short()}".split())
        return f"<{line if len(line) <= _LONGEST else line[: _LONGEST - 3] + '...'}>"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"


def changed_fields(value: Any) -> str:
    """The fields of a dataclass that are not as they are by default."""
    if not dataclasses.is_dataclass(value):
        return f"at {id(value):#x}"
    shown = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        made = field.default_factory
        usual = made() if made is not dataclasses.MISSING else field.default
        if given is not usual and repr(given) != repr(usual):
            shown.append(f"{field.name}={given!r}")
    return ", ".join(shown) or "all as by default"
