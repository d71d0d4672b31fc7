"""A selector with everything around it, for tests of what it chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fakes import Blocks, DictStore, Doubling, Listener, TableTuner, call_of, key_of

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Invocation, Kernel, PersistentCache


@dataclass
class World:
    """One selector with everything around it."""

    kernel: Kernel
    selector: ConfigSelectorChain
    inv: Invocation

    @property
    def key(self):
        return key_of(self.kernel, self.inv)

    @property
    def tuner(self):
        return self.selector.tuner

    @property
    def listener(self):
        return self.selector.on_event

    def choose(self, **changes):
        return self.selector.choose(replace(self.inv, **changes), self.kernel)

    def kept(self):
        """What is in memory and what is in the store."""
        store = self.selector.persistent
        return self.selector.cache._data.get(self.key), None if store is None else store.get(*self.key)


def world(kernel=None, *args, policy=None, tuner=None, persistent=None, cache=None, **more):
    """A world of fakes, but for the parts that are given."""
    kernel = kernel or Doubling()
    selector = ConfigSelectorChain(
        cache or ConfigCache(),
        policy or AutotunePolicy(),
        tuner or TableTuner(),
        DictStore() if persistent is None else persistent,
        on_event=Listener(),
        **more,
    )
    return World(kernel, selector, call_of(kernel, *args))


NO_TUNING = AutotunePolicy(allow_autotune=False)


def stored_world(tmp_path, **more):
    """One whose store is a file."""
    return world(persistent=PersistentCache(tmp_path / "x.json", cfg_type=Blocks), **more)


def heuristic_reason(w):
    """The reason that the listener was told for a guess."""
    name, data = w.listener.last
    assert name == "heuristics"
    return str(data["reason"])


class Typed(Doubling):
    """Declares what its cfgs are."""

    op_id = "typed"
    cfg_type = Blocks
