"""Draws the documentation's pictures from real runs on this machine: `python benchmarks/pictures.py [folder]`.

demo.svg is the demo as a terminal shows it, race.svg one tuning sample by sample, gains.svg what tuning gave for each
operation of the demo. Needs the extra `plot` and about two minutes. Nothing in the user's cache folder is touched.
"""

from __future__ import annotations

import html
import io
import os
import re
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib import pyplot

from ejkernel.library import demo
from ejkernel.ops import OperationStores, device_fingerprint, tunable
from ejkernel.ops.core.formatting import seconds, short

# The same run gives the same file.
pyplot.rcParams |= {"svg.hashsalt": "ejkernel", "font.size": 10}
COLOURS = {"": "#d8dee9", "1": "#ffffff", "32": "#8fd18a", "2": "#8a94a6"}


class Terminal(io.StringIO):
    """Takes the text with its colours."""

    def isatty(self) -> bool:
        """Says that it is a terminal, so that the demo writes colours."""
        return True


def machine() -> str:
    """The machine that the figures come from."""
    return f"{device_fingerprint().partition('|')[2]}, {os.cpu_count()} cores, jax {jax.__version__}, {date.today()}"


def terminal_svg(text: str) -> str:
    """Lines of terminal text with colours as a picture."""
    lines = text.rstrip().splitlines()
    columns = max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in lines)
    width, height = 8.43 * columns + 40, 18 * len(lines) + 36
    drawn = []
    for number, line in enumerate(lines):
        # A styled line that ends with an empty one is closed on that.
        code, plain = re.fullmatch(r"(?:\x1b\[0m)?(?:\x1b\[(\d+)m)?(.*?)(?:\x1b\[0m)?", line).groups()
        weight = ' font-weight="bold"' if code == "1" else ""
        place = f'x="20" y="{32 + 18 * number}" fill="{COLOURS[code or ""]}"{weight}'
        drawn.append(f'<text {place} xml:space="preserve">{html.escape(plain)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1d2129"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


@tunable(
    way=["differences", "products", "bfloat16"],
    rows=[8, 48, 64, 512],
    constraint=lambda points, others, *, way, rows: len(points) % rows == 0 or f"{rows} does not divide {len(points)}",
)
def nearest(points: Any, others: Any, *, way: str, rows: int) -> Any:
    """The squared distance from each point to the nearest of some others; one way rounds too much."""

    narrow = jnp.bfloat16 if way == "bfloat16" else jnp.float32
    close = others.astype(narrow)

    def block(some: Any) -> Any:
        some = some.astype(narrow)
        if way == "differences":
            return jnp.min(jnp.sum((some[:, None] - close) ** 2, -1), -1)
        squares = jnp.sum(some * some, -1)[:, None] + jnp.sum(close * close, -1)
        return jnp.min(squares - 2 * some @ close.T, -1).astype(jnp.float32)

    return jax.lax.map(block, points.reshape(-1, rows, points.shape[1])).reshape(-1)


def save(figure: Any, axes: Any, path: Path) -> None:
    """Writes a figure, with where it comes from, and forgets it."""
    axes.set_xlabel(f"{axes.get_xlabel()}\n{machine()}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def race(path: Path) -> None:
    """One tuning: samples over rounds, which candidates were dropped, which were wrong."""
    points, others = (jax.random.normal(jax.random.key(seed), (1024, 32)) for seed in (0, 1))
    record = nearest.tune(points, others).record
    print(record.table())
    figure, axes = pyplot.subplots(figsize=(11, 4.6), layout="constrained")
    record.plot(axes)
    save(figure, axes, path)


def gains(path: Path) -> None:
    """Each candidate's time over the winner's, and what that gave over the heuristic cfg."""
    found = [demo.choose(case, OperationStores()) for case in demo.cases()]
    rows = [(f.case, f.record) for f in found if f.record is not None and f.record.gain is not None]
    figure, axes = pyplot.subplots(figsize=(11, 0.5 * len(rows) + 1.3), layout="constrained")
    slowest = 1.0
    for place, (_, record) in enumerate(rows):
        times = [trial.seconds for trial in record.trials]
        best = times[record.winner]
        ratios = [time / best for time in times if time is not None]
        slowest = max(slowest, *ratios)
        axes.plot(ratios, [place] * len(ratios), "o", color="0.6", markersize=6)
        axes.plot(times[record.heuristic] / best, place, "o", color="none", markeredgecolor="black", markersize=12)
        axes.plot(1.0, place, "o", color="C0", markersize=9)
        axes.text(1.02, place, summary(record), va="center", fontsize=9, transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(rows)), [f"{case.operation}  {case.title}" for case, _ in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.9, slowest * 1.2)
    ticks = [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if n <= slowest * 1.5]
    axes.set_xticks(ticks, [f"{n}x" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("a candidate's time over the winner's (blue); a ring is the heuristic cfg")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, axes, path)


def summary(record: Any) -> str:
    """The gain in a few words."""
    gain, low, high = record.gain
    chosen = short(record.cfg)
    said = f"{gain:.2f} times as fast ({low:.2f} to {high:.2f}): {chosen}"
    if record.winner == record.heuristic:
        said = f"the heuristic cfg is the best: {chosen}"
    untimed = sum(trial.seconds is None for trial in record.trials)
    return f"{said}, {seconds(record.trials[record.winner].seconds)}" + (f"; {untimed} not timed" if untimed else "")


def main(folder: str = "docs/pictures") -> None:
    """Runs the demo, then a tuning, and draws both."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # So that every candidate is timed, also on a busy machine.
    demo._SECONDS = 60.0
    screen = Terminal()
    demo.main([], screen)
    (target / "demo.svg").write_text(terminal_svg(screen.getvalue()), encoding="utf-8")
    gains(target / "gains.svg")
    race(target / "race.svg")


if __name__ == "__main__":
    # A home of its own, so that everything is measured, and paths read as a user's would.
    with tempfile.TemporaryDirectory() as home:
        for name in [name for name in os.environ if name.startswith(("EJKERNEL_", "XDG_"))]:
            del os.environ[name]
        os.environ |= {"HOME": home, "EJKERNEL_OPS_PROGRESS": "off"}
        main(*sys.argv[1:])
