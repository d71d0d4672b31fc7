"""The result that every candidate must compute: the kernel's own reference, compiled beside the candidates.

It runs in higher precision, float32 and exact products, and once more as it was written: what the two differ by is
noise that a right candidate may have too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from ..timing.compile_pool import Built, CompilePool
from ..timing.inputs import FlatCall, is_float
from ..timing.program import Staged, forward, stage

# The numbers under which its two programs are compiled: no candidate's.
NUMBER, PLAIN = -1, -2
NUMBERS = frozenset((NUMBER, PLAIN))
# Noise of a plain run is at most so many times what a step of rounding in the inputs does; another computation, such
# as other random numbers, differs by over a hundred times that.
_OF_ROUNDING = 16.0


@dataclass(frozen=True)
class ExportedReference:
    """A reference with programs from another process, which has made a more exact one or none."""

    plain: Callable[..., Any]
    exact: Callable[..., Any] | None = None
    # Functions that give the programs of both, in this order.
    compilers: Sequence[Callable[[], Any]] = ()

    @property
    def by_number(self) -> dict[int, Callable[[], Any]]:
        """The functions of `compilers` by the numbers of their programs."""
        order = (NUMBER,) if self.exact is None else (PLAIN, NUMBER)
        return dict(zip(order, self.compilers, strict=False))

    def __call__(self, *args: Any) -> Any:
        """Computes the reference as it was written."""
        return self.plain(*args)


@final
class Reference:
    """Two programs, since every operation of it would else be compiled alone; as it is where that cannot be."""

    def __init__(self, fn: Callable[..., Any], call: FlatCall, leaves: Sequence[Any], *, platform: str) -> None:
        plain = stage(fn, call, leaves, "forward", name="reference")
        self._narrow = any(_is_narrow(leaf) for leaf in leaves)
        self._compilers = fn.by_number if isinstance(fn, ExportedReference) else {}
        exact: Staged | None = None
        if isinstance(fn, ExportedReference):
            exact = None if fn.exact is None else stage(fn.exact, call, leaves, "forward", name="reference")
        # A CPU multiplies float32 as it is: there is nothing more exact.
        elif self._narrow or platform != "cpu":
            exact = _widened(fn, call, leaves, plain)
        # What each is, by its number; without a more exact one the plain one has its place.
        self.staged = {NUMBER: plain} if exact is None else {NUMBER: exact, PLAIN: plain}
        self._as_it_is: Callable[..., Any] = forward(fn, call)
        self._built: dict[int, Callable[..., Any]] = {}
        self._pool: CompilePool | None = None
        # Those that are still being compiled.
        self.coming: set[int] = set()

    @property
    def is_asked_for(self) -> bool:
        """Was it given to a pool?"""
        return self._pool is not None

    def begin(self, pool: CompilePool) -> None:
        """Has both compiled, and not for speed: they run once for each set of inputs."""
        self._pool, self.coming = pool, set(self.staged)
        for number, staged in self.staged.items():
            build = self._compilers.get(number, functools.partial(staged.build, quickly=True))
            pool.give(number, build, stays=True)

    def arrived(self, built: Built) -> None:
        """One is there; what cannot be compiled may still run."""
        self.coming.discard(built.number)
        if not built.failed:
            self._built[built.number] = built.outcome.call

    def is_there_by(self, end: float) -> bool:
        """Waits until then for both; one of them will do."""
        while self._pool is not None and self.coming:
            built = self._pool.late(self.coming, end)
            if built is None:
                break
            self.arrived(built)
        return bool(self._built) or not self.coming

    def __call__(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The right result for these inputs, and that of the reference as written; None where that is not known."""
        plain = self._plain(leaves)
        exact = self._built.get(NUMBER)
        if exact is None:
            return (plain if plain is not None else jax.block_until_ready(self._as_it_is(*leaves))), None
        try:
            right = jax.block_until_ready(exact(*leaves))
        # Float32 needs more memory, say: the reference as it was written may run all the same.
        except jax.errors.JaxRuntimeError:
            if plain is None:
                raise
            return plain, None
        if plain is None:
            return right, None
        # In another precision values may be rounded to other integers, or come in another order.
        merged = jax.tree_util.tree_map(lambda one, other: one if is_float(one) else other, right, plain)
        return merged, plain

    def is_noise(self, leaves: Sequence[Any], right: Any, plain: Any) -> bool:
        """Does the plain run differ by rounding, where it differs by much?

        Where values cancel, rounding is all that is left of them. But a computation may also look at its dtypes, and do
        something else in float32: draw other random numbers, for one.
        """
        if not self._narrow:
            return True
        moved = self._built[NUMBER](*(_moved(leaf) for leaf in leaves))
        trees = [jax.tree_util.tree_leaves(tree) for tree in (right, plain, moved)]
        return all(_is_rounding(*arrays) for arrays in zip(*trees, strict=True) if is_float(arrays[0]))

    def _plain(self, leaves: Sequence[Any]) -> Any:
        run = self._built.get(PLAIN)
        if run is None:
            return None
        try:
            return jax.block_until_ready(run(*leaves))
        # Its noise is welcome, but not needed.
        except jax.errors.JaxRuntimeError:
            if NUMBER not in self._built:
                raise
            return None


def _is_narrow(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, np.floating)) and leaf.dtype.itemsize < 4


def _widened(fn: Callable[..., Any], call: FlatCall, leaves: Sequence[Any], plain: Staged) -> Staged | None:
    """The reference in float32, its outputs in their own dtypes again; None where it takes no such inputs."""
    if plain.traced is None:
        return None
    shapes = plain.traced.out_info

    def wide(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree_util.tree_map(_in_float32, (args, kwargs))
        # In here, so that whatever traces it again, such as exporting, does it so.
        with jax.default_matmul_precision("highest"):
            found = fn(*args, **kwargs)
        return jax.tree_util.tree_map(lambda out, as_it_was: out.astype(as_it_was.dtype), found, shapes)

    try:
        staged = stage(wide, call, leaves, "forward", name="reference")
    # The user's code, which was written for other dtypes, may raise anything.
    except Exception:
        return None
    same = [(out.shape, out.dtype) for out in jax.tree_util.tree_leaves(shapes)]
    found = jax.tree_util.tree_leaves(staged.traced.out_info) if staged.traced is not None else []
    return staged if [(out.shape, out.dtype) for out in found] == same else None


def _in_float32(leaf: Any) -> Any:
    return leaf.astype(np.float32) if hasattr(leaf, "dtype") and _is_narrow(leaf) else leaf


def _moved(leaf: Any) -> Any:
    """Each value of a narrow type a step of rounding up or down."""
    if not _is_narrow(leaf):
        return leaf
    step = 2.0 * float(jax.numpy.finfo(leaf.dtype).eps)
    signs = jax.random.rademacher(jax.random.key(0), leaf.shape, np.float32)
    return (jax.numpy.asarray(leaf, np.float32) * (1 + step * signs)).astype(leaf.dtype)


def _is_rounding(right: Any, plain: Any, moved: Any) -> bool:
    kind = np.complex128 if jax.numpy.issubdtype(right.dtype, np.complexfloating) else np.float64
    right, plain, moved = (np.asarray(x).astype(kind) for x in (right, plain, moved))
    if not np.array_equal(np.isfinite(right), np.isfinite(plain)):
        return False
    finite = np.isfinite(right) & np.isfinite(moved)
    off, step = (float(np.linalg.norm((x - right)[finite])) for x in (plain, moved))
    return off <= _OF_ROUNDING * step
