"""A function as a tuned kernel, in three lines."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from ..config.selection import ConfigSelectorChain, Decision
from ..core.errors import KernelError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, check_class, versioned
from ..core.kernel_code import known_by
from ..core.record import Trial
from ..timing.program import UNTRACEABLE
from .arguments import RESERVED, invocation_of, split
from .default import default_executor
from .executor import Executor
from .kernel_check import check
from .short_key import ARRAY, frames_in_force
from .table import NeedsValues
from .tunable_name import operation_name
from .tunable_space import ParameterSpace, of_candidates, of_values

_KINDS = inspect.Parameter


def tunable(
    function: Any = None,
    /,
    *,
    candidates: Iterable[Any] | None = None,
    heuristic: Any = None,
    constraint: Callable[..., bool | str] | None = None,
    reference: Callable[..., Any] | None = None,
    example_inputs: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    op_id: str | None = None,
    version: str = "0",
    executor: Executor[Any, Any] | None = None,
    traced: Iterable[str] = (),
    **values: Iterable[Any],
) -> Callable[[Callable[..., Any]], Tunable]:
    """Makes a function choose some of its parameters by measuring: value lists by name, or whole `candidates`.

    `heuristic` (a dict, a cfg, or a function of the call's arguments) serves untuned, else the first that is allowed.
    `constraint` is called as the function is, and says True, or False or a reason. `reference` computes what is right
    from the call's arguments; `example_inputs(rng, *args, **kwargs)` makes arguments where values matter. Parameters
    named in `traced` are arrays even where a call gives a Python number: their values are not tuned one by one.
    """
    if function is not None:
        named = getattr(function, "__name__", None) or repr(function)
        raise KernelError(
            f"@tunable needs to know what to choose from: write @tunable(block=[16, 32]) above {named}, with a keyword "
            f"parameter `block`, or @tunable(candidates=[...])"
        )

    def declare(function: Callable[..., Any]) -> Tunable:
        name = _name(function)
        if bool(values) == (candidates is not None):
            raise KernelError(f"@tunable of {name} needs value lists, such as block=[16, 32], or candidates=[...]")
        space = of_values(name, values) if values else of_candidates(name, candidates or ())
        _check_parameters(function, space)
        arrays = _traced_places(function, space, traced)
        for title, hook in (
            ("constraint", constraint),
            ("reference", reference),
            ("example_inputs", example_inputs),
        ):
            if hook is not None and not callable(hook):
                raise KernelError(f"{title}={hook!r} of {name} is no function")
        if not isinstance(version, (str, int)):
            raise KernelError(
                f"version={version!r} of {name} is no version; write version='2' (a parameter of that name "
                "cannot be tuned: rename it)"
            )
        if executor is not None and not isinstance(executor, Executor):
            raise KernelError(f"executor={executor!r} of {name} is no Executor; leave it out for the default one")
        guess = heuristic
        if guess is not None and (not callable(guess) or isinstance(guess, space.cfg_type)):
            guess = space.cfg(guess, f"heuristic of {name}")
        members: dict[str, Any] = {
            "function": staticmethod(function),
            "space": space,
            "guess": staticmethod(guess) if callable(guess) else guess,
            "constraint": None if constraint is None else staticmethod(constraint),
            "cfg_type": space.cfg_type,
            "tolerance": tolerance,
            "op_id": op_id if op_id is not None else operation_name(function, name),
            "version": str(version),
        }
        if reference is not None:
            members["reference"] = lambda self, *args, **kwargs: reference(*args, **kwargs)
        if example_inputs is not None:
            members["example_inputs"] = lambda self, inv, rng: example_inputs(rng, *inv.args, **inv.kwargs)
        kind = _kernel_type(function, members)
        known_by(kind, [hook for hook in (function, constraint) if hook is not None], space.text)
        return Tunable(function, kind, executor, arrays)

    return declare


class TunableKernel(Kernel[Any, Any]):
    """The kernel behind a tunable function; each function has a class of its own."""

    op_id = "tunable"
    function: Callable[..., Any]
    space: ParameterSpace
    guess: Any
    constraint: Callable[..., bool | str] | None

    def run(self, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        """The function with the parameters that were chosen."""
        self._refuse_chosen(kwargs)
        return self.function(*args, **self.space.keywords(cfg), **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        """The cfg of the declaration, else the first one that the constraint allows."""
        # Every choice starts here: a call that cannot be made is an error before it is tuned.
        self._refuse_chosen(inv.kwargs)
        self._refuse_misfit(inv)
        if self.guess is None:
            found = next((cfg for cfg in self.space.cfgs() if self._allows(inv, cfg) is True), None)
            if found is None:
                raise KernelError(
                    f"the constraint of {versioned(self)} leaves no candidate for this call: {_call(inv)}"
                )
            return found
        said = self.guess(*inv.args, **inv.kwargs) if callable(self.guess) else self.guess
        cfg = self.space.cfg(said, f"heuristic of {versioned(self)}")
        verdict = self._allows(inv, cfg)
        if verdict is not True:
            why = f": {verdict}" if verdict else ""
            raise KernelError(f"the constraint of {versioned(self)} forbids the heuristic {cfg!r}{why}; {_call(inv)}")
        return cfg

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        """The cfgs of the declared space."""
        return self.space.cfgs()

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: Any) -> bool | str:
        """The constraint's answer: True, or False or a reason."""
        return self._allows(inv, cfg)

    def _allows(self, inv: Invocation[Any, Any], cfg: Any) -> bool | str:
        if self.constraint is None:
            return True
        verdict = self.constraint(*inv.args, **self.space.keywords(cfg), **inv.kwargs)
        return verdict if isinstance(verdict, str) else bool(verdict)

    def _refuse_chosen(self, kwargs: Mapping[str, Any]) -> None:
        given = [name for name in self.space.names if name in kwargs]
        if given:
            raise KernelError(
                f"{', '.join(given)} of {versioned(self)} is chosen by tuning; to choose it yourself pass "
                f"cfg={{...}} with a value for each of {', '.join(self.space.names)}"
            )

    def _refuse_misfit(self, inv: Invocation[Any, Any]) -> None:
        # What jit wraps has the words; what another decorator wraps may take other arguments than it shows.
        function: Any = self.function
        if isinstance(function, jax.stages.Wrapped):
            function = function.__wrapped__  # type: ignore[attr-defined]
        keywords = {**dict.fromkeys(self.space.names), **inv.kwargs}
        with contextlib.suppress(TypeError):
            inspect.signature(function, follow_wrapped=False).bind(*inv.args, **keywords)
            return
        # Python itself says best why this cannot be called, and goes no further than that.
        function(*inv.args, **keywords)


class Tunable:
    """A function with tuned parameters that are filled in at each call; `cfg=` of a call chooses by hand."""

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any],
        kernel_type: type[TunableKernel],
        executor: Executor[Any, Any] | None,
        traced: Mapping[str, int | None] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = _visible_signature(function, kernel_type.space)
        # Importable by this very name, so that a kernel written down by its path is found again.
        self.kernel_type = kernel_type
        self.cfg_type = kernel_type.space.cfg_type
        self.kernel = kernel_type()
        # The short key of a call without keywords.
        self._short: Any = kernel_type
        self._executor = executor
        # Parameters that are arrays whatever a call gives, with their place among positional arguments.
        self._traced = dict(traced or {})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function's result, with the best parameters for this call."""
        if self._traced:
            args, kwargs = self._with_arrays(args, kwargs)
        executor = self._executor or default_executor()
        kernel = self.kernel
        if kwargs or kernel.__dict__ or type(executor) is not Executor:
            if "cfg" in kwargs or "_cfg" in kwargs:
                kwargs = self._with_cfg(kwargs)
            return executor(kernel, *args, **kwargs)
        # The executor's own short way, written out for a kernel without attributes and a call without keywords.
        for arg in args:
            if type(arg) is not ARRAY:
                return executor(kernel, *args)
        entry = executor.find(self._short)
        if entry is None or entry.count != len(args) or frames_in_force():
            return executor(kernel, *args)
        entry.hot = True
        try:
            return entry.fn(*args)
        # A new shape that cannot be measured, or traced, without its values.
        except (NeedsValues, *UNTRACEABLE):
            entry.forget_failures()
            return executor.call_anew(kernel, args, {})

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds a method: the instance is the first argument, a static value or a tree of arrays."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def executor(self) -> Executor[Any, Any]:
        """The executor that calls go through."""
        return self._executor or default_executor()

    def choose(self, /, *args: Any, **kwargs: Any) -> Any:
        """The cfg that such a call would run with."""
        args, kwargs = self._with_arrays(args, kwargs)
        return self.executor.choose_config(self.kernel, *args, **self._with_cfg(kwargs))

    def tune(self, /, *args: Any, **kwargs: Any) -> Decision:
        """Tunes such a call now, whatever is known already: the cfg, and the record of how it was found."""
        selector = self.executor.chooser
        if not isinstance(selector, ConfigSelectorChain):
            raise KernelError(f"{self.__name__}.tune needs an executor over a ConfigSelectorChain, not {selector!r}")
        args, kwargs = self._with_arrays(args, kwargs)
        options, keywords = split(self.kernel, kwargs)
        return selector.tune(invocation_of(self.kernel, args, keywords, options), self.kernel)

    def explain(self, /, *args: Any, **kwargs: Any) -> Any:
        """Says why such a call gets the cfg that it would get now: an `Explanation`; nothing is tuned or kept."""
        # By its public name: explanations are made in a later room, and only where one is asked for.
        from .. import explain

        return explain(self.kernel, *args, executor=self.executor, **self._with_cfg(kwargs))

    def check(self, /, *args: Any, **kwargs: Any) -> tuple[Trial, ...]:
        """Runs every candidate of such a call and says whether it computes the right thing; nothing is timed."""
        args, kwargs = self._with_arrays(args, kwargs)
        return check(self.kernel, *args, **kwargs)

    def _with_arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = list(args)
        for name, place in self._traced.items():
            if name in kwargs:
                kwargs = {**kwargs, name: _array(kwargs[name])}
            elif place is not None and place < len(given):
                given[place] = _array(given[place])
        return tuple(given), kwargs

    def _with_cfg(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        for spelling in ("cfg", "_cfg"):
            if kwargs.get(spelling) is not None:
                cfg = self.kernel.space.cfg(kwargs[spelling], f"cfg= of {self.__name__}")
                kwargs = {**kwargs, spelling: cfg}
        return kwargs

    def __repr__(self) -> str:
        return f"<tunable {versioned(self.kernel)}: {', '.join(self.kernel.space.names)}>"


def _name(function: Any) -> str:
    if not callable(function) or isinstance(function, (type, staticmethod, classmethod)):
        raise KernelError(f"@tunable decorates a function, not {function!r}; put it below @staticmethod")
    return str(getattr(function, "__name__", "")) or type(function).__name__


def _check_parameters(function: Any, space: ParameterSpace) -> None:
    """Raises where the function cannot be called as it is declared."""
    name = _name(function)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is _KINDS.VAR_KEYWORD for p in parameters.values())
    whole = space.names == ("cfg",)
    for chosen in space.names:
        parameter = parameters.get(chosen)
        if parameter is None and not takes_any:
            hint = "cfgs are passed whole" if whole else f"it has {', '.join(parameters) or 'none'}"
            raise KernelError(f"{name} has no parameter {chosen!r} ({hint}); add it as a keyword, `*, {chosen}`")
        if parameter is not None and parameter.kind not in (_KINDS.KEYWORD_ONLY, _KINDS.POSITIONAL_OR_KEYWORD):
            raise KernelError(f"{chosen!r} of {name} cannot be passed by keyword; declare it after `*`")
    reserved = sorted((RESERVED & {*parameters, *space.names}) - ({"cfg"} if whole else set()))
    if reserved:
        raise KernelError(f"{name} has the parameter {reserved[0]!r}, a keyword of the executor's own; rename it")


