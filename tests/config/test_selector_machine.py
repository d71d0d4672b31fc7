"""The selector against a small model of the seven tiers, through random histories."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, PersistentCache, overlay_cache
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.store import StoredEntry

FORWARD, BOTH = "forward", "forward+backward"
CANDIDATES = (1, 2, 4)
SIZES = (1, 2, 4, 8, 16)
# What failed is remembered for the process, so every history has an operation of its own.
HISTORIES = itertools.count()

which = st.integers(0, 1)
sizes = st.sampled_from(SIZES)


class Model:
    """What the contract says, in plain dicts of sizes; it knows nothing of the code."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[int, str | None]] = {}
        # Size, whether it is of this environment, what it was tuned for.
        self.disk: dict[int, tuple[int, bool, str | None]] = {}
        self.overlays: list[dict[int, int]] = []
        self.failed: set[int] = set()
        self.policy = AutotunePolicy()
        self.times = dict.fromkeys(SIZES, 1)
        self.broken = False

    def choose(self, call: int, override: int | None):
        """The size (None: an error), the events, and how many warnings."""
        if override is not None:
            return override, ["override"], 0
        for overlay in reversed(self.overlays):
            if call in overlay:
                return overlay[call], ["overlay_hit"], 0
        return self._known(call)

    def _known(self, call: int):
        asked = BOTH if self.policy.validate_backward else FORWARD
        seeds = []
        if call in self.memory:
            size, tuned = self.memory[call]
            if asked == FORWARD or tuned != FORWARD:
                return size, ["memory"], 0
            seeds.append((size, "memory"))
        if call in self.disk:
            size, here, tuned = self.disk[call]
            if here and (asked == FORWARD or tuned != FORWARD):
                self.memory[call] = (size, tuned)
                return size, ["persistent"], 0
            seeds.append((size, "persistent"))
        return self._measured(call, seeds, asked)

    def _measured(self, call: int, seeds: list[tuple[int, str]], asked: str):
        if not self.policy.allow_autotune or self.policy.cache_miss_fallback == "heuristics":
            if seeds:
                return seeds[0][0], [seeds[0][1]], 0
            return self._guessed([], 0)
        if call in self.failed:
            return self._guessed([], 0)
        events = ["autotune_start", "autotune_finish"]
        if self.broken:
            self.failed.add(call)
            return self._guessed(events, 1)
        offered = [*CANDIDATES, *(size for size, _ in seeds)]
        winner = min(offered, key=lambda size: (self.times[size], offered.index(size)))
        self.memory[call] = (winner, asked)
        self.disk[call] = (winner, True, asked)
        return winner, events, 0

    def _guessed(self, events: list[str], warned: int):
        if self.policy.allow_heuristics:
            return CANDIDATES[0], [*events, "heuristics"], warned
        return None, [*events, "error"], warned


class SelectorMachine(RuleBasedStateMachine):
    """Two calls of one kernel, asked for in every state that the rules can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ops.json"
        self.model = Model()
        self.kernel = Doubling(CANDIDATES)
        self.kernel.op_id = f"machine{next(HISTORIES)}"
        self.calls = [call_of(self.kernel, jnp.ones(n + 2)) for n in range(2)]
        self.keys = [key_of(self.kernel, inv) for inv in self.calls]
        self.entered: list[overlay_cache] = []
        self.tuner = TableTuner(self.model.times)
        self.make_selector()

    def make_selector(self) -> None:
        self.listener = Listener()
        self.store = PersistentCache("ops", self.path, cfg_type=Blocks)
        self.selector = ConfigSelectorChain(
            ConfigCache(), self.model.policy, self.tuner, self.store, on_event=self.listener
        )

    def teardown(self) -> None:
        while self.entered:
            self.entered.pop().__exit__(None, None, None)
        self.folder.cleanup()

    @rule(call=which, override=st.none() | sizes)
    def choose(self, call, override):
        size, events, warned = self.model.choose(call, override)
        inv = replace(self.calls[call], override_cfg=None if override is None else Blocks(override))
        self.listener.events.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if size is None:
                with pytest.raises(RuntimeError):
                    self.selector.choose(inv, self.kernel)
            else:
                assert self.selector.choose(inv, self.kernel) == Blocks(size)
        assert [data.get("level", name) for name, data in self.listener.events] == events
        assert len(caught) == warned

    @precondition(lambda self: len(self.entered) < 3)
    @rule(mapping=st.dictionaries(which, sizes, max_size=2))
    def enter_overlay(self, mapping):
        overlay = overlay_cache({self.keys[call]: Blocks(size) for call, size in mapping.items()})
        overlay.__enter__()
        self.entered.append(overlay)
        self.model.overlays.append(mapping)

    @precondition(lambda self: self.entered)
    @rule()
    def leave_overlay(self):
        self.entered.pop().__exit__(None, None, None)
        self.model.overlays.pop()

    @rule(call=which, size=sizes)
    def put_into_memory(self, call, size):
        self.selector.cache.put(*self.keys[call], Blocks(size))
        self.model.memory[call] = (size, None)

    @rule(call=which, size=sizes)
    def put_into_store(self, call, size):
        self.store.put(*self.keys[call], Blocks(size))
        self.model.disk[call] = (size, True, None)

    @rule(call=which, size=sizes, objective=st.sampled_from([FORWARD, BOTH]))
    def another_environment_left_an_entry(self, call, size, objective):
        # Which of two seeds counts, and whether one helps a key that failed, is left open.
        if call in self.model.memory or call in self.model.failed:
            return
        other = {**environment(jax.local_devices()[0]), "jaxlib": "0.1.7"}
        self.store.keep(Key(*self.keys[call]), StoredEntry(Blocks(size), other, "autotune", objective))
        self.model.disk[call] = (size, False, objective)

    @rule()
    def clear_memory(self):
        self.selector.cache.clear()
        self.model.memory.clear()

    @rule(
        autotune=st.booleans(),
        heuristics=st.booleans(),
        fallback=st.sampled_from(["autotune", "autotune", "heuristics"]),
        backward=st.booleans(),
    )
    def change_policy(self, autotune, heuristics, fallback, backward):
        self.selector.policy = self.model.policy = AutotunePolicy(autotune, heuristics, fallback, backward)

    @rule(times=st.tuples(*[st.integers(1, 4)] * len(SIZES)))
    def change_times(self, times):
        self.model.times = self.tuner.times = dict(zip(SIZES, times, strict=True))

    @rule(broken=st.booleans())
    def break_or_mend_the_tuner(self, broken):
        self.model.broken = self.tuner.broken = broken

    # Whether a new selector of one process tries again what failed is tested elsewhere.
    @precondition(lambda self: not self.model.failed)
    @rule()
    def start_a_new_selector_on_the_same_store(self):
        self.model.memory.clear()
        self.make_selector()

    @invariant()
    def memory_is_as_the_model_says(self):
        expected = {self.keys[call]: Blocks(size) for call, (size, _) in self.model.memory.items()}
        assert dict(self.selector.cache._data) == expected

    @invariant()
    def disk_is_as_the_model_says(self):
        fresh = PersistentCache("ops", self.path, cfg_type=Blocks)
        found = [fresh.get(*key) for key in self.keys]
        assert found == [Blocks(self.model.disk[c][0]) if c in self.model.disk else None for c in range(2)]


SelectorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSelectorMachine = pytest.mark.one_leg(SelectorMachine.TestCase)
