"""One program in a process of its own: plain JAX, heuristics, and `autotune` with a clock around it, all raced."""

from __future__ import annotations

import contextlib
import cProfile
import io
import json
import pstats
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import program_calls
import program_guesses
import program_race
from processors import watched_elsewhere
from program_where import Where
from programs import PROGRAMS
from programs.operations import Library, Plain

from ejkernel.library import Matmul
from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Tuner,
    autotune,
    default_selector,
    policy_override,
    refresh,
)

FEW_ROUNDS = 5


def say(text: str) -> None:
    """A line at once: the process may be killed before its end."""
    print(text, flush=True)


def study(name: str, options: Any) -> dict[str, Any]:
    """Studies one program: all its forms, and its tunings."""
    program = PROGRAMS[name]
    sizes = program.sized(tiny=options.tiny, changes=options.sizes)
    say(f"== {name} {vars(sizes)}, jax {jax.__version__} on {jax.devices()[0].device_kind}")
    args = jax.block_until_ready(program.make(sizes))
    step, selector = program.build(Library(), sizes), default_selector()
    if options.worker is not None:
        selector.tuner = Tuner(isolate=options.worker)
    if options.backward:
        selector.policy = AutotunePolicy(validate_backward=True)
    untuned = policy_override(selector, allow_autotune=False)
    forms = {"plain": plain(program, sizes, args)}
    with untuned:
        forms["heuristics"] = program_race.Steps("step_heuristics", step, args, program)
        if options.medians is not None:
            program_guesses.install(Path(options.medians) if options.medians else None)
            refresh()
            forms["medians"] = program_race.Steps("step_medians", step, args, program)
    say("compiled in " + ", ".join(f"{key} {form.compile_s:.1f} s" for key, form in forms.items()))
    values = {key: float(form()) for key, form in forms.items()}
    say("values " + ", ".join(f"{key} {value:.4f}" for key, value in values.items()))
    before = program_race.compared(program_race.race(forms, FEW_ROUNDS))
    program_race.show("before", before)
    row: dict[str, Any] = {"program": name, "sizes": vars(sizes), "values": values, "before": before}
    result, row["seconds"] = tuned(program, step, args, options)
    row["budget"], row["result_notes"] = options.budget, list(result.notes)
    calls = program_calls.calls_of(step, args)
    seen = {(entry.op_id_v, entry.call_key) for entry in result.entries}
    row["calls"] = [program_calls.told(entry) for entry in result.entries]
    row["calls"] += [program_calls.passed_over(call) for key, call in calls.items() if key not in seen]
    for call in row["calls"]:
        program_calls.show(call)
    for note in result.notes:
        say(f"note: {note}")
    saved(row, options)
    if options.keep:
        result.dump(Path(options.keep) / "result.json")
        program_guesses.written(Path(options.keep) / "medians.json", result.entries)
    with untuned:
        forms["tuned"] = program_race.Steps("step_tuned", step, args, program)
    if options.before:
        with untuned, AutotuningResult.load(options.before):
            forms["tuned before"] = program_race.Steps("step_tuned_before", step, args, program)
        row["picks"] = picks(AutotuningResult.load(options.before), result)
    known = [(one, other) for one, other in program_race.PAIRS if one in forms and other in forms]
    row["equal"] = [f"{one} = {other}" for one, other in known if forms[one].text == forms[other].text]
    say(f"equal programs: {', '.join(row['equal']) or 'none'}")
    row["after"] = program_race.compared(program_race.race(forms, options.rounds))
    program_race.show("after", row["after"])
    saved(row, options)
    if options.exhaustive:
        row["exhaustive"] = [everything(calls, entry, at) for at, entry in enumerate(result.entries)]
    return row


def saved(row: dict[str, Any], options: Any) -> None:
    """Writes what is known so far: the process may be stopped before its end."""
    if options.row:
        Path(options.row).write_text(json.dumps(row, default=str), encoding="utf-8")


def plain(program: Any, sizes: Any, args: tuple[Any, ...]) -> program_race.Steps:
    """Plain JAX, with cuDNN's attention where it can be had."""
    if jax.default_backend() == "gpu":
        try:
            return program_race.Steps("step_plain", program.build(Plain("cudnn"), sizes), args, program)
        # Whatever cuDNN says against this call, JAX's own way runs.
        except Exception as error:
            say(f"plain JAX without cuDNN: {type(error).__name__}: {str(error).splitlines()[0]}")
    return program_race.Steps("step_plain", program.build(Plain(), sizes), args, program)


