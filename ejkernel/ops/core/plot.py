"""A record as a picture: every sample over the rounds of the race, and each candidate's outcome. No JAX here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import formatting
from .errors import MissingExtraError
from .standing import Standing, standings, verdict
from .table import notes, ranked

if TYPE_CHECKING:
    from .record import Record

# More lines of text than this would fill the picture; the others are counted.
_NAMED = 10
_WIDEST = 72
_QUIET = "0.72"
_COLOURS = ("C1", "C2", "C4", "C5", "C6", "C8", "C9")


def draw(record: Record, axes: Any = None) -> Any:
    """Draws the race into a matplotlib Axes, a new one unless it is given, and returns it."""
    pyplot = _pyplot()
    if axes is None:
        _, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    order = ranked(record)
    shown = standings(record)
    timed = [place for place in order if record.trials[place].samples_s]
    # The slow ones first, so that the winner lies on top.
    for rank, place in reversed(list(enumerate(timed))):
        _line(axes, record, place, rank, shown[place])
    for place in [place for place in order if not record.trials[place].samples_s][: _NAMED - min(len(timed), _NAMED)]:
        axes.plot([], [], " ", label=_label(record, place, shown[place]))
    hidden = len(order) - len(axes.get_legend_handles_labels()[1])
    if hidden > 0:
        axes.plot([], [], " ", label=f"and {hidden} more")
    if timed:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: formatting.seconds(value))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    # Batches of a search run one after the other: the first sample of each is no common round.
    axes.set_xlabel("round" if record.space is None else "sample")
    axes.set_ylabel(f"time [{record.clock}]")
    axes.set_title(_title(record), loc="left", fontsize="medium")
    _legend(axes, order)
    return axes


def _line(axes: Any, record: Record, place: int, rank: int, standing: Standing) -> None:
    samples = record.trials[place].samples_s
    style: dict[str, Any] = {"color": _QUIET, "linewidth": 1, "alpha": 0.9}
    if rank < _NAMED:
        style |= {"color": _COLOURS[rank % len(_COLOURS)], "label": _label(record, place, standing)}
    if place == record.heuristic:
        style |= {"color": "black", "linestyle": "--"}
    if place == record.winner:
        style |= {"color": "C0", "linewidth": 2.5}
    rounds = range(1, len(samples) + 1)
    axes.plot(rounds, samples, marker=".", **style)
    if record.trials[place].dropped_round is not None:
        axes.plot(rounds[-1:], samples[-1:], marker="x", markersize=8, color=style["color"], linestyle="none")


def _label(record: Record, place: int, standing: Standing) -> str:
    trial = record.trials[place]
    status = "" if trial.status == "ok" else trial.status
    time = "" if standing.seconds is None else formatting.seconds(standing.seconds)
    cfg, rest = formatting.short(trial.cfg), [time, status, notes(record, place, standing)]
    text = ", ".join(part for part in (cfg, *rest) if part)
    # A message may be cut, a cfg may not.
    return _safe(text if len(text) <= _WIDEST else text[: max(_WIDEST - 3, len(cfg))] + "...")


def _safe(text: str) -> str:
    # matplotlib hides labels that begin with an underscore, and reads formulas between dollar signs.
    return ("\u200b" + text if text.startswith("_") else text).replace("$", r"\$")


def _title(record: Record) -> str:
    title = record.key.get("op_id") or record.kernel or "tuning"
    return _safe(f"{title}: {verdict(record).text}" if record.trials else title)


def _legend(axes: Any, order: list[int]) -> None:
    if not order:
        return
    handles, labels = axes.get_legend_handles_labels()
    # Lines were drawn from the last to the first; the rest was added in order.
    lines = [i for i, handle in enumerate(handles) if len(handle.get_xdata())]
    others = [i for i in range(len(handles)) if i not in lines]
    places = [*reversed(lines), *others]
    axes.legend(
        [handles[i] for i in places],
        [labels[i] for i in places],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        fontsize="small",
        frameon=False,
    )


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtraError(
            "a record is drawn with matplotlib, which cannot be imported here; pip install 'ejkernel-ops[plot]', "
            f"or print record.table() ({error})"
        ) from error
