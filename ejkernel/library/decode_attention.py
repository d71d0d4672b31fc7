"""Attention of one to a few new tokens to all that came before, in pages or side by side."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import (
    ArgumentError,
    ArgumentTypeError,
    as_array,
    as_int32,
    float_array,
    integers,
    known_values,
    same,
    same_dtype,
)
from .attention_arguments import in_range, lengths_of, scale_of
from .call import plan, planned, program
from .decode_attention_cudnn import by_cudnn, cudnn_refuses
from .decode_attention_pages import by_pages, pages_refuse
from .decode_attention_ways import CacheSight, looped, split, whole
from .examples import drawn
from .extent import too_large
from .reverse import recomputed
from .triton.served import missing
from .values import fit_together, were_checked

_PAGES = ("pages", "page_size", "heads", "head_dim")
_PLAIN = ("batch", "length", "heads", "head_dim")
_ARRAYS = ("q", "k_pages", "v_pages", "lengths", "page_table", "sinks")


@dataclass(frozen=True)
class DecodeAttentionConfig:
    """An implementation, and the parts or the block of keys that it has."""

    implementation: str
    parts: int | None = None
    block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


class DecodeAttention(Kernel[DecodeAttentionConfig, jax.Array]):
    """Queries (batch, queries, heads, head_dim), the last tokens of sequences of these lengths, and pages of keys.

    Implementations: "gather" (all keys of the table, then one softmax), "fused" (the same without products, so that the
    gather is part of the same program), "split" (parts of the keys side by side), "loop" (blocks of keys one after the
    other, as far as the longest sequence goes), "triton" (parts of the pages, each read once where it lies) and "cudnn"
    (the same by cuDNN, for one query).
    """

    op_id = "library.decode_attention"
    version = "1"
    cfg_type = DecodeAttentionConfig

    def run(
        self,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        lengths: jax.Array,
        page_table: jax.Array | None = None,
        sinks: jax.Array | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float,
        cfg: DecodeAttentionConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        sight = CacheSight(window, soft_cap, scale)
        given = [x for x in (q, k_pages, v_pages, lengths, page_table, sinks) if x is not None]

        def of(way: Callable[..., jax.Array], **how: Any) -> Callable[..., jax.Array]:
            def computed(*arrays: jax.Array) -> jax.Array:
                q, k, v, lengths, *rest = arrays
                table = rest.pop(0) if page_table is not None else None
                return way(q, k, v, table, lengths, rest[0] if rest else None, sight, **how)

            return computed

        plain = of(whole, fused=False)
        if cfg.implementation == "gather":
            return plain(*given)
        ways: dict[str, Any] = {
            "fused": functools.partial(of, whole, fused=True),
            "split": functools.partial(of, split, parts=cfg.parts or 8),
            "loop": functools.partial(of, looped, block=cfg.block or 512),
            "triton": functools.partial(of, by_pages, cfg=cfg, interpret=interpret),
            "cudnn": functools.partial(of, by_cudnn),
        }
        if cfg.implementation not in ways:
            raise ArgumentError(f"{cfg} names no implementation of decode_attention; use gather, {', '.join(ways)}")
        return recomputed(ways[cfg.implementation](), plain)(*given)  # type: ignore[no-any-return]

    def run_cpu(self, *args: Any, cfg: DecodeAttentionConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        if cfg.implementation == "cudnn":
            raise ArgumentError(f"{cfg} cannot compute this call: cudnn runs on GPUs alone")
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes with all keys at once."""
        return self.run(*args, cfg=DecodeAttentionConfig("gather"), **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> DecodeAttentionConfig:
        """All keys at once where they are few, else block by block, so that room in the table costs nothing."""
        return DecodeAttentionConfig(
            "gather" if _keys(inv) <= 1024 else "loop", block=None if _keys(inv) <= 1024 else 1024
        )

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> DecodeAttentionConfig:
        """cuDNN wherever it takes the call; else the kernel, with enough parts to fill the GPU; else all keys at once.

        On an H200 with 32 heads on 8, 64 sequences of 4096 keys took 260 us by cuDNN, 332 by the kernel, 869 by
        `gather`; one of 65536 took 97 by the kernel, 226 by `gather`; `split` took 1,780 and 480.
        """
        ready = DecodeAttentionConfig("cudnn"), DecodeAttentionConfig("triton", _enough(inv), 64, 4, 3)
        return next((cfg for cfg in ready if self.valid_cfg(inv, cfg) is True), DecodeAttentionConfig("gather"))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[DecodeAttentionConfig]:
        """All ways in plain JAX, with blocks and parts of several sizes."""
        parts = [DecodeAttentionConfig("split", parts=n) for n in (4, 16)]
        blocks = [DecodeAttentionConfig("loop", block=n) for n in (256, 1024, 4096)]
        return [DecodeAttentionConfig("gather"), DecodeAttentionConfig("fused"), *parts, *blocks]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[DecodeAttentionConfig]:
        """cuDNN and the kernel as well, the latter with parts for few sequences and for many."""
        enough = _enough(inv)
        launches = [(n, b, w, 3) for n in (enough, 4 * enough) for b in (64, 128) for w in (2, 4)]
        kernels = [DecodeAttentionConfig("triton", *launch) for launch in launches]
        return [DecodeAttentionConfig("cudnn"), *self.candidate_cfgs(inv), *kernels]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: DecodeAttentionConfig) -> bool | str:
        """A part or a block must be worth a program of its own."""
        keys = _keys(inv)
        if cfg.implementation == "cudnn":
            return cudnn_refuses(inv, dict(zip(_ARRAYS, inv.args, strict=False)) | dict(inv.kwargs), keys) or True
        if cfg.implementation == "triton":
            return (
                missing()
                or pages_refuse(inv.args, keys, cfg.parts, cfg.block)
                or too_large(inv, inv.args[1].size)
                or True
            )
        if cfg.implementation == "fused" and inv.args[0].dtype == jnp.float32:
            return "sums without a product are for narrow numbers: of float32 they lose twice as much"
        if cfg.implementation == "split" and (not cfg.parts or keys < 32 * cfg.parts):
            return f"{keys} keys are too few for {cfg.parts} parts"
        if cfg.implementation == "loop" and (not cfg.block or keys < cfg.block):
            return f"{keys} keys are fewer than a block of {cfg.block}"
        return True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Sequences that fill at least half of their room, on pages in no order, where a trace hides the real ones."""
        q, k, v, lengths, *rest = inv.args
        room = _keys(inv)
        lengths = drawn(rng, lengths, max(q.shape[1], room // 2), room + 1)
        if rest and rest[0] is not None and known_values(rest[0]) is None:
            table = rest[0]
            order = np.concatenate([rng.permutation(k.shape[0]) for _ in range(-(-table.size // k.shape[0]))])
            rest[0] = order[: table.size].reshape(table.shape).astype(np.int32)
        return (q, k, v, lengths, *rest), dict(inv.kwargs)


def _enough(inv: Invocation[Any, Any]) -> int:
    """Parts of the keys that give every multiprocessor of a large GPU four blocks."""
    q, k = inv.args[:2]
    return 1 << max(0, math.ceil(math.log2(max(1, 528 / max(1, q.shape[0] * k.shape[2])))))


def _fit(table: Any, lengths: Any, wanted: tuple[tuple[int, ...], int]) -> bool:
    pages, added = wanted
    if len(pages) != 4 or table.ndim != 2 or lengths.shape != table.shape[:1]:
        return False
    # Wide, so that lengths of few bits can be added to.
    whole = lengths.astype(np.int64) + added
    return in_range(lengths, table.shape[1] * pages[1] - added) and not _missing_pages(table, whole, pages).any()


def _pages_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # All arguments by position, as nearly every call has them: a call of another form is checked in full.
    if len(args) != 5:
        return False
    _, k, _, table, lengths = args
    shape = k.shape
    if table is not None:
        return fit_together(table, lengths, (shape, 0), _fit)
    return len(shape) == 4 and were_checked(lengths, shape[1], in_range)


def _room_is_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if len(args) != 6:
        return False
    pages, _, k, _, table, lengths = args
    shape = k.shape
    return fit_together(table, lengths, (pages.shape, shape[1] if len(shape) == 4 else 1), _fit)


@planned(known_good=_pages_are_known)
def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array | None,
    lengths: jax.Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    cfg: DecodeAttentionConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """Attention of new tokens `q` (batch, heads, head_dim), or (batch, queries, heads, head_dim), to their sequences.

    `k_pages` and `v_pages` are (pages, page_size, heads, head_dim); row b of `page_table` (batch, pages of a sequence)
    names its pages in order, and `lengths[b]` tokens of them are real, the queries' own the last. With
    `page_table=None` keys and values are (batch, length, heads, head_dim). Heads of q are a multiple of those of k. A
    query sees the tokens up to its own and, with a window, so many before it. `sinks` (heads,) are scores without a
    value. Pages out of range are an error where they can be read; under a trace the nearest page is read.
    """
    q, k, v, single = _checked_heads(q, k_pages, v_pages, page_table)
    table, room = _checked_table(page_table, q, k)
    sizes = lengths_of("lengths", lengths, q.shape[0], room)
    if sizes is None:
        raise ArgumentError("lengths must be given: the number of tokens of each sequence")
    check_pages(page_table, sizes, k)
    given = [q, k, v, sizes, table]
    if sinks is not None:
        sink = float_array("sinks", sinks, ("heads",))
        same("heads", "q", q, q.shape[2], "sinks", sink, sink.shape[0])
        given.append(sink)
    how = {"window": _window(window), "soft_cap": _positive("soft_cap", soft_cap)}
    factor = scale_of(scale, q.shape[3])

    def whole(out: jax.Array) -> jax.Array:
        return out[:, 0] if single else out

    if not q.size or not k.size or not room:
        return whole(jnp.zeros_like(q))
    return plan(DecodeAttention(), *given, scale=factor, cfg=cfg, executor=executor, then=whole, **how)  # type: ignore[no-any-return]


@planned(known_good=_room_is_known)
def append_to_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens `k` and `v`, (batch, heads, head_dim) or (batch, tokens, heads, head_dim), behind the old ones.

    `lengths` are those before the new tokens. Inside a jit that donates the pages nothing is copied. A token without a
    page is an error where that can be read, and is left out under a trace.
    """
    if page_table is None:
        raise ArgumentError("page_table must be given; without pages use jax.lax.dynamic_update_slice")
    k, keys, values, _ = _checked_heads(k, k_pages, v_pages, page_table, "k")
    v, *_ = _checked_heads(v, k_pages, v_pages, page_table, "v")
    if k.shape != v.shape or k.shape[2] != keys.shape[2]:
        raise ArgumentError(f"k {k.shape} and v {v.shape} must have the heads of k_pages {keys.shape}")
    table, room = _checked_table(page_table, k, keys, "k")
    sizes = lengths_of("lengths", lengths, k.shape[0], room)
    known = None if sizes is None else known_values(sizes)
    if sizes is None or (known is not None and known.size and known.max() + k.shape[1] > room):
        raise ArgumentError(
            f"lengths and {k.shape[1]} new tokens must fit the {room} places of page_table {table.shape}"
        )
    check_pages(page_table, sizes + k.shape[1], keys)

    def written(executor: Any) -> tuple[jax.Array, jax.Array]:
        page_size, count = keys.shape[1], keys.shape[0]
        place = sizes[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        page = jnp.take_along_axis(table, jnp.minimum(place // page_size, table.shape[1] - 1), axis=1)
        # A page that is not there is beyond the last, where nothing is written; JAX counts negative ones from the end.
        page = jnp.where((place < room) & (page >= 0), page, count)
        at = (page, place % page_size)
        return keys.at[at].set(k, mode="drop"), values.at[at].set(v, mode="drop")

    return program("library.append_to_pages", written)  # type: ignore[no-any-return]


def check_pages(table: Any, lengths: Any, k: jax.Array) -> None:
    """An error where a page that a sequence uses is out of range, as far as that can be read."""
    known = None if table is None else known_values(table)
    sizes = known_values(lengths)
    if known is None or sizes is None:
        return
    wrong = _missing_pages(known, sizes, k.shape)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ArgumentError(
            f"page_table[{row}, {column}] is {known[row, column]}, "
            f"and k_pages {k.shape} have pages 0 to {k.shape[0] - 1}"
        )


def _missing_pages(table: Any, lengths: Any, pages: tuple[int, ...]) -> np.ndarray[Any, Any]:
    used = np.arange(table.shape[1]) * pages[1] < lengths[:, None]
    wrong: np.ndarray[Any, Any] = used & ((table < 0) | (table >= pages[0]))
    return wrong


def _checked_heads(q: Any, k: Any, v: Any, table: Any, name: str = "q") -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    array = as_array(name, q)
    single = array.ndim == 3
    q = float_array(name, array[:, None] if single else array, ("batch", "queries", "heads", "head_dim"))
    form = _PLAIN if table is None else _PAGES
    k, v = float_array("k_pages", k, form), float_array("v_pages", v, form)
    same_dtype(name, q, "k_pages", k)
    same_dtype("k_pages", k, "v_pages", v)
    if k.shape != v.shape:
        raise ArgumentError(f"k_pages and v_pages must have the same shape, got {k.shape} and {v.shape}")
    same("head_dim", name, q, q.shape[3], "k_pages", k, k.shape[3])
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"the heads of {name} must be a multiple of those of k_pages: {q.shape[2]} and {k.shape[2]}, "
            f"of shapes {q.shape} and {k.shape}"
        )
    return q, k, v, single


def _checked_table(page_table: Any, q: jax.Array, k: jax.Array, name: str = "q") -> tuple[Any, int]:
    """The table in 32 bits, and the tokens that a sequence has room for."""
    if page_table is None:
        same("batch", name, q, q.shape[0], "k_pages", k, k.shape[0])
        return None, k.shape[1]
    table = integers("page_table", page_table, ("batch", "pages"))
    same("batch", name, q, q.shape[0], "page_table", table, table.shape[0])
    return as_int32(table), table.shape[1] * k.shape[1]


def _window(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, tuple) and value:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ArgumentError(f"window must be a number of keys before a query's own, from 0 on; got {value!r}")
    return int(value)


def _positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number, got {type(value).__qualname__}")
    if not 0 < float(value) < math.inf:
        raise ArgumentError(f"{name}={value!r} must be a finite number above 0")
    return float(value)


def _keys(inv: Invocation[Any, Any]) -> int:
    k = inv.args[1]
    table = inv.args[4] if len(inv.args) > 4 else inv.kwargs.get("page_table")
    return int(k.shape[1] if table is None else table.shape[1] * k.shape[1])
