"""A page: what it answers, what it leaves out and says so, and that nothing in it comes from elsewhere.

Covers `reporting/charts.py`, `reporting/compare.py`, `reporting/gather.py`, `reporting/markup.py`,
`reporting/page_style.py` and `reporting/sections.py`.
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import subprocess
import sys

import pytest
from fakes_reporting import record, result

from ejkernel.ops import OperationStores, OpsError, PersistentCache, Record, Trial, report
from ejkernel.ops.core.key import Key
from ejkernel.ops.programs.confirm import Confirmation
from ejkernel.ops.store.store import StoredEntry


class Reader(html.parser.HTMLParser):
    """The text of a page as a reader without a script gets it, and the tags that were left open."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.links, self.ids, self.loads = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.loads += [values[name] for name in ("src", "href") if tag != "a" and name in values]
        if tag not in ("meta", "link", "input", "path", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("path", "circle"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read(source, tmp_path, **options):
    """The page of a source."""
    page = report(source, tmp_path / "page.html", **options).read_text(encoding="utf-8")
    found = Reader(page)
    assert found.open == []
    return found


def test_the_page_of_a_result_answers_what_users_ask(tmp_path):
    """Choice, gain with interval, race, parameters, floor, failures, time, shares, origin and the command."""
    text = read(result(confirmation=Confirmation(2e-3, 1e-3, (2.0, 1.9, 2.1), 20)), tmp_path).text
    for answer in (
        "3 calls on gpu|NVIDIA H200",
        "surely faster 3",
        "The program itself:",
        "triton block_m=16 block_n=32",
        "2.00 times as fast as the heuristic cfg (1.90 to 2.10 with 95%)",
        "dropped in round 2",
        "What each parameter does",
        "block_m and block_n: best time over the winner's",
        "times the floor of 46.5 us, which memory sets (200 MB in and out, 4 GFLOP)",
        "measured on one H200: copies, and products of bfloat16",
        "reason 4: it went wrong",
        "Where the time of the tuning went",
        "50% of 3 runs",
        "tuned with: jax 0.11.2",
        "ejkernel remeasure --call 0000000000000002 --fix",
    ):
        assert answer in text, answer


def test_every_sample_is_in_the_race(tmp_path):
    """A point for each, also of candidates that were dropped."""
    one = record(candidates=12)
    page = report(one, tmp_path / "page.html").read_text(encoding="utf-8")
    race = re.search(r'<svg role="img" aria-label="The race: (\d+) candidates.*?</svg>', page)
    assert int(race[1]) == sum(bool(trial.samples_s) for trial in one.trials)
    lines = re.findall(r'<path class="[owh]" d="([^"]*)"', race[0])
    points = sum(len(re.findall(r"-?\d+[ -]-?\d+|h0", re.sub(r"M\d+ \d+h0", "h0", line))) for line in lines)
    assert points == sum(len(trial.samples_s) for trial in one.trials)


def test_nothing_is_loaded_from_anywhere(tmp_path):
    """No address, no file: the page is whole in itself, and every link leads to a part of it."""
    page = report(result(), tmp_path / "page.html").read_text(encoding="utf-8")
    found = Reader(page)
    assert found.loads == ["data:,"]
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)


@pytest.mark.one_leg
@pytest.mark.parametrize("candidates", [4, 24, 72])
def test_fifty_calls_stay_below_250_kilobytes(tmp_path, candidates):
    """However many candidates each has, and each call is there."""
    path = report(result(50, candidates), tmp_path / "page.html")
    assert path.stat().st_size <= 250_000
    assert len(re.findall("<section", path.read_text(encoding="utf-8"))) == 50


@pytest.mark.one_leg
def test_ten_thousand_calls_make_a_page_that_says_what_is_missing(tmp_path):
    """The costliest are listed, the others counted."""
    one = record(candidates=4)
    records = [dataclasses.replace(one, key={**one.key, "call_key": f"{i:x}"}) for i in range(10_000)]
    text = read(records, tmp_path).text
    assert "10,000 calls on" in text
    assert "9,000 more calls, the ones that take least, are not on this page" in text
    assert "more calls are in the table alone" in text


def test_names_with_markup_are_text(tmp_path):
    """In operations, cfgs, messages, titles and notes; control characters are shown as such."""
    bad = "<script>alert(1)</script>\x00&\"'"
    trials = (Trial({"way": bad}, samples_s=(1.0, 1.0)), Trial({"way": "b"}, "wrong", bad))
    key = {"device": bad, "op_id": bad, "call_key": bad, "call.args[0]": bad}
    hostile = Record(key=key, trials=trials, winner=0, heuristic=0, conditions=bad, environment={bad: bad})
    page = report(hostile, tmp_path / "page.html", title=bad).read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert "\x00" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize(
    ("poor", "said"),
    [
        (Record(), "No samples are known of this call"),
        (Record(trials=(Trial(1, "crash", "gone"),), stop="failed"), "no candidate can be used"),
        (record(cost={}), "bytes and operations were not kept with this tuning"),
        (record(phases={}), "compiling, all threads together"),
        (record(key={"device": "cpu|some cpu"}), "the peaks of cpu|some cpu are not known here"),
        (record(winner=None, heuristic=None, runner_up=None, gain=None), "nothing was measured"),
    ],
)
def test_a_record_with_parts_missing_makes_a_page_that_says_so(tmp_path, poor, said):
    """Never a traceback."""
    assert said in read(poor, tmp_path).text


def test_the_page_of_a_store_has_its_entries_and_their_records(tmp_path):
    """One with a record, one with its summary alone, one put by hand; shares need a program."""
    store = PersistentCache("ops", tmp_path / "ops.json")
    one = record()
    store.keep(
        Key("cpu|x", "matmul@v1", "a"), StoredEntry(one.cfg, source="autotune", summary=one.summary(), record=one)
    )
    store.keep(Key("cpu|x", "matmul@v1", "b"), StoredEntry(one.cfg, source="autotune", summary=one.summary()))
    store.put("cpu|x", "matmul@v1", "c", {"block": 1})
    for source in (store, tmp_path / "ops.json"):
        text = read(source, tmp_path).text
        assert "3 calls on cpu|x; surely faster 2, not measured 1" in text
        assert "Shares need a program" in text
        assert "No samples are known of this call" in text


def test_a_damaged_record_costs_its_samples_alone(tmp_path):
    """The page names it and shows the rest."""
    store = OperationStores(tmp_path / "stores")
    one = record()
    store.keep(
        Key("cpu|x", "matmul@v1", "a"), StoredEntry(one.cfg, source="autotune", summary=one.summary(), record=one)
    )

    class Broken(type(store.of("matmul@v1"))):
        def record(self, *key):
            return Record.loads(json.dumps({"format": 99}))

    store.of("matmul@v1").__class__ = Broken
    text = read(store, tmp_path).text
    assert "its record cannot be read: record format 99 is unknown" in text
    assert "surely faster 1" in text


def test_an_empty_store_makes_a_page(tmp_path):
    """It says that there is nothing yet."""
    assert "There is no call here" in read(OperationStores(tmp_path / "none"), tmp_path).text


def test_what_differs_between_two_runs(tmp_path):
    """Another cfg, another time, another version, a new and a gone call; equal runs say so."""
    now, then = result(3), result(2)
    slower = dataclasses.replace(record(0), winner=1, environment={"jax": "0.10.0"})
    entries = [dataclasses.replace(then.entries[0], record=slower, cfg=slower.cfg), then.entries[1]]
    text = read(now, tmp_path, against=dataclasses.replace(then, entries=entries)).text
    assert "2 calls differ, 1 do not" in text
    assert "triton block_m=32 block_n=32 became triton block_m=16 block_n=32" in text
    assert "times as fast" in text
    assert "jax: 0.10.0, 0.11.2 before, 0.11.2 now" in text
    assert re.search(r"new - 1\d\d us", text)
    assert "Every call has the cfg that it had" in read(now, tmp_path, against=result(3)).text


@pytest.mark.parametrize("source", [3, "nothing/here", [], {"a": 1}, object()])
def test_a_source_that_is_none_is_a_sentence(tmp_path, source):
    """It says what a page can be made of."""
    with pytest.raises(OpsError, match=r"a page is made of|there is nothing at"):
        report(source, tmp_path / "page.html")


def test_a_file_of_something_else_is_a_sentence(tmp_path):
    """JSON or not."""
    for content in ("[]", "{}}", '{"kind": "recorded calls"}'):
        (tmp_path / "other.json").write_text(content, encoding="utf-8")
        with pytest.raises(OpsError, match="is no result of a tuning, no record and no store"):
            report(tmp_path / "other.json", tmp_path / "page.html")


def test_a_file_that_is_too_large_to_be_ours_is_not_read(tmp_path):
    """A sparse file of 200 GB is named, and takes no memory."""
    with open(tmp_path / "other.json", "wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(OpsError, match=r"other\.json is not read: it has 214,748,364,800 bytes"):
        report(tmp_path / "other.json", tmp_path / "page.html")


def test_a_folder_is_no_page(tmp_path):
    """The message names a file in it."""
    with pytest.raises(ValueError, match=r"is a folder; give the path of a file, such as .*report\.html"):
        report(record(), tmp_path)


def test_the_pages_of_result_and_record_files(tmp_path):
    """What `dump` wrote and what `Record.dumps` gives."""
    result(2).dump(tmp_path / "result.json")
    (tmp_path / "record.json").write_text(record().dumps(), encoding="utf-8")
    assert "2 calls on" in read(tmp_path / "result.json", tmp_path).text
    assert "1 call on" in read(tmp_path / "record.json", tmp_path).text


def test_a_page_of_a_store_needs_no_jax(tmp_path):
    """It is made where the results are looked at."""
    PersistentCache("ops", tmp_path / "ops.json").put("cpu|x", "matmul@v1", "c", {"block": 1})
    code = (
        "import sys; from ejkernel.ops.reporting.page import report\n"
        f"report({str(tmp_path / 'ops.json')!r}, {str(tmp_path / 'page.html')!r})\n"
        "print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
