"""The kernel class: an operation with a computation, a heuristic cfg and candidates.

Of the variants of a method the most specific one that the class defines runs. One class has one name: two that share a
cache, a store or an executor would share their entries.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from .errors import BadNameError, ConfigTypeError, KernelError
from .invocation import Cfg, Invocation, Out

_OP_ID = re.compile(r"[A-Za-z0-9_.-]+")
_F = TypeVar("_F", bound=Callable[..., Any])


def absent(method: _F) -> _F:
    """Marks a method that a kernel may define and this class does not."""
    method._is_absent = True  # type: ignore[attr-defined]
    return method


class Kernel(Generic[Cfg, Out]):
    """Subclass this: define `run` and `heuristic_cfg`, and `candidate_cfgs` for what may be measured."""

    op_id: str = ""
    version: str = "0"
    key_builder: Callable[[Any], str] | None = None
    # Optional, for tuning: the cfg's class, and the largest error allowed (None: by the output's dtype).
    cfg_type: type | None = None
    tolerance: float | None = None

    _checked: ClassVar[bool] = False
    _named: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a class without an `op_id` its own name; `check_class` follows when it is first made or used."""
        super().__init_subclass__(**kwargs)
        cls._checked = False
        cls._named = cls._named or "op_id" in cls.__dict__
        if not cls._named:
            cls.op_id = f"{cls.__module__}.{cls.__name__}"

    def __init__(self, op_id: str | None = None) -> None:
        if not self._checked:
            check_class(type(self))
        if op_id is not None:
            self.op_id = _check_op_id(op_id, type(self))

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normalises a call before anything else sees it."""
        return args, kwargs

    @absent
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The computation; `cfg` comes by keyword."""
        raise NotImplementedError

    @absent
    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Any:
        """A good default for this call, never measured."""
        raise NotImplementedError

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Any]:
        """The cfgs to measure for this call: the heuristic one alone, unless a kernel defines more."""
        # Only a call has a device; the class itself does without that module.
        from .device import platform_of

        return [variant(self, "heuristic_cfg", platform=platform_of(inv), method=inv.method)(inv)]

    @absent
    def fwd_with_residuals(self, *args: Any, **kwargs: Any) -> Any:
        """The computation and the values that its gradient needs: `(out, residuals)`."""
        raise NotImplementedError

    @absent
    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """One gradient per positional argument, None where there is none."""
        raise NotImplementedError

    @absent
    def create_shard_map_wrapper(self, *args: Any, **kwargs: Any) -> Any:
        """The function that runs the kernel sharded: `(fn, args)` or `(fn, args, callback)`."""
        raise NotImplementedError

    @absent
    def example_inputs(self, inv: Invocation[Cfg, Out], rng: Any) -> Any:
        """Arguments to measure with, where values matter: `(args, kwargs)`."""
        raise NotImplementedError

    @absent
    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The right result, which every candidate must compute."""
        raise NotImplementedError

    @absent
    def operations(self, inv: Invocation[Cfg, Out]) -> float:
        """Operations of a forward pass, where the reference computes more than it needs, or they do not show."""
        raise NotImplementedError

    def valid_cfg(self, inv: Invocation[Cfg, Out], cfg: Any) -> bool | str:
        """True, or the reason why this cfg cannot run this call."""
        return True


def versioned(kernel: Kernel[Any, Any]) -> str:
    """The operation's name in every key: `op@vN`."""
    return f"{kernel.op_id}@v{kernel.version}"


def kernel_path(kernel: Kernel[Any, Any]) -> str:
    """The kernel's class as `module:qualname`, to import it by."""
    return f"{type(kernel).__module__}:{type(kernel).__qualname__}"


def check_cfg_type(kernel: Kernel[Any, Any], cfg: Any, origin: str) -> Any:
    """The cfg itself, or an error where the kernel declares another type."""
    kind = kernel.cfg_type
    if kind is not None and not isinstance(cfg, kind):
        raise ConfigTypeError(
            f"{origin} of kernel {versioned(kernel)} is {cfg!r}, a {type(cfg).__qualname__}; "
            f"the kernel declares cfg_type = {kind.__qualname__}"
        )
    return cfg


def key_builder_of(kernel: Kernel[Any, Any]) -> Callable[[Any], str] | None:
    """The kernel's key builder as a function of the invocation alone, however it was written."""
    if "key_builder" in vars(kernel):
        return vars(kernel)["key_builder"]  # type: ignore[no-any-return]
    raw = next(vars(base)["key_builder"] for base in type(kernel).__mro__ if "key_builder" in vars(base))
    if raw is None:
        return None
    # A plain function or lambda in the class body takes the invocation; a method takes self first.
    if inspect.isfunction(raw) and len(_required(raw)) < 2:
        return raw
    # A partial, which Python is about to make a method as well, is a function of the invocation.
    return raw if isinstance(raw, functools.partial) else kernel.key_builder


def _required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


@functools.lru_cache(maxsize=1024)
def _is_op_id(text: str) -> bool:
    return _OP_ID.fullmatch(text) is not None


def _check_op_id(op_id: Any, cls: type) -> str:
    if not isinstance(op_id, str) or not _is_op_id(op_id):
        raise BadNameError(
            f"{cls.__qualname__} has the op_id {op_id!r}; use letters, digits, '_', '.' and '-', such as 'matmul'"
        )
    return op_id


