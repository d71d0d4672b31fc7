"""What a command ends with: its statuses, and errors that are one sentence and what to do."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """The exit statuses of every command; `record` gives the program's own."""

    DONE = 0
    # A check found something, or not everything could be done: the output says what.
    FOUND = 1
    # The command line itself is wrong.
    USAGE = 2
    # A file, a store, a module or a setting that cannot be used.
    UNUSABLE = 3
    # Nobody foresaw this: --traceback shows where.
    UNEXPECTED = 4
    INTERRUPTED = 130
    # Whoever reads the output went away.
    BROKEN_PIPE = 141


class CommandError(Exception):
    """Something that a command was given and cannot use."""

    status = Status.UNUSABLE


class UsageError(CommandError):
    """A command line that means nothing."""

    status = Status.USAGE
