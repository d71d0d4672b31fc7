"""Memory that a device has left, and that a compiled program needs."""

from __future__ import annotations

from typing import Any

import jax


def free_memory(device: jax.Device) -> int | None:
    """Bytes that can still be used on a device, or None where that is not known."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return host_memory() if device.platform == "cpu" else None


def host_memory() -> int | None:
    """Bytes of host memory that are still free, or None where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {line.split(":")[0]: line.split()[1] for line in file}
        return int(found["MemAvailable"]) * 1024
    # Not Linux: nothing is known, so nothing is refused.
    except (OSError, KeyError):
        return None


def needed_memory(executable: Any) -> int:
    """Bytes that a run of a compiled program takes beyond its arguments; 0 where the compiler does not say."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes) + int(analysis.output_size_in_bytes)
