"""Definitions in source files, and their meaning: what is left of code without layout, comments, docstrings and types.

Only the standard library, and only what Python 3.11 to 3.13 parse alike: the meaning of a text is the same on each.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Says nothing about what code does.
_SKIPPED = frozenset(("ctx", "type_comment", "type_params", "returns", "annotation", "kind", "simple"))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Scope = Mapping[str, Sequence[ast.AST]]


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A parsed file, with the node around each node."""

    tree: ast.Module
    parents: Mapping[ast.AST, ast.AST]
    # By name and first line; several where lambdas share a line.
    functions: Mapping[tuple[str, int], Sequence[ast.AST]]

    def function(self, name: str, line: int) -> ast.AST | None:
        """The function of a name that begins at a line, decorators included."""
        found = self.functions.get((name, line), ())
        return found[0] if len(found) == 1 else None

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that a method is written in."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, (ast.ClassDef, *_FUNCTIONS)):
            parent = self.parents.get(parent)
        return parent if isinstance(parent, ast.ClassDef) else None

    def class_named(self, qualified: str) -> ast.ClassDef | None:
        """The class of a qualified name; of several the last one, which replaced the others."""
        found = [n for n in self.parents if isinstance(n, ast.ClassDef) and self._qualified(n) == qualified]
        return found[-1] if found else None

    def scopes(self, node: ast.AST) -> Iterator[Scope]:
        """The names that code at a node sees, the nearest first: functions around it, then the file."""
        parent = self.parents.get(node)
        while parent is not None:
            if isinstance(parent, (ast.Module, *_FUNCTIONS)):
                yield bound_names(parent)
            parent = self.parents.get(parent)

    def _qualified(self, node: ast.AST) -> str:
        names = []
        around: ast.AST | None = node
        while around is not None:
            if isinstance(around, _FUNCTIONS):
                names.append(f"{around.name}.<locals>")
            elif isinstance(around, ast.ClassDef):
                names.append(around.name)
            around = self.parents.get(around)
        return ".".join(reversed(names))


@dataclass(frozen=True, eq=False)
class Definition:
    """A piece of code, the file that it is in, and the names of its module at run time."""

    node: ast.AST
    file: SourceFile
    names: Mapping[str, Any]


def definition_of(function: Any) -> Definition | None:
    """The definition of a function, through what wraps it; None where its source is missing."""
    plain = unwrapped(function)
    if plain is None:
        return None
    file = file_of(plain.__code__.co_filename, plain.__globals__)
    node = None if file is None else file.function(plain.__code__.co_name, plain.__code__.co_firstlineno)
    return None if file is None or node is None else Definition(node, file, plain.__globals__)


def class_definition(kind: type) -> Definition | None:
    """The definition of a class; None where its source is missing."""
    for member in vars(kind).values():
        method = definition_of(member) if callable(member) or hasattr(member, "__func__") else None
        owner = None if method is None else method.file.owner(method.node)
        if method is not None and owner is not None and owner.name == kind.__name__:
            return Definition(owner, method.file, method.names)
    module = sys.modules.get(kind.__module__)
    file = None if module is None else file_of(getattr(module, "__file__", None) or "", vars(module))
    node = None if file is None else file.class_named(kind.__qualname__)
    return None if file is None or node is None else Definition(node, file, vars(module))


def unwrapped(value: Any) -> types.FunctionType | None:
    """The function behind a method, a property, a partial, or what a decorator such as `jax.jit` returns."""
    for _ in range(32):
        if isinstance(value, types.FunctionType) and not hasattr(value, "__wrapped__"):
            return value
        inner = [getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func")]
        known = next((one for one in inner if callable(one)), None)
        if known is None:
            known = None if isinstance(value, type) else getattr(type(value), "__call__", None)  # noqa: B004  its code
        value = known
    return None


def file_of(path: str, names: Mapping[str, Any]) -> SourceFile | None:
    """The parsed source of a file, a zip archive's or a notebook's cell included; None where it is missing."""
    linecache.checkcache(path)
    loading = {name: names[name] for name in ("__name__", "__loader__", "__spec__") if name in names}
    text = "".join(linecache.getlines(path, loading))
    return _parsed(text) if text else None


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> SourceFile | None:
    try:
        tree = ast.parse(text)
    # A file that was changed since, or is written for another version of Python.
    except (SyntaxError, ValueError):
        return None
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    functions: dict[tuple[str, int], list[ast.AST]] = {}
    for node in parents:
        if isinstance(node, ast.Lambda):
            functions.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.setdefault((node.name, first), []).append(node)
    return SourceFile(tree, parents, functions)


@functools.lru_cache(maxsize=256)
def bound_names(scope: Any) -> Scope:
    """The statements of a function, a class or a file that bind each name, and calls such as `f.defvjp(...)`."""
    found: dict[str, list[ast.AST]] = {}
    calls = []
    for statement in _statements(scope.body):
        if isinstance(statement, (ast.ClassDef, *_FUNCTIONS)):
            found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name.partition(".")[0], []).append(_import(statement, alias))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        found.setdefault(node.id, []).append(statement)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            calls.append(statement)
    for statement in calls:
        root: Any = statement.value
        while isinstance(root, (ast.Call, ast.Attribute)):
            root = root.func if isinstance(root, ast.Call) else root.value
        known = found.get(root.id, []) if isinstance(root, ast.Name) else []
        if any(not isinstance(node, (ast.Import, ast.ImportFrom)) for node in known):
            found[root.id].append(statement)
    return found


def _statements(body: Sequence[Any]) -> Iterator[Any]:
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.ClassDef, *_FUNCTIONS)):
            inner = [n for n in ast.iter_child_nodes(statement) if isinstance(n, (ast.stmt, ast.ExceptHandler))]
            yield from _statements(inner)


def _import(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.AST:
    if isinstance(statement, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(statement.module, [alias], statement.level)


def names_used(node: ast.AST) -> set[str]:
    """Every plain name in a piece of code, but for those of its types."""
    return {inner.id for inner in parts_of(node) if isinstance(inner, ast.Name)}


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """A piece of code and everything in it that has a meaning."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in _SKIPPED:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from parts_of(inner)


def meaning(node: Any) -> Any:
    """JSON for a piece of code that is equal for texts that do the same, but for their layout and their words."""
    if isinstance(node, ast.Constant):
        return [type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["f-string", _joined(node.values)]
    if isinstance(node, ast.AnnAssign):
        # A declaration without a value is a field of a dataclass, and nothing elsewhere.
        node = ast.Assign([node.target], node.value or ast.Constant(None))
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _SKIPPED]
        return [type(node).__name__, {name: meaning(value) for name, value in fields if value not in (None, [])}]
    if isinstance(node, list):
        return [meaning(item) for item in node if not _says_nothing(item)]
    return node


def _joined(values: Sequence[ast.expr]) -> list[Any]:
    """The parts of an f-string; neighbouring texts are one, however they were written."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], str):
            parts[-1] += str(value.value)
        else:
            parts.append(str(value.value) if isinstance(value, ast.Constant) else meaning(value))
    return parts


def _says_nothing(item: Any) -> bool:
    # Docstrings, other texts that stand alone, `...` and `pass`.
    return isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
