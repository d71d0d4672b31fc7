"""The space of a tunable function: the declared values, and a cfg type that is made of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import codec
from ..core.errors import ConfigTypeError, KernelError


@dataclass(frozen=True)
class ParameterSpace:
    """The cfgs of a tunable function, and the keywords that one of them becomes."""

    cfg_type: type
    # The parameters that tuning fills in; `cfg` alone where candidates are passed whole.
    names: tuple[str, ...]
    # In the order of their declaration; made anew for each call, since a product may be large.
    cfgs: Callable[[], Iterable[Any]]
    keywords: Callable[[Any], dict[str, Any]]
    # Everything that was declared, as JSON text.
    text: str

    def cfg(self, value: Any, origin: str) -> Any:
        """A cfg from what the user wrote: a cfg already, or a mapping with a value for every parameter."""
        if isinstance(value, self.cfg_type):
            return value
        if isinstance(value, Mapping) and self.names != ("cfg",):
            if set(value) == set(self.names):
                return self.cfg_type(**value)
            raise ConfigTypeError(f"{origin} is {dict(value)!r}; give a value for each of {', '.join(self.names)}")
        wanted = f"a {self.cfg_type.__qualname__}" if self.names == ("cfg",) else f"a dict of {', '.join(self.names)}"
        raise ConfigTypeError(f"{origin} is {value!r}; give {wanted}")


def of_values(name: str, values: Mapping[str, Iterable[Any]]) -> ParameterSpace:
    """Every combination of the values of some parameters; the last one changes fastest."""
    declared = {parameter: _listed(name, parameter, given) for parameter, given in values.items()}
    kind = _cfg_type(name, declared)

    def cfgs() -> Iterable[Any]:
        return (kind(*combination) for combination in itertools.product(*declared.values()))

    text = codec.dumps(codec.encode({parameter: list(offered) for parameter, offered in declared.items()}))
    return ParameterSpace(kind, tuple(declared), cfgs, vars, text)


def of_candidates(name: str, candidates: Iterable[Any]) -> ParameterSpace:
    """The space of these candidates alone: mappings of parameters to values, or cfgs taken whole as `cfg`."""
    if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
        raise KernelError(f"candidates={candidates!r} of {name} is no list; give a list of dicts or of cfgs")
    offered = list(candidates)
    if not offered:
        raise KernelError(f"candidates of {name} is empty; give at least one")
    if all(isinstance(candidate, Mapping) for candidate in offered):
        return _of_mappings(name, offered)
    return _of_whole(name, offered)


def _of_mappings(name: str, offered: Sequence[Mapping[str, Any]]) -> ParameterSpace:
    parameters = list(offered[0])
    for candidate in offered:
        if set(candidate) != set(parameters) or not parameters:
            raise KernelError(
                f"a candidate of {name} is {dict(candidate)!r}, another one {dict(offered[0])!r}; "
                "every candidate gives a value to the same parameters"
            )
    declared = {p: _listed(name, p, [candidate[p] for candidate in offered]) for p in parameters}
    kind = _cfg_type(name, declared)
    cfgs = tuple(kind(**candidate) for candidate in offered)
    return ParameterSpace(kind, tuple(parameters), lambda: cfgs, vars, _text(cfgs))


def _of_whole(name: str, offered: Sequence[Any]) -> ParameterSpace:
    kind = type(offered[0])
    for cfg in offered:
        if type(cfg) is not kind:
            raise KernelError(f"candidates of {name} are of more than one type: {offered[0]!r} and {cfg!r}; use one")
        _spelled(cfg, f"candidate {cfg!r} of {name}")
        try:
            same = codec.decode(kind, codec.encode(cfg))
        except ConfigTypeError as error:
            raise KernelError(f"candidate {cfg!r} of {name} cannot be read back from a store: {error}") from error
        if same != cfg:
            raise KernelError(
                f"candidate {cfg!r} of {name} comes back from a store as {same!r}; annotate the fields of "
                f"{kind.__qualname__} with their types, or use numbers, strings and a frozen dataclass of them"
            )
    cfgs = tuple(offered)
    return ParameterSpace(kind, ("cfg",), lambda: cfgs, lambda cfg: {"cfg": cfg}, _text(cfgs))


def _text(cfgs: Sequence[Any]) -> str:
    return codec.dumps([codec.encode(cfg) for cfg in cfgs])


def _listed(name: str, parameter: str, given: Any) -> tuple[Any, ...]:
    """The values of a parameter, each once."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise KernelError(f"{parameter}={given!r} of {name} is no list of values; write {parameter}=[{given!r}]")
    values: dict[str, Any] = {}
    for value in given:
        where = f"{parameter}={value!r} of {name}"
        text = _spelled(value, where)
        known = values.setdefault(text, value)
        if known != value or type(known) is not type(value):
            raise KernelError(f"{where} and {known!r} are both {text} in a store; give values that differ there")
    if not values:
        raise KernelError(f"{parameter} of {name} has no values; give at least one, or leave {parameter} out")
    return tuple(values.values())


def _spelled(value: Any, where: str) -> str:
    """A value as a store writes it, which tells 1, 1.0 and True apart."""
    try:
        hash(value)
    except TypeError as error:
        raise KernelError(f"{where} cannot be hashed; use a tuple instead of a list, a frozen dataclass") from error
    try:
        return codec.dumps(codec.encode(value))
    except ConfigTypeError as error:
        raise KernelError(f"{where} cannot be kept in a store: {error}; use a name and look it up inside") from error


def _cfg_type(name: str, declared: Mapping[str, tuple[Any, ...]]) -> type:
    """A frozen dataclass: its fields hold declared values alone, and hold them as they were declared."""
    known = {p: {codec.dumps(codec.encode(v)): v for v in values} for p, values in declared.items()}

    # JSON turns tuples into lists and enums into their values: what comes from a store is looked up.
    def look_up(self: Any) -> None:
        for parameter, values in known.items():
            given = getattr(self, parameter)
            text = codec.dumps(codec.encode(given))
            if text not in values:
                offered = ", ".join(map(repr, values.values()))
                raise ConfigTypeError(f"{parameter}={given!r} is not declared for {name}; it has {offered}")
            object.__setattr__(self, parameter, values[text])

    def show(self: Any) -> str:
        return f"{name}({', '.join(f'{p}={getattr(self, p)!r}' for p in known)})"

    return dataclasses.make_dataclass(
        f"{name}_cfg",
        [(p, Any) for p in declared],
        frozen=True,
        repr=False,
        namespace={"__post_init__": look_up, "__repr__": show},
    )
