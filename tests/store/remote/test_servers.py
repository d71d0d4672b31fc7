"""The contract of every store, and a remote's own promises, against real servers: SSH, HTTP, S3 and a folder."""

from __future__ import annotations

import gc
import itertools
import os
import warnings

import pytest
import servers
from fakes_remote import LONG, SECRET, key_of_call, remote_warnings, unhurried

pytest.importorskip("fsspec", reason="needs the extra `remote`: pip install 'ejkernel-ops[remote]'")

from test_contract import (  # the one suite, with other doors
    Doors,
    test_a_plain_tuple_is_a_key,
    test_a_put_notes_its_environment,
    test_a_store_has_a_name_for_messages,
    test_an_entry_keeps_all_that_is_known_about_it,
    test_an_unknown_key_has_no_answer,
    test_every_store_has_the_interface,
    test_get_returns_what_was_put,
    test_keys_lists_every_key_sorted,
    test_odd_keys_are_kept_apart,
    test_parts_of_a_key_do_not_run_into_each_other,
    test_puts_of_threads_are_all_kept,
    test_the_newest_put_wins,
    test_values_come_back_equal,
)

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store.remote import layout, remote_store
from ejkernel.ops.store.remote.folding import compact_remote
from ejkernel.ops.store.remote.remote_store import RemoteStore
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.engines


@pytest.fixture(autouse=True)
def collected():
    """Drivers leave their sockets to the garbage collector, which warns of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


CONTRACT = (
    *(test_a_plain_tuple_is_a_key, test_a_put_notes_its_environment, test_a_store_has_a_name_for_messages),
    *(test_an_entry_keeps_all_that_is_known_about_it, test_an_unknown_key_has_no_answer),
    *(test_every_store_has_the_interface, test_get_returns_what_was_put, test_keys_lists_every_key_sorted),
    *(test_odd_keys_are_kept_apart, test_parts_of_a_key_do_not_run_into_each_other),
    *(test_puts_of_threads_are_all_kept, test_the_newest_put_wins, test_values_come_back_equal),
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3():
    """An S3 server for the whole file, with one bucket."""
    pytest.importorskip("moto", reason="needs the extra `servers`")
    pytest.importorskip("s3fs", reason="needs the extra `servers`")
    with servers.server("s3") as port, pytest.MonkeyPatch.context() as patched:
        for name, value in servers.s3_settings(port).items():
            patched.setenv(name, value)
        servers.make_bucket("team")
        yield port


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """An SSH server for the whole file."""
    pytest.importorskip("asyncssh", reason="needs the extra `servers`")
    pytest.importorskip("paramiko", reason="needs the extra `servers`")
    with servers.server("ssh") as port:
        yield f"sftp://me:any@127.0.0.1:{port}{tmp_path_factory.mktemp('ssh')}"


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A folder, and an HTTP server in front of it."""
    pytest.importorskip("aiohttp", reason="needs the extra `servers`")
    folder = tmp_path_factory.mktemp("http")
    with servers.server("http", folder) as port:
        yield folder, f"http://127.0.0.1:{port}"


KINDS = ["folder", "ssh", "s3", "http"]


@pytest.fixture(params=KINDS)
def urls(request, tmp_path):
    """Where a test writes, and where it reads: the same place."""
    number = next(_numbers)
    if request.param == "folder":
        return f"file://{tmp_path}/team", f"file://{tmp_path}/team"
    if request.param == "http":
        folder, url = request.getfixturevalue("http")
        os.makedirs(folder / str(number))
        return f"file://{folder}/{number}", f"{url}/{number}"
    if request.param == "ssh":
        url = f"{request.getfixturevalue('ssh')}/{number}"
    else:
        request.getfixturevalue("s3")
        url = f"s3://team/{number}"
    return url, url


def opened(url, **more):
    """A store of one machine that lists anew for every look."""
    return RemoteStore(url, key=SECRET, fresh_seconds=0.0, on_fault="raise", **more)


