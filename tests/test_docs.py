"""Every example in the documentation runs, and what pages say about the code is what the code says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import forked_python
import pytest
from tier_table import tier_table

import ejkernel.library
import ejkernel.ops
from ejkernel.ops.core.record import Status, Stop

ROOT = Path(__file__).parent.parent
# Pages with examples that need a package of an extra.
EXTRAS = {"remote.md": ("fsspec", "remote")}
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def blocks(page: Path) -> str:
    """The Python of a page, in order: later blocks build on earlier ones."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


# What these pages show does not depend on a cfg: without tuning they run in a third of the time.
UNTUNED = ("library.md", "library_ops.md", "library_serving.md")


def run(command: list[str], cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would, with a cache folder of its own."""
    settings = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **more}
    # What an example writes must not lie in the tree.
    return forked_python.run(command, env=settings, cwd=cache.parent, timeout=300)


# Pages that need seconds, and of which no version of JAX or Python changes a thing.
LONG = {"predicting.md"}


def of_page(page: Path) -> Any:
    """A page as a case."""
    return pytest.param(page, id=page.name, marks=[pytest.mark.one_leg] if page.name in LONG else [])


@pytest.mark.parametrize("page", [of_page(page) for page in PAGES if blocks(page)])
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after the other, raise nothing and warn of nothing."""
    if page.name in EXTRAS:
        module, extra = EXTRAS[page.name]
        pytest.importorskip(module, reason=f"needs the extra `{extra}`: pip install 'ejkernel-ops[{extra}]'")
    script = tmp_path / "page.py"
    script.write_text(blocks(page), encoding="utf-8")
    settings = {"EJKERNEL_OPS_AUTOTUNE": "off"} if page.name in UNTUNED else {}

    done = run([sys.executable, "-W", "error", str(script)], tmp_path / "cache", **settings)

    assert done.returncode == 0, done.stderr


@pytest.mark.engines
@pytest.mark.parametrize("framework", ["flax.nnx", "equinox"])
def test_the_example_of_a_framework_runs(framework: str, tmp_path: Path) -> None:
    """It stands under the framework's name, behind the other blocks of the page."""
    pytest.importorskip(framework, reason="needs the extra `frameworks`: pip install 'ejkernel-ops[frameworks]'")
    page = ROOT / "docs/programs.md"
    named = rf'^```python title="{re.escape(framework)}"\n(.*?)^```'
    (block,) = re.findall(named, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    script.write_text(f"{blocks(page)}\n{block}", encoding="utf-8")

    done = run([sys.executable, "-W", "error", str(script)], tmp_path / "cache")

    assert done.returncode == 0, done.stderr


def test_the_readme_has_examples() -> None:
    """The check above has something to check."""
    assert "@tunable(" in blocks(ROOT / "README.md")


def text(page: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_table_of_tiers_is_the_codes() -> None:
    """What the page says of each tier is what a selector does; `python tests/tier_table.py` prints the table anew."""
    assert tier_table() in text("choosing.md")


def test_every_public_name_has_its_place_in_the_reference() -> None:
    """A new name is listed once, and a name that is gone is not."""
    listed = re.findall(
        r"^::: ejkernel\.ops\.(\w+)$", text("reference/ops.md") + text("reference/stores.md"), re.MULTILINE
    )
    assert sorted(listed) == sorted(ejkernel.ops.__all__)


def test_every_name_of_the_library_has_its_place_in_the_reference() -> None:
    """The same for `ejkernel.library`."""
    listed = re.findall(r"^::: ejkernel\.library\.\w+\.(\w+)$", text("reference/library.md"), re.MULTILINE)
    assert sorted(listed) == sorted(ejkernel.library.__all__)


def test_the_table_of_settings_is_complete() -> None:
    """The README names every variable that is read, and no other."""
    source = (ROOT / "ejkernel/ops/settings.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"(EJKERNEL_\w+|NO_COLOR)"', source))
    table = re.findall(r"^\| `(\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(read)


@pytest.mark.parametrize("word", [*get_args(Status), *get_args(Stop)])
def test_the_page_on_records_knows_every_outcome(word: str) -> None:
    """Each status of a candidate and each end of a tuning is explained."""
    assert re.search(rf"^\| .*`{word}`", text("tuning.md"), re.MULTILINE)


def messages() -> str:
    """Every text of the package's own, with a gap where a value is put in."""
    found = []
    for path in sorted((ROOT / "ejkernel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.one_leg
def test_messages_that_are_explained_are_messages_of_the_code() -> None:
    """What the page on troubleshooting quotes can be seen: a text that was changed is changed there, too."""
    first_cells = re.findall(r"^\| (.*?) \| ", text("troubleshooting.md"), re.MULTILINE)
    quoted = [part for cell in first_cells for part in re.findall(r"`([^`]* [^`]*)`", cell)]
    code = messages()
    assert len(quoted) > 40
    assert [part for part in quoted if part not in code] == []


def test_every_page_is_in_the_list_of_the_site() -> None:
    """A page that is written can be found."""
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Pages outside of the site, which the strict build does not see, link to files that exist."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/pictures/*")), ids=lambda p: p.name)
def test_a_picture_is_shown(picture: Path) -> None:
    """Each picture and each example page is used by a page of the documentation."""
    assert any(f"pictures/{picture.name})" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/pictures/*.html")), ids=lambda p: p.name)
def test_an_example_page_is_small_and_whole(page: Path) -> None:
    """At most 250 kB, nothing loaded from elsewhere, and no folder of the machine that it was made on."""
    made = page.read_text(encoding="utf-8")
    assert len(made.encode()) <= 250_000
    assert made.endswith("</body></html>\n")
    assert not re.search(r"https?:|/(home|root|tmp|Users)/", made)


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/pictures/*.svg")), ids=lambda p: p.name)
def test_a_drawing_is_one(picture: Path) -> None:
    """Each is whole, and shows no folder of the machine that it was made on."""
    drawn = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"/(home|root|tmp|Users)/", "".join(drawn.itertext()))


def test_every_promise_of_the_security_page_names_tests_that_exist():
    """Each row of the table has one at least; a file is there, and defines the test that is named in it."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("## Promises and their tests")[2].partition("\n## ")[0]
    rows = [row.rsplit("|", 2)[1] for row in table.splitlines() if row.startswith("| ")][1:]
    rows = [row for row in rows if "---" not in row]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in text, (file, test)
