"""The table of tiers in docs/choosing.md, found by asking a selector: `python tests/tier_table.py` prints it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from fakes import Blocks, Doubling, Listener, TableTuner, call_of, key_of
from fakes_remote import MemoryObjects, remote, writing

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    make_pack,
    overlay_cache,
)
from ejkernel.ops.core.description import described
from ejkernel.ops.core.device import environment
from ejkernel.ops.core.errors import NoConfigError
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store.store import StoredEntry

KERNEL = Doubling()
CALL = call_of(KERNEL)
GUESS, OTHER = Blocks(1), Blocks(2)
HEADER = (
    "| tier | answers with | last event | in memory afterwards | on disk afterwards |\n| --- | --- | --- | --- | --- |"
)


def tuned_calls() -> Iterator[tuple[Key, StoredEntry]]:
    """Tunings of other lengths, all of them with one winner."""
    for length in (16, 32, 64, 128, 256):
        call = call_of(KERNEL, jnp.ones(length))
        trials = [Trial(Blocks(size), samples_s=(seconds,)) for size, seconds in ((1, 3.0), (2, 1.0), (4, 2.0))]
        record = Record(trials=tuple(trials), winner=1, heuristic=0)
        here = environment(jax.devices()[0])
        entry = StoredEntry(OTHER, here, "autotune", "forward", summary=record.summary(), call=described(call))
        yield Key(*key_of(KERNEL, call)), entry


class Scene:
    """A selector over a cache and a store, and one call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = Key(*key_of(KERNEL, CALL))
        self.cache: ConfigCache[Any] = ConfigCache()
        self.store: PersistentCache[Any] = PersistentCache("mine", folder / "mine.json")
        self.objects = MemoryObjects()
        self.call = CALL
        self.policy = AutotunePolicy()
        self.listener = Listener()

    def selector(self) -> ConfigSelectorChain[Any, Any]:
        chosen = {"on_event": self.listener, "remote": remote(self.objects)}
        return ConfigSelectorChain(self.cache, self.policy, TableTuner(), self.store, **chosen)

    @contextlib.contextmanager
    def answered_by(self, tier: str) -> Iterator[None]:
        """Arranges that no tier but this one has an answer."""
        with contextlib.ExitStack() as around:
            match tier:
                case "OverrideTier":
                    self.call = call_of(KERNEL, cfg=OTHER)
                case "OverlayTier":
                    around.enter_context(overlay_cache({tuple(self.key): OTHER}))
                case "MemoryTier":
                    self.cache.put(*self.key, OTHER)
                case "StoreTier":
                    self.store.put(*self.key, OTHER)
                case "RemoteTier":
                    writing(self.objects).put(*self.key, OTHER)
                case "PacksTier":
                    others: PersistentCache[Any] = PersistentCache("others", self.folder / "others.json")
                    others.put(*self.key, OTHER)
                    make_pack(self.folder / "pack.json", others)
                    packs = {"EJKERNEL_OPS_PACKS": str(self.folder / "pack.json")}
                    around.enter_context(mock.patch.dict("os.environ", packs))
                case "SeedTier":
                    self.store.keep(self.key, StoredEntry(OTHER, {"jax": "0.1", "jaxlib": "0.1"}, "autotune"))
                    self.policy = AutotunePolicy(allow_autotune=False)
                case "PredictedTier":
                    for key, entry in tuned_calls():
                        self.store.keep(key, entry)
                    self.policy = AutotunePolicy(allow_autotune=False, allow_predictions=True)
                case "HeuristicsTier":
                    self.policy = AutotunePolicy(allow_autotune=False)
                case "error":
                    self.policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
            yield

    def kept(self) -> list[bool]:
        return [tuple(self.key) in place.keys() for place in (self.cache, self.store)]


def row(tier: str, name: str, says: str) -> str:
    """One line: what a tier is, and what is seen where it answers."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        with scene.answered_by(tier):
            before = scene.kept()
            try:
                found = scene.selector().choose(scene.call, KERNEL)
            except NoConfigError:
                found = None
        # Another tier than this one would have answered otherwise.
        assert found == {"HeuristicsTier": GUESS, "error": None}.get(tier, OTHER), (tier, found)
        kept = ["is there" if was else "yes" if now else "no" for was, now in zip(before, scene.kept(), strict=True)]
    event, data = scene.listener.last
    level = f", {data['level']}" if "level" in data else ""
    return f"| {name} | {says.rstrip('.').lower()[0]}{says.rstrip('.')[1:]} | `{event}`{level} | {' | '.join(kept)} |"


def tier_table() -> str:
    """The tiers in the order in which a selector asks them; the last line is what is left where none answers."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        every = AutotunePolicy(allow_predictions=True)
        tiers = [(type(tier).__name__, tier.name, type(tier).__doc__) for tier in scene.selector()._tiers(every)]
    return "\n".join([HEADER, *(row(*tier) for tier in [*tiers, ("error", "error", NoConfigError.__doc__)])])


if __name__ == "__main__":
    print(tier_table())
