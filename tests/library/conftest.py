"""Most tests of this room compile, and nearly none reads compiled text: they share programs whatever their labels."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def shared_programs(any_labels):
    """A test that reads labels asks for `own_text`."""
