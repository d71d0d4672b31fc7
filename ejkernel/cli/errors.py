"""Exit statuses of the commands, and errors that are one sentence and what to do."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses of every command; `record` gives the program's own."""

    DONE = 0
    # A check found something, or not everything could be done: the output says what.
    FOUND = 1
    # The command line itself is wrong.
    USAGE = 2
    # A file, a store, a module or a setting that cannot be used.
    UNUSABLE = 3
    # An error that no command foresees: --traceback shows where.
    UNEXPECTED = 4
    INTERRUPTED = 130
    # The reader of the output is gone.
    BROKEN_PIPE = 141


class CommandError(Exception):
    """An input that a command cannot use."""

    status = ExitStatus.UNUSABLE


class UsageError(CommandError):
    """A command line that means nothing."""

    status = ExitStatus.USAGE
