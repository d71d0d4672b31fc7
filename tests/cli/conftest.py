"""What the tests of the command share."""

from __future__ import annotations

import pytest
from fakes_cli import HERE, Shell

from ejkernel.ops.store.packs import forget_packs


@pytest.fixture
def shell(capsys, monkeypatch, tmp_path):
    """Runs commands in this process, in a folder of their own, with the test programs to import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    forget_packs()
    yield Shell(capsys)
    forget_packs()


@pytest.fixture
def folder(tmp_path):
    """The cache folder of a test."""
    return tmp_path / "cache"
