"""The fingerprint of a kernel's code: an entry that was tuned for other code must be measured again."""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .kernel import SUFFIXES, Kernel
from .source import Definition, bound_names, class_definition, definition_of, meaning, names_used, parts_of

# A change of what counts, or of how it is written, changes every fingerprint: then this number moves too.
_SCHEME = "1"
# What a tuning measured, and among what. A heuristic cfg, a reference or example inputs change no entry.
_METHODS = ("run", "fwd_with_residuals", "vjp", "candidate_cfgs", "valid_cfg")
_MEASURED = (*(name + suffix for name in _METHODS for suffix in SUFFIXES), "prepare", "create_shard_map_wrapper")
# Written by hand or by a decorator such as `dataclass`, which leaves no source.
_CONSTRUCTORS = ("__init__", "__post_init__")
_PLAIN = (bool, int, float, str, bytes, type(None))

_known: WeakKeyDictionary[type, str] = WeakKeyDictionary()
# Kernels that are made of functions.
_declared: WeakKeyDictionary[type, tuple[Sequence[Callable[..., Any]], str]] = WeakKeyDictionary()


def known_by(kind: type, functions: Sequence[Callable[..., Any]], more: str) -> None:
    """Lets a kernel class that is not written out be known by the functions behind it, and by some text."""
    _declared[kind] = functions, more


def code_of(kernel: Kernel[Any, Any]) -> str:
    """The fingerprint of a kernel's code; empty where its author gave it a version, or where the source is missing."""
    if kernel.version != Kernel.version:
        return ""
    kind = type(kernel)
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _fingerprint(kind)
    return found


def function_code(functions: Sequence[Callable[..., Any]], more: str = "") -> str:
    """The fingerprint of some functions and of what they use of their modules; empty where a source is missing."""
    found = [definition_of(function) for function in functions]
    return "" if None in found else _hashed(_Closure().of([one for one in found if one is not None]), more)


def _fingerprint(kind: type[Kernel[Any, Any]]) -> str:
    if kind in _declared:
        return function_code(*_declared[kind])
    closure = _Closure(kind)
    roots: list[Definition] = []
    for name in _MEASURED:
        for method in closure.methods(name):
            if method is None:
                return ""
            roots.append(method)
    roots += [method for name in _CONSTRUCTORS for method in closure.methods(name) if method is not None]
    cfg = kind.cfg_type
    known = class_definition(cfg) if cfg is not None and cfg.__module__ == kind.__module__ else None
    return _hashed(closure.of([*roots, *([] if known is None else [known])]))


def _hashed(pieces: Sequence[str], more: str = "") -> str:
    text = json.dumps([_SCHEME, more, sorted(set(pieces))])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Closure:
    """Some definitions, and everything of their modules that they use by name."""

    def __init__(self, kind: type | None = None) -> None:
        own = [] if kind is None else [base for base in kind.__mro__ if _is_users(base)]
        self._classes = own
        self._bodies = [class_definition(base) for base in own]
        self._seen: set[ast.AST] = {body.node for body in self._bodies if body is not None}
        self._texts: list[str] = []

    def of(self, roots: Sequence[Definition]) -> list[str]:
        """The meaning of each, as text."""
        waiting = list(roots)
        while waiting:
            definition = waiting.pop()
            node = _undecorated(definition.node)
            if definition.node in self._seen:
                continue
            self._seen.add(definition.node)
            self._texts.append(json.dumps(meaning(node), sort_keys=True))
            for name in sorted(names_used(node)):
                waiting += self._behind(name, definition)
            # Of any object: `self`, `type(self)` and the class by its name lead to one and the same member.
            for name in sorted(_attributes(node)):
                waiting += [method for method in self.methods(name) if method is not None]
                waiting += self._attribute(name)
        return self._texts

    def methods(self, name: str) -> Iterator[Definition | None]:
        """The definition of a method that runs, and those that it reaches by `super`; None for a missing source."""
        for base in self._classes:
            member = vars(base).get(name)
            if not (callable(member) or hasattr(member, "__func__") or isinstance(member, property)):
                continue
            found = definition_of(member)
            yield found
            if found is None or "super" not in names_used(found.node):
                return

    def _attribute(self, name: str) -> Iterator[Definition]:
        """The statements about an attribute in the bodies of the classes."""
        for body in self._bodies:
            for node in [] if body is None else bound_names(body.node).get(name, ()):
                if body is not None and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    yield Definition(node, body.file, body.names)

    def _behind(self, name: str, user: Definition) -> Iterator[Definition]:
        """The definitions behind a name, in the module of the code that uses it."""
        for scope in user.file.scopes(user.node):
            if name in scope:
                yield from (Definition(node, user.file, user.names) for node in scope[name])
                return
        # A notebook's other cells; a module's own names were found in its file.
        if name in user.names and not hasattr(builtins, name):
            yield from self._elsewhere(name, user.names)

    def _elsewhere(self, name: str, names: Mapping[str, Any]) -> Iterator[Definition]:
        value, module = names[name], names.get("__name__")
        if isinstance(value, type):
            found = class_definition(value) if value.__module__ == module else None
        elif callable(value):
            found = definition_of(value) if getattr(value, "__module__", None) == module else None
        else:
            found = None
            if module == "__main__" and _is_plain(value):
                self._texts.append(json.dumps([name, repr(value)]))
        if found is not None:
            yield found


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("builtins", "typing", "abc") and not (
        kind.__module__.startswith("ejkernel.ops.")
    )


def _undecorated(node: ast.AST) -> ast.AST:
    """A function without its `@tunable`: of that declaration the values count, which its space holds."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node
    same = copy.copy(node)
    same.decorator_list = [one for one in node.decorator_list if "tunable" not in names_used(one) | _attributes(one)]
    return same


def _attributes(node: ast.AST) -> set[str]:
    return {inner.attr for inner in parts_of(node) if isinstance(inner, ast.Attribute)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return type(value) in _PLAIN
