"""The device of a call, and the device's name in every key."""

from __future__ import annotations

import contextlib
import functools
import platform as host
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from .. import _jax
from .errors import SettingError
from .stable import is_array

_target: ContextVar[jax.Device | None] = ContextVar("ejkernel_target_device", default=None)

# Widest first, as the kernel lists them in /proc/cpuinfo; one name for all of AVX-512, since its parts vary little.
_VECTOR_SETS = (
    *(("amx_tile", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"), ("avx", "avx"), ("sse4_2", "sse4.2")),
    *(("sve2", "sve2"), ("sve", "sve"), ("asimd", "neon"), ("v", "rvv")),
)


@contextlib.contextmanager
def target_device(device: jax.Device) -> Iterator[None]:
    """Calls traced inside are tuned and looked up for this device."""
    if not isinstance(device, jax.Device):
        raise SettingError(f"target_device needs a device such as jax.devices('cpu')[0], got {device!r}")
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def target_in_force() -> jax.Device | None:
    """The device of the `target_device` block around, if there is one."""
    return _target.get()


def default_device() -> jax.Device:
    """The device that JAX puts a new array on."""
    chosen: Any = _jax.setting("jax_default_device")
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen if chosen is not None else jax.local_devices()[0]


def device_of(inv: Any) -> jax.Device:
    """The device of a call: its first committed array's; for a trace the target, then the mesh's; else the default."""
    concrete = False
    traced = []
    for leaf in jax.tree_util.tree_leaves((inv.args, dict(inv.kwargs))):
        if isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            traced.append(leaf)
        elif is_array(leaf):
            concrete = True
            if isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.committed:
                return min(leaf.devices(), key=lambda d: d.id)
    if concrete and not traced:
        return default_device()
    return (
        _target.get()
        or _first(inv.mesh)
        or next(filter(None, map(_mesh_device, traced)), None)
        or _attached(jax.sharding.get_abstract_mesh())
        or default_device()
    )


def _mesh_device(leaf: Any) -> jax.Device | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
            return _attached(leaf.sharding.mesh)
        devices = getattr(leaf.sharding, "device_set", None)
        return min(devices, key=lambda d: d.id) if devices else None
    return _attached(jax.typeof(leaf).sharding.mesh)


def _attached(mesh: Any) -> jax.Device | None:
    # A trace's mesh is abstract: it names a kind of device, which this process may have.
    wanted = getattr(mesh, "abstract_device", None)
    if wanted is None:
        return None
    # Older versions do not say the platform: then the default one.
    devices = jax.local_devices(backend=getattr(wanted, "platform", None))
    return next((d for d in devices if d.device_kind == wanted.device_kind), None)


def _first(mesh: Any) -> jax.Device | None:
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        return None
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return (mine or list(mesh.devices.flat))[0]


def is_attached(device: jax.Device) -> bool:
    """Is the device one of this process? One of a described machine can be compiled for, and runs nothing."""
    return device in jax.local_devices(backend=device.client.platform)


def platform_of(inv: Any) -> str:
    """`gpu`, `tpu` or `cpu`: the platform of a call's device."""
    return get_device_platform(device_of(inv))


def get_device_platform(dev: jax.Device | None = None) -> str:
    """The platform of a device, the default one unless given."""
    found = (dev or default_device()).platform
    return "gpu" if found in ("cuda", "rocm") else found


def device_kind(dev: jax.Device | None = None) -> str:
    """Name of the hardware; for a CPU its model and widest vector set."""
    device = dev or default_device()
    return cpu_kind() if device.platform == "cpu" else device.device_kind


def device_fingerprint(dev: jax.Device | None = None) -> str:
    """`platform|kind`, as every key, event and store spells a device."""
    device = dev or default_device()
    return f"{get_device_platform(device)}|{device_kind(device)}"


@functools.cache
def cpu_kind() -> str:
    """The processor's model and its widest vector set."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    # Not Linux, or a sandbox that hides it.
    except OSError:
        text = ""
    return read_cpu_kind(text, machine=host.machine(), processor=_apple_model() or host.processor())


def _apple_model() -> str:
    # On macOS Python knows a processor as 'arm' or 'i386' alone.
    if sys.platform != "darwin":
        return ""
    asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def read_cpu_kind(cpuinfo: str, *, machine: str, processor: str) -> str:
    """The processor's kind from the text of /proc/cpuinfo, or from Python's own names where there is none."""

    def field(name: str) -> str:
        found = re.search(rf"^{name}[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE | re.IGNORECASE)
        return " ".join(found.group(1).split()) if found else ""

    model = field("model name") or field("Hardware")
    if not model and field("CPU part"):
        # ARM servers name their core by numbers: implementer 0x41 is ARM, 0xc0 Ampere.
        model = f"{machine} {field('CPU implementer')}:{field('CPU part')}"
    model = model or processor or machine or "unknown processor"
    has = set(f"{field('flags')} {field('Features')}".split())
    vector = next((name for flag, name in _VECTOR_SETS if flag in has), machine or "scalar")
    return f"{model} {vector}".replace("|", "/")


def environment(device: jax.Device | str) -> dict[str, str]:
    """Versions that may change which cfg is best: those of JAX, its runtime and the driver."""
    found = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    fingerprint = device if isinstance(device, str) else device_fingerprint(device)
    # A put by hand must not start a backend: then the runtime's version stays unknown.
    if isinstance(device, str) and _jax.backend_is_up():
        same = [d for d in jax.local_devices() if device_fingerprint(d) == device]
        device = same[0] if same else device
    if not isinstance(device, str):
        found["platform"] = " ".join(str(device.client.platform_version).split())
    if fingerprint.startswith("gpu|"):
        driver = _driver()
        if driver:
            found["driver"] = driver
    return found


def same_environment(kept: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Would a cfg tuned under `kept` still be believed: same jaxlib minor version, runtime and driver?"""
    if _minor(kept.get("jaxlib", "")) != _minor(now.get("jaxlib", "")):
        return False
    # A version that one side does not know is no difference: a put by hand may come before any backend.
    return all(kept[name] == now[name] for name in ("platform", "driver") if name in kept and name in now)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@functools.cache
def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""
