"""Cross entropy of a linear layer's logits, which are never all held at once."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from ..ops.core.device import device_of, get_device_platform
from .arguments import (
    ArgumentError,
    ArgumentTypeError,
    as_array,
    as_int32,
    float_array,
    integer,
    integers,
    known_values,
    same_dtype,
)
from .call import plan, planned
from .examples import drawn
from .extent import are_known, examples, too_large
from .linear_cross_entropy_chunks import at_once, by_tokens, by_words, gradients_by_words
from .linear_cross_entropy_terms import Terms
from .linear_cross_entropy_ways import (
    CPU_BYTES,
    WHOLE_BYTES,
    LinearCrossEntropyConfig,
    are_kept_untuned,
    by_chunks,
    by_exponentials,
    by_kernel,
    by_xla,
    launch_of,
    refuses_exponentials,
    refuses_products,
    whole_products_first,
    with_whole_products,
)
from .mosaic import measured_calls, served, spread
from .values import were_checked

_ARRAYS = ("hidden", "weight", "labels")


class LinearCrossEntropy(Kernel[LinearCrossEntropyConfig, jax.Array]):
    """Cross entropy of `hidden` (tokens, d) times `weight`; arguments as `linear_cross_entropy` makes them.

    Implementations: "chunked_tokens" (each chunk's gradients are computed with its logits, where one number is asked
    for), "triton" and "mosaic" (the same, with Pallas kernels over logits; without a chunk, for all tokens at once),
    "mosaic_kept" (for Hopper GPUs: exponentials of all logits, or of a chunk's, in place of these), "chunked_vocab" (a
    running sum of exponentials; logits are computed again for gradients) and "xla" (all logits at once). All logits at
    once take at most 64 MiB, and exponentials 3 GiB.
    """

    op_id = "library.linear_cross_entropy"
    version = "2"  # `padded` and `stacked` came, and `mosaic_kept`
    cfg_type = LinearCrossEntropyConfig

    def run(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        vocab_first: bool = False,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        cfg: LinearCrossEntropyConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The loss by the cfg's implementation."""
        terms = Terms(z_loss, label_smoothing, vocab_first)
        counted = _counted(labels, ignore_index, _words(weight, terms))
        hidden, weight = _ready(cfg, hidden, weight, counted)
        if cfg.implementation == "xla":
            losses = at_once(hidden, weight, labels, terms=terms)
        elif cfg.implementation == "chunked_vocab":
            chunk = _chunk(cfg, _words(weight, terms))
            losses, _ = by_words(hidden, weight, labels, terms=terms, chunk=chunk)
        else:
            way = _way(cfg, hidden.shape[0], interpret)
            losses, _ = way(hidden, weight, labels, counted, terms=terms, gradients=False)
        return _reduced(losses, counted, reduction)

    # Its arrays are named once more: the executor turns those given by name into positions, by this signature.
    def run_cpu(
        self, hidden: Any, weight: Any, labels: Any, *, cfg: LinearCrossEntropyConfig, **kwargs: Any
    ) -> jax.Array:
        """The loss on a CPU, where a Pallas kernel is interpreted, for tests alone."""
        return self.run(hidden, weight, labels, cfg=cfg, interpret=True, **kwargs)

    def fwd_with_residuals(
        self,
        hidden: Any,
        weight: Any,
        labels: Any,
        *,
        cfg: LinearCrossEntropyConfig,
        interpret: bool = False,
        **kwargs: Any,
    ) -> tuple[jax.Array, Any]:
        """The loss, with its gradients where it is one number, else with what they need."""
        if cfg.implementation == "xla":
            return jax.vjp(lambda one, other: self.run(one, other, labels, cfg=cfg, **kwargs), hidden, weight)
        terms, ignore_index, reduction = _options(**kwargs)
        counted = _counted(labels, ignore_index, _words(weight, terms))
        hidden, weight = _ready(cfg, hidden, weight, counted)
        if cfg.implementation == "chunked_vocab":
            chunk = _chunk(cfg, _words(weight, terms))
            losses, kept = by_words(hidden, weight, labels, terms=terms, chunk=chunk)
        else:
            way = _way(cfg, hidden.shape[0], interpret)
            # Not divided by the count yet: numbers of that size would be lost in float16.
            scales = counted / _count(counted) if _is_divided(cfg, reduction) else counted
            losses, kept = way(hidden, weight, labels, scales, terms=terms, gradients=reduction != "none")
        return _reduced(losses, counted, reduction), kept

    def fwd_with_residuals_cpu(self, *args: Any, cfg: LinearCrossEntropyConfig, **kwargs: Any) -> tuple[jax.Array, Any]:
        """The loss and its residuals on a CPU, where a Pallas kernel is interpreted."""
        return self.fwd_with_residuals(*args, cfg=cfg, interpret=True, **kwargs)

    def vjp(
        self,
        residuals: Any,
        y: jax.Array,
        dy: jax.Array,
        hidden: Any,
        weight: Any,
        labels: Any,
        *,
        cfg: LinearCrossEntropyConfig,
        interpret: bool = False,
        **kwargs: Any,
    ) -> tuple[jax.Array, jax.Array, None]:
        """Gradients of hidden states and weight."""
        if cfg.implementation == "xla":
            return (*residuals(dy), None)
        dtypes = (hidden.dtype, weight.dtype)
        terms, ignore_index, reduction = _options(**kwargs)
        counted = _counted(labels, ignore_index, _words(weight, terms))
        hidden, weight = _ready(cfg, hidden, weight, counted)
        scale = dy / _count(counted) if reduction == "mean" and not _is_divided(cfg, reduction) else dy
        if cfg.implementation == "chunked_vocab":
            chunk = _chunk(cfg, _words(weight, terms))
            # One number for all tokens is not multiplied with what is rounded.
            scales, factor = (counted * scale, jnp.float32(1)) if reduction == "none" else (counted, scale)
            grads = gradients_by_words(hidden, weight, labels, scales, factor, residuals, terms=terms, chunk=chunk)
        elif reduction == "none":
            way = _way(cfg, hidden.shape[0], interpret)
            _, grads = way(hidden, weight, labels, counted * scale, terms=terms, gradients=True)
        else:
            grads = tuple(x.astype(jnp.float32) * scale for x in residuals)
        return grads[0].astype(dtypes[0]), grads[1].astype(dtypes[1]), None

    def vjp_cpu(self, *args: Any, cfg: LinearCrossEntropyConfig, **kwargs: Any) -> tuple[jax.Array, jax.Array, None]:
        """The gradients on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        """Chunks of tokens: their gradients need no second computation of the logits."""
        return by_chunks(*_sizes(inv))

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        """The kernel, in as few chunks as may be, on NVIDIA GPUs; elsewhere chunks, or all at once where small.

        Exponentials are kept on Hopper GPUs. Whether a gradient is asked for is not known here; without one the same
        product writes sums alone.
        """
        from .triton.rows import is_measured

        sizes = _sizes(inv)
        if not are_known(sizes[0]):
            return self.heuristic_cfg(inv)
        # Small logits at once take 0.87 of the time of chunks on an H200.
        ways = [*(by_kernel(*sizes) if is_measured(inv) else ()), LinearCrossEntropyConfig("xla")]
        if measured_calls.is_measured(inv):
            # Where there is no Triton: the same passes over logits took 0.4 to 1.0 of XLA's time.
            mosaic = by_kernel(*sizes, "mosaic")[:3]
            ways[-1:-1] = [*whole_products_first(mosaic[:1], *sizes), *mosaic]
            ways = [*whole_products_first(ways[:1], *sizes), *ways]
            depth = _named(inv)["hidden"].shape[1]
            if measured_calls.runs_at_once(inv) and are_kept_untuned(sizes[0], depth, sizes[1]):
                ways = [*self._exponentials(inv), *ways]
        return next((cfg for cfg in ways if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        """Chunks of tokens, smaller than elsewhere."""
        return by_chunks(*_sizes(inv), CPU_BYTES)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[LinearCrossEntropyConfig]:
        """Chunks of tokens and of words, of several sizes, and all at once where that is small."""
        return by_xla(*_sizes(inv))

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[LinearCrossEntropyConfig]:
        """The kernel by either backend as well; its launch is varied for the largest chunk alone."""
        if not are_known(_sizes(inv)[0]):
            return by_xla(*_sizes(inv))
        # The same chunks by Mosaic: what differs is the pass over logits alone.
        mosaic = by_kernel(*_sizes(inv), "mosaic")[:3]
        triton = by_kernel(*_sizes(inv))
        # The largest chunk and the next smaller one: beside all derivatives a chunk's logits need less room.
        firsts = [cfg for cfg in triton if (cfg.block, cfg.num_warps) == (triton[0].block, triton[0].num_warps)][:2]
        whole = [cfg for cfg in with_whole_products(firsts, _sizes(inv)[1]) if not self._refuses_products(inv, cfg)]
        whole += [cfg for cfg in with_whole_products(mosaic[:1], _sizes(inv)[1]) if not cfg.stacked]
        return [*by_xla(*_sizes(inv)), *triton, *mosaic, *whole, *self._exponentials(inv)]

    def candidate_cfgs_cpu(self, inv: Invocation[Any, Any]) -> Iterable[LinearCrossEntropyConfig]:
        """Smaller chunks than elsewhere, for narrow inputs in float32 too: not every CPU has narrow products."""
        found = by_xla(*_sizes(inv), CPU_BYTES)
        if _named(inv)["hidden"].dtype.itemsize == 4:
            return found
        return [*found, *(replace(cfg, wide=True) for cfg in found if cfg.implementation != "chunked_vocab")]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: LinearCrossEntropyConfig) -> bool | str:
        """Refuses all logits at once where they are more than a chunk may be, and the kernel where it cannot run."""
        tokens, words = _sizes(inv)
        if not are_known(tokens):
            said = "the number of tokens is a symbol, and chunks of words alone do not depend on it: chunked_vocab"
            return cfg.implementation == "chunked_vocab" or said
        is_kernel = cfg.implementation in ("triton", "mosaic")
        size = tokens * words * 4 * examples(inv)
        if (cfg.implementation == "xla" or (is_kernel and (cfg.chunk or tokens) >= tokens)) and size > WHOLE_BYTES:
            return f"all logits take {size >> 20} MiB, over the {WHOLE_BYTES >> 20} MiB that may be held at once"
        refused = self._refuses_products(inv, cfg)
        if cfg.implementation == "mosaic_kept":
            shape, columns = _named(inv)["hidden"].shape, words + -words % (cfg.padded or 1)
            dtype = jnp.dtype(jnp.float32) if cfg.wide else _named(inv)["hidden"].dtype
            refused = refused or refuses_exponentials(cfg, shape, words, dtype, examples(inv))
            # Of a chunk's exponentials, the weight, and hidden states, of which a forward pass takes all at once.
            sizes = (cfg.chunk or tokens) * columns, shape[1] * columns, shape[0] * shape[1]
            return refused or served.refuses(inv, *sizes, hopper=True) or True
        if refused or not is_kernel:
            return refused or True
        if get_device_platform(device_of(inv)) != "gpu":
            return f"{cfg.implementation} runs on GPUs alone"
        block, num_warps = launch_of(cfg)
        columns = words + -words % (cfg.padded or 1)
        logits = (tokens if cfg.stacked else min(cfg.chunk or tokens, tokens)) * columns
        if cfg.implementation == "mosaic":
            refused = spread.refuses(columns, 4, num_warps, spread.block_spread(columns, 4, block, num_warps).each)
            return refused or served.refuses(inv, logits, hopper=False) or True
        from .triton.cross_entropy import refuses

        return refuses(block, num_warps) or too_large(inv, logits) or True

    def _exponentials(self, inv: Invocation[Any, Any]) -> list[LinearCrossEntropyConfig]:
        """The cfg that keeps exponentials, where it can run."""
        found = by_exponentials(*_sizes(inv))
        return [found] if found is not None and self.valid_cfg(inv, found) is True else []

    def _refuses_products(self, inv: Invocation[Any, Any], cfg: LinearCrossEntropyConfig) -> str:
        tokens, words = _sizes(inv)
        return refuses_products(cfg, tokens * examples(inv), words, _named(inv)["hidden"].dtype.name)

    def operations(self, inv: Invocation[Any, Any]) -> float:
        """Each token times each word: of a product that is a kernel of its own, nothing else says what it computes."""
        tokens, words = _sizes(inv)
        return float(2 * tokens * words * _named(inv)["hidden"].shape[1])

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Labels of any word, where a trace hides the real ones."""
        given = _named(inv)
        given["labels"] = drawn(rng, given["labels"], 0, _sizes(inv)[1])
        rest = {name: value for name, value in inv.kwargs.items() if name not in _ARRAYS}
        return tuple(given[name] for name in _ARRAYS), rest


