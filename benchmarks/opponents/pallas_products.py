"""JAX's own Mosaic kernels for products on Hopper GPUs: hopper_matmul_mgpu, ragged_dot_mgpu and its transpose."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax

from ejkernel.library.jax_pallas import gpu_kernels

from .opponent import Call, Opponent

# Of those that JAX's own benchmarks try; each kernel counts by its best.
# Rows and columns of a tile, steps in flight, and columns of tiles that are visited together.
RAGGED = ((128, 128, 4, 1), (64, 128, 6, 1), (128, 128, 4, 4), (128, 64, 6, 2), (64, 256, 4, 1), (128, 192, 4, 1))
TRANSPOSED = ((128, 128, 4, 1), (64, 128, 4, 4), (128, 64, 4, 4))
# Rows and columns of a warpgroup's tile, along which dimension a block has two, and tiles visited together.
MATMUL = ((128, 128, "M", 8), (128, 128, "N", 8), (64, 256, "M", 8), (256, 64, "N", 8), (128, 64, "N", 16))


def ragged(lhs: Any, rhs: Any, sizes: Any, *, config: tuple[int, ...], transposed: bool = False) -> jax.Array:
    """Rows times the matrix of their group, or times its transpose."""
    kernel = gpu_kernels("ragged_dot_mgpu").ragged_dot
    return kernel(lhs, rhs, group_sizes=sizes, transpose_rhs=transposed, **_tiles(*config))


def ragged_weights(lhs: Any, dy: Any, sizes: Any, *, config: tuple[int, ...]) -> jax.Array:
    """The gradient of the groups' matrices."""
    kernel = gpu_kernels("transposed_ragged_dot_mgpu").transposed_ragged_dot
    return kernel(lhs, dy, group_sizes=sizes, **_tiles(*config))


def _tiles(block_m: int, block_n: int, steps: int, together: int) -> dict[str, int]:
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": 64}
    return {**sizes, "max_concurrent_steps": steps, "grid_block_n": together}


def ragged_with_gradients(forward: Any, backward: Any) -> Any:
    """Result and both gradients, by three kernels that JAX does not join itself."""

    def run(lhs: Any, rhs: Any, sizes: Any, dy: Any) -> Any:
        to_lhs = ragged(dy, rhs, sizes, config=forward, transposed=True)
        return ragged(lhs, rhs, sizes, config=forward), (to_lhs, ragged_weights(lhs, dy, sizes, config=backward))

    return run


def matmul(a: Any, b: Any, *, config: tuple[int, int, str, int]) -> jax.Array:
    """A product that its tiles divide."""
    kernels = gpu_kernels("hopper_matmul_mgpu")
    tile_m, tile_n, along, together = config
    chosen = kernels.TuningConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=kernels.MatmulDimension.M,
        grid_tile_width=together,
        wg_dimension=kernels.MatmulDimension[along],
    )
    return kernels.matmul(a, b, None, chosen)


def opponents(call: Call) -> Iterator[Opponent]:
    """Every kernel and config for the operation that its shapes allow."""
    if call.op == "ragged_dot":
        depth, width = call.arrays[1].shape[1:]
        for config in RAGGED:
            # Tiles that are visited together must divide the columns, which backward are the inner dimension.
            if any(size % (config[1] * config[3]) for size in ((width, depth) if call.backward else (width,))):
                continue
            if not call.backward:
                yield Opponent(f"jax ragged_dot_mgpu{config}", functools.partial(ragged, config=config))
                continue
            for other in TRANSPOSED:
                if depth % other[0] == 0 and width % (other[1] * other[3]) == 0:
                    fn = ragged_with_gradients(config, other)
                    yield Opponent(f"jax ragged_dot_mgpu{config} and transposed{other}", fn, derived=False)
                    # The forward kernel's configs matter more than their product with these.
                    break
    elif call.op == "matmul" and len(call.arrays) == 2 and not call.static and not call.backward:
        m, n = call.arrays[0].shape[0], call.arrays[1].shape[1]
        for config in MATMUL:
            rows, columns = config[0] * (1 + (config[2] == "M")), config[1] * (1 + (config[2] == "N"))
            if m % rows == 0 and n % columns == 0:
                yield Opponent(f"jax hopper_matmul{config}", functools.partial(matmul, config=config))
