"""Words drawn from logits, with temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import LARGEST, ArgumentError, ArgumentTypeError, as_array, integer, known_values
from .call import plan, planned
from .double import is_double
from .order import bits_refused, ordered
from .rows import float_rows
from .sample_ways import by_bits, by_parts_of, by_recomputing, by_sorting, weights_of
from .values import were_checked

# The least and the largest value.
_RANGES = {"temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
# Logits over a lower temperature may be infinite, and equal; over this one, differences are far beyond all noise.
_COLDEST = 1e-30


_WAYS = ("sort", "bits", "recompute", "parts")


@dataclass(frozen=True)
class SampleConfig:
    """The search for the threshold of top-k and top-p, and its bits of a pass."""

    implementation: str
    bits: int | None = None


class Sample(Kernel[SampleConfig, jax.Array]):
    """One word for each row of `logits` (rows, words): the largest of logit over temperature plus Gumbel noise.

    Every implementation adds the same noise and finds the same threshold, so that each draws the same words. "sort"
    sorts the rows, "bits" finds the threshold digit by digit, "recompute" as well, from the logits alone in each pass,
    and "parts" from the k largest alone.
    """

    op_id = "library.sample"
    version = "1"
    cfg_type = SampleConfig

    def run(
        self,
        key: jax.Array,
        logits: jax.Array,
        temperature: jax.Array,
        top_p: jax.Array | None = None,
        min_p: jax.Array | None = None,
        *,
        top_k: int | None = None,
        cfg: SampleConfig,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        if cfg.implementation not in _WAYS:
            raise _no_way(cfg)
        warm = temperature > 0
        degrees = jnp.where(warm, jnp.maximum(temperature, _COLDEST), 1)
        wide = logits.astype(jnp.float32)
        kept = None
        if top_k is not None or top_p is not None:
            least = _threshold(cfg, logits, degrees, top_k, top_p)
            kept = ordered(logits) >= least[:, None]
        if min_p is not None:
            largest = jnp.max(wide, axis=-1, keepdims=True)
            # Not less, in place of at least: a word that is no number stays, as in every other filter.
            likely = ~(wide < largest + (degrees * jnp.log(min_p))[:, None])
            kept = likely if kept is None else kept & likely
        scaled = wide / degrees[:, None]
        scaled = scaled if kept is None else jnp.where(kept, scaled, -jnp.inf)
        return jnp.argmax(scaled + jnp.where(warm[:, None], _noise(key, logits.shape), 0), axis=-1).astype(jnp.int32)

    def reference(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Draws the words by sorting."""
        return self.run(*args, cfg=SampleConfig("sort"), **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> SampleConfig:
        """Few words from those alone; else bit by bit, which reads rows often and moves nothing."""
        return SampleConfig("parts") if self._few(inv) else SampleConfig("bits", 1)

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> SampleConfig:
        """Few words from those alone; else two bits a pass, from the logits: three sums take hardly longer than one.

        On an H200 one, two and four bits took 768, 492 and 630 us for 64 rows of 128256 words in float32, and 314, 238
        and 321 us in bfloat16: the fifteen sums of four bits are more than one program holds. Two bits with weights
        that are computed again took 296 and 174.
        """
        if not self._filters(inv):
            return SampleConfig("bits", 1)
        return SampleConfig("parts") if self._few(inv) else SampleConfig("recompute", 2)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[SampleConfig]:
        """All ways but "recompute"; one bit a pass where nothing filters the words."""
        if not self._filters(inv):
            return [SampleConfig("bits", 1)]
        return [SampleConfig("sort"), SampleConfig("parts"), *(SampleConfig("bits", bits) for bits in (1, 2, 4))]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[SampleConfig]:
        """The candidates of every device, and those that read the logits alone: reading is what takes the time."""
        again = [SampleConfig("recompute", bits) for bits in (2, 3)] if self._filters(inv) else []
        return [*self.candidate_cfgs(inv), *again]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: SampleConfig) -> bool | str:
        """Parts are for a top-k that is small beside the words, and passes of bits end with the last one."""
        if cfg.implementation == "parts" and not self._few(inv):
            return "parts need a top_k of at most a quarter of the words"
        if cfg.implementation == "bits":
            return bits_refused(inv.args[1].dtype, cfg.bits or 1) or True
        return True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """A key, temperatures around one and shares below it, where a trace hides the real ones."""
        key, logits, temperature, *shares = inv.args
        if known_values(temperature) is None:
            drawn = rng.uniform(0.5, 1.5, temperature.shape).astype(np.float32)
            shares = [None if s is None else rng.uniform(0.5, 0.95, s.shape).astype(np.float32) for s in shares]
            made = jax.random.key(int(rng.integers(1 << 31)))
            key = jax.random.split(made, key.shape[0]) if key.ndim else made
            return (key, logits, drawn, *shares), dict(inv.kwargs)
        return inv.args, dict(inv.kwargs)

    @staticmethod
    def _filters(inv: Invocation[Any, Any]) -> bool:
        return inv.kwargs.get("top_k") is not None or (len(inv.args) > 3 and inv.args[3] is not None)

    @staticmethod
    def _few(inv: Invocation[Any, Any]) -> bool:
        k = inv.kwargs.get("top_k")
        return k is not None and 4 * k <= inv.args[1].shape[-1] and k <= 1024


