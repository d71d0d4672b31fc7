"""Every error that this package raises by itself: one small tree, each also the built-in that callers expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OpsError(Exception):
    """The root: catch this for anything that `ejkernel.ops` found wrong."""


class KernelError(OpsError, TypeError):
    """A kernel that is not written as the contract asks."""


class BadNameError(OpsError, ValueError):
    """An operation or store name that cannot be part of a key or a path."""


class KeyPartError(OpsError, TypeError):
    """A static argument that has no stable form, so that no key can be made of it."""


class ConfigTypeError(OpsError, TypeError):
    """A cfg of another type than its kernel declares, or one that cannot be written as JSON."""


class PolicyValueError(OpsError, ValueError):
    """A policy field with a value that means nothing."""


class PolicyFieldError(OpsError, TypeError):
    """A policy field that does not exist."""


class RulesTypeError(OpsError, TypeError):
    """Rules of a pool's schedule that are of another type."""


class SettingError(OpsError, ValueError):
    """An environment variable or a constructor setting with a value that means nothing."""


class ScopeError(OpsError, RuntimeError):
    """A `with` block that was left in another order than it was entered."""


class NoConfigError(OpsError, RuntimeError):
    """The error of a call for which no tier had an answer."""


class TuningError(OpsError, RuntimeError):
    """A tuning that ended without a winner."""

    def __init__(self, message: str, reasons: Sequence[str] = (), record: Any = None) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)
        # The record with every candidate's outcome, where there is one.
        self.record = record


class OutOfTimeError(TuningError):
    """A tuning that ran out of time before the heuristic cfg was measured: no cfg is known to be better."""


class NotExportedError(OpsError, TypeError):
    """A candidate that cannot be exported to another process."""


class IsolationError(OpsError, RuntimeError):
    """A tuning that should run in a worker process, and cannot."""


class RetuneError(OpsError, RuntimeError):
    """A second tuning of one key where that is forbidden."""


class StoreError(OpsError, OSError):
    """A store that cannot be opened as it was asked for."""


class RecordFormatError(OpsError, ValueError):
    """A record, store or result file that this version cannot read."""


class SignatureError(OpsError, TypeError):
    """A call that cannot be written to a recording, or made from one."""


class JaxChangedError(OpsError, ImportError):
    """The installed JAX lacks a private name that this package uses."""


class MissingExtraError(OpsError, ImportError):
    """A feature that needs a package from one of the extras."""


class AgreementError(OpsError, RuntimeError):
    """Processes of one program that cannot agree on a cfg."""


class ProgramArgumentError(OpsError, ValueError):
    """An argument of a whole program that is no tree of arrays."""


class GradientError(OpsError, TypeError):
    """An own gradient that does not fit its call."""


class ShardingError(OpsError, ValueError):
    """A sharded call without its mesh or its specs."""


class StaticArgumentError(OpsError, TypeError):
    """A static argument that cannot be part of a compiled program's identity."""
