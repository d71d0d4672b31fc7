"""Settings around a call that change its key or its cost, kept so that a tuning can set them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from .. import _jax


@dataclass(frozen=True)
class TraceContext:
    """The mesh axes, the matmul precision and the width of numbers in force where a call was made."""

    # None: no mesh. The axes of a shard_map are manual ones here.
    mesh: jax.sharding.AbstractMesh | None = None
    precision: str | None = None
    x64: bool = False

    @staticmethod
    def now() -> TraceContext:
        """The settings in force here."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        precision = _jax.setting("jax_default_matmul_precision")
        return TraceContext(
            None if mesh.empty else mesh,
            None if precision is None else str(precision),
            bool(_jax.setting("jax_enable_x64")),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Puts these settings in force for a `with` block."""
        mesh = self.mesh or jax.sharding.AbstractMesh((), ())
        with (
            jax.sharding.use_abstract_mesh(mesh),
            jax.default_matmul_precision(self.precision),
            jax.enable_x64(self.x64),
        ):
            yield
