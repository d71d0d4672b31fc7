"""tokamax as a provider: attention and ragged products by whichever of its implementations takes the call."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
    query_lengths: Any = None,
    key_value_lengths: Any = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float,
    logits_soft_cap: float | None = None,
) -> Any:
    """Attention as the library's `Attention.run` takes it."""
    return importlib.import_module("tokamax").dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_value_lengths,
        local_window_size=window,
        logits_soft_cap=logits_soft_cap,
    )


def supports_attention(*args: Any, sinks: Any = None, **kwargs: Any) -> bool | str:
    """Refuses lengths, masks and windows: a query that sees no key gives zeros here, and need not in tokamax."""
    absent = _missing()
    if absent:
        return absent
    if len(args) > 7 or sinks is not None:
        return "tokamax has no attention sinks"
    hidden = any(arg is not None for arg in (*args[3:4], *args[5:7]))
    hidden = hidden or any(kwargs.get(name) is not None for name in ("mask", "query_lengths", "key_value_lengths"))
    if hidden or kwargs.get("window") is not None:
        return "tokamax says nothing of queries that see no key"
    return True


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any, *, preferred_element_type: str | None = None) -> Any:
    """A ragged product as the library's `RaggedDot.run` takes it."""
    dtype = preferred_element_type or lhs.dtype
    return importlib.import_module("tokamax").ragged_dot(lhs, rhs, group_sizes, preferred_element_type=dtype)


def supports_ragged_dot(*args: Any, **kwargs: Any) -> bool | str:
    """Every call, where the package is installed."""
    return _missing() or True


def _missing() -> str:
    return "" if find_spec("tokamax") else "tokamax is not installed: pip install tokamax"
