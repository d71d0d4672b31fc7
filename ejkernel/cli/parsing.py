"""Reading a command line: argparse, with examples in every help and the nearest name for a wrong one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """One command's options; a wrong one is a UsageError that names the nearest."""

    def __init__(self, prog: str, about: str, examples: Sequence[str] = (), usage: str | None = None) -> None:
        # First, since the class itself adds --help.
        self.options: list[str] = []
        super().__init__(
            prog=prog,
            usage=usage,
            description=about,
            epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]) if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # A shortened option would change its meaning with every option that is added.
            allow_abbrev=False,
        )

    def add_argument(self, *names: Any, **about: Any) -> argparse.Action:
        """Adds an argument, and remembers the names of an option."""
        self.options += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **about)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Reads the options from the words of a command line."""
        found, unknown = self.parse_known_args(list(words))
        if unknown:
            word = unknown[0].partition("=")[0]
            what = "option" if word.startswith("-") else "argument"
            self.error(f"there is no {what} {word}{nearest(word, self.options)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raises a UsageError that also says where help is."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def nearest(word: str, known: Iterable[str]) -> str:
    """Hint at the nearest known word, ` (did you mean ...?)`; empty where none is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""


@dataclass(frozen=True)
class Command:
    """One command: its purpose, its examples, its options and its function."""

    about: str
    examples: tuple[str, ...]
    arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    usage: str | None = None

    def parser(self, prog: str) -> Parser:
        """The parser of its command line."""
        parser = Parser(prog, self.about, self.examples, self.usage and f"{prog} {self.usage}")
        self.arguments(parser)
        parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        return parser


@dataclass(frozen=True)
class Group:
    """Commands under one name."""

    about: str
    commands: Mapping[str, Command]


def listing(prog: str, about: str, commands: Mapping[str, str], examples: Sequence[str] = ()) -> str:
    """The help of a name with commands under it."""
    width = max(map(len, commands))
    lines = [f"usage: {prog} <command> [options]", "", about, "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in commands.items()]
    lines += ["", "examples:", *(f"  {example}" for example in examples)] if examples else []
    return "\n".join([*lines, "", f"`{prog} <command> --help` shows a command's options and examples."])


def pick(prog: str, word: str, commands: Mapping[str, Any]) -> Any:
    """The command of a name; else an error with the nearest."""
    if word in commands:
        return commands[word]
    what = "option" if word.startswith("-") else "command"
    raise UsageError(f"{prog} has no {what} {word}{nearest(word, commands)}; see `{prog} --help`")
