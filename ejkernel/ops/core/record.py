"""The record of a tuning: every candidate's outcome and how the winner was found. No JAX here."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Literal, get_args

from . import codec, formatting
from .errors import ConfigTypeError, OpsError, RecordFormatError
from .record_shape import odd_field
from .shown import Shown
from .standing import verdict
from .table import HEADER, record_rows, record_table
from .times import times_of

FORMAT = 1

Status = Literal["ok", "compile", "memory", "runtime", "wrong", "timeout", "crash", "invalid", "skipped"]
Stop = Literal["finished", "deadline", "failed", "settled", "foreign", "interrupted"]
Objective = Literal["forward", "forward+backward"]


@dataclass(frozen=True)
class Finding:
    """The test of a check that came nearest to its limit, or went furthest beyond it."""

    # "form", "equal", "finite", "segments", "whole", "element" or "factor": docs/checking.md has them.
    test: str
    # How far, over the limit; None where there is no number.
    ratio: float | None
    # Which array.
    output: str = "output"
    # The share of segments with a limit wider than rounding, because a plain run is noisy there too.
    widened: float = 0.0


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """One candidate: its outcome and its times."""

    cfg: Any
    status: Status = "ok"
    message: str = ""
    compile_s: float | None = None
    samples_s: tuple[float, ...] = ()
    # 0: before the race, by a look at a program that was compiled quickly.
    dropped_round: int | None = None
    # Largest deviation from the reference's output, over the reference's root mean square.
    error: float | None = None
    # What the check found.
    check: Finding | None = None

    def in_short(self) -> str:
        """The value in a few words."""
        time = "" if self.seconds is None else f", {formatting.seconds(self.seconds)}"
        return f"{formatting.short(self.cfg)}, {self.status}{time}"

    @property
    def seconds(self) -> float | None:
        """The median sample, or None where nothing was timed."""
        return median(self.samples_s) if self.samples_s else None

    @property
    def spread(self) -> float | None:
        """Half of the samples lie within this share of the median; None for fewer than two."""
        middle = self.seconds
        if not middle or len(self.samples_s) < 2:
            return None
        low, _, high = quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / 2 / middle


@dataclass(frozen=True, repr=False)
class Record(Shown):
    """One whole tuning; indices point into `trials`."""

    key: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    objective: Objective = "forward"
    clock: str = "wall"
    seed: int = 0
    budget_s: float | None = None
    stop: Stop = "finished"
    trials: tuple[Trial, ...] = ()
    winner: int | None = None
    heuristic: int | None = None
    runner_up: int | None = None
    # Time of the heuristic cfg over the winner's: middle, low and high end.
    gain: tuple[float, float, float] | None = None
    tied: tuple[int, ...] = ()
    # How many candidates there were, where only some of them were measured.
    space: int | None = None
    # What the inputs and the caches were like while candidates were timed.
    conditions: str = ""
    # What became of the winner later on, such as being taken back.
    note: str = ""
    # What the computation needs at least: `bytes` of arguments and results, `operations` as the compiler counts them.
    cost: Mapping[str, float] = field(default_factory=dict)
    # Seconds of the tuning by what they went into.
    phases: Mapping[str, float] = field(default_factory=dict)

    def in_short(self) -> str:
        """The value in a few words."""
        name = " ".join(filter(None, [self.key.get("op_id", ""), self.key.get("call_key", "")])) or "a tuning"
        cfg = "" if self.winner is None else f" {formatting.short(self.cfg)},"
        return f"{name},{cfg} {len(self.trials)} candidates, {verdict(self).text}"

    @property
    def cfg(self) -> Any:
        """The winner's cfg, or None."""
        return None if self.winner is None else self.trials[self.winner].cfg

    @property
    def failures(self) -> tuple[Trial, ...]:
        """The candidates that could not be used; not those that the kernel itself rules out."""
        return tuple(t for t in self.trials if t.status not in ("ok", "skipped", "invalid"))

    def summary(self) -> dict[str, Any]:
        """The few figures that a store keeps beside the cfg."""
        winner = None if self.winner is None else self.trials[self.winner].seconds
        return {
            "seconds": winner,
            "gain": None if self.gain is None else list(self.gain),
            "candidates": sum(t.status != "invalid" for t in self.trials),
            "failed": len(self.failures),
            "tied": len(self.tied),
            "clock": self.clock,
            "stop": self.stop,
            **({} if self.space is None else self._for_kin()),
            **self._times(),
        }

    def _times(self) -> dict[str, Any]:
        """The times of all candidates, from which other calls are predicted."""
        # The host's noise only adds, so a lower quantile of its samples stands for a candidate.
        quantile = 0.25 if self.clock.startswith("wall") else 0.5
        try:
            times = times_of(self.trials, raced=self.space is None, quantile=quantile)
        # What JSON cannot hold is not kept by a store either.
        except ConfigTypeError:
            return {}
        return {"times": times} if times and len(json.dumps(times)) <= _MOST_TIMES else {}

    def _for_kin(self) -> dict[str, Any]:
        """Figures of a search that start the operation's next search, for another call or on another device."""
        few = {"space": self.space, "next": self._next_best()}
        # A summary is loaded with every read of its entry; the record itself has everything.
        return {name: value for name, value in few.items() if len(json.dumps(value)) <= _MOST_TEXT}

    def _next_best(self) -> list[Any]:
        """The fastest cfgs that are unlike the winner and each other, then some of quite another kind.

        The last ones are for a device where the winner and similar cfgs are slow.
        """
        timed = [t for t in self.trials if t.status == "ok" and t.samples_s]
        timed.sort(key=lambda t: t.seconds or 0.0)
        try:
            kept = [] if self.winner is None else [codec.encode(self.cfg)]
            for cfg in (codec.encode(t.cfg) for t in timed):
                if len(kept) <= _NEXT_BEST and all(_unlike(cfg, other, len(kept) > _ALIKE) for other in kept):
                    kept.append(cfg)
        # What JSON cannot hold is not kept by a store either.
        except ConfigTypeError:
            return []
        return kept[1:]

    def table(self) -> str:
        """The candidates as text, the fastest first: median time, spread, ratio to the winner, error and outcome."""
        return record_table(self)

    def _repr_html_(self) -> str:
        rows = record_rows(self)
        more = f"<p>{len(rows) - _MOST_ROWS} more candidates are in the record.</p>" if len(rows) > _MOST_ROWS else ""
        return f"{formatting.as_html(HEADER, rows[:_MOST_ROWS])}{more}<p>{html.escape(verdict(self).text)}</p>"

    def plot(self, axes: Any = None) -> Any:
        """The race as a picture, in a matplotlib Axes of its own or the one given; needs the extra `plot`."""
        # Reading records must not import matplotlib.
        from .plot import draw

        return draw(self, axes)

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in (*_PLAIN, "space", "conditions", "note")},
            "key": dict(self.key),
            "environment": dict(self.environment),
            "cost": dict(self.cost),
            "phases": dict(self.phases),
            "trials": [_trial_json(t) for t in self.trials],
        }

    def dumps(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.as_json(), allow_nan=False, ensure_ascii=False)

    @staticmethod
    def loads(text: str, load_cfg: Callable[[Any], Any] = lambda data: data) -> Record:
        """The record that `dumps` wrote; `load_cfg` rebuilds the cfgs."""
        try:
            data = codec.loads(text)
        except ValueError as error:
            raise RecordFormatError(f"this is not a record: {error}") from error
        return Record.from_json(data, load_cfg)

    @staticmethod
    def from_json(data: Any, load_cfg: Callable[[Any], Any] = lambda data: data) -> Record:
        """The record behind what `as_json` gave."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise RecordFormatError(f"record format {found!r} is unknown; this version reads format {FORMAT}")
        try:
            record = Record(
                **{name: _tuples(data[name]) for name in _PLAIN},
                # Records of an earlier version know nothing of these.
                space=data.get("space"),
                conditions=str(data.get("conditions", "")),
                note=str(data.get("note", "")),
                cost=_numbers(data.get("cost")),
                phases=_numbers(data.get("phases")),
                key=dict(data["key"]),
                environment=dict(data["environment"]),
                trials=tuple(_trial(t, load_cfg) for t in data["trials"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # A cfg that does not fit its type says so itself.
            if isinstance(error, OpsError):
                raise
            raise RecordFormatError(f"the record is damaged: {type(error).__name__}: {str(error)[:80]}") from error
        odd = odd_field(record)
        if odd:
            raise RecordFormatError(f"the record is damaged: {odd} is not what a tuning writes")
        places = [record.winner, record.heuristic, record.runner_up, *record.tied]
        if any(
            place is not None and not (isinstance(place, int) and 0 <= place < len(record.trials)) for place in places
        ):
            raise RecordFormatError("the record is damaged: it points to a trial that it does not hold")
        return record


# Configs beside the winner that a summary names, how many of them may be of its kind, and the most text of one item.
_NEXT_BEST, _ALIKE = 4, 2
_MOST_TEXT = 2000
# Candidates that a notebook lists.
_MOST_ROWS = 50
_MOST_TIMES = 8000


def _unlike(one: Any, other: Any, quite: bool) -> bool:
    """Do two cfgs differ in two fields, and if `quite` in half of them?"""
    if isinstance(one, dict) and isinstance(other, dict):
        names = {*one, *other}
        differ = [name for name in names if one.get(name) != other.get(name)]
        return len(differ) >= max(2, (len(names) + 1) // 2 if quite else 0)
    return bool(one != other)


_PLAIN = (
    *("kernel", "objective", "clock", "seed", "budget_s", "stop"),
    *("winner", "heuristic", "runner_up", "gain", "tied"),
)


def _numbers(value: Any) -> dict[str, float]:
    """Named figures of a file, without what is none."""
    if not isinstance(value, dict):
        return {}
    return {str(k): v for k, v in value.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _trial_json(trial: Trial) -> dict[str, Any]:
    check = None if trial.check is None else vars(trial.check)
    return {**vars(trial), "cfg": codec.encode(trial.cfg), "samples_s": list(trial.samples_s), "check": check}


def _trial(data: Mapping[str, Any], load_cfg: Callable[[Any], Any]) -> Trial:
    if data["status"] not in get_args(Status):
        raise RecordFormatError(f"a trial of the record has the unknown status {data['status']!r}")
    # Records of an earlier version do not know what their checks found.
    check = data.get("check")
    return Trial(
        **{
            **data,
            "cfg": load_cfg(data["cfg"]),
            "samples_s": tuple(data["samples_s"]),
            "check": None if check is None else Finding(**check),
        }
    )