def _out_of_range(labels: Any, ignore_index: int, words: int) -> Any:
    return labels[(labels != ignore_index) & ((labels < 0) | (labels >= words))]


def _labels_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # All three arrays by position, as nearly every call has them: a call of another form is checked in full.
    shape: tuple[int, ...] = args[1].shape if len(args) == 3 else ()
    if len(shape) != 2:
        return False
    words = shape[0 if kwargs.get("vocab_first") else 1]
    return were_checked(args[2], (kwargs.get("ignore_index", -100), words), _are_in_range)


def _are_in_range(labels: Any, wanted: tuple[int, int]) -> bool:
    return not _out_of_range(labels, *wanted).size


@planned(known_good=_labels_are_known)
def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    vocab_first: bool = False,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    cfg: LinearCrossEntropyConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """Cross entropy, in float32, of the logits `hidden` (..., d) times `weight` (d, vocab) with `labels` (...).

    `vocab_first`: the weight is (vocab, d). Labels that are `ignore_index` count for nothing, whatever their hidden
    states are, and "mean" divides by the number of the others; "none" gives a loss for each label. A label out of range
    is an error where it can be read; under a trace it counts for nothing.
    """
    hidden = as_array("hidden", hidden)
    if hidden.ndim < 1:
        raise ArgumentError(f"hidden must have the shape (..., d), got {hidden.shape}")
    flat_hidden = hidden if hidden.ndim == 2 else hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    rows = float_array("hidden", flat_hidden, ("tokens", "d"))
    weight = float_array("weight", weight, ("vocab", "d") if vocab_first else ("d", "vocab"))
    same_dtype("hidden", hidden, "weight", weight)
    words, depth = weight.shape if vocab_first else weight.shape[::-1]
    if depth != hidden.shape[-1]:
        turn = f"; with vocab_first={not vocab_first} it would fit" if words == hidden.shape[-1] else ""
        raise ArgumentError(f"hidden {hidden.shape} and weight {weight.shape} differ in d{turn}")
    ignore_index = integer("ignore_index", ignore_index)
    flat = _labels(labels, hidden, ignore_index, words)
    _check_options(z_loss, label_smoothing, reduction)
    if not rows.shape[0] or not words:
        return jnp.zeros(labels.shape if reduction == "none" else (), jnp.float32)
    if not depth:
        # All logits are zero, which nothing needs to be tuned for.
        cfg = cfg or by_chunks(rows.shape[0], words, CPU_BYTES)
    return plan(  # type: ignore[no-any-return]
        LinearCrossEntropy(),
        rows,
        weight,
        flat,
        # As plain as the rest: a truth of numpy is an array to a kernel.
        vocab_first=bool(vocab_first),
        # Labels have 32 bits by now; one that is ignored by a larger number is out of range for them.
        ignore_index=ignore_index if -1 << 31 <= ignore_index < 1 << 31 else -100,
        z_loss=float(z_loss),
        label_smoothing=float(label_smoothing),
        reduction=reduction,
        cfg=cfg,
        executor=executor,
        then=(lambda loss: loss.reshape(labels.shape)) if reduction == "none" else None,
    )


