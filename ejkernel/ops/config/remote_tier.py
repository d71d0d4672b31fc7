"""The tier of a team's remote: signed entries answer, unsigned ones are candidates that are measured first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from ..core.errors import ConfigTypeError
from ..core.request import Hit, Keep, Miss, Planned, Request, revived, vetted
from ..store.store import StoredEntry
from .autotune_tier import AutotuneTier
from .tiers import StoreTier
from .walk import Tier

if TYPE_CHECKING:
    from ..store.remote.remote_store import RemoteStore


@final
@dataclass(frozen=True, eq=False)
class RemoteTier(Tier):
    """A cfg that another machine of the team tuned."""

    remote: RemoteStore
    # The tier that measures, or the reason why nothing may be measured.
    autotune: Tier
    name = "remote"
    # One thread asks for a key. Of processes that agree, one asks for all, so `remembers` stays False.
    exclusive = True

    def find(self, request: Request) -> Hit | Miss:
        """The answer of a signed entry; an unsigned one once it has won against the heuristic cfg."""
        entry = self.remote.lookup(request.key)
        if entry is None or entry.trusted:
            return self._believed(request, entry)
        cfg = self._vetted(request, entry)
        if isinstance(cfg, Miss):
            return cfg
        if not isinstance(self.autotune, AutotuneTier):
            return self._unmeasured(request)
        return self.autotune.confirm(request, cfg[0], str(self.remote))

    def preview(self, request: Request) -> Hit | Miss | Planned:
        """The answer of a signed entry, or the race of an unsigned one."""
        entry = self.remote.lookup(request.key)
        if entry is None or entry.trusted:
            return self._believed(request, entry)
        cfg = self._vetted(request, entry)
        if isinstance(cfg, Miss):
            return cfg
        if not isinstance(self.autotune, AutotuneTier):
            return self._unmeasured(request)
        return self.autotune.preview_of(request, cfg[0], str(self.remote))

    def _believed(self, request: Request, entry: StoredEntry | None) -> Hit | Miss:
        if entry is None and self.remote.reason:
            return Miss(f"{self.remote} is left out: {self.remote.reason}")
        answer = StoreTier(self.remote).judged(request, entry)
        if isinstance(answer, Hit):
            # The user's own store has it from now on: the next process asks no remote.
            return self._from(replace(answer, keep=Keep.MEMORY_AND_STORE, entry=entry))
        return replace(answer, seeds=answer.seeds and tuple(map(self._from, answer.seeds)))

    def _from(self, hit: Hit) -> Hit:
        return replace(hit, tier=self.name, data={**hit.data, "source": self.name, "remote": str(self.remote)})

    def _vetted(self, request: Request, entry: StoredEntry) -> tuple[object] | Miss:
        try:
            cfg = revived(request, entry.cfg)
        except ConfigTypeError as error:
            return Miss(f"the entry in {self.remote} does not fit the kernel: {error}")
        if not vetted(request, cfg):
            return Miss(f"the entry in {self.remote} is not signed, and not among the kernel's candidates")
        return (cfg,)

    def _unmeasured(self, request: Request) -> Miss:
        refused = self.autotune.find(request)
        why = refused.reason if isinstance(refused, Miss) else ""
        return Miss(f"the entry in {self.remote} is not signed, and autotune is {why}")