@pytest.fixture
def doors(urls):
    """For the contract: one machine writes, another one reads."""
    writer = opened(urls[0], write=True)
    # As after any first push: a place that does not exist is an error for a command.
    writer.objects.write(layout.MARK, b'{"format": 1}')
    return Doors(writer, opened(urls[1]))


def test_what_was_folded_is_found(urls):
    """One object for each operation and device, with everything that was put."""
    writer = opened(urls[0], write=True)
    for number in range(12):
        writer.keep(key_of_call(number), StoredEntry(number))
    (folded,) = compact_remote(opened(urls[0], write=True))
    assert (folded.entries, folded.removed) == (12, 12)
    reader = opened(urls[1])
    assert [reader.get(*key_of_call(number)) for number in range(12)] == list(range(12))
    assert reader.lookup(key_of_call(3)).trusted is True


def test_a_put_after_a_get_is_seen(urls):
    """By a reader that lists again."""
    writer, reader = opened(urls[0], write=True), opened(urls[1])
    writer.put(*key_of_call("one"), "old")
    assert reader.get(*key_of_call("one")) == "old"
    writer.put(*key_of_call("one"), "new")
    assert reader.get(*key_of_call("one")) == "new"


def test_writes_in_the_background_arrive_at_the_end_of_a_process(urls, tmp_path):
    """A program that puts and ends at once leaves nothing behind."""
    from fakes_store import run_script

    code = (
        "import sys\n"
        "from fakes_remote import LONG, SECRET, key_of_call, unhurried\n"
        "from ejkernel.ops import RemoteStore\n"
        "from ejkernel.ops.store.remote import remote_store, writer\n"
        "from ejkernel.ops.store.store import StoredEntry\n"
        # A machine that is busy is no remote that is slow.
        "writer.SECONDS = remote_store._LOAD_SECONDS = LONG\n"
        "store = unhurried(RemoteStore(sys.argv[1], key=SECRET, write=True))\n"
        "store.lookup(key_of_call('first'))\n"
        "for number in range(3): store.keep_later(key_of_call(number), StoredEntry(number))\n"
        "print(0)"
    )
    run_script(code, urls[0])
    assert [opened(urls[1]).get(*key_of_call(number)) for number in range(3)] == [0, 1, 2]


def test_a_web_server_is_read_only(http):
    """A put says so, and what to use."""
    with pytest.raises(StoreError, match="can be read and not written"):
        opened(http[1], write=True).put(*key_of_call("one"), 1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://no-such-bucket/x", "there is no bucket no-such-bucket"),
        ("file:///no/such/folder", "it does not exist"),
        ("http://127.0.0.1:9/x", "left out"),
        ("sftp://me:any@127.0.0.1:9/x", "left out"),
        ("nosuch://place/x", "knows no driver for nosuch"),
    ],
)
def test_a_place_that_is_not_there_is_one_sentence(s3, monkeypatch, url, words):
    """Local work goes on."""
    monkeypatch.setattr(remote_store, "_LOAD_SECONDS", LONG)
    with remote_warnings() as said:
        store = RemoteStore(url, key=SECRET)
        # One that has no driver is left out from the start.
        store = store if store.reason else unhurried(store)
        assert [store.lookup(key_of_call(number)) for number in range(5)] == [None] * 5
    assert any(words in text for text in said), said
    assert len([text for text in said if "left out" in text]) == 1, said


def test_a_place_with_something_else_in_it_is_one_sentence(http, monkeypatch):
    """A web page, or a bucket for something else."""
    (http[0] / "other").mkdir(exist_ok=True)
    (http[0] / "other" / "page.html").write_text("<html>")
    monkeypatch.setattr(remote_store, "_LOAD_SECONDS", LONG)
    with remote_warnings() as said:
        assert unhurried(RemoteStore(f"{http[1]}/other", key=SECRET)).lookup(key_of_call("one")) is None
    assert len(said) == 1
    assert "something else" in said[0]
