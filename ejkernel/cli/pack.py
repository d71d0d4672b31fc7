"""`ejkernel pack`: tuned configs to give to others, as one read-only file."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .entries import add_store, refuse_newer, target
from .errors import CommandError, ExitStatus
from .parsing import Command, Group, Parser
from .program import add_trust, program_at
from .screen import say, write, write_json, write_table


def _create_arguments(parser: Parser) -> None:
    parser.add_argument("file", help="the pack to write; an older pack there is replaced")
    parser.add_argument(
        "--op",
        action="append",
        metavar="NAME",
        help="an operation, with or without @version, * for anything; repeatable",
    )
    parser.add_argument("--device", metavar="NAME", help="one device, as `cache list` spells it; else every device")
    parser.add_argument("--name", default="", help="what the pack calls itself; else its file's name")
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="what the pack says of itself, for scripts")


def _create(options: argparse.Namespace) -> int:
    from ..ops import OperationStores, make_pack

    if options.store and not os.path.exists(options.store):
        raise CommandError(f"there is no store at {options.store}; give a folder of stores, or a store's .json file")
    source = target(options.store)
    if isinstance(source, OperationStores):
        # Which of them are meant is known once they are read.
        refuse_newer(source, source.operations())
    made = make_pack(options.file, source, name=options.name, device=options.device, ops=options.op)
    if options.json:
        write_json({"path": made.path, **made.about})
    else:
        write(f"{len(made.entries)} entries in {made.path}")
        write(f"other users run: ejkernel pack install {os.path.basename(made.path)}", "dim")
    return ExitStatus.DONE


def _verify_arguments(parser: Parser) -> None:
    parser.add_argument("files", nargs="+", metavar="file", help="packs")
    parser.add_argument("--calls", metavar="FILE", help="a recording: are its calls' configs among the candidates?")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def _verify(options: argparse.Namespace) -> int:
    from ..ops import default_selector, verify_pack

    calls: list[Any] = []
    if options.calls:
        program = program_at(options.calls, default_selector(), trust=options.trust)
        calls = [(call.kernel, call.inv) for call in program.calls]
    reports = [verify_pack(file, calls) for file in options.files]
    if options.json:
        names = ("path", "entries", "damage", "refused", "checked", "is_sound")
        write_json([{name: getattr(report, name) for name in names} for report in reports])
    else:
        for report in reports:
            checked = f", {report.checked} compared with their kernels" if calls else ""
            if report.is_sound:
                write(f"sound   {report.entries} entries{checked}  {report.path}")
            else:
                write(f"damaged {report.damage}" if report.damage else f"refused {report.path}", "bad")
            for refused in report.refused:
                write(f"        {refused}")
    return ExitStatus.DONE if all(report.is_sound for report in reports) else ExitStatus.FOUND


def _install_arguments(parser: Parser) -> None:
    parser.add_argument("file", help="a pack, or the URL of one")
    parser.add_argument("--force", action="store_true", help="replace an installed pack of that name")


def _install(options: argparse.Namespace) -> int:
    from ..ops.store import bundle, files
    from ..ops.store.packs import forget_packs, pack_folder, read_pack

    pack = read_pack(options.file)
    to = os.path.join(pack_folder(), os.path.basename(pack.path.partition("#")[0]))
    there = files.identity(to) is not None
    if there and not options.force and bundle.read("pack", to).digest != bundle.read("pack", pack.path).digest:
        raise CommandError(f"{to} is another pack; remove it, rename yours, or use --force")
    content = bundle.content_of(pack.path)
    assert content is not None, "it was read a moment ago"
    files.make_folder(os.path.dirname(to))
    files.write(to, content.data, durable=False)
    forget_packs()
    write(f"{len(pack.entries)} entries installed as {to}; every selector looks there after its own store")
    write("to take it away, remove that file", "dim")
    return ExitStatus.DONE


def _list_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts")


def _list(options: argparse.Namespace) -> int:
    from ..ops import verify_pack
    from ..ops.settings import Settings
    from ..ops.store.packs import found_packs, read_pack

    paths = Settings.read().packs
    if paths is None:
        say("EJKERNEL_OPS_PACKS=off: no pack is used")
    reports = [verify_pack(pack.path) for pack in found_packs(paths or ())]
    rows = []
    for report in reports:
        about = {} if report.damage else dict(read_pack(report.path).about)
        rows.append({"path": report.path, "entries": report.entries, "damage": report.damage, **about})
    if options.json:
        write_json(rows)
    elif rows:
        cells = [(str(r.get("name", "-")), str(r["entries"]), str(r.get("made", "-")), r["path"]) for r in rows]
        write_table(("name", "entries", "made", "path"), cells)
    else:
        say("no pack is installed; `ejkernel pack install file` installs one")
    for report in reports:
        if report.damage:
            say(f"{report.damage}; it is left out")
    return ExitStatus.FOUND if any(report.damage for report in reports) else ExitStatus.DONE


COMMAND = Group(
    "Tuned configs to give to others: one read-only file that selectors look into after their own store.",
    {
        "create": Command(
            "write a pack of what is kept",
            ("ejkernel pack create h200.json --op attention --op matmul", "ejkernel pack create all.json --name team"),
            _create_arguments,
            _create,
        ),
        "verify": Command(
            "check packs: format, checksums and, against a recording, the kernels' candidates",
            ("ejkernel pack verify h200.json", "ejkernel pack verify h200.json --calls recorded.json"),
            _verify_arguments,
            _verify,
        ),
        "install": Command(
            "put a pack where every selector of this user looks",
            ("ejkernel pack install h200.json", "ejkernel pack install h200.json --force"),
            _install_arguments,
            _install,
        ),
        "list": Command(
            "list the packs that selectors look into",
            ("ejkernel pack list", "ejkernel pack list --json"),
            _list_arguments,
            _list,
        ),
    },
)
