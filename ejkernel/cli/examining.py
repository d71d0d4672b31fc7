"""The checks of `ejkernel doctor`, each a few findings about one thing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

# The bounds that the project's dependencies declare; a test compares them.
SUPPORTED_JAX = ((0, 10), (0, 13))
# The distribution and the purpose of each extra.
EXTRAS = {
    "pydantic": ("pydantic", "cfgs as pydantic models"),
    "mosaic": ("absl-py", "Mosaic GPU kernels under JAX 0.10"),
    "triton": ("jax-triton", "row kernels in Triton's language, a provider"),
    "plot": ("matplotlib", "pictures of tunings, Record.plot"),
    "remote": ("fsspec", "entries that a team shares, RemoteStore"),
    "dask": ("distributed", "tuning on a Dask cluster"),
    "ray": ("ray", "tuning on a Ray cluster, RayPool"),
    "slurm": ("submitit", "tuning by jobs of SLURM, SlurmPool"),
    "mpi": ("mpi4py", "tuning on processes of MPI"),
}

# Above this much spread a tuning needs many rounds to tell candidates apart.
_NOISY = 0.2


@dataclass(frozen=True)
class HealthFinding:
    """One line of the report."""

    state: Literal["ok", "note", "fix"]
    name: str
    text: str
    # Names the repair, where one is needed.
    advice: str = ""


def installation() -> Iterator[HealthFinding]:
    """Versions, and whether another package lies over this one."""
    from ..ops._version import __version__

    yield HealthFinding("ok", "ejkernel-ops", f"{__version__}, Python {platform.python_version()}")
    other = _version("ejkernel")
    if other is not None:
        yield HealthFinding(
            *("fix", "ejkernel", f"{other}: another distribution that shares the import name lies in the same place"),
            "pip uninstall ejkernel ejkernel-ops && pip install ejkernel-ops",
        )
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax is None or jaxlib is None:
        yield HealthFinding("fix", "jax", "not installed", "pip install jax, or jax[cuda12] for an NVIDIA GPU")
        return
    low, high = SUPPORTED_JAX
    wanted = f"at least {'.'.join(map(str, low))} and below {'.'.join(map(str, high))}"
    if low <= _minor(jax) < high:
        yield HealthFinding("ok", "jax", f"{jax}, jaxlib {jaxlib}")
    else:
        yield HealthFinding("fix", "jax", f"{jax} is not supported", f"install JAX of {wanted}")


def settings() -> Iterator[HealthFinding]:
    """Settings that the environment makes."""
    from ..ops.core.errors import RecordFormatError, SettingError
    from ..ops.settings import Settings

    try:
        found = Settings.read()
    except SettingError as error:
        yield HealthFinding("fix", "settings", str(error), "correct the variable, or unset it")
        return
    if not found.autotune:
        yield HealthFinding("note", "settings", "EJKERNEL_OPS_AUTOTUNE=off: nothing is tuned")
    if found.tune_seconds is not None:
        yield HealthFinding("note", "settings", f"a process tunes for {found.tune_seconds:g} s at most")
    if found.lock_file is not None:
        from ..ops.store.lock_file import read_lock

        try:
            lock_file = read_lock(found.lock_file)
        except (RecordFormatError, OSError) as error:
            yield HealthFinding(
                "fix", "settings", f"EJKERNEL_OPS_LOCK: {error}", "freeze the program again, or unset it"
            )
        else:
            yield HealthFinding(
                "note", "settings", f"every call must be in the lock {found.lock_file}: {len(lock_file.entries)} calls"
            )


def devices() -> Iterator[HealthFinding]:
    """Devices that JAX sees."""
    try:
        import jax

        found = jax.local_devices()
    # ImportError: no JAX, or parts of two versions. RuntimeError: a backend that was asked for does not start.
    except (ImportError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        yield HealthFinding("fix", "devices", f"JAX finds none: {first}", "see that JAX_PLATFORMS and the driver fit")
        return
    from ..ops.core.device import device_fingerprint, get_device_platform

    kinds: dict[str, int] = {}
    for device in found:
        kinds[device_fingerprint(device)] = kinds.get(device_fingerprint(device), 0) + 1
    for kind, number in kinds.items():
        yield HealthFinding("ok", "devices", f"{number} of {kind}")
    has_card = Path("/proc/driver/nvidia/version").exists()
    if has_card and all(get_device_platform(device) != "gpu" for device in found):
        advice = "pip install 'jax[cuda12]', or unset JAX_PLATFORMS"
        yield HealthFinding("fix", "devices", "there is an NVIDIA driver, and JAX sees no GPU", advice)


def clock() -> Iterator[HealthFinding]:
    """The clock that a tuning reads here, and the difference that it shows between two equal programs now."""
    try:
        import jax
        import jax.numpy as jnp

        from ..ops.core.device import device_fingerprint
        from ..ops.core.errors import TuningError
        from ..ops.tuning.job import TuningJob
        from ..ops.tuning.tuner import Tuner
    # `installation` and `devices` name it.
    except ImportError:
        return

    def twin(cfg: float) -> Any:
        # A constant that changes no result makes two programs of one.
        return lambda x: x @ x + cfg

    try:
        x = jax.random.normal(jax.random.key(0), (512, 512), jnp.float32)
        record = Tuner[float](iters=9, isolate=False).tune(TuningJob(twin, (x,), {}, (0.0, 1e-20)))
    except (TuningError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        yield HealthFinding(
            "fix", "clock", f"nothing can be measured here: {first}", "run a small JAX program to see why"
        )
        return
    samples = sorted(s for trial in record.trials for s in trial.samples_s)
    middle = samples[len(samples) // 2]
    spread = (samples[(9 * len(samples)) // 10] - samples[len(samples) // 10]) / middle
    medians = [trial.seconds for trial in record.trials if trial.seconds]
    apart = max(medians) / min(medians) - 1
    text = (
        f"{record.clock} on {device_fingerprint()}; equal programs differ by {apart:.1%} now, samples by {spread:.0%}"
    )
    if spread > _NOISY:
        advice = "other programs are running, or the clock rate changes: tune when the machine is quiet"
        yield HealthFinding("note", "clock", text, advice)
    else:
        yield HealthFinding("ok", "clock", text)


def cache() -> Iterator[HealthFinding]:
    """The cache folder: can it be written, what is in it, is it sound."""
    from ..ops.core.errors import SettingError, StoreError
    from ..ops.settings import default_folder
    from ..ops.store.maintenance import verify
    from ..ops.store.persistent import PersistentCache
    from .entries import store_paths, why_newer

    try:
        folder = default_folder()
    # `settings` names it.
    except SettingError:
        return
    advice = "set EJKERNEL_PERSISTENT_CACHE_DIR to a folder that you can write"
    if not folder.exists():
        above = next(parent for parent in folder.parents if parent.exists())
        if os.access(above, os.W_OK):
            yield HealthFinding("ok", "cache", f"{folder} does not exist yet; the first tuning makes it")
        else:
            yield HealthFinding("fix", "cache", f"{folder} does not exist and cannot be made", advice)
        return
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        yield HealthFinding("fix", "cache", f"{folder} is not a folder that can be read", advice)
        return
    writable = os.access(folder, os.W_OK)
    sizes = [entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()]
    entries = 0
    for path in store_paths(None):
        try:
            seen = verify(PersistentCache[Any]("", path))
            wrong = [*seen.damaged, *filter(None, [why_newer(path)])]
        except (StoreError, OSError) as error:
            wrong = [str(error)]
        else:
            entries += seen.entries
        for damage in wrong:
            yield HealthFinding(
                "fix", "cache", damage if path in damage else f"{path}: {damage}", "ejkernel cache verify"
            )
    text = f"{folder}: {entries} entries, {sum(sizes) / 1e6:.1f} MB"
    if writable:
        yield HealthFinding("ok", "cache", f"read-write, {text}")
    else:
        yield HealthFinding("fix", "cache", f"read-only, {text}", advice)
    aside = [entry for entry in folder.rglob("*") if entry.name.endswith(".damaged") or ".json.damaged-" in entry.name]
    if aside:
        yield HealthFinding(
            "note", "cache", f"{len(aside)} damaged files were set aside", f"look, then remove: {aside[0]}"
        )


def packs() -> Iterator[HealthFinding]:
    """Packs that selectors look into."""
    if _version("jax") is None:
        return
    from ..ops import verify_pack
    from ..ops.core.errors import SettingError
    from ..ops.settings import Settings
    from ..ops.store.packs import found_packs

    try:
        paths = Settings.read().packs
    # `settings` names it.
    except SettingError:
        return
    for pack in found_packs(paths) if paths is not None else ():
        report = verify_pack(pack.path)
        if report.is_sound:
            yield HealthFinding("ok", "pack", f"{report.entries} entries, {report.path}")
        else:
            yield HealthFinding("fix", "pack", f"{report.damage}", "make it again, or remove it")


def remote() -> Iterator[HealthFinding]:
    """The remote of the settings: is it there, how long does it take, and are its entries believed?"""
    from ..ops.core import formatting
    from ..ops.core.errors import OpsError, SettingError
    from ..ops.settings import Settings
    from ..ops.store.remote.remote_store import RemoteStore

    try:
        settings = Settings.read()
    # `settings` names it.
    except SettingError:
        return
    if settings.remote is None:
        return
    try:
        store = RemoteStore(settings.remote, on_fault="raise", write=settings.remote_write)
        start = time.perf_counter()
        store.check()
        store.objects.names("")
        seconds = time.perf_counter() - start
    except (OpsError, OSError) as error:
        yield HealthFinding(
            "fix", "remote", str(error), "correct EJKERNEL_OPS_REMOTE and what its driver needs, or unset it"
        )
        return
    way = "read and written" if settings.remote_write else "read"
    yield HealthFinding("ok", "remote", f"{store} answers in {formatting.seconds(seconds)}, and is {way}")
    if store.signer is None:
        advice = "set EJKERNEL_OPS_REMOTE_KEY to the team's key to have signed entries believed"
        yield HealthFinding(
            "note", "remote", "no key is set, so each of its entries is measured before it is used", advice
        )


def extras() -> Iterator[HealthFinding]:
    """Optional packages."""
    for name, (distribution, purpose) in EXTRAS.items():
        found = _version(distribution)
        if found is not None:
            yield HealthFinding("ok", "extra", f"{distribution} {found} ({purpose})")
        else:
            yield HealthFinding(
                "note", "extra", f"{name} is not installed ({purpose})", f"pip install 'ejkernel-ops[{name}]'"
            )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