def tuned(program: Any, step: Any, args: tuple[Any, ...], options: Any) -> tuple[AutotuningResult, float]:
    """The result of `autotune`, and the seconds that it took."""
    selector, budget = default_selector(), options.budget
    if options.jitted:
        step = jax.jit(step, donate_argnums=program.donated)
        # What a tuning may overwrite is not what is raced later.
        copied = [
            jax.tree_util.tree_map(jnp.copy, arg) if at in program.donated else arg for at, arg in enumerate(args)
        ]
        args = tuple(jax.block_until_ready(copied))
    start = time.perf_counter()

    def listen(event: str, **data: Any) -> None:
        if event.startswith("autotune"):
            say(f"   {time.perf_counter() - start:6.1f} s {event} {data['op_id']} {data['call_key']}")

    selector.on_event = listen
    say(f"autotune, budget {budget}")
    start = time.perf_counter()
    with watched(options):
        result = autotune(step, *args, tuning=AutotuneOptions(seconds=budget, **options.tuning))
        taken = time.perf_counter() - start
        late = budget is not None and taken > budget + max(1.0, 0.05 * budget)
        say(f"autotune took {taken:.1f} s of {budget}{': TOO LATE' if late else ''}; {result.totals}")
    selector.on_event = None
    return result, taken


@contextlib.contextmanager
def watched(options: Any) -> Iterator[None]:
    """Says where this thread was, and what Python's profiler saw if that is wanted."""
    profile = cProfile.Profile() if options.profile else None
    with Where() as where, watched_elsewhere() if options.processors else contextlib.nullcontext([]) as tables:
        if profile:
            profile.enable()
        try:
            yield
        finally:
            if profile:
                profile.disable()
    say("where the asking thread was:\n" + where.table())
    for table in tables:
        say(table)
    if profile:
        profiled(profile, options.out)


def profiled(profile: cProfile.Profile, out: str | None) -> None:
    """The forty largest functions by cumulative and by own time."""
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(40)
        say(text.getvalue())
        if out:
            Path(out).mkdir(parents=True, exist_ok=True)
            (Path(out) / f"profile_{order}.txt").write_text(text.getvalue(), encoding="utf-8")


def picks(before: AutotuningResult, now: AutotuningResult) -> dict[str, Any]:
    """The calls that got another cfg than in the tuning before."""
    old = {(e.op_id_v, e.call_key): e for e in before.entries}
    new = {(e.op_id_v, e.call_key): e for e in now.entries}
    loaded = AutotuningResult.loads(now.dumps()).entries
    plain_new = {(e.op_id_v, e.call_key): e.cfg for e in loaded}
    differ = [key for key in new if key in old and old[key].cfg != plain_new[key]]
    for key in differ:
        say(f"another pick for {' '.join(key)}: {new[key].cfg}, before {old[key].cfg}")
    say(f"picks: {len(differ)} of {len(new)} differ")
    return {"calls": len(new), "differ": [" ".join(key) for key in differ]}


def everything(calls: Any, entry: Any, number: int) -> dict[str, Any]:
    """A call's pick beside the best of all its candidates."""
    title = {"operation": entry.op_id_v, "call": entry.call_key}
    try:
        row = program_calls.exhaustive(calls[entry.op_id_v, entry.call_key], entry, number)
    # One call that cannot be measured so does not end the others.
    except Exception as error:
        say(f"not all of {entry.op_id_v} {entry.call_key}: {type(error).__name__}: {error}")
        return title | {"pick_off": None, "error": str(error)}
    off = "not among them" if row["pick_off"] is None else f"off by {row['pick_off']:.2%}"
    best = f"best {row['best_us']:.1f} us {row['best']} (in the tuning: {row['best_became']})"
    counts = f"{row['compiled']} of {row['candidates']} candidates in {row['seconds']:.0f} s"
    say(f"{entry.op_id_v} {entry.call_key}, {counts}: {best}, median {row['median_us']:.1f} us; pick {off}")
    return title | row


def one_call(options: Any) -> dict[str, Any]:
    """A single product, forward and backward, tuned alone."""
    default = {"rows": 64, "inner": 64, "columns": 64} if options.tiny else {}
    sizes = {"rows": 8192, "inner": 2048, "columns": 5632} | default
    sizes |= {name: value for name, value in options.sizes.items() if name in sizes}
    keys = jax.random.split(jax.random.key(0))
    shapes = ((sizes["rows"], sizes["inner"]), (sizes["inner"], sizes["columns"]))
    arrays = [jax.random.normal(k, s, "bfloat16") for k, s in zip(keys, shapes, strict=True)]
    jax.block_until_ready(arrays)
    records: list[Any] = []

    def listen(event: str, **data: Any) -> None:
        records.extend([data["record"]] if event == "autotune_finish" else [])

    tuner: Tuner[Any] = Tuner(isolate=options.worker, seconds=options.budget)
    chain = ConfigSelectorChain(ConfigCache(), AutotunePolicy(validate_backward=True), tuner, on_event=listen)
    start = time.perf_counter()
    with watched(options):
        cfg = Executor(chain).choose_config(Matmul(), *arrays)
        taken = time.perf_counter() - start
        where = {None: "where the tuner likes", True: "in a worker", False: "in the process"}[options.worker]
        say(f"matmul {'x'.join(map(str, sizes.values()))} {where}: {taken:.1f} s, {cfg}")
    rows = [program_calls.told(Entry("matmul", "", cfg, record, "autotune")) for record in records]
    for row in rows:
        program_calls.show(row)
    return {"program": "matmul", "worker": options.worker, "sizes": sizes, "seconds": taken, "calls": rows}