def _labels(labels: Any, hidden: jax.Array, ignore_index: int, words: int) -> jax.Array:
    found = integers("labels", labels)
    if found.shape != hidden.shape[:-1]:
        raise ArgumentError(f"labels {found.shape} must have the shape of hidden {hidden.shape} without d")
    known = known_values(found)
    if known is not None:
        wrong = _out_of_range(known, ignore_index, words)
        if wrong.size:
            raise ArgumentError(
                f"labels must be from 0 to {words - 1}, or ignore_index={ignore_index}; "
                f"{wrong.size} of {known.size} are not, the first is {wrong[0]}"
            )
    narrow = as_int32(found)
    return narrow if narrow.ndim == 1 else narrow.reshape(-1)


def _check_options(z_loss: Any, smoothing: Any, reduction: Any) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    for name, value in (("z_loss", z_loss), ("label_smoothing", smoothing)):
        if not isinstance(value, numbers.Real):
            raise ArgumentTypeError(f"{name} must be a number, got {type(value).__qualname__}")
    if not math.isfinite(z_loss):
        raise ArgumentError(f"z_loss must be finite, got {z_loss}")
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing must be from 0 to 1, got {smoothing}")


def _options(
    *,
    vocab_first: bool = False,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[Terms, int, str]:
    return Terms(z_loss, label_smoothing, vocab_first), ignore_index, reduction


def _counted(labels: Any, ignore_index: int, words: int) -> Any:
    """1 for labels that count, 0 for others."""
    return ((labels != ignore_index) & (labels >= 0) & (labels < words)).astype(jnp.float32)


def _reduced(losses: jax.Array, counted: jax.Array, reduction: str) -> jax.Array:
    # What does not count is left out, not multiplied by zero: it need not be a number.
    losses = jnp.where(counted > 0, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    # Both sums at once: each alone would be a program of its own on a GPU, and take as long as both.
    sums = jnp.sum(jnp.stack([losses, counted]), axis=1)
    return sums[0] / jnp.maximum(sums[1], 1)


def _count(counted: Any) -> Any:
    """The number that a mean is divided by."""
    return jnp.maximum(jnp.sum(counted), 1)


def _is_divided(cfg: LinearCrossEntropyConfig, reduction: str) -> bool:
    """Are gradients that are kept those of the mean? They are narrow, and multiplied by nothing but the loss's own."""
    return cfg.implementation == "mosaic_kept" and reduction == "mean"


def _ready(cfg: LinearCrossEntropyConfig, hidden: Any, weight: Any, counted: Any) -> tuple[Any, Any]:
    """Both as the products take them: widened if the cfg says so, and zeros for what does not count."""
    # Such a token has no gradient either, and zero times what is no number would be none.
    hidden = jnp.where(counted[:, None] > 0, hidden, 0)
    return (hidden.astype(jnp.float32), weight.astype(jnp.float32)) if cfg.wide else (hidden, weight)


def _words(weight: Any, terms: Terms) -> int:
    return int(weight.shape[0 if terms.vocab_first else 1])


def _way(cfg: LinearCrossEntropyConfig, tokens: int, interpret: bool) -> Callable[..., tuple[jax.Array, Any]]:
    """`by_tokens` with the cfg's chunk, passes and products, or what takes its place."""
    if cfg.implementation == "mosaic_kept":
        from .linear_cross_entropy_kept import by_kept

        return functools.partial(by_kept, cfg=cfg, interpret=interpret)
    way = functools.partial(by_tokens, padded=cfg.padded, stacked=cfg.stacked)
    if cfg.implementation in ("triton", "mosaic"):
        from .linear_cross_entropy_kernel import passes

        made = passes(*launch_of(cfg), interpret, cfg.implementation)
        return functools.partial(way, chunk=min(cfg.chunk or tokens, tokens), passes=made)
    if cfg.implementation != "chunked_tokens":
        names = "chunked_tokens, triton, mosaic, mosaic_kept, chunked_vocab or xla"
        raise ArgumentError(f"{cfg} names no way to compute this; use {names}")
    return functools.partial(way, chunk=_chunk(cfg, tokens))


def _chunk(cfg: LinearCrossEntropyConfig, most: int) -> int:
    return min(cfg.chunk or 1024, most)


def _named(inv: Invocation[Any, Any]) -> dict[str, Any]:
    return dict(zip(_ARRAYS, inv.args, strict=False)) | dict(inv.kwargs)


def _sizes(inv: Invocation[Any, Any]) -> tuple[int, int]:
    """Tokens and words."""
    given = _named(inv)
    return given["hidden"].shape[0], given["weight"].shape[0 if given.get("vocab_first") else 1]
