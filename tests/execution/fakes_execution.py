"""Stand-ins for the executor's tests: choosers and tuners that remember what they were asked, kernels that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, device_fingerprint
from ejkernel.ops.core.stable import is_array


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of a tree's arrays in order."""
    return [tuple(leaf.shape) for leaf in jax.tree_util.tree_leaves(tree) if is_array(leaf)]


@dataclass(frozen=True)
class Question:
    """What a chooser was asked, without the arrays."""

    op_id: str
    shapes: tuple[tuple[int, ...], ...]
    batch_axes: Any
    override_cfg: Any
    stamp: bool
    method: str | None
    mesh: Any
    in_specs: Any
    out_specs: Any
    check_vma: bool
    keywords: tuple[str, ...]
    traced: bool
    call_key: str

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes of the vmaps around the call, innermost first."""
        return [size for size, _ in self.batch_axes or ()]


class Asked:
    """A chooser of the user's own: answers with one cfg, or with the next of several, and remembers the questions."""

    def __init__(self, *cfgs: Any) -> None:
        self.cfgs = list(cfgs) or [1]
        self.questions: list[Question] = []

    def choose(self, inv, kernel):
        leaves = jax.tree_util.tree_leaves((inv.args, dict(inv.kwargs)))
        self.questions.append(
            Question(
                op_id=inv.op_id,
                shapes=tuple(shapes_of((inv.args, dict(inv.kwargs)))),
                batch_axes=inv.batch_axes,
                override_cfg=inv.override_cfg,
                stamp=inv.stamp,
                method=inv.method,
                mesh=inv.mesh,
                in_specs=inv.in_specs,
                out_specs=inv.out_specs,
                check_vma=inv.check_vma,
                keywords=tuple(inv.kwargs),
                traced=any(isinstance(leaf, jax.core.Tracer) for leaf in leaves),
                call_key=inv.call_key,
            )
        )
        return self.cfgs.pop(0) if len(self.cfgs) > 1 else self.cfgs[0]

    @property
    def count(self) -> int:
        return len(self.questions)

    @property
    def last(self) -> Question:
        return self.questions[-1]


class Picking:
    """A tuner of the user's own: takes the last candidate, runs nothing, and remembers what it was given."""

    def __init__(self) -> None:
        self.shapes: list[list[tuple[int, ...]]] = []
        self.kinds: list[list[type]] = []
        self.traced: list[bool] = []
        self.integers: list[list[list[int]]] = []

    @property
    def calls(self) -> int:
        return len(self.shapes)

    def autotune(self, make_fn, args, kwargs, candidates):
        leaves = [leaf for leaf in jax.tree_util.tree_leaves((args, dict(kwargs))) if is_array(leaf)]
        self.shapes.append(shapes_of(leaves))
        self.kinds.append([type(leaf) for leaf in leaves])
        self.traced.append(any(isinstance(leaf, jax.core.Tracer) for leaf in leaves))
        concrete = [leaf for leaf in leaves if not isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))]
        self.integers.append([np.asarray(x).tolist() for x in concrete if jnp.issubdtype(x.dtype, jnp.integer)])
        return list(candidates)[-1]


class Running(Picking):
    """The same, but every candidate is run on what was given, as a simple tuner would."""

    def autotune(self, make_fn, args, kwargs, candidates):
        for cfg in candidates:
            jax.block_until_ready(make_fn(cfg)(*args, **kwargs))
        return super().autotune(make_fn, args, kwargs, candidates)


class Counting(Kernel[Any, Any]):
    """A kernel whose subclasses count how often `run` is entered: once per trace, or per call where nothing is traced.

    `fresh()` makes a subclass with a log of its own, so that no test sees another's programs.
    """

    op_id = "counting"
    log: Sequence[Any] = ()
    candidates: Sequence[Any] = (2, 3, 5)

    @classmethod
    def fresh(cls, **attributes: Any) -> type[Counting]:
        return type(f"Fresh{cls.__name__}", (cls,), {"log": [], **attributes})

    def heuristic_cfg(self, inv):
        return self.candidates[0]

    def candidate_cfgs(self, inv):
        return list(self.candidates)


class Times(Counting):
    """The argument times the cfg: the result shows which cfg ran."""

    op_id = "times"

    def run(self, x, *, cfg):
        self.log.append(cfg)
        return x * cfg


class Cubic(Counting):
    """`x**3 / 2 + x`, whatever the cfg says."""

    op_id = "cubic"

    def run(self, x, *, cfg):
        self.log.append(cfg)
        return x * x * x * 0.5 + x


class OwnCubic(Cubic):
    """The same with a gradient of its own."""

    op_id = "own_cubic"

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), x

    def vjp(self, residuals, y, dy, x, *, cfg):
        return (dy * (1.5 * residuals * residuals + 1.0),)


class Product(Counting):
    """`a * b` with a gradient of its own for both."""

    op_id = "product"

    def run(self, a, b, *, cfg):
        self.log.append(cfg)
        return a * b

    def fwd_with_residuals(self, a, b, *, cfg):
        return self.run(a, b, cfg=cfg), (a, b)

    def vjp(self, residuals, y, dy, a, b, *, cfg):
        ra, rb = residuals
        return dy * rb, dy * ra


HEURISTICS = AutotunePolicy(allow_autotune=False)


def selector_with(tuner: Any = None, **settings: Any) -> ConfigSelectorChain:
    """A selector with an empty cache; without a tuner it never measures."""
    policy = settings.pop("policy", HEURISTICS if tuner is None else AutotunePolicy())
    return ConfigSelectorChain(ConfigCache(), policy=policy, tuner=tuner or Picking(), **settings)


def executor_with(tuner: Any = None, **settings: Any) -> Executor:
    """An executor over such a selector."""
    return Executor(selector_with(tuner, **settings))


def put(executor: Executor, kernel: Kernel[Any, Any], cfg: Any, *args: Any, **kwargs: Any) -> None:
    """Puts a cfg for this eager call into the cache behind an executor."""
    executor.chooser.cache.put(*key_for(kernel, *args, **kwargs), cfg)


def key_for(kernel: Kernel[Any, Any], *args: Any, **kwargs: Any) -> tuple[str, str, str]:
    """The key of a plain call on the default device."""
    asked = Asked()
    Executor(asked).choose_config(kernel, *args, **kwargs)
    return device_fingerprint(), f"{kernel.op_id}@v{kernel.version}", asked.last.call_key


def close(got: Any, expected: Any) -> None:
    """The two trees hold the same numbers."""
    jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def by_hand(kernel: Kernel[Any, Any], cfg: Any) -> Callable[..., Any]:
    """The kernel's `run` with its cfg, without an executor."""
    return lambda *args, **kwargs: kernel.run(*args, cfg=cfg, **kwargs)


def mesh_of(*sizes: int, names: str = "ij") -> jax.sharding.Mesh:
    """A mesh over the first local devices, with one letter a name for each axis."""
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(names[: len(sizes)]))
