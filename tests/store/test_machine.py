"""Two open caches on one file behave like one dictionary, whatever is done in whichever order."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from fakes_store import entries, store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from thinning import AT_LENGTH

from ejkernel.ops.core.key import Key
from ejkernel.ops.store import entry_log, entry_reader
from ejkernel.ops.store.maintenance import prune
from ejkernel.ops.store.snapshot import spell
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.one_leg

OPS = ("matmul@v1", "attention@v2")
KEYS = st.builds(Key, st.just("gpu|x"), st.sampled_from(OPS), st.sampled_from(["a", "b|c", "größe\n"]))
CFGS = st.one_of(st.integers(-5, 5), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=2))
WHO = st.sampled_from([0, 1])


class TwoCaches(RuleBasedStateMachine):
    """The file is small: it is up to date after every put."""

    small = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-"))
        self.patched = pytest.MonkeyPatch()
        if not self.small:
            self.patched.setattr(entry_reader, "SMALL", -1)
            self.patched.setattr(entry_log, "_PENDING", 5)
        self.path = self.folder / "ops.json"
        self.caches = [store(self.folder), store(self.folder)]
        self.model: dict[Key, object] = {}
        # What a cache may still answer for a key that was edited by hand, until something else changes.
        self.before_edit: list[dict[Key, object]] = [{}, {}]

    def teardown(self) -> None:
        self.patched.undo()
        shutil.rmtree(self.folder)

    def _changed(self) -> None:
        self.before_edit = [{}, {}]

    @initialize(count=st.integers(0, 2))
    def start(self, count):
        for number in range(count):
            self.put(0, Key("gpu|x", OPS[0], "a"), number)

    @rule(who=WHO, key=KEYS, cfg=CFGS)
    def put(self, who, key, cfg):
        self.caches[who].keep(key, StoredEntry(cfg))
        assert self.caches[who].status == "read-write"
        self.model[key] = cfg
        self._changed()

    @rule(who=WHO, key=KEYS)
    def get(self, who, key):
        found = self.caches[who].get(*key)
        assert found == self.model.get(key) or found == self.before_edit[who].get(key, object())

    @rule(who=WHO)
    def keys(self, who):
        assert self.caches[who].keys() == sorted(self.model)

    @rule(who=WHO)
    def reopen(self, who):
        self.caches[who] = store(self.folder)
        self.before_edit[who] = {}

    @rule(who=WHO)
    def fold(self, who):
        assert self.caches[who].fold()
        self._changed()
        assert set(entries(self.path) if self.path.exists() else ()) == {spell(key) for key in self.model}

    @rule(who=WHO)
    def close(self, who):
        self.caches[who].close()
        # A close that had nothing to fold changes nothing.

    @precondition(lambda self: self.model)
    @rule(data=st.data(), cfg=CFGS, pretty=st.booleans())
    def edit_by_hand(self, data, cfg, pretty):
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.fold(0)
        whole = json.loads(self.path.read_text(encoding="utf-8"))
        whole[spell(key)].pop("sha256", None)
        whole[spell(key)]["cfg"] = cfg
        if pretty:
            text = json.dumps(whole, indent=2)
        else:
            rows = [f"{json.dumps(name)}: {json.dumps(raw)}" for name, raw in whole.items()]
            text = "{\n" + ",\n".join(rows) + "\n}\n"
        self.path.write_text(text, encoding="utf-8")
        for old in self.before_edit:
            old[key] = self.model[key]
        self.model[key] = cfg

    @rule(who=WHO, op=st.sampled_from(OPS))
    def prune(self, who, op):
        doomed = [key for key in self.model if key.op_id == op]
        assert prune(self.caches[who], op_id=op) == len(doomed)
        for key in doomed:
            del self.model[key]
        self._changed()

    @invariant()
    def the_file_is_json_and_sorted(self):
        if self.path.exists():
            found = list(entries(self.path))
            assert found == sorted(found)
            if self.small:
                assert set(found) == {spell(key) for key in self.model}

    @invariant()
    def a_fresh_cache_agrees(self):
        fresh = store(self.folder)
        assert {key: fresh.get(*key) for key in fresh.keys()} == self.model


class TwoCachesPastTheThreshold(TwoCaches):
    """The file is large: entries stay in their own files until they are folded."""

    small = False


QUICK = settings(max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=300, stateful_step_count=50)

TestTwoCaches = TwoCaches.TestCase
TestTwoCaches.settings = QUICK
TestTwoCachesPastTheThreshold = TwoCachesPastTheThreshold.TestCase
TestTwoCachesPastTheThreshold.settings = QUICK


@AT_LENGTH
class TestTwoCachesAtLength(TwoCaches.TestCase):
    """The same, longer."""

    settings = LONG


@AT_LENGTH
class TestTwoCachesPastTheThresholdAtLength(TwoCachesPastTheThreshold.TestCase):
    """The same, longer."""

    settings = LONG
