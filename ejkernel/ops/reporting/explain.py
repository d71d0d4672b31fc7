"""Explanations of why a call gets its cfg: asked without tuning, telling or changing anything."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config.preview import entry_behind, near_misses, record_behind
from ..config.selection import ConfigSelectorChain, is_program_text
from ..config.walk import Walked
from ..core import codec, formatting
from ..core.description import Near, one_line
from ..core.errors import ConfigTypeError, SettingError
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.record import Record
from ..core.request import Hit, Request
from ..core.shown import Shown
from ..execution.default import default_executor
from ..execution.executor import Executor
from ..execution.tunable import Tunable
from ..programs.found_call import FoundCall
from ..store.store import StoredEntry
from .summary import TuningSummary, summary_of, summary_of_entry


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The tier that answers a call, why the earlier ones do not, and what is known about the answer."""

    device: str
    op_id: str
    call_key: str
    call: Mapping[str, str]
    # override, overlay, memory, persistent, remote, packs, autotune, seeds, predicted, heuristics or error.
    tier: str
    # None where it would have to be tuned first, or where nothing answers.
    cfg: Any
    # The answer in a sentence.
    answer: str
    # The tiers before it, in order, with their reasons.
    misses: tuple[tuple[str, str], ...]
    # Where the answer is kept and how it came to be, as far as that is known.
    origin: Mapping[str, str] = field(default_factory=dict)
    figures: TuningSummary | None = None
    # The whole record, where it was kept.
    record: Record | None = None
    nearest: tuple[Near, ...] = ()
    # Is this call still to be measured: would it be tuned, guessed, or an error?
    is_open: bool = False

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{one_line(self.op_id, self.call)}, {self.tier}: {self.answer}"

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain data that JSON can hold."""
        return {
            "key": {"device": self.device, "op_id": self.op_id, "call_key": self.call_key},
            "call": dict(self.call),
            "tier": self.tier,
            "cfg": plain(self.cfg),
            "answer": self.answer,
            "misses": [{"tier": tier, "reason": reason} for tier, reason in self.misses],
            "origin": dict(self.origin),
            "figures": None if self.figures is None else self.figures.as_dict(plain),
            "nearest": [
                {"key": near.key._asdict(), "where": near.where, "fields": {n: list(p) for n, p in near.fields.items()}}
                for near in self.nearest
            ],
        }

    def __str__(self) -> str:
        """The explanation as text for people."""
        width = max(len(name) for name in ("heuristics", self.tier))
        lines = [self._title(), *(f"  {name:<{width}}  {text}" for name, text in self._rows())]
        return formatting.at_home("\n".join(lines))

    def _repr_html_(self) -> str:
        rows = [(name, formatting.at_home(text)) for name, text in self._rows()]
        return f"<p>{html.escape(self._title())}</p>{formatting.as_html(('', ''), rows)}"

    def _title(self) -> str:
        return f"{one_line(self.op_id, self.call)} on {self.device}, call {self.call_key}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [*self.misses, (self.tier, f"<- {self.answer}"), *self.origin.items()]
        rows += [] if self.figures is None else self.figures.rows()
        # An answer that was measured stands without its neighbours; the data has them all the same.
        return rows + ([("nearest", str(near)) for near in self.nearest] if self.is_open else [])


def explain(
    kernel: Kernel[Any, Any] | Tunable,
    /,
    *args: Any,
    executor: Executor[Any, Any] | None = None,
    selector: ConfigSelectorChain[Any, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Says why this call gets the cfg that it would get now; takes arrays or shapes, and every keyword of a call.

    The kernel may be a tunable function, which is asked with its own executor.
    """
    if isinstance(kernel, Tunable):
        if executor is None and selector is None:
            executor = kernel.executor
        kernel = kernel.kernel
    asked = _Question(_selector(executor, selector))
    Executor[Any, Any](asked).choose_config(kernel, *args, **kwargs)
    return _explained(asked.selector, asked.found[0])


def explain_call(call: FoundCall) -> Explanation:
    """Explains a call that was found or recorded, with what was around it put back."""
    selector = _selector(None, call.selectors[0])
    with call.restored():
        return _explained(selector, selector.preview(call.inv, call.kernel))