def _traced_places(function: Any, space: ParameterSpace, traced: Iterable[str]) -> dict[str, int | None]:
    """The place of each named parameter among the positional arguments of a call; None for keywords alone."""
    name = _name(function)
    if isinstance(traced, str) or not all(isinstance(one, str) for one in traced):
        raise KernelError(f"traced={traced!r} of {name} is no list of parameters; write traced=('scale',)")
    mine = [p for p in inspect.signature(function).parameters.values() if p.name not in space.names]
    positional = [p.name for p in mine if p.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)]
    places: dict[str, int | None] = {}
    for one in traced:
        if one in space.names:
            raise KernelError(f"traced of {name} names {one!r}, which is tuned; name parameters that a call gives")
        if one not in positional and not any(p.name == one and p.kind is _KINDS.KEYWORD_ONLY for p in mine):
            raise KernelError(f"traced of {name} names {one!r}; it has {', '.join(p.name for p in mine) or 'none'}")
        places[one] = positional.index(one) if one in positional else None
    return places


def _array(value: Any) -> Any:
    """A Python number as an array of a weak type, as JAX would trace it; everything else as it is."""
    return jax.numpy.asarray(value) if type(value) in (bool, int, float, complex) else value


def _visible_signature(function: Any, space: ParameterSpace) -> inspect.Signature:
    """The function's parameters without those that tuning fills in, and `cfg`."""
    signature = inspect.signature(function)
    mine = [p for p in signature.parameters.values() if p.name not in space.names]
    cfg = inspect.Parameter("cfg", _KINDS.KEYWORD_ONLY, default=None)
    place = next((i for i, p in enumerate(mine) if p.kind is _KINDS.VAR_KEYWORD), len(mine))
    return signature.replace(parameters=[*mine[:place], cfg, *mine[place:]])


