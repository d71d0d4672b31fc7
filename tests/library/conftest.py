"""Most tests of this room compile, and nearly none reads compiled text: they share programs whatever their labels."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(autouse=True)
def shared_programs(any_labels):
    """A test that reads labels asks for `own_text`."""


@pytest.fixture
def cudnn(monkeypatch):
    """JAX traces calls of cuDNN as if it were installed; the module of its calls."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91600)
    return module
