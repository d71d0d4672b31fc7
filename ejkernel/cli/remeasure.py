"""`ejkernel remeasure`: are stored entries still the fastest, after an upgrade or in a nightly run?"""

from __future__ import annotations

import argparse
from typing import Any

from .entries import EntryRow, add_store, target
from .errors import CommandError, ExitStatus
from .filters import Filter
from .parsing import Command, Parser
from .program import TARGET, add_device, add_trust, on_device, program_at
from .screen import say, write, write_json


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--op", metavar="NAME", help="one operation alone; * stands for anything")
    parser.add_argument("--call", metavar="KEY", help="one call: its key, or the beginning of it")
    parser.add_argument("--calls", metavar="TARGET", help=f"a program that makes the calls: {TARGET}")
    parser.add_argument("--sample", type=int, metavar="N", help="the N entries that are worth most, else all of them")
    parser.add_argument("--seconds", type=float, metavar="N", help="a budget for everything; those worth most first")
    parser.add_argument("--fix", action="store_true", help="tune again what is stale or broken")
    add_device(parser)
    add_store(parser)
    add_trust(parser)
    parser.add_argument("--quiet", action="store_true", help="the last line alone")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    """Measures the entries again; status 1 where one is stale or broken and was not tuned again."""
    from ..ops.core.key import Key
    from ..ops.programs.remeasure import remeasure, summary_line
    from ..ops.reporting.explain import plain

    store: Any = target(options.store)
    wanted = Filter(op=options.op)
    keys = [key for key in map(Key._make, store.keys()) if wanted.fits(EntryRow(key, {}, ""))]
    keys = [key for key in keys if key.call_key.startswith(options.call or "")]
    if not keys:
        raise CommandError("no entry fits; `ejkernel cache list` shows all, and `ejkernel tune` makes new ones")
    with on_device(options.device):
        calls = () if options.calls is None else program_at(options.calls, _selector(store), trust=options.trust).calls
        shown = (lambda one: None) if options.quiet or options.json else (lambda one: _show(one))
        done = remeasure(store, keys=keys, calls=calls, sample=options.sample, seconds=options.seconds, told=shown)
        stale = [one for one in done if one.state in ("stale", "broken")]
        fixed = [one for one in stale if options.fix and _tuned_again(one, store)]
    if not done:
        say("no entry is for this device; name another one with --device")
    names = ("state", "why", "loss")
    if options.json:
        entries = [{**one.key._asdict(), **{n: getattr(one, n) for n in names}, "cfg": plain(one.cfg)} for one in done]
        write_json({"summary": summary_line(done), "tuned_again": len(fixed), "entries": entries})
    else:
        write(summary_line(done) + (f"; {len(fixed)} tuned again" if options.fix else ""), "bad" if stale else "good")
    return ExitStatus.FOUND if len(fixed) < len(stale) else ExitStatus.DONE


def _show(one: Any) -> None:
    if one.state != "fine":
        write(str(one), "bad" if one.state in ("stale", "broken") else "dim")


def _selector(store: Any) -> Any:
    from ..ops import ConfigCache, ConfigSelectorChain

    return ConfigSelectorChain[Any, Any](ConfigCache(), persistent=store)


def _tuned_again(one: Any, store: Any) -> bool:
    """Tunes a stale entry's call, for what it was tuned before; False where that gave no answer."""
    from ..ops.store.store import peek

    call = one.call
    if call is None:
        return False
    entry = peek(store, one.key)
    objective = "forward" if entry is None or entry.objective is None else entry.objective
    mine = call.by(_selector(store)).tuned_for(objective)
    with mine.restored():
        return mine.selectors[0].tune(mine.inv, mine.kernel).record is not None


COMMAND = Command(
    "Measure stored entries again, each against its heuristic and its runner-up, and say whether any is stale.\n"
    "Status 1 when one is; with --fix those are tuned again. For nightly runs, and after an upgrade.",
    (
        "ejkernel remeasure",
        "ejkernel remeasure --sample 50 --quiet",
        "ejkernel remeasure --calls train:step --fix",
    ),
    arguments,
    run,
)
