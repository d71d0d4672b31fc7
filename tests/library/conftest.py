"""What tests of this room share."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def cudnn(monkeypatch):
    """JAX traces calls of cuDNN as if it were installed; the module of its calls."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91600)
    return module
