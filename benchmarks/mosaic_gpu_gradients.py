"""The gradient of a norm alone, for `mosaic_gpu.py`: warpgroups of a row, blocks and rows asked for in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

from ejkernel.library.mosaic import norm_rows, streams


@dataclass(frozen=True)
class GradientLaunch:
    """Elements of a row for each thread at most, blocks of a multiprocessor at most, rows asked for in advance.

    `together`: 1 with one barrier for all sums of a row. `kept`: 1 with a mean and a factor of each row from the
    forward pass, as the last array. `streams`: with rows that stream through so many blocks of a multiprocessor, and
    `each` elements of a step for each thread.
    """

    implementation: str
    each: int
    blocks: int
    ahead: int
    together: int = 0
    kept: int = 0
    streams: int = 0


# Of one, two or four times as many warpgroups for a row, with rows asked for early or late.
LAUNCHES = (
    GradientLaunch("mosaic", 32, 8, 3),
    GradientLaunch("mosaic", 32, 1, 3),
    *(GradientLaunch("mosaic", each, 8, ahead, 1) for each in (32, 16, 8) for ahead in (3, 1)),
)


# With what the forward pass kept: one round of exchanges, or one barrier.
KEPT = (GradientLaunch("mosaic", 32, 8, 3, 0, 1), GradientLaunch("mosaic", 32, 8, 1, 1, 1))


# Rows that stream through two or four blocks of a multiprocessor, for which the registers have room.
STREAMS = tuple(
    GradientLaunch("mosaic", each, 8, 1, 1, kept, blocks) for each, blocks in ((32, 2), (16, 4)) for kept in (0, 1)
)


class NormGradient:
    """The gradient kernel as an operation; its cfg is a launch."""

    def run(self, x: jax.Array, dy: jax.Array, *vectors: jax.Array, cfg: GradientLaunch, added: bool = False) -> Any:
        """Gradients of x and of the vectors: a weight, and for layer_norm a bias; another gradient is before them."""
        from ejkernel.library.mosaic import norm_gradients, norm_streams

        if cfg.streams:
            rows, width = x.shape
            stream = streams.stream_of(rows, width, 2, arrays=2, blocks=cfg.streams, each=cfg.each)
            assert stream is not None
            given = {"weight": vectors[0], "bias": vectors[1], "kept": vectors[-1] if cfg.kept else None}
            how: dict[str, Any] = {"stream": stream, "eps": 1e-6, "interpret": False, "name": "study"}
            return norm_streams.gradients(x, dy, **given, **how)
        course = norm_rows.Course(cfg.each, cfg.ahead, together=bool(cfg.together))
        kept = vectors[-1] if cfg.kept else None
        vectors = vectors[:-1] if cfg.kept else vectors
        others, (weight, *rest) = vectors[:added], vectors[added:]
        with (
            mock.patch.object(norm_rows, "_BLOCKS", cfg.blocks),
            mock.patch.object(norm_gradients, "course_of", return_value=course),
        ):
            how = {"centred": bool(rest), "eps": 1e-6, "interpret": False, "name": "study"}
            how |= {"bias": rest[0] if rest else None, "added": others[0] if others else None}
            how |= {"kept": kept}
            return norm_gradients.norm_gradients(x, dy, weight=weight, **how)


def launches(width: int, extra: int = 0, tried: Sequence[GradientLaunch] = LAUNCHES) -> Sequence[GradientLaunch]:
    """The launches that differ for rows of this width, with so many arrays beside x, its gradient and one vector's."""
    found: dict[tuple[int, ...], GradientLaunch] = {}
    for one in tried:
        with mock.patch.object(norm_rows, "_BLOCKS", one.blocks):
            shape = norm_rows.portions(1 << 20, width, extra, one.each)
            found.setdefault((*shape, one.ahead, one.together, one.kept, one.streams), one)
    return list(found.values())
