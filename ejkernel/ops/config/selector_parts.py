"""The parts of a selector: memory, store, remote, tuner, policy, lock file, listener; each may be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from ..core import invalidation
from ..core.errors import SettingError
from ..core.invocation import Cfg, Out
from ..core.kernel import KernelNames, names_in
from ..settings import Settings
from ..store.lock_file import LockFile
from ..store.packs import found_packs
from ..store.store import Mapped, Store, as_store
from ..tuning.custom_tuner import Autotuner
from .cache import ConfigCache, lock_in_force
from .events import Teller
from .policy import AutotunePolicy, in_force
from .tuning_budget import seconds_spent

if TYPE_CHECKING:
    from ..store.remote.remote_store import RemoteStore


class SelectorParts(Generic[Cfg, Out]):
    """A selector without its walk: its parts, and what its settings allow."""

    _cache: ConfigCache[Cfg]
    _policy: AutotunePolicy
    _persistent: Mapped | None
    _lock_file: LockFile | None
    settings: Settings
    store: Store | None
    store_names: KernelNames | None
    remote: RemoteStore | None
    tuner: Autotuner
    persist_autotune: bool
    forbid_reautotune: bool
    tell: Teller

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force here: this selector's, with the overrides of this context."""
        return in_force(self, self._policy)

    @policy.setter
    def policy(self, policy: AutotunePolicy) -> None:
        self._policy = checked(policy)
        invalidation.note_everything()

    @property
    def cache(self) -> ConfigCache[Cfg]:
        """The memory of this process; another one takes effect at the next choice."""
        return self._cache

    @cache.setter
    def cache(self, cache: ConfigCache[Cfg]) -> None:
        self._cache = cache
        invalidation.note_everything()

    @property
    def persistent(self) -> Mapped | None:
        """The store, as it was given."""
        return self._persistent

    @persistent.setter
    def persistent(self, persistent: Mapped | None) -> None:
        self._take_store(persistent)
        invalidation.note_everything()

    def _take_store(self, persistent: Mapped | None) -> None:
        self._persistent = persistent
        self.store = None if persistent is None else as_store(persistent)
        self.store_names = None if persistent is None else names_in(persistent)

    @property
    def lock_file(self) -> LockFile | None:
        """The lock file in force here: that of a block around, else the setting's."""
        around = lock_in_force()
        return self._lock_file if around is None else around

    @property
    def on_event(self) -> Callable[..., Any] | None:
        """The function that is told about every choice."""
        return self.tell.listener

    @on_event.setter
    def on_event(self, listener: Callable[..., Any] | None) -> None:
        self.tell = Teller(listener)

    def stores(self) -> list[Store]:
        """The places of entries: the selector's own store, then the packs."""
        packs = self.settings.packs
        return [*([] if self.store is None else [self.store]), *([] if packs is None else found_packs(packs))]

    def tuning_is_off(self) -> str:
        """The reason why settings allow no tuning now; else empty."""
        if not self.settings.autotune:
            return "off (EJKERNEL_OPS_AUTOTUNE)"
        limit = self.settings.tune_seconds
        if limit is not None and seconds_spent() >= limit:
            return f"the process has spent its {limit:g} s of tuning (EJKERNEL_OPS_TUNE_SECONDS)"
        return ""


def check_part(name: str, part: Any, method: str, such: str) -> None:
    """A part without the method that is called on it is an error."""
    if part is not None and not callable(getattr(part, method, None)):
        raise SettingError(f"{name}={part!r} has no method {method}; give an object that has, {such}")


def checked(policy: Any) -> AutotunePolicy:
    """The policy, if it is one."""
    if not isinstance(policy, AutotunePolicy):
        raise SettingError(
            f"policy={policy!r} is no AutotunePolicy; give one, such as AutotunePolicy(allow_autotune=False)"
        )
    return policy
