"""The first lines of a process that traces: it ends with its parent from here on, before JAX is imported."""

from __future__ import annotations

import sys

from ...tuning.worker.start import settle_in


def main(life: int, parent: int) -> None:
    """Serves until the other side is gone."""
    settle_in(life, parent)
    from .tracer import main as serve

    serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
