"""Makes the documentation's example pages from real tunings here: `python benchmarks/report_pages.py [name] [folder]`.

A third argument, `step`, leaves the operations' page out.

The demo's operations and its training step are tuned into a store of their own. `<name>.html` is the page of the store,
`<name>_step.html` that of the step with its profile, `<name>.png` a picture, where Chromium is installed. Sizes and the
time to open are printed. On an H200: `python benchmarks/report_pages.py h200`. The user's cache folder is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


def pages(name: str, target: Path, part: str) -> list[Path]:
    """Tunes, and writes both pages, or that of the step alone."""
    import jax

    from ejkernel.library import demo, demo_step
    from ejkernel.ops import (
        ConfigCache,
        ConfigSelectorChain,
        Executor,
        OperationStores,
        attribute,
        device_fingerprint,
        report,
    )

    stores = OperationStores()
    for case in demo.cases() if part != "step" else ():
        found = demo.choose(case, stores)
        print(f"{case.operation}: {found.seconds:.1f} s")
    device = device_fingerprint().partition("|")[2]
    made = []
    if part != "step":
        title = f"The library's operations on {device}, jax {jax.__version__}"
        made.append(report(stores, target / f"{name}.html", title=title))
    result = demo_step.tuned(stores)
    print(result.table())
    step = report(result, target / f"{name}_step.html", title=f"A training step on {device}, jax {jax.__version__}")
    trace = tempfile.mkdtemp()
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=None, persistent=stores))
    program = jax.jit(lambda weights, words: demo_step.step(weights, words, executor))
    arguments = demo_step.model(), demo_step.tokens()
    jax.block_until_ready(program(*arguments))
    with jax.profiler.trace(trace):
        jax.block_until_ready(program(*arguments))
    profile = attribute(trace, store=stores)
    print(profile)
    report(result, step, title=f"A training step on {device}, jax {jax.__version__}", profile=profile)
    return [*made, step]


def browser(*words: str) -> float:
    """Seconds that a browser of its own takes for something."""
    start = time.perf_counter()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
    subprocess.run([CHROMIUM, *options, *words], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - start


def main(name: str = "demo", folder: str = "docs/pictures", part: str = "all") -> None:
    """Makes the pages, looks at them, and says how large they are."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    made = pages(name, target, part)
    for page in made:
        print(f"{page}: {page.stat().st_size / 1e3:.0f} kB")
    if CHROMIUM is None:
        print("no picture: Chromium is not installed")
        return
    for page in made:
        print(f"{page}: opened in {browser('--dump-dom', page.resolve().as_uri()):.1f} s, the browser's start included")
    picture = target / f"{name}.png"
    browser(f"--screenshot={picture}", "--window-size=1000,1300", made[0].resolve().as_uri())
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    # A home of its own, so that everything is measured.
    with tempfile.TemporaryDirectory() as home:
        for variable in [variable for variable in os.environ if variable.startswith(("EJKERNEL_", "XDG_"))]:
            del os.environ[variable]
        os.environ |= {"HOME": home, "EJKERNEL_OPS_PROGRESS": "off"}
        main(*sys.argv[1:])
