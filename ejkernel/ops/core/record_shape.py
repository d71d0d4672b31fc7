"""The types of a record's fields, for records that came from a file. No JAX here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import Record

Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _all(check: Check) -> Check:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(one) for pair in value.items() for one in pair)


def _is_gain(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value))


_RECORD: dict[str, Check] = {
    **dict.fromkeys(("kernel", "objective", "clock", "stop", "conditions", "note"), _is_text),
    **dict.fromkeys(("key", "environment"), _are_texts),
    "seed": _is_whole,
    "budget_s": _or_none(_is_number),
    **dict.fromkeys(("winner", "heuristic", "runner_up", "space"), _or_none(_is_whole)),
    "gain": _or_none(_is_gain),
    "tied": _all(_is_whole),
}
_TRIAL: dict[str, Check] = {
    "message": _is_text,
    **dict.fromkeys(("compile_s", "error"), _or_none(_is_number)),
    "dropped_round": _or_none(_is_whole),
    "samples_s": _all(lambda value: _is_number(value) and value >= 0),
}
_FINDING: dict[str, Check] = {
    **dict.fromkeys(("test", "output"), _is_text),
    "ratio": _or_none(_is_number),
    "widened": _is_number,
}


def odd_field(record: Record) -> str:
    """The name of a field that holds what no tuning writes there; empty where there is none."""
    parts: list[tuple[Any, dict[str, Check]]] = [(record, _RECORD)]
    for trial in record.trials:
        parts.append((trial, _TRIAL))
        if trial.check is not None:
            parts.append((trial.check, _FINDING))
    return next(
        (name for part, checks in parts for name, check in checks.items() if not check(getattr(part, name))), ""
    )