def _fits(name: str) -> Callable[[np.ndarray[Any, Any], Any], bool]:
    low, high = _RANGES[name]

    def fits(values: np.ndarray[Any, Any], wanted: Any) -> bool:
        # A comparison with a NaN is false.
        return bool(np.all((values >= low) & (values <= high) & (values < np.inf)))

    return fits


_FITS = {name: _fits(name) for name in _RANGES}


def _numbers_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for name, fits in _FITS.items():
        value = kwargs.get(name)
        if value is not None and not were_checked(value, None, fits, jnp.number):
            return False
    return True


@planned(known_good=_numbers_are_known, numbers=("temperature", "top_p", "min_p"))
def sample(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: Any = 1.0,
    top_k: int | None = None,
    top_p: Any = None,
    min_p: Any = None,
    cfg: SampleConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """One word for each row of logits (..., words), as int32 indices.

    First the temperature; then the `top_k` most likely words are kept, of what they leave the most likely words that
    have a share of `top_p` together, and of all words those at least `min_p` as likely as the most likely one. Words as
    likely as the last one that is kept are kept, too. Temperature 0 takes the most likely word. Each of temperature,
    top_p and min_p is a number or an array with one for each row; so may `key` be. A logit that is no number wins its
    row, as in JAX's argmax.
    """
    logits = float_rows("logits", logits)
    # Noise and weights are of float32 in any case.
    logits = logits.astype(jnp.float32) if is_double(logits) else logits
    rows, words = logits.shape[:-1], logits.shape[-1]
    if not words:
        raise ArgumentError(f"logits have the shape {logits.shape}; there must be a word to draw")
    if top_k is not None:
        top_k = integer("top_k", top_k)
        if top_k < 1:
            raise ArgumentError(f"top_k={top_k} must be at least 1")
        top_k = top_k if top_k < words else None
    count = math.prod(rows)
    made = _key(key, rows, count)
    if not count:
        return jnp.zeros(rows, jnp.int32)
    given = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    numbers = [_numbers(name, value, rows, count) for name, value in given.items()]
    while numbers[-1] is None:
        numbers.pop()
    flat = logits.reshape(count, words)

    def whole(out: jax.Array) -> jax.Array:
        return out.reshape(rows)

    return plan(Sample(), made, flat, *numbers, top_k=top_k, cfg=cfg, executor=executor, then=whole)  # type: ignore[no-any-return]


def _threshold(
    cfg: SampleConfig, logits: jax.Array, degrees: jax.Array, k: int | None, top_p: jax.Array | None
) -> jax.Array:
    if cfg.implementation == "recompute":
        return by_recomputing(logits, degrees, k, top_p, cfg.bits or 1)
    weights = weights_of(logits, degrees)
    if cfg.implementation == "sort":
        return by_sorting(logits, weights, k, top_p)
    if cfg.implementation == "bits":
        return by_bits(logits, weights, k, top_p, cfg.bits or 1)
    if cfg.implementation == "parts" and k is not None:
        return by_parts_of(logits, weights, k, top_p)
    raise _no_way(cfg)


def _no_way(cfg: SampleConfig) -> ArgumentError:
    names = "sort, bits, recompute, or parts with a top_k"
    return ArgumentError(f"{cfg} names no implementation of sample; use {names}")


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if key.ndim:
        return jax.vmap(lambda one: jax.random.gumbel(one, shape[1:], jnp.float32))(key)
    return jax.random.gumbel(key, shape, jnp.float32)


def _key(key: Any, rows: tuple[int, ...], count: int) -> jax.Array:
    key = as_array("key", key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim == 0:
            raise ArgumentTypeError(f"key is {key.dtype.name} {key.shape}; use jax.random.key(seed)")
        try:
            key = jax.random.wrap_key_data(key)
        except TypeError as error:
            raise ArgumentTypeError(f"key is uint32 {key.shape}, which is no key; use jax.random.key(seed)") from error
    if key.shape not in ((), rows):
        raise ArgumentError(f"key has the shape {key.shape}; use one key, or one for each row, {rows}")
    made: jax.Array = key if key.ndim == 0 else key.reshape(count)
    return made


def _numbers(name: str, value: Any, rows: tuple[int, ...], count: int) -> jax.Array | None:
    if value is None and name != "temperature":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.ndarray, np.generic, jax.Array)):
        raise ArgumentTypeError(f"{name} must be a number or an array of them, got {type(value).__qualname__}")
    low, high = _RANGES[name]
    most = "any finite float32" if high == math.inf else f"{high:g}"
    refused = ArgumentError(f"{name} must be from {low:g} to {most}, got {value}")
    # A comparison with a NaN is false.
    if isinstance(value, (int, float)) and not low <= value <= min(high, LARGEST):
        raise refused
    array = jnp.asarray(value, jnp.float32)
    if array.shape not in ((), rows):
        raise ArgumentError(f"{name} has the shape {array.shape}; use one number, or one for each row, {rows}")
    known = known_values(array)
    if known is not None and not _FITS[name](known, None):
        raise refused
    return jnp.broadcast_to(array, rows).reshape(count)
