"""A record in a few figures: time, spread, runner-up, gain and check, as data and as lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..core import formatting
from ..core.record import Record, Trial
from ..core.standing import standings, verdict, verdict_of_gain


@dataclass(frozen=True)
class TuningSummary:
    """Figures of one tuning; None is not known."""

    clock: str = ""
    stop: str = ""
    candidates: int | None = None
    failed: int | None = None
    tied: int | None = None
    # The winner's middle sample, and the range of the middle eight tenths of them.
    seconds: float | None = None
    spread: tuple[float, float] | None = None
    samples: int = 0
    runner_up: Any = None
    runner_up_seconds: float | None = None
    # Time of the heuristic cfg over the winner's: middle, low and high end.
    gain: tuple[float, float, float] | None = None
    # Largest deviation from the reference, over the reference's root mean square.
    error: float | None = None
    # Candidates that could not be used: cfg, status, message.
    failures: tuple[tuple[Any, str, str], ...] = ()
    # The outcome in a sentence, as tables and pages say it.
    verdict: str = ""

    def as_dict(self, plain: Callable[[Any], Any]) -> dict[str, Any]:
        """The figures as plain data; `plain` writes a cfg."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["runner_up"] = None if self.runner_up is None else plain(self.runner_up)
        found["spread"] = None if self.spread is None else list(self.spread)
        found["gain"] = None if self.gain is None else list(self.gain)
        found["failures"] = [{"cfg": plain(c), "status": s, "message": m} for c, s, m in self.failures]
        return found

    def gain_cell(self) -> str:
        """The gain as a cell of a table; a dash where it is not known."""
        if self.gain is None:
            return "-"
        return "too noisy to tell" if verdict_of_gain(self.gain).kind == "noisy" else f"{self.gain[0]:.2f}x"

    def rows(self) -> list[tuple[str, str]]:
        """The figures as named lines."""
        return [(name, text) for name, text in self._rows() if text]

    def _rows(self) -> list[tuple[str, str]]:
        counts = [f"{self.candidates} candidates" if self.candidates is not None else ""]
        counts += [f"{self.failed} failed" if self.failed else "", f"{self.tied} tied" if self.tied else ""]
        clock = f"{self.clock} clock" if self.clock else ""
        tuning = ", ".join(filter(None, [*counts, clock, self.stop]))
        rows = [("tuning", tuning), ("verdict", self.verdict), ("time", self._time())]
        if self.runner_up is not None and self.runner_up_seconds and self.seconds:
            ratio = self.runner_up_seconds / self.seconds
            taken = formatting.seconds(self.runner_up_seconds)
            shown = f"{formatting.short(self.runner_up)}, {taken}, {ratio:.2f} times as long"
            rows.append(("runner-up", shown))
        if self.gain is not None:
            middle, low, high = self.gain
            itself = low == middle == high == 1.0
            against = f"{middle:.2f} times as long ({low:.2f} to {high:.2f} with 95%)"
            rows.append(("heuristic", "is the winner, or as fast" if itself else against))
        if self.error is not None:
            rows.append(("check", f"largest error {self.error:.1e} of the reference's RMS"))
        return rows + [("failed", f"{formatting.short(c)}: {status}, {why}") for c, status, why in self.failures]

    def _time(self) -> str:
        if self.seconds is None:
            return ""
        if self.spread is None:
            return formatting.seconds(self.seconds)
        low, high = map(formatting.seconds, self.spread)
        return f"{formatting.seconds(self.seconds)} ({low} to {high}, {self.samples} samples)"


def summary_of(record: Record) -> TuningSummary:
    """The figures of a whole record."""
    winner = Trial(None) if record.winner is None else record.trials[record.winner]
    second = Trial(None) if record.runner_up is None else record.trials[record.runner_up]
    # Without the drift between rounds, so that no runner-up is shown as faster than the winner that it lost to.
    behind = None if record.runner_up is None else standings(record)[record.runner_up].seconds
    return TuningSummary(
        clock=record.clock,
        stop=record.stop,
        candidates=len(record.trials),
        failed=len(record.failures),
        tied=len(record.tied),
        seconds=winner.seconds,
        spread=_spread(winner.samples_s),
        samples=len(winner.samples_s),
        runner_up=second.cfg,
        runner_up_seconds=behind,
        gain=record.gain,
        error=winner.error,
        failures=tuple((t.cfg, t.status, t.message.splitlines()[0] if t.message else "") for t in record.failures),
        verdict=verdict(record).text,
    )


def summary_of_entry(summary: Mapping[str, Any]) -> TuningSummary | None:
    """The figures in the summary beside a cfg; None for a cfg that was put by hand."""
    if not summary:
        return None
    gain = summary.get("gain")
    known = tuple(map(_number, gain)) if isinstance(gain, list) and len(gain) == 3 else ()
    return TuningSummary(
        clock=str(summary.get("clock") or ""),
        stop=str(summary.get("stop") or ""),
        candidates=_count(summary.get("candidates")),
        failed=_count(summary.get("failed")),
        tied=_count(summary.get("tied")),
        seconds=_number(summary.get("seconds")),
        gain=_gain(known),
        verdict="" if (told := _gain(known)) is None else verdict_of_gain(told).text,
    )


def _spread(samples: tuple[float, ...]) -> tuple[float, float] | None:
    if len(samples) < 2:
        return None
    ordered = sorted(samples)
    edge = len(ordered) // 10
    return ordered[edge], ordered[-1 - edge]


def _gain(known: tuple[float | None, ...]) -> tuple[float, float, float] | None:
    middle, low, high = known if len(known) == 3 else (None, None, None)
    return None if middle is None or low is None or high is None else (middle, low, high)


# A file may hold anything.
def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
