"""Comparison of arrays: by numpy on the host, or by one compiled program on the device that they are on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .deviation import Noise, Scales, differing, numbers_of, scales_of
from .program import own_program, run_own_program
from .rounding import Limits

# Of each array its limits; None: its values are equal or not.
About = tuple[Limits | None, ...]

# With fewer elements than that the host is quicker than compiling: a copy of 64 Ki elements of an accelerator, and
# numpy for the ten to twenty comparisons of a tuning on a CPU.
_DEVICE_ELEMENTS = 1 << 16
_CPU_ELEMENTS = 1 << 22


def place_of(arrays: Sequence[Any], on_device: bool | None = None) -> jax.Device | None:
    """The device that arrays like these are compared on; None: the host. By their number, unless it is said."""
    size = sum(array.size for array in arrays)
    there = [min(array.devices(), key=lambda d: int(d.id)) for array in arrays if isinstance(array, jax.Array)]
    if on_device is None:
        device = there[0] if there else None
        return device if device is not None and is_large(size, device) else None
    return (there[0] if there else jax.local_devices()[0]) if on_device else None


def is_large(size: int, device: jax.Device) -> bool:
    """Are so many elements compared on this device, and not by the host?"""
    return size >= (_CPU_ELEMENTS if device.platform == "cpu" else _DEVICE_ELEMENTS)


def bring(arrays: Sequence[Any], device: jax.Device | None) -> list[Any]:
    """The arrays where they are compared; those of several devices are brought together."""
    if device is None:
        # All copies are under way before the first is waited for.
        return [np.asarray(array) for array in jax.device_get([_bits(array) for array in arrays])]
    return [array if _is_on(array, device) else jax.device_put(array, device) for array in arrays]


def _is_on(array: Any, device: jax.Device) -> bool:
    return isinstance(array, jax.Array) and array.devices() == {device}


def _bits(array: Any) -> Any:
    """Keys as the integers that they are."""
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
    return jax.random.key_data(array) if is_key else array


def scales(
    wants: Sequence[Any], plains: Sequence[Any] | None, about: About, device: jax.Device | None
) -> tuple[list[Scales | None], list[Noise | None]]:
    """Scales and noise for every comparison with these arrays; the plain run's arrays are None where there was none."""
    if device is None:
        with np.errstate(all="ignore"):
            found = _scales(np, wants, plains, about)
    else:
        found = run_own_program(_scales_there, device, (list(wants), plains), about)
    kept, noises = found
    return list(kept), jax.device_get(list(noises))


def numbers(gots: Sequence[Any], wants: Sequence[Any], known: Sequence[Any], about: About, device: Any) -> Any:
    """The `Numbers` of each array, as rows; on a device they are under way and not there yet."""
    if device is None:
        with np.errstate(all="ignore"):
            return _numbers(np, gots, wants, known, about)
    return run_own_program(_numbers_there, device, (list(gots), list(wants), list(known)), about)


def builders(
    shapes: Sequence[Any], about: About, device: jax.Device, *, plain: Sequence[bool]
) -> list[Callable[[], Any]]:
    """Functions that compile, on any thread, the programs that comparisons of such arrays need."""
    wants = list(shapes)
    plains = [shape if has else None for shape, has in zip(shapes, plain, strict=True)]
    given = (wants, plains if any(plain) else None)
    known, _ = jax.eval_shape(functools.partial(_scales_there, about=about), *given)
    return [
        functools.partial(own_program, _scales_there, device, given, about),
        functools.partial(own_program, _numbers_there, device, (wants, wants, list(known)), about),
    ]


def _scales_there(wants: Any, plains: Any, about: About) -> tuple[list[Any], list[Any]]:
    return _scales(jax.numpy, wants, plains, about)


def _numbers_there(gots: Any, wants: Any, known: Any, about: About) -> Any:
    return _numbers(jax.numpy, gots, wants, known, about)


def _scales(xp: Any, wants: Any, plains: Any, about: About) -> tuple[list[Any], list[Any]]:
    kept: list[Any] = []
    noises: list[Any] = []
    for want, plain, limits in zip(wants, plains or [None] * len(wants), about, strict=True):
        scale, noise = None, None
        if limits is not None:
            own = None if plain is None else _reals(xp, plain)
            scale, noise = scales_of(xp, _reals(xp, want), own, limits)
        kept.append(scale)
        noises.append(noise)
    return kept, noises


def _numbers(xp: Any, gots: Any, wants: Any, known: Any, about: About) -> Any:
    rows = []
    for got, want, scale, limits in zip(gots, wants, known, about, strict=True):
        if limits is None:
            rows.append(differing(xp, _bits(got), _bits(want)))
        elif xp is np and _are_equal(got, want):
            rows.append(np.zeros(8, np.float32))
        else:
            rows.append(numbers_of(xp, _reals(xp, got), _reals(xp, want), scale, limits))
    return xp.stack(rows)


def _are_equal(got: Any, want: Any) -> bool:
    """Bit by bit: candidates often are, and on a host that is quickly seen."""
    return got.flags.c_contiguous and want.flags.c_contiguous and bool(np.array_equal(*map(_bytes, (got, want))))


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


def _reals(xp: Any, x: Any) -> Any:
    """A complex number as two neighbours: the smaller one's rounding depends on both."""
    if not jax.numpy.issubdtype(x.dtype, np.complexfloating):
        return x
    both = xp.stack([xp.real(x), xp.imag(x)], -1)
    return both.reshape(*x.shape[:-1], -1)
