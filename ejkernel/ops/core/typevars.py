"""The two type variables of every kernel: its cfg and its output. No JAX here."""

from __future__ import annotations

from typing import TypeVar

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")
