"""Locked mode: calls are answered by a reviewed file alone, and one that is not in it is an error.

Covers `store/bundle.py`.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    OpsError,
    current_scope,
    device_fingerprint,
    locked,
    overlay_cache,
    refresh,
)
from ejkernel.ops.core.description import described
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.lock_file import read_lock, write_lock
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()


def selector(**settings):
    """A selector that would tune whatever no tier answers."""
    return ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), **settings)


def entry(inv, size, **fields):
    """What a lock says about a call."""
    fields.setdefault("environment", environment(device_fingerprint()))
    return StoredEntry(Blocks(size), source="autotune", call=described(inv), **fields)


def lock_of(path, *calls, size=4, kernel=KERNEL, device=None):
    """A lock file of these calls, all with one cfg."""
    keys = [Key(*key_of(kernel, inv)) for inv in calls]
    keys = [key._replace(device=device or key.device) for key in keys]
    return write_lock(path, {key: entry(inv, size) for key, inv in zip(keys, calls, strict=True)}).path


@pytest.fixture
def path(tmp_path):
    """A lock file of a call of eight numbers."""
    return lock_of(tmp_path / "step.lock.json", call_of(KERNEL))


# What is answered.


def test_a_call_in_the_file_gets_its_cfg(path):
    """Exactly that cfg, as the kernel knows it; nothing is tuned."""
    chooser = selector()
    with locked(path):
        assert chooser.choose(call_of(KERNEL), KERNEL) == Blocks(4)
    assert chooser.tuner.calls == 0


def test_memory_stores_and_heuristics_are_not_asked(path):
    """What the cache holds for the call does not matter, and stays as it is."""
    chooser = selector()
    chooser.cache.put(*key_of(KERNEL, call_of(KERNEL)), Blocks(1))
    with locked(path):
        assert chooser.choose(call_of(KERNEL), KERNEL) == Blocks(4)
    assert chooser.choose(call_of(KERNEL), KERNEL) == Blocks(1)


def test_the_callers_own_cfg_wins(path):
    """`cfg=` is written in the program itself, so no file need say it."""
    with locked(path):
        assert selector().choose(call_of(KERNEL, cfg=Blocks(1)), KERNEL) == Blocks(1)
        assert selector().choose(call_of(KERNEL, jnp.ones(3), cfg=Blocks(1)), KERNEL) == Blocks(1)


def test_an_overlay_inside_the_lock_wins_and_one_around_it_does_not(path):
    """The innermost `with` speaks first; a lock replaces everything that it is inside of."""
    key = key_of(KERNEL, call_of(KERNEL))
    with overlay_cache({key: Blocks(1)}), locked(path):
        assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(4)
        with overlay_cache({key: Blocks(2)}):
            assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(2)
    other = call_of(KERNEL, jnp.ones(3))
    with overlay_cache({key_of(KERNEL, other): Blocks(1)}), locked(path), pytest.raises(RuntimeError, match="no entry"):
        selector().choose(other, KERNEL)


def test_locks_nest(path, tmp_path):
    """The inner lock alone answers; leaving it brings the outer one back."""
    inner = lock_of(tmp_path / "inner.json", call_of(KERNEL), size=2)
    with locked(path):
        with locked(inner):
            assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(2)
        assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(4)


def test_one_lock_may_be_entered_again_and_ends_with_an_exception(path):
    """It is left as often as it was entered, whatever happens inside."""
    lock = locked(path)
    with pytest.raises(KeyError), lock, lock:
        raise KeyError
    assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(2)


def test_another_thread_is_not_locked_unless_it_opts_in(path):
    """A lock belongs to the thread that entered it; `current_scope` carries it on."""
    found = {}

    def ask(name, scope):
        with scope:
            found[name] = selector().choose(call_of(KERNEL), KERNEL)

    with locked(path):
        for name, scope in (("plain", overlay_cache({})), ("opted in", current_scope())):
            thread = threading.Thread(target=ask, args=(name, scope))
            thread.start()
            thread.join()
    assert found == {"plain": Blocks(2), "opted in": Blocks(4)}


def test_the_listener_hears_of_the_file(path):
    """The event is an overlay's, with the lock's path."""
    listener = Listener()
    with locked(path):
        selector(on_event=listener).choose(call_of(KERNEL), KERNEL)
    name, data = listener.last
    assert (name, data["lock"], data["cfg"]) == ("overlay_hit", path, Blocks(4))


def test_an_entry_of_another_environment_is_used_and_told(tmp_path):
    """A lock gives what it says after an update as well; the event has the environment it was made in."""
    inv = call_of(KERNEL)
    old = {Key(*key_of(KERNEL, inv)): entry(inv, 4, environment={"jaxlib": "0.1.0"})}
    listener = Listener()
    with locked(write_lock(tmp_path / "lock.json", old).path):
        assert selector(on_event=listener).choose(inv, KERNEL) == Blocks(4)
    assert "0.1.0" in listener.last[1]["environment"]


# What is an error.


def test_a_call_that_is_not_in_the_file_names_the_nearest_entry_and_what_differs(path):
    """Nothing is tuned or guessed; the message has the file, the call, the nearest entry and both sides."""
    chooser = selector(on_event=(listener := Listener()))
    with locked(path), pytest.raises(RuntimeError) as caught:
        chooser.choose(call_of(KERNEL, jnp.ones(9)), KERNEL)
    text = str(caught.value)
    assert f"no entry in {path} for doubling@v3(float32[9])" in text
    assert "args[0] is float32[8] there, float32[9] here" in text
    assert "Freeze the program again" in text
    assert listener.names == ["error"]
    assert isinstance(caught.value, OpsError)


def test_every_tier_says_that_it_was_not_asked(path):
    """The error says for each tier why it had no answer."""
    with locked(path), pytest.raises(RuntimeError) as caught:
        selector().choose(call_of(KERNEL, jnp.ones(9)), KERNEL)
    for tier in ("memory", "persistent", "autotune", "heuristics"):
        assert f"{tier:<10}  not asked: locked" in str(caught.value)


def test_a_lock_of_another_device_is_named(tmp_path):
    """The message has both devices."""
    where = lock_of(tmp_path / "lock.json", call_of(KERNEL), device="gpu|NVIDIA H200")
    with locked(where), pytest.raises(RuntimeError, match=r"is for gpu\|NVIDIA H200, and this call is for cpu"):
        selector().choose(call_of(KERNEL), KERNEL)


def test_a_lock_of_another_program_is_named(tmp_path):
    """Where the operation is not in the file at all, the message says what is."""
    other = Doubling()
    other.op_id = "tripling"
    where = lock_of(tmp_path / "lock.json", call_of(other), kernel=other)
    with locked(where), pytest.raises(RuntimeError, match=r"another program's: it holds tripling@v3"):
        selector().choose(call_of(KERNEL), KERNEL)


def test_another_version_of_the_kernel_is_named(path):
    """An entry of an older version does not serve, and the difference is told."""
    newer = Doubling()
    newer.version = "4"
    with locked(path), pytest.raises(RuntimeError, match="version is 3 there, 4 here"):
        selector().choose(call_of(newer), newer)


def test_a_cfg_that_does_not_fit_the_kernel_is_an_error(path):
    """An entry of another type is never handed to the kernel, nor passed over."""

    class Typed(Doubling):
        cfg_type = int

    with locked(path), pytest.raises(TypeError, match=r"step\.lock\.json does not fit"):
        selector().choose(call_of(KERNEL), Typed())


# Functions that the user jitted.


def traced(chooser):
    """A jitted function whose trace chooses, and the cfgs that it was traced with."""
    seen = []

    @jax.jit
    def function(x):
        seen.append(chooser.choose(call_of(KERNEL, x), KERNEL))
        return x * 1.0

    return function, seen


def test_a_jitted_function_is_traced_again_inside_and_not_after(path):
    """Inside it gets the lock's cfg, outside its old program; entering once more compiles nothing."""
    function, seen = traced(selector())
    function(jnp.ones(8))
    for _ in range(2):
        with locked(path):
            function(jnp.ones(8))
    function(jnp.ones(8))
    assert seen == [Blocks(2), Blocks(4)]


