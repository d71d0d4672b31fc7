"""The runtime that gives every JAX kernel call its best configuration: the public names."""

from typing import TYPE_CHECKING, Any

from ._lazy import lazy
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .config.cache import ConfigCache as ConfigCache
    from .config.cache import current_scope as current_scope
    from .config.cache import locked as locked
    from .config.cache import overlay_cache as overlay_cache
    from .config.cache import refresh as refresh
    from .config.call_log import calls_made as calls_made
    from .config.events import Counters as Counters
    from .config.events import counters as counters
    from .config.persistent import PersistentCache as PersistentCache
    from .config.selection import AutotunePolicy as AutotunePolicy
    from .config.selection import ConfigSelectorChain as ConfigSelectorChain
    from .config.selection import Tuner as Tuner
    from .config.selection import forward_autotune_only as forward_autotune_only
    from .config.selection import policy_override as policy_override
    from .core.abstract import abstractify as abstractify
    from .core.abstract import sharding_fingerprint as sharding_fingerprint
    from .core.device import device_fingerprint as device_fingerprint
    from .core.device import device_kind as device_kind
    from .core.device import get_device_platform as get_device_platform
    from .core.device import target_device as target_device
    from .core.errors import OpsError as OpsError
    from .core.invocation import Cfg as Cfg
    from .core.invocation import Invocation as Invocation
    from .core.invocation import Out as Out
    from .core.kernel import Kernel as Kernel
    from .core.params import BwdParams as BwdParams
    from .core.params import FwdParams as FwdParams
    from .core.record import Finding as Finding
    from .core.record import Record as Record
    from .core.record import Trial as Trial
    from .core.stable import from_json as from_json
    from .core.stable import short_hash as short_hash
    from .core.stable import stable_json as stable_json
    from .core.stable import to_json as to_json
    from .execution.default import default_executor as default_executor
    from .execution.default import default_selector as default_selector
    from .execution.executor import ConfigChooser as ConfigChooser
    from .execution.executor import Executor as Executor
    from .execution.kernel_check import check as check
    from .execution.labels import extract_labels_from_hlo_text as extract_labels_from_hlo_text
    from .execution.labels import find_labels_in_lowered as find_labels_in_lowered
    from .execution.labels import label as label
    from .execution.labels import labels_to_configs as labels_to_configs
    from .execution.mapped import pmap_with_config as pmap_with_config
    from .execution.mapped import vmap_with_config as vmap_with_config
    from .execution.tunable import tunable as tunable
    from .fleet.agreement import agreement_report as agreement_report
    from .fleet.report import Agreed as Agreed
    from .fleet.report import AgreementReport as AgreementReport
    from .programs.autotune import AutotuneOptions as AutotuneOptions
    from .programs.autotune import autotune as autotune
    from .programs.autotune import autotune_lowered as autotune_lowered
    from .programs.autotune import autotune_recorded as autotune_recorded
    from .programs.autotune import benchmark as benchmark
    from .programs.freeze import freeze as freeze
    from .programs.pool.local import LocalPool as LocalPool
    from .programs.pool.ray import RayPool as RayPool
    from .programs.pool.slurm import SlurmPool as SlurmPool
    from .programs.results import AutotuneData as AutotuneData
    from .programs.results import AutotuningResult as AutotuningResult
    from .programs.results import Entry as Entry
    from .programs.results import Measurement as Measurement
    from .registry import get_invocations as get_invocations
    from .registry import record_invocation as record_invocation
    from .reporting.explain import Explanation as Explanation
    from .reporting.explain import explain as explain
    from .reporting.page import report as report
    from .reporting.profile import Attribution as Attribution
    from .reporting.profile import attribute as attribute
    from .store.folder import OperationStores as OperationStores
    from .store.packing import make_pack as make_pack
    from .store.packing import merge_packs as merge_packs
    from .store.packing import verify_pack as verify_pack
    from .store.remote.remote_store import RemoteStore as RemoteStore
    from .store.remote.remote_store import RemoteWarning as RemoteWarning
    from .tuning.journal.folder import forget_crashes as forget_crashes
    from .tuning.search.features import Space as Space
    from .tuning.search.guided import GuidedSearch as GuidedSearch
    from .tuning.search.random import RandomSearch as RandomSearch
    from .tuning.search.strategy import Strategy as Strategy
    from .tuning.worker.limits import Isolation as Isolation

_NAMES = {
    "config.cache": "ConfigCache current_scope locked overlay_cache refresh",
    "store.folder": "OperationStores",
    "config.call_log": "calls_made",
    "config.events": "Counters counters",
    "store.packing": "make_pack merge_packs verify_pack",
    "store.remote.remote_store": "RemoteStore RemoteWarning",
    "tuning.journal.folder": "forget_crashes",
    "config.persistent": "PersistentCache",
    "config.selection": "AutotunePolicy ConfigSelectorChain Tuner forward_autotune_only policy_override",
    "core.abstract": "abstractify sharding_fingerprint",
    "core.device": "device_fingerprint device_kind get_device_platform target_device",
    "core.errors": "OpsError",
    "core.invocation": "Cfg Invocation Out",
    "core.kernel": "Kernel",
    "core.params": "BwdParams FwdParams",
    "core.record": "Finding Record Trial",
    "core.stable": "from_json short_hash stable_json to_json",
    "execution.kernel_check": "check",
    "execution.default": "default_executor default_selector",
    "execution.executor": "ConfigChooser Executor",
    "reporting.explain": "Explanation explain",
    "reporting.page": "report",
    "reporting.profile": "Attribution attribute",
    "programs.freeze": "freeze",
    "execution.mapped": "pmap_with_config vmap_with_config",
    "execution.labels": "extract_labels_from_hlo_text find_labels_in_lowered label labels_to_configs",
    "programs.autotune": "AutotuneOptions autotune autotune_lowered autotune_recorded benchmark",
    "programs.pool.local": "LocalPool",
    "programs.pool.ray": "RayPool",
    "programs.pool.slurm": "SlurmPool",
    "programs.results": "AutotuneData AutotuningResult Entry Measurement",
    "execution.tunable": "tunable",
    "fleet.agreement": "agreement_report",
    "fleet.report": "Agreed AgreementReport",
    "registry": "get_invocations record_invocation",
    "tuning.worker.limits": "Isolation",
    "tuning.search.features": "Space",
    "tuning.search.guided": "GuidedSearch",
    "tuning.search.random": "RandomSearch",
    "tuning.search.strategy": "Strategy",
}

_resolve, __dir__, __all__ = lazy(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)


def __getattr__(name: str) -> Any:
    if name == "GeneticSearch":
        return _leaving()
    return _resolve(name)


def _leaving() -> Any:
    import sys
    import warnings

    from .tuning.search.genetic import GeneticSearch

    # `from ejkernel.ops import GeneticSearch` asks twice, first in the machinery of imports: one warning is enough.
    if "importlib._bootstrap" not in sys._getframe(2).f_code.co_filename:
        message = "GeneticSearch goes with the next release: GuidedSearch, the default, finds more with less"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    return GeneticSearch
