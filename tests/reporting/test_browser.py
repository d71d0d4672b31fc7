"""Pages in a real Chromium: they open from disk, load nothing, sort, filter, and fit a telephone and paper."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time

import pytest
from fakes_reporting import result

from ejkernel.ops import report

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]


def browse(path, folder, *options, take="--dump-dom", limit=300):
    """Opens a file in a browser of its own; what it printed, and what its console said."""
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000"),
        *(*options, take, path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, said


def asked(page, folder, script, *options):
    """What a script finds in a page that was opened; nothing may stand in the console."""
    probe = folder / "probe.html"
    end = f"<script>document.title=JSON.stringify((function(){{{script}}})())</script></body>"
    probe.write_text(page.read_text(encoding="utf-8").replace("</body>", end), encoding="utf-8")
    dom, said = browse(probe, folder, *options)
    assert said == []
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]))


@pytest.fixture
def page(tmp_path):
    """A page of a result with twelve calls."""
    return report(result(12, 16), tmp_path / "page.html")


def test_it_opens_from_disk_without_an_error_and_without_a_request(page, tmp_path):
    """The console is empty, and no resource was asked for."""
    dom, said = browse(page, tmp_path)
    assert said == []
    assert dom.count("<section") == 12
    assert asked(page, tmp_path, "return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_a_column_sorts_both_ways(page, tmp_path):
    """A press on the head of a column orders the rows by its numbers, a second one the other way."""
    script = """
    var table = document.querySelector("table.s"), heads = table.tHead.rows[0].cells;
    function column() { return Array.from(table.tBodies[0].rows, r => +r.cells[2].getAttribute("data-v")); }
    heads[2].querySelector("button").click(); var up = column(), said = heads[2].getAttribute("aria-sort");
    heads[2].querySelector("button").click(); return [up, column(), said, heads[2].getAttribute("aria-sort")];
    """
    up, down, first, second = asked(page, tmp_path, script)
    assert up == sorted(up)
    assert down == sorted(up, reverse=True)
    assert (first, second) == ("ascending", "descending")


def test_the_filter_leaves_the_calls_that_fit(page, tmp_path):
    """Rows and their parts go together, and the count is said; an empty filter shows all again."""
    script = """
    function seen(what) { return Array.from(document.querySelectorAll(what)).filter(e => !e.hidden).length; }
    function type(text) { var box = document.getElementById("filter"); box.value = text;
      box.dispatchEvent(new Event("input")); }
    type("bfloat16[256,2048]"); var some = [seen("tr[data-f]"), seen("section")];
    var said = document.getElementById("found").textContent; type("");
    return [some, said, [seen("tr[data-f]"), seen("section")]];
    """
    assert asked(page, tmp_path, script) == [[1, 1], "1 calls fit", [12, 12]]


def test_pointing_at_a_line_says_what_it_is(page, tmp_path):
    """The candidate, its time and its part in the race."""
    script = """
    var line = document.querySelector("path.w");
    line.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
    var tip = document.getElementById("tip"); return [tip.style.display, tip.textContent];
    """
    shown, text = asked(page, tmp_path, script)
    assert shown == "block"
    assert re.fullmatch(r"triton block_m=16 block_n=32, .* us, winner", text)


def test_it_fits_a_telephone(page, tmp_path):
    """At 360 pixels nothing but the tables, each in a box of its own, is wider than the screen."""
    frame = tmp_path / "frame.html"
    inner = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frame.write_text(
        f'<!doctype html><title>-</title><iframe width="360" height="800" style="border:0" srcdoc="{inner}"></iframe>'
        "<script>onload=function(){var d=document.querySelector('iframe').contentDocument;"
        "document.title=JSON.stringify([d.documentElement.clientWidth,d.documentElement.scrollWidth])}</script>",
        encoding="utf-8",
    )
    dom, said = browse(frame, tmp_path)
    assert said == []
    assert json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1])) == [360, 360]


def test_light_and_dark_follow_the_system(page, tmp_path):
    """Paper and ink change places."""
    script = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    light = asked(page, tmp_path, script, "--blink-settings=preferredColorScheme=1")
    dark = asked(page, tmp_path, script, "--blink-settings=preferredColorScheme=0")
    assert [sum(map(int, re.findall(r"\d+", colour))) > 380 for colour in (*light, *dark)] == [True, False, False, True]


def test_it_prints(page, tmp_path):
    """Every call is on paper; what only a screen can do is not."""
    target = tmp_path / "page.pdf"
    browse(page, tmp_path, take=f"--print-to-pdf={target}")
    assert target.read_bytes().startswith(b"%PDF-")
    assert target.stat().st_size > 20_000


def test_a_page_of_fifty_calls_opens_at_once(tmp_path):
    """By the browser's own clock, load and all; the figure is printed, and held against a minute alone."""
    page = report(result(50, 24), tmp_path / "page.html")
    script = "return performance.now()"
    start = time.perf_counter()
    ready = asked(page, tmp_path, script)
    taken = time.perf_counter() - start
    print(f"{page.stat().st_size / 1e3:.0f} kB, ready after {ready:.0f} ms, {taken:.1f} s with the browser's start")
    assert ready < 60_000