def _check_tolerance(tolerance: Any, name: str) -> None:
    if tolerance is None or isinstance(tolerance, property):
        return
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise KernelError(
            f"kernel {name} has the tolerance {tolerance!r}; give the largest error of neighbouring values over their "
            "own size, such as 1e-3, 0 for none at all, or None for a limit by dtype"
        )


def check_kernel(kernel: Kernel[Any, Any]) -> None:
    """Raises unless the kernel keeps the contract, whatever its own constructor did."""
    if not isinstance(kernel, Kernel):
        hint = "; make an instance of it" if isinstance(kernel, type) else ""
        raise KernelError(f"{kernel!r} is no kernel: pass an instance of a subclass of Kernel{hint}")
    check_class(type(kernel))
    _check_op_id(kernel.op_id, type(kernel))


def check_class(cls: type[Kernel[Any, Any]]) -> None:
    """Raises unless the class keeps the contract; checks once, when the class is first made or used."""
    if cls._checked:
        return
    name = f"{cls.__module__}.{cls.__qualname__}"
    for method, spelling in (("run", "run(self, *args, cfg, **kwargs)"), ("heuristic_cfg", "heuristic_cfg(self, inv)")):
        if not has_any(cls, method):
            raise KernelError(f"kernel {name} has no {method}; define {spelling}")
    slots = [slot for base in cls.__mro__ for slot in vars(base).get("__slots__", ())]
    if slots:
        raise KernelError(
            f"kernel {name} has __slots__ ({', '.join(slots)}), which vars() does not show, so that kernels with other "
            "values could not be told apart; leave them out (slots=False)"
        )
    half = lonely_half(cls)
    if half:
        raise KernelError(f"kernel {name} defines {half}; an own gradient is a forward and a vjp of one level")
    _check_op_id(cls.op_id, cls)
    _check_tolerance(inspect.getattr_static(cls, "tolerance"), name)
    cls._checked = True


PLATFORMS = ("gpu", "tpu", "cpu")
SUFFIXES = ("", "_shard_map", *(f"_{p}" for p in PLATFORMS), *(f"_shard_map_{p}" for p in PLATFORMS))


def levels(platform: str, method: str | None) -> tuple[str, ...]:
    """The suffixes that apply to a call, most specific first."""
    sharded = (f"_shard_map_{platform}", "_shard_map") if method == "shard_map" else ()
    return (*sharded, f"_{platform}", "")


def has_any(cls: type, name: str) -> bool:
    """Does the class define the method at any level?"""
    return any(_defines(cls, name + suffix) for suffix in SUFFIXES)


def variant(kernel: Any, name: str, *, platform: str, method: str | None = None) -> Callable[..., Any]:
    """The most specific variant of one method."""
    for suffix in levels(platform, method):
        if _defines(type(kernel), name + suffix):
            return getattr(kernel, name + suffix)  # type: ignore[no-any-return]
    raise KernelError(
        f"kernel {type(kernel).__qualname__} has no {name} for {platform}"
        f"{' under shard_map' if method == 'shard_map' else ''}; define {name} or {name}_{platform}"
    )


def gradient(kernel: Any, *, platform: str, method: str | None = None) -> tuple[Any, Any] | None:
    """Forward with residuals and its `vjp`, from the most specific level that has both."""
    for suffix in levels(platform, method):
        if _defines(type(kernel), "fwd_with_residuals" + suffix) and _defines(type(kernel), "vjp" + suffix):
            return getattr(kernel, "fwd_with_residuals" + suffix), getattr(kernel, "vjp" + suffix)
    return None


def lonely_half(cls: type) -> str:
    """A forward pass or a `vjp` where no level of the class has both; empty where there is none."""
    pairs = [("fwd_with_residuals" + suffix, "vjp" + suffix) for suffix in SUFFIXES]
    if any(_defines(cls, one) and _defines(cls, other) for one, other in pairs):
        return ""
    either = [pair for pair in pairs for pair in (pair, pair[::-1])]
    return next((f"{one} without {other}" for one, other in either if _defines(cls, one)), "")


def _defines(cls: type, name: str) -> bool:
    found = getattr(cls, name, None)
    return callable(found) and not getattr(found, "_is_absent", False)


class KernelNames:
    """The classes behind the operations that were called so far in one place."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def claim(self, kernel: Kernel[Any, Any]) -> None:
        """Raises where another class has the operation's name and version; one of the same name replaces it."""
        name, path = versioned(kernel), kernel_path(kernel)
        # A cell that was edited and run again, or a module that was reloaded, defines a class of the same path.
        known = self._paths.setdefault(name, path)
        if known != path:
            raise KernelError(
                f"kernels {known} and {path} are both called {name}, so that each would run with cfgs that were tuned "
                "for the other; give one of them another op_id or version"
            )


_of_paths: dict[str, KernelNames] = {}
_of_objects: WeakKeyDictionary[Any, KernelNames] = WeakKeyDictionary()
_lock = threading.Lock()


def names_in(store: Any) -> KernelNames:
    """The names of a store: those of its path where it has one, since several objects may stand for one file."""
    path = getattr(store, "path", None) or getattr(store, "folder", None)
    with _lock:
        if isinstance(path, (str, os.PathLike)):
            return _of_paths.setdefault(os.path.realpath(path), KernelNames())
        try:
            return _of_objects.setdefault(store, KernelNames())
        # An object without an address that can be watched, or without a hash.
        except TypeError:
            return KernelNames()
