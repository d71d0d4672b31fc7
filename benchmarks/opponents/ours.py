"""Our side of a row: the heuristic choice, the tuned one, and the tuned one without Pallas-Triton."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library_check_gpu import Asked
from library_programs import HEURISTIC, TUNED, Study, both_passes, study

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, PersistentCache
from ejkernel.ops.core.request import ask, candidates

from .table import Entry

BARE = "without Triton"
SWITCH = "EJKERNEL_OPS_TRITON"


@dataclass(frozen=True)
class Ours:
    """Our programs by name, unjitted, and all that was found on the way."""

    programs: dict[str, Callable[..., Any]]
    # Of plain JAX and what it has ready-made, the slowest left out.
    ready: dict[str, Callable[..., Any]]
    arrays: tuple[Any, ...]
    static: dict[str, Any]
    chosen: dict[str, str]
    candidates: int
    tuning_s: float
    bare_tuning_s: float
    # Why nothing was tuned, where nothing was.
    note: str


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """The setting as a user would have it; also what is traced in here is traced so."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def ours(entry: Entry, seconds: float, folder: str | None) -> Ours:
    """Tunes the case with Pallas-Triton, and without where the choice needs it."""
    case = entry.case
    found = study(case, seconds=seconds, store=_store(folder, entry, "tuned"))
    given = found.arrays[:-1] if case.backward else found.arrays
    asked = Asked()
    Executor(asked).choose_config(case.kernel(), *given, **found.static)
    offered = len(dict.fromkeys(candidates(ask(asked.inv, asked.kernel, "forward"))))
    cfg, bare_seconds = found.chosen, 0.0
    with without_triton():
        # The best of all candidates is also the best of those that are left, if it is among them.
        if asked.kernel.valid_cfg(asked.inv, cfg) is not True:
            bare = study(case, seconds=seconds, store=_store(folder, entry, "bare"))
            cfg, bare_seconds = bare.chosen, bare.seconds
    programs = {name: found.programs[name] for name in (HEURISTIC, TUNED)}
    programs[BARE] = _bare(entry, found, given, cfg)
    ready = {name: fn for name, fn in found.programs.items() if name not in (*programs, *entry.hopeless)}
    chosen = {TUNED: str(found.chosen), BARE: str(cfg)}
    tried = sum(t.status != "invalid" for t in found.record.trials) if found.record else offered
    return Ours(programs, ready, found.arrays, found.static, chosen, tried, found.seconds, bare_seconds, found.note)


def _bare(entry: Entry, found: Study, given: tuple[Any, ...], cfg: Any) -> Callable[..., Any]:
    executor = Executor(ConfigSelectorChain(ConfigCache()))

    def forward(*arrays: Any) -> Any:
        return executor(entry.case.kernel(), *arrays, cfg=cfg, **found.static)

    fn = both_passes(forward, given) if entry.case.backward else forward

    def run(*arrays: Any) -> Any:
        with without_triton():
            return fn(*arrays)

    return run


def _store(folder: str | None, entry: Entry, kind: str) -> Any:
    if folder is None:
        return None
    # A key is the same for both; a choice for both passes is none for the forward one alone.
    passes = "both" if entry.case.backward else "forward"
    path = Path(folder, f"{entry.case.op}-{passes}-{kind}.json")
    return PersistentCache(entry.case.op, path, cfg_type=entry.case.kernel.cfg_type)
