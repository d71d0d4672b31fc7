"""`ejkernel tune`: tunes the calls of a recording or of a function, and says what that gave."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .errors import CommandError, ExitStatus
from .parsing import Command, Parser
from .program import TARGET, NamedProgram, add_device, add_trust, is_function, on_device, program_at
from .screen import say, write, write_json

# As `Tuner(effort=...)` names them; written here because help must not wait for JAX.
EFFORTS = ("quick", "default", "full", "exhaustive")


def arguments(parser: Parser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", help=TARGET)
    parser.add_argument("--effort", choices=EFFORTS, help="how long very many candidates are searched (default)")
    parser.add_argument("--seconds", type=float, metavar="N", help="a budget for everything; the costliest calls first")
    add_device(parser)
    parser.add_argument("--store", metavar="FOLDER", help="keep what is found here; else where the program keeps it")
    parser.add_argument("--backward", action="store_true", help="tune forward and backward together")
    parser.add_argument("--again", action="store_true", help="tune what is known already, too; else that is skipped")
    parser.add_argument(
        "--repetitions", type=int, default=1, metavar="N", help="tunings of each call; the fastest stays"
    )
    parser.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        help="run the program before and after, and take back what does not help (where it has arguments with values)",
    )
    parser.add_argument(
        "--pool",
        metavar="N|ENGINE",
        help="tune on N processes of this machine (processes:gpu:0,gpu:1 names devices), or on an engine: "
        "dask:ADDRESS, ray, ray:ADDRESS, slurm:workers=8 (submitit's options), mpi",
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="tune the I-th of N parts of the calls (1/8 to 8/8); jobs share the --store"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="also write the result, with every record, to a file")
    add_trust(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="the summary, for scripts")


def run(options: argparse.Namespace) -> int:
    """Tunes the calls of the target."""
    from ..ops import AutotuneOptions
    from ..ops.settings import Settings

    if not Settings.read().autotune:
        raise CommandError("EJKERNEL_OPS_AUTOTUNE=off forbids every tuning; unset it for this command")
    # A file that cannot be written is an error before an hour of tuning.
    if options.output:
        _check_output(options.output)
    if options.store:
        _check_store(options.store)
    shard = _shard(options.shard)
    with on_device(options.device), _opened(options.pool) as pool:
        selector = _selector(options)
        tuning = AutotuneOptions(
            seconds=options.seconds,
            selector=selector,
            again=options.again,
            repetitions=options.repetitions,
            progress=not options.quiet,
            refresh=False,
            pool=pool,
        )
        program = program_at(options.target, selector, trust=options.trust, elsewhere=pool is not None)
        if not program.calls and not program.notes:
            raise CommandError(
                f"{options.target} makes no kernel call that a selector answers; there is nothing to tune"
            )
        if shard is not None:
            # A part of the calls is no program that could be run before and after.
            program = NamedProgram(calls=_part(program.calls, *shard), notes=program.notes)
        confirm = _has_values(program) if options.confirm is None else options.confirm
        result = _tuned(program, replace(tuning, confirm=confirm))
        lost = _why_lost(program, selector)
    if options.output:
        result.dump(options.output)
    if options.json:
        write_json(summary(result))
    else:
        write(result.table())
    return _status(result, lost)


def _check_output(path: str) -> None:
    from ..ops import AutotuningResult

    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise CommandError(f"{path} cannot be written: its folder does not exist")
    if os.path.isdir(path):
        raise CommandError(f"{path} is a folder; give the path of a file")
    if os.path.isfile(path) and os.path.getsize(path):
        try:
            AutotuningResult.load(path)
        except ValueError as error:
            raise CommandError(
                f"{path} exists and is no result of a tuning; give another path, or remove it"
            ) from error


def _check_store(path: str) -> None:
    """Refuses a folder that no file can be made in; one that is not there yet is left so, and its parent is tried."""
    if os.path.isfile(path):
        raise CommandError(f"{path} is a file; --store takes a folder, with a file for each operation")
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        # Without a name where the system can do so, and gone at once; a disk that is full for a while passes.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"--store {path} cannot be written: {folder}: {error.strerror}; nothing was tuned. Give a folder that you "
            "may write, or leave --store out"
        ) from error


def _selector(options: argparse.Namespace) -> Any:
    """The selector that tunes; None leaves a function's calls to the selectors of the program."""
    from ..ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, OperationStores, Tuner

    own = options.effort or options.store or options.backward
    if is_function(options.target) and not own:
        return None
    return ConfigSelectorChain[Any, Any](
        ConfigCache(),
        AutotunePolicy(validate_backward=options.backward),
        Tuner(effort=options.effort or "default"),
        OperationStores(options.store),
    )