def test_a_function_compiled_before_is_an_error_under_a_lock_without_it(path):
    """What was compiled outside does not slip through, also under an empty lock."""
    function, _ = traced(selector())
    function(jnp.ones(3))
    with locked(path), pytest.raises(RuntimeError, match="no entry"):
        function(jnp.ones(3))
    function(jnp.ones(3))


def test_an_empty_lock_locks(tmp_path):
    """A file without entries answers nothing."""
    function, _ = traced(selector())
    function(jnp.ones(3))
    with locked(write_lock(tmp_path / "lock.json", {}).path), pytest.raises(RuntimeError, match="it holds nothing"):
        function(jnp.ones(3))


def test_refresh_inside_keeps_the_lock(path):
    """Everything chooses again, from the lock."""
    function, seen = traced(selector())
    with locked(path):
        function(jnp.ones(8))
        refresh()
        function(jnp.ones(8))
    assert seen == [Blocks(4), Blocks(4)]


# The setting.


def test_the_setting_locks_a_selector(path, monkeypatch):
    """`EJKERNEL_OPS_LOCK` holds for every selector made under it, in every thread; blocks inside it speak first."""
    monkeypatch.setenv("EJKERNEL_OPS_LOCK", path)
    chooser = selector(policy=AutotunePolicy(allow_autotune=False))
    assert chooser.choose(call_of(KERNEL), KERNEL) == Blocks(4)
    with pytest.raises(RuntimeError, match="no entry"):
        chooser.choose(call_of(KERNEL, jnp.ones(3)), KERNEL)
    with overlay_cache({key_of(KERNEL, call_of(KERNEL)): Blocks(1)}):
        assert chooser.choose(call_of(KERNEL), KERNEL) == Blocks(1)


