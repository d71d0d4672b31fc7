"""The command in terminals and pipes: colours, narrow windows, Ctrl-C, readers that go away, full disks.

Covers `cli/screen.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fakes_cli import COMMAND, in_terminal, piped, raw, variables, write_store


@pytest.fixture
def store(folder):
    """More output than a pipe holds."""
    return write_store(folder / "matmul.json", {("matmul@v1", f"{i:016x}"): raw() for i in range(2_000)})


def test_a_terminal_has_colours_and_a_pipe_has_none(folder):
    """Nor has a terminal whose user does not want any."""
    write_store(folder / "op.json", {("op@v1", "aaaa"): raw()})
    assert "\x1b[1moperation" in in_terminal("cache", "list", columns=120)[1]
    assert "\x1b" not in in_terminal("cache", "list", columns=120, NO_COLOR="1")[1]
    assert "\x1b" not in piped("cache", "list").out


def test_what_a_store_holds_cannot_steer_the_terminal(folder):
    """Control characters are shown as question marks; what the encoding lacks, as escapes."""
    write_store(folder / "op.json", {("op@v1", "aa\x1b[2Jaa\ud800é"): raw(cfg="\x1b]0;title\x07")})
    status, shown = in_terminal("cache", "list", columns=200, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert status == 0, shown
    assert "\x1b" not in shown
    assert "aa?[2Jaa\\ud800\\xe9" in shown
    assert in_terminal("cache", "show", "aa", columns=200, NO_COLOR="1")[0] == 0


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200b", "\x9b", "\u2028"], ids=ascii)
def test_characters_that_hide_text_are_neither_in_tables_nor_raw_in_json(shell, folder, character):
    """What turns the direction of text, or steers a terminal, is a question mark in a table and escaped in JSON."""
    write_store(folder / "op.json", {("op@v1", f"a{character}b"): raw()})
    table, data = shell("cache", "list"), shell("cache", "list", "--json")

    assert "a?b" in table.out
    assert character not in table.out + data.out
    assert data.data[0]["call_key"] == f"a{character}b"


def test_a_list_fits_the_window(folder):
    """Long cells are cut; in a pipe they are whole."""
    cfg = {f"a_long_name_{i}": i for i in range(3)}
    write_store(folder / "op.json", {("op@v1", "aaaa"): raw(cfg=cfg)})
    _, shown = in_terminal("cache", "list", columns=90, NO_COLOR="1")
    assert max(map(len, shown.splitlines())) <= 90
    assert ".." in shown
    assert "a_long_name_2" in piped("cache", "list").out


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("words", [("--help",), ("cache", "list", "--help"), ("cache", "list"), ("cache", "verify")])
def test_a_very_narrow_window_breaks_nothing(store, words):
    """Even one of five columns."""
    status, shown = in_terminal(*words, columns=5)
    assert status == 0
    assert "Traceback" not in shown


def test_a_reader_that_goes_away_ends_the_command_quietly(store):
    """As with `| head`: no traceback, and the status of a broken pipe."""
    process = subprocess.Popen(
        [*COMMAND, "cache", "list"], env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("words", [("cache", "list"), ("cache", "list", "--json"), ("cache", "path")], ids=" ".join)
def test_a_full_disk_is_one_sentence(store, words):
    """With the status for it."""
    with open("/dev/full", "w") as full:
        streams = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run([*COMMAND, *words], env=variables(), timeout=300, check=False, **streams)
    assert done.returncode == 3
    assert "No space left on device; make room" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-"])
def test_streams_that_are_closed_break_nothing(store, closed):
    """As daemons and cron have it."""
    command = " ".join([*COMMAND, "cache", "list", closed])
    done = subprocess.run(
        ["sh", "-c", command], env=variables(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_program_that_is_recorded_and_not_the_recording(tmp_path):
    """The program's status is ours, and what was recorded is said."""
    # Many short sleeps: a signal between a look at signals and one long sleep would wait for its end.
    program = "import time; print('ready', flush=True); [time.sleep(0.05) for _ in range(1200)]"
    words = ("record", "-o", str(tmp_path / "calls.json"), "--", sys.executable, "-c", program)
    status, shown = in_terminal(*words, stop_after="ready\r\n")
    assert status == 130, shown
    assert "0 new calls recorded" in shown


def test_ctrl_c_stops_a_tuning_keeps_what_was_measured_and_says_how_to_go_on(shell, folder):
    """The next run begins with what is left."""
    status, shown = in_terminal("tune", "tuned_program:many", columns=200, stop_after="3 of 20: cli.row_sum@v1")
    assert status == 130, shown
    assert "Traceback" not in shown
    assert "stopped; what was measured is kept. Go on with: ejkernel tune tuned_program:many" in shown
    kept = len(shell("cache", "list", "--json").data)
    assert 1 <= kept < 20
    tiers = [call["tier"] for call in shell("explain", "tuned_program:many", "--json").data]
    assert tiers.count("persistent") == kept
    assert tiers.count("autotune") == 20 - kept