class _Question:
    """A chooser that looks ahead in place of choosing."""

    def __init__(self, selector: ConfigSelectorChain[Any, Any]) -> None:
        self.selector = selector
        self.found: list[Walked] = []

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        self.found.append(self.selector.preview(inv, kernel))


def _selector(executor: Executor[Any, Any] | None, selector: Any) -> ConfigSelectorChain[Any, Any]:
    if executor is not None and selector is not None:
        raise SettingError("explain was given both executor= and selector=; give the one that would choose")
    if executor is not None and not isinstance(executor, Executor):
        raise SettingError(f"executor={executor!r} is no Executor; leave it out for the default one")
    asked = default_executor() if executor is None and selector is None else executor
    chooser = selector if asked is None else asked.chooser
    if not isinstance(chooser, ConfigSelectorChain):
        raise SettingError(
            f"explain can look into a ConfigSelectorChain, and this is a {type(chooser).__qualname__}; "
            "a chooser of your own has reasons of its own"
        )
    return chooser


def _explained(selector: ConfigSelectorChain[Any, Any], seen: Walked) -> Explanation:
    key, hit = seen.request.key, seen.hit
    refused = "" if seen.planned is None else seen.planned.refused
    origin: dict[str, str] = {}
    figures = record = None
    if hit is not None and hit.measured:
        origin, entry = _origin(selector, seen.request, hit)
        record = None if is_program_text(seen.request) else record_behind(selector, key, hit.cfg)
        if record is not None:
            figures = summary_of(record)
        elif entry is not None:
            figures = summary_of_entry(entry.summary)
    elif hit is not None:
        origin = {f"from call {number}": text for number, text in enumerate(hit.data.get("calls", ()), 1)}
    return Explanation(
        *key,
        call=seen.request.call,
        tier="error" if refused else seen.tier,
        cfg=None if hit is None else hit.cfg,
        answer=_answer(seen),
        misses=(*seen.misses, (seen.tier, refused)) if refused else seen.misses,
        origin=origin,
        figures=figures,
        record=record,
        nearest=near_misses(selector, seen.request),
        is_open=hit is None or not (hit.measured or is_program_text(seen.request)),
    )


def _origin(
    selector: ConfigSelectorChain[Any, Any], request: Request, hit: Hit
) -> tuple[dict[str, str], StoredEntry | None]:
    lock_file, found = selector.lock_file if "lock" in hit.data else None, None
    if lock_file is not None:
        found = lock_file.entries[request.key], lock_file.path
    elif not is_program_text(request):
        found = entry_behind(selector, request.key, hit.cfg)
    if found is None:
        return {}, None
    entry, where = found
    source = f"{entry.source} for {entry.objective}" if entry.objective else entry.source
    how = ", ".join(filter(None, [source, entry.when, entry.by]))
    known = ", ".join(f"{name} {value}" for name, value in entry.environment.items())
    return {name: text for name, text in (("kept in", where), ("source", how), ("tuned with", known)) if text}, entry


def _answer(seen: Walked) -> str:
    if seen.planned is not None and not seen.planned.refused:
        return f"would be tuned: {seen.planned.candidates} candidates"
    if seen.hit is None:
        return "nothing: the call would be an error"
    shown = formatting.short(seen.hit.cfg)
    notes = {
        "lock": "locked by {}",
        "pack": "from the pack {}",
        "remote": "from the remote {}",
        "environment": "tuned in another environment ({})",
        "code": "tuned for other code of the kernel ({})",
        "process": "as process {} decided for all",
        "confidence": "predicted: within 5% of the best with a chance of {:.0%}",
        "within": "at most {:.2f} times the best in nine of ten",
    }
    said = [text.format(seen.hit.data[name]) for name, text in notes.items() if name in seen.hit.data]
    if not seen.hit.measured and not is_program_text(seen.request):
        said.append("a guess, never measured")
    return f"{shown} ({'; '.join(said)})" if said else shown


def plain(cfg: Any) -> Any:
    """A cfg as JSON can hold it."""
    try:
        return codec.encode(cfg)
    # A cfg that has no JSON is shown as Python prints it.
    except ConfigTypeError:
        return codec.describe(cfg)