def test_a_setting_that_names_no_lock_is_an_error_at_once(tmp_path, monkeypatch):
    """A selector is not made without the lock that was asked for."""
    monkeypatch.setenv("EJKERNEL_OPS_LOCK", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json does not exist.*freeze"):
        selector()


# The file.


def test_the_file_is_sorted_json_with_an_entry_a_line(tmp_path):
    """Two changes of two calls are two changed lines."""
    calls = [call_of(KERNEL, jnp.ones(n)) for n in (5, 3, 8)]
    where = lock_of(tmp_path / "lock.json", *calls)
    text = (tmp_path / "lock.json").read_text()
    data = json.loads(text)
    assert list(data) == sorted(data)
    assert len(text.splitlines()) == len(calls) + 3
    assert where == str(tmp_path / "lock.json")
    (line,) = [line for line in text.splitlines() if "float32[5]" in line]
    assert '"cfg": {"size": 4}' in line
    assert '"jaxlib": ' in line


def test_the_same_decisions_are_the_same_text(tmp_path):
    """A file that is written again without a change has no difference to review."""
    calls = [call_of(KERNEL, jnp.ones(n)) for n in (5, 3)]
    lock_of(tmp_path / "one.json", *calls)
    lock_of(tmp_path / "two.json", *reversed(calls))
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


def edited(path, change):
    """The file with its first entry changed."""
    file = Path(path)
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")


def test_a_changed_line_without_its_checksum_is_an_edit(path):
    """A reviewer may set another cfg: the line is theirs once its checksum is deleted."""
    edited(path, lambda text: re.sub(r', "sha256": "\w+"', "", text.replace('"size": 4', '"size": 1')))
    with locked(path):
        assert selector().choose(call_of(KERNEL), KERNEL) == Blocks(1)


DAMAGE = {
    "a changed cfg": (lambda text: text.replace('"size": 4', '"size": 1'), "does not fit its checksum.*sha256"),
    "a changed key": (lambda text: text.replace("doubling@v3", "doubling@v4"), "does not fit its checksum"),
    "cut off": (lambda text: text[:90], "cannot be read"),
    "a conflict": (lambda text: text.replace("{\n", "{\n<<<<<<< ours\n", 1), "cannot be read"),
    "a line twice": (lambda text: text.replace("{\n", "{\n" + text.splitlines()[1] + "\n", 1), "stands twice"),
    "a newer format": (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2"),
    "no lock": (lambda text: text.replace('"~lock"', '"~pack"'), "is no lock, but a pack"),
    "a store": (lambda text: text.replace('"~lock": {"format": 1}', '"~format": 1'), "is no lock, but a store"),
    "no entry": (lambda text: text.replace('"~lock"', '"what": 1, "~lock"'), "is no entry"),
    "no object": (lambda text: "[]", "holds a list"),
    "empty": (lambda text: "", "is empty"),
    "not a number": (lambda text: text.replace('"size": 4', '"size": NaN'), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_an_error_that_names_it(path, kind):
    """Nothing of it is used; the message has the path and what to do."""
    change, message = DAMAGE[kind]
    edited(path, change)
    with pytest.raises(ValueError, match=rf"(?s)step\.lock\.json.*{message}.*freeze") as caught:
        locked(path)
    assert isinstance(caught.value, OpsError)


def test_a_folder_is_no_lock(tmp_path):
    """What cannot be opened is named."""
    with pytest.raises(ValueError, match="cannot be read"):
        locked(tmp_path)


def test_a_lock_is_read_through_a_link_and_written_through_it(path, tmp_path):
    """Build systems link files; the link stays."""
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert len(read_lock(link)) == 1
    lock_of(link, call_of(KERNEL), call_of(KERNEL, jnp.ones(3)))
    assert link.is_symlink()
    assert len(read_lock(path)) == 2


def test_a_file_of_another_kind_is_not_written_over(tmp_path):
    """A store stays as it is; a lock, damaged or not, is replaced."""
    path = tmp_path / "ops.json"
    path.write_text('{"~format": 1}')
    with pytest.raises(OSError, match=r"ops\.json exists and is no lock"):
        lock_of(path, call_of(KERNEL))
    assert path.read_text() == '{"~format": 1}'
    path.write_text('{ <<<<<<< "~lock"')
    lock_of(path, call_of(KERNEL))
    assert len(read_lock(path)) == 1
