"""The library's names: what is there, and what an import costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel.library

ROOT = Path(ejkernel.library.__file__).parent


@pytest.mark.parametrize("name", ejkernel.library.__all__)
def test_a_name_is_the_thing_and_not_its_file(name):
    """Functions and files share names; whatever was imported before, the name is the function."""
    found = getattr(ejkernel.library, name)
    importlib.import_module(found.__module__)
    assert callable(getattr(ejkernel.library, name))
    assert getattr(ejkernel.library, name) is found
    assert name in dir(ejkernel.library)


def test_a_file_may_be_imported_first():
    """The function is found even where its file was imported before it."""
    code = "import ejkernel.library.matmul; from ejkernel.library import matmul; print(callable(matmul))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def test_importing_the_library_does_not_import_jax():
    """Names are found when they are first used."""
    code = "import sys, ejkernel.library; print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: p.name)
def test_the_library_keeps_the_rules_of_the_package(path):
    """Private names of JAX and the environment stay where they belong."""
    text = path.read_text(encoding="utf-8")
    assert "jax._src" not in text
    assert "environ[" not in text
    assert "ejkernel.cli" not in text