def _kernel_type(function: Any, members: dict[str, Any]) -> type[TunableKernel]:
    space: ParameterSpace = members["space"]
    module, qualified = function.__module__, getattr(function, "__qualname__", members["op_id"])

    def run(self: TunableKernel, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        return TunableKernel.run(self, *args, cfg=cfg, **kwargs)

    # Code that binds keywords to positions looks at the function's own parameters.
    signature = _visible_signature(function, space)
    kernel = inspect.Parameter("_kernel", _KINDS.POSITIONAL_ONLY)
    run.__signature__ = signature.replace(parameters=[kernel, *signature.parameters.values()])  # type: ignore[attr-defined]
    place = {"__module__": module, "__qualname__": f"{qualified}.kernel_type", "run": run}
    made = type(f"{_name(function)}_kernel", (TunableKernel,), {**members, **place})
    check_class(made)
    # The generated cfg type is found by the function's own name as well; one of the user's stays as it is.
    if space.names != ("cfg",):
        space.cfg_type.__module__, space.cfg_type.__qualname__ = module, f"{qualified}.cfg_type"
    return made


def _call(inv: Invocation[Any, Any]) -> str:
    parts = [f"{name} = {text}" for name, text in inv.parts.items() if name != "scheme"]
    return f"{'; '.join(parts)}. Declare values that fit it, or loosen the constraint"
