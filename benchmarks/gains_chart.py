"""Draws what users gain, from the tables of docs/performance.md: `python benchmarks/gains_chart.py [folder]`.

users_gain.svg has a bar for each case of the library on an H200: the time of plain JAX over the tuned time, on a scale
of doublings, with the best ready-made alternative as a tick. It needs the page alone; the figures there come from runs.
"""

from __future__ import annotations

import html
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_ROW, _LEFT, _WIDTH = 15, 330, 420


def rows() -> list[tuple[str, float, float]]:
    """Each case: its name, plain JAX over tuned, and the best ready-made over tuned."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = page.partition("## The library on an H200")[2].partition("Read honestly")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and re.match(r"[\d.,]+$", cells[1]):
            plain, ready, tuned = (float(re.match(r"[\d.,]+", cells[i])[0].replace(",", "")) for i in (1, 2, 4))
            found.append((cells[0], plain / tuned, ready / tuned))
    return sorted(found, key=lambda row: -row[1])


def svg(cases: list[tuple[str, float, float]]) -> str:
    """The chart as text; colours suit light and dark paper."""
    most = max(gain for _, gain, _ in cases)
    scale = _WIDTH / math.log2(most)
    height = _ROW * len(cases) + 60
    drawn = []
    for power in range(int(math.log2(most)) + 1):
        x = _LEFT + power * scale
        drawn.append(f'<path d="M{x:.0f} 24V{height - 32}" stroke="#8886"/>')
        drawn.append(f'<text x="{x:.0f}" y="18" text-anchor="middle" fill="#888">{2**power}x</text>')
    for place, (name, gain, ready) in enumerate(cases):
        y = 30 + place * _ROW
        width = max(1.5, math.log2(max(gain, 1.0)) * scale)
        tick = _LEFT + math.log2(max(ready, 1.0)) * scale
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end" fill="#888">{html.escape(name)}</text>')
        drawn.append(f'<rect x="{_LEFT}" y="{y + 1}" width="{width:.1f}" height="{_ROW - 4}" fill="#3d85c6"/>')
        drawn.append(f'<path d="M{tick:.1f} {y}v{_ROW - 2}" stroke="#e69138" stroke-width="3"/>')
        drawn.append(f'<text x="{_LEFT + width + 5:.0f}" y="{y + 10}" fill="#888">{gain:.3g}x</text>')
    words = "plain JAX over tuned; orange: the best of jax.nn, jax.lax and cuDNN, over tuned; one H200, device time"
    drawn.append(f'<text x="{_LEFT - 180}" y="{height - 12}" fill="#888">{words}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 80} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img" aria-label="What users gain">'
        + "\n".join(drawn)
        + "</svg>\n"
    )


def main(folder: str = "docs/pictures") -> None:
    """Writes the chart, and says what is in it."""
    cases = rows()
    target = Path(folder) / "users_gain.svg"
    target.write_text(svg(cases), encoding="utf-8")
    over, most = sum(gain > 1.05 for _, gain, _ in cases), cases[0][1]
    middle = sorted(gain for _, gain, _ in cases)[len(cases) // 2]
    print(f"{target}: {len(cases)} cases, {over} gain over 5%, in the middle {middle:.2f} times, at most {most:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
