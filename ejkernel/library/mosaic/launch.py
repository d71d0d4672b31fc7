"""The call of a Mosaic GPU kernel, on every supported JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from ...ops import _jax
from ..varying import all_alike, varying_like

# Untyped: its signatures change from version to version.
plgpu: Any = mosaic_gpu
# JAX 0.10.0 has other names for what a kernel makes and for what it holds.
_NAMES = ("out_type", "scratch_types")
if "out_type" not in inspect.signature(plgpu.kernel).parameters:
    _NAMES = ("out_shape", "scratch_shapes")
# An index beside the reference was required once, and is gone now.
_WITH_INDEX = getattr(inspect.signature(plgpu.load).parameters.get("idx"), "default", None) is inspect.Parameter.empty
# A block's threads are in groups of four warps.
LANES = 128


def launch(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    scratch: Sequence[Any] = (),
    groups: dict[str, int] | None = None,
    interpret: bool,
    name: str,
    **params: Any,
) -> Sequence[jax.Array]:
    """Runs the kernel over a grid of named axes; `groups` names the warpgroups of a block and says how many.

    `interpret` is for tests, on machines without a GPU.
    """
    out, operands = all_alike(out, operands)
    threads: dict[str, Any] = {}
    if groups:
        ((threads["thread_name"], threads["num_threads"]),) = groups.items()
    how = {"lowering_semantics": plgpu.LoweringSemantics.Warpgroup, **params}
    kernel = plgpu.kernel(
        body,
        **{_NAMES[0]: list(out), _NAMES[1]: scratch},
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(**how),
        interpret=_jax.gpu_interpreter() if interpret else None,
        kernel_name=name,
        **threads,
    )
    # Kernels, and JAX's pipelines inside them, count in 32 bits.
    with jax.enable_x64(False):
        made: Sequence[jax.Array] = kernel(*operands)
    # Inside shard_map JAX forgets what a kernel's results vary over, though it was told.
    return [varying_like(one, *operands) for one in made]


def load(ref: Any, layout: Any, *, interpret: bool, **how: Any) -> jax.Array:
    """The array behind a reference, in registers of this layout; the interpreter has no layouts."""
    if interpret:
        return ref[...]  # type: ignore[no-any-return]
    index = ((),) if _WITH_INDEX else ()
    made: jax.Array = plgpu.load(ref, *index, layout=layout, **how)
    return made


def places(size: int, layout: Any, *, interpret: bool) -> jax.Array:
    """The numbers from 0 to before the size, in these registers."""
    counted: jax.Array = jax.lax.broadcasted_iota("int32", (size,), 0)
    return counted if interpret else plgpu.layout_cast(counted, layout)


def loop(count: Any, step: Callable[[Any, Any], Any], state: Any, *, interpret: bool) -> Any:
    """`fori_loop` from 0; the interpreter of JAX 0.10.0 has no loops over references."""
    if interpret and isinstance(count, int) and jax.__version_info__ < (0, 10, 2):
        for number in range(count):
            state = step(jnp.int32(number), state)
        return state
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), step, state)
