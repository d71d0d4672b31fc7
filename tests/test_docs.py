"""Every example in the documentation runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def blocks(page: Path) -> str:
    """The Python of a page, in order: later blocks build on earlier ones."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def run(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would, with a cache folder of its own."""
    settings = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after the other, raise nothing and warn of nothing."""
    script = tmp_path / "page.py"
    script.write_text(blocks(page), encoding="utf-8")

    done = run([sys.executable, "-W", "error", str(script)], tmp_path / "cache")

    assert done.returncode == 0, done.stderr


def test_the_readme_has_examples() -> None:
    """The check above has something to check."""
    assert "executor(" in blocks(ROOT / "README.md")
