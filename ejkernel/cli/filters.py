"""Filters that select a command's entries by operation, device, age and gain. No JAX here."""

from __future__ import annotations

import argparse
import fnmatch
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..ops.core.key import Key
from .entries import EntryRow
from .parsing import Parser

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


@dataclass(frozen=True)
class Filter:
    """Selection of entries; a field that is not given fits every entry."""

    op: str | None = None
    device: str | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    min_gain: float | None = None
    max_gain: float | None = None
    environment: str | None = None

    @property
    def is_empty(self) -> bool:
        """Does every entry fit?"""
        return self == Filter()

    def fits(self, row: EntryRow) -> bool:
        """Does the entry fit every field that was given?"""
        fits = self._fits_key(row.key) and self._fits_age(row) and self._fits_gain(row)
        return fits and self._fits_environment(row)

    def _fits_environment(self, row: EntryRow) -> bool:
        known = row.raw.get("environment")
        text = ", ".join(f"{name} {value}" for name, value in known.items()) if isinstance(known, dict) else ""
        return self.environment is None or self.environment.lower() in text.lower()

    def _fits_key(self, key: Key) -> bool:
        name = key.op_id if self.op is None or "@" in self.op else key.op_id.partition("@")[0]
        return (self.op is None or fnmatch.fnmatchcase(name, self.op)) and (
            self.device is None or self.device.lower() in key.device.lower()
        )

    def _fits_age(self, row: EntryRow) -> bool:
        if self.older_than is None and self.newer_than is None:
            return True
        # An entry without a date has no age that could be too much or too little.
        if row.when is None:
            return False
        age = datetime.now(UTC) - row.when
        return (self.older_than is None or age > self.older_than) and (self.newer_than is None or age < self.newer_than)

    def _fits_gain(self, row: EntryRow) -> bool:
        if self.min_gain is None and self.max_gain is None:
            return True
        gain = row.gain
        if gain is None:
            return False
        return (self.min_gain is None or gain >= self.min_gain) and (self.max_gain is None or gain <= self.max_gain)


def add_filters(parser: Parser) -> None:
    """Adds the options that make a filter."""
    parser.add_argument(
        "--op", metavar="NAME", help="an operation, with or without its @version; * stands for anything"
    )
    parser.add_argument("--device", metavar="TEXT", help="devices with this in their name, such as H200 or cpu")
    parser.add_argument("--older-than", metavar="AGE", type=age, help="put before that: 12h, 30d, 8w, 1y")
    parser.add_argument("--newer-than", metavar="AGE", type=age, help="put since then")
    parser.add_argument("--environment", metavar="TEXT", help="tuned with this, such as 'jaxlib 0.12' or 'driver 570'")
    parser.add_argument("--min-gain", metavar="X", type=float, help="at least so many times as fast as the heuristic")
    parser.add_argument("--max-gain", metavar="X", type=float, help="at most so many times as fast")


def filter_of(options: argparse.Namespace) -> Filter:
    """The filter that the options make."""
    return Filter(**{name: getattr(options, name) for name in Filter.__dataclass_fields__})


def age(text: str) -> timedelta:
    """An age such as `30d` as a time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdwy])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; use a number with s, m, h, d, w or y, such as 30d")
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])
