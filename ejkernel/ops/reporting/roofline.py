"""The distance of a call from what its device can do: bytes and operations over the device's peaks. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import formatting
from ..core.record import Record


@dataclass(frozen=True)
class Peaks:
    """Bytes and operations a second that a device can do at most, and where these figures are from."""

    bytes_s: float
    operations_s: float
    origin: str


_SHEET = "the vendor's data sheet, matrix products of 16-bit floats without sparsity"
# By a part of the device's name; the first that fits. Other dtypes than 16-bit floats have other peaks.
_KNOWN = (
    ("H200", Peaks(4.3e12, 790e12, "measured on one H200: copies, and products of bfloat16")),
    ("H100 PCIe", Peaks(2.0e12, 756e12, _SHEET)),
    ("H100", Peaks(3.35e12, 989e12, _SHEET)),
    ("A100-SXM4-80GB", Peaks(2.04e12, 312e12, _SHEET)),
    ("A100", Peaks(1.56e12, 312e12, _SHEET)),
    ("L40S", Peaks(0.864e12, 362e12, _SHEET)),
    ("L4", Peaks(0.3e12, 121e12, _SHEET)),
    ("V100", Peaks(0.9e12, 125e12, _SHEET)),
    ("RTX 4090", Peaks(1.008e12, 165e12, _SHEET)),
    ("B200", Peaks(8.0e12, 2250e12, _SHEET)),
    ("TPU v4", Peaks(1.2e12, 275e12, _SHEET)),
    ("TPU v5 lite", Peaks(0.82e12, 197e12, _SHEET)),
    ("TPU v5", Peaks(2.77e12, 459e12, _SHEET)),
    ("TPU v6 lite", Peaks(1.64e12, 918e12, _SHEET)),
)


@dataclass(frozen=True)
class Floor:
    """A call's least time by its device's peaks, and how far the call is from that."""

    bytes: float
    operations: float
    seconds: float
    # Time over the floor.
    ratio: float
    bound: str

    def __str__(self) -> str:
        """The distance in a sentence."""
        needs = f"{amount(self.bytes, 'B')} in and out"
        needs += f", {amount(self.operations, 'FLOP')}" if self.operations else ", operations unknown"
        far = f"{self.ratio:.2f} times the floor of {formatting.seconds(self.seconds)}"
        below = "; below it: caches, or operations that the compiler counted twice" if self.ratio < 0.95 else ""
        return f"{far}, which {self.bound} sets ({needs}){below}"


def peaks_of(device: str) -> Peaks | None:
    """The peaks of a device by its name, as keys have it; None where they are not known."""
    return next((peaks for part, peaks in _KNOWN if part.lower() in device.lower()), None)


def floor_of(record: Record, peaks: Peaks | None) -> Floor | None:
    """The floor of a record's call; None where its cost, its time or the peaks are not known."""
    seconds = None if record.winner is None else record.trials[record.winner].seconds
    moved, done = record.cost.get("bytes", 0.0), record.cost.get("operations", 0.0)
    if peaks is None or not seconds or not (moved or done):
        return None
    by_memory, by_work = moved / peaks.bytes_s, done / peaks.operations_s
    least = max(by_memory, by_work)
    return Floor(moved, done, least, seconds / least, "memory" if by_memory >= by_work else "arithmetic")


def amount(value: float, unit: str) -> str:
    """A number with the prefix that suits it: `12.6 MB`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