def _opened(text: str | None) -> contextlib.AbstractContextManager[Any]:
    """The pool that `--pool` names; none without it."""
    if text is None:
        return contextlib.nullcontext()
    from ..ops.programs.pool.engines import opened
    from ..ops.settings import take_memory_as_needed

    # This process measures nothing: the device's memory is for the workers.
    take_memory_as_needed()
    return opened(text)


def _shard(text: str | None) -> tuple[int, int] | None:
    """The numbers of `--shard I/N`."""
    if text is None:
        return None
    one, _, all_of_them = text.partition("/")
    if not (one.isdecimal() and all_of_them.isdecimal() and 1 <= int(one) <= int(all_of_them)):
        raise CommandError(f"--shard {text} is no part: write I/N with I from 1 to N, such as 1/8 for the first of 8")
    return int(one), int(all_of_them)


def _part(calls: Sequence[Any], one: int, all_of_them: int) -> tuple[Any, ...]:
    """Every n-th call in the order of the keys, which is the same for every process that reads the recording."""
    return tuple(sorted(calls, key=lambda call: call.key)[one - 1 :: all_of_them])


def _has_values(program: NamedProgram) -> bool:
    """Can the program be run on the arguments that were given with it?"""
    from ..ops.timing.inputs import flatten_call, is_concrete

    leaves = flatten_call(program.args, program.kwargs).leaves
    return program.fn is not None and bool(leaves) and all(map(is_concrete, leaves))


def _tuned(program: NamedProgram, tuning: Any) -> Any:
    from ..ops import autotune
    from ..ops.programs.autotune import tune_calls

    if program.fn is not None:
        return autotune(program.fn, *program.args, tuning=tuning, **program.kwargs)
    mine = tuning.selector
    calls = program.calls if mine is None else [call.by(mine) for call in program.calls]
    return tune_calls(calls, tuning, program.notes)


def summary(result: Any) -> dict[str, Any]:
    """A result in the figures that a script asks for; `--output` writes everything."""
    from ..ops.reporting.explain import plain

    totals = result.totals
    return {
        "device": result.device,
        "interrupted": result.interrupted,
        "heuristic_seconds": totals.heuristic_s,
        "tuned_seconds": totals.tuned_s,
        "calls": [
            {
                "op_id": entry.op_id_v,
                "call_key": entry.call_key,
                "cfg": plain(entry.cfg),
                "from": entry.source,
                "note": entry.note,
                "runs": entry.count,
                **({} if entry.record is None else entry.record.summary()),
            }
            for entry in result.entries
        ],
        "notes": list(result.notes),
        "workers": list(result.workers),
        "confirmation": None if result.confirmation is None else str(result.confirmation),
    }


def _why_lost(program: NamedProgram, selector: Any) -> str:
    """Reason why a store did not keep what was tuned for it; empty where all is kept."""
    selectors = [selector] if selector is not None else [s for call in program.calls for s in call.selectors]
    reasons = (getattr(s.persistent, "reason", "") for s in selectors)
    return next((reason for reason in reasons if reason), "")


def _status(result: Any, lost: str) -> int:
    again = shlex.join(["ejkernel", *sys.argv[1:]])
    if result.interrupted:
        say(f"stopped; what was measured is kept. Go on with: {again}")
        return ExitStatus.INTERRUPTED
    if lost:
        say(f"not everything that was tuned is kept: {lost}; make room or give --store, and run it again", "bad")
        return ExitStatus.UNUSABLE
    # What was measured and taken back again was tuned.
    left = [entry for entry in result.entries if entry.note and not entry.is_measured]
    if left or result.notes:
        count = len(left) + len(result.notes)
        say(f"{count} {'call was' if count == 1 else 'calls were'} not tuned, for the reasons above", "bad")
        return ExitStatus.FOUND
    return ExitStatus.DONE


COMMAND = Command(
    "Tune every kernel call of a recording, or of a function of yours, each once, and show the gains.\n"
    "What is known already is skipped, so that a stopped or killed tuning goes on when it is run again.",
    (
        "ejkernel tune recorded.json",
        "ejkernel tune recorded.json --seconds 300 --effort quick",
        "ejkernel tune train:step --device gpu:0 --json",
        "ejkernel tune recorded.json --pool 8",
        "ejkernel tune recorded.json --store /shared/cfgs --shard 3/8",
    ),
    arguments,
    run,
)
