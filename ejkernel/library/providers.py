"""Implementations from other packages, which a user puts in the race with the library's own."""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Invocation, Kernel
from ..ops.core import invalidation
from ..ops.core.errors import OpsError
from .arguments import ArgumentError, ArgumentTypeError

_PREFIX = "provider:"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
# Adapters that come with the library; the package behind one is imported when it is first asked about a call.
_SHIPPED = {
    **{(operation, "tokamax"): operation for operation in ("attention", "ragged_dot")},
    **{(operation, "jax_triton"): operation for operation in ("softmax", "rms_norm", "layer_norm")},
}
_HOOKS = ("run", "fwd_with_residuals", "vjp", "candidate_cfgs")
_LEVELS = ("", "_gpu", "_cpu", "_tpu")


class ProviderError(OpsError, RuntimeError):
    """A provider that raised, or returned another shape or dtype than the operation has."""


@dataclass(frozen=True)
class Provider:
    """An implementation from another package: `fn` takes what the kernel's `run` takes, without a cfg.

    `supports`, with the same arguments, returns True or the reason that a call is not for it.
    """

    operation: str
    name: str
    fn: Callable[..., Any]
    supports: Callable[..., bool | str]

    def refuses(self, inv: Invocation[Any, Any]) -> str:
        """The reason that a call is not for this provider; empty where it is."""
        try:
            verdict = self.supports(*inv.args, **inv.kwargs)
        # Code of another package: any exception is its answer, and must not end a tuning.
        except Exception as error:
            return f"supports of provider {self.name} raised {type(error).__name__}: {error}"
        return verdict if isinstance(verdict, str) else "" if verdict else f"provider {self.name} does not support this"

    def run(self, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        """The provider's result; an error with its name where it fails, or is of another shape or dtype."""
        what = f"provider {self.name} of {self.operation}"
        try:
            made = self.fn(*args, **kwargs)
        # As above.
        except Exception as error:
            raise ProviderError(f"{what} raised {type(error).__name__}: {error}") from error
        # JAX itself returns lists of some operations, such as `lax.top_k`, and tuples of others.
        made = tuple(made) if isinstance(made, list) and isinstance(wanted, tuple) else made
        found, asked = (jax.tree.map(_described, one) for one in (made, wanted))
        if found != asked:
            raise ProviderError(f"{what} returned {found} in place of {asked}")
        return made


_lock = threading.Lock()
# Replaced as a whole, so that a call reads it without the lock.
_known: Mapping[str, tuple[Provider, ...]] = MappingProxyType({})


def register_provider(
    operation: str,
    name: str,
    fn: Callable[..., Any] | None = None,
    supports: Callable[..., bool | str] | None = None,
) -> None:
    """Adds an implementation from another package to an operation's candidates; a name that is there is replaced.

    It is checked and raced as every candidate, and its name is in cfgs, records and keys. Without `fn` it is one that
    comes with the library: "tokamax" of attention and ragged_dot, "jax_triton" of softmax and the norms.
    """
    _check_operation(operation)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(f"name={name!r} is no name for a provider; use letters, digits, - and _")
    if fn is None:
        fn, shipped = _shipped(operation, name)
        supports = supports or shipped
    for what, given in (("fn", fn), ("supports", supports)):
        if given is not None and not callable(given):
            raise ArgumentTypeError(f"{what} must be a function, got {type(given).__qualname__}")
    made = Provider(operation, name, fn, supports or (lambda *args, **kwargs: True))
    _change(operation, lambda others: (*(one for one in others if one.name != name), made))


def unregister_provider(operation: str, name: str) -> None:
    """Takes a provider out of the race."""
    if name not in {one.name for one in providers(operation)}:
        raise ArgumentError(f"{operation} has no provider {name!r}; it has {[p.name for p in providers(operation)]}")
    _change(operation, lambda others: tuple(one for one in others if one.name != name))


def providers(operation: str) -> tuple[Provider, ...]:
    """The providers of an operation."""
    return _known.get(operation, ())


def with_providers(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel, or one with its operation's providers among the candidates and their names in its key."""
    if not _known:
        return kernel
    found = providers(kernel.op_id.removeprefix("library."))
    if not found:
        return kernel
    kind: Any = type(kernel)
    made: Kernel[Any, Any] = _provided(kind, found)()
    return made


def _change(operation: str, change: Callable[[tuple[Provider, ...]], tuple[Provider, ...]]) -> None:
    global _known
    with _lock:
        left = {**_known, operation: change(_known.get(operation, ()))}
        _known = MappingProxyType({name: some for name, some in left.items() if some})
    # Functions that were planned without it plan once more.
    invalidation.note_everything()


def _check_operation(operation: str) -> None:
    import ejkernel.library as library

    found = [getattr(library, name) for name in library.__all__ if name[0].isupper()]
    kernels = [one for one in found if isinstance(one, type) and issubclass(one, Kernel)]
    names = sorted(one.op_id.removeprefix("library.") for one in kernels)
    if operation not in names:
        raise ArgumentError(f"operation={operation!r} is none of the library; use one of {', '.join(names)}")


def _shipped(operation: str, name: str) -> tuple[Callable[..., Any], Callable[..., bool | str]]:
    place = _SHIPPED.get((operation, name))
    if place is None:
        there = ", ".join(f"{other} of {one}" for one, other in _SHIPPED)
        raise ArgumentError(f"the library brings no provider {name!r} of {operation}; give fn, or use {there}")
    module = importlib.import_module(f".provided.{name}", __package__)
    return getattr(module, place), getattr(module, f"supports_{place}")


@functools.lru_cache(maxsize=64)
def _provided(base: Any, found: tuple[Provider, ...]) -> Any:
    """A kernel class like the base, with these providers among its candidates."""
    by_cfg = {_PREFIX + one.name: one for one in found}

    def provider_of(cfg: Any) -> Provider | None:
        return by_cfg.get(getattr(cfg, "implementation", ""))

    def result(self: Any, provider: Provider, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inv: Invocation[Any, Any] = Invocation(base.op_id, args, kwargs)

        # The plain way, which needs no device, says which shape is right.
        def plain(*args: Any) -> Any:
            return base.run(self, *args, cfg=base.heuristic_cfg(self, inv), **kwargs)

        return provider.run(jax.eval_shape(plain, *args), *args, **kwargs)

    def runs(hook: Any) -> Any:
        @functools.wraps(hook)
        def run(self: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
            provider = provider_of(cfg)
            return hook(self, *args, cfg=cfg, **kwargs) if provider is None else result(self, provider, args, kwargs)

        return run

    def forwards(hook: Any) -> Any:
        @functools.wraps(hook)
        def fwd(self: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
            provider = provider_of(cfg)
            if provider is None:
                return hook(self, *args, cfg=cfg, **kwargs)
            floats = [arg for arg in args if _is_float(arg)]

            def of_floats(*values: Any) -> Any:
                left = iter(values)
                return result(self, provider, tuple(next(left) if _is_float(x) else x for x in args), kwargs)

            return jax.vjp(of_floats, *floats)

        return fwd

    def pulls(hook: Any) -> Any:
        @functools.wraps(hook)
        def vjp(self: Any, residuals: Any, y: Any, dy: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
            if provider_of(cfg) is None:
                return hook(self, residuals, y, dy, *args, cfg=cfg, **kwargs)
            grads = iter(residuals(dy))
            return tuple(next(grads) if _is_float(arg) else None for arg in args)

        return vjp

    def offers(hook: Any) -> Any:
        @functools.wraps(hook)
        def candidate_cfgs(self: Any, inv: Invocation[Any, Any]) -> Iterable[Any]:
            return [*hook(self, inv), *(base.cfg_type(name) for name in by_cfg)]

        return candidate_cfgs

    def valid_cfg(self: Any, inv: Invocation[Any, Any], cfg: Any) -> bool | str:
        provider = provider_of(cfg)
        return base.valid_cfg(self, inv, cfg) if provider is None else provider.refuses(inv) or True

    wrap = dict(zip(_HOOKS, (runs, forwards, pulls, offers), strict=True))
    body: dict[str, Any] = {"valid_cfg": valid_cfg, "__doc__": base.__doc__, "__module__": __name__}
    for name, level in ((name, level) for name in _HOOKS for level in _LEVELS):
        hook = getattr(base, name + level, None)
        if hook is not None and not getattr(hook, "_is_absent", False):
            body[name + level] = wrap[name](hook)
    body["op_id"] = ".".join((base.op_id, *(one.name for one in found)))
    return type("_with_".join((base.__name__, *(one.name for one in found))), (base,), body)


def _described(x: Any) -> str:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return f"a {type(x).__qualname__}"
    return f"{x.dtype.name}{list(x.shape)}"


def _is_float(arg: Any) -> bool:
    return arg is not None and bool(jnp.issubdtype(arg.dtype, jnp.floating))
