"""Block sizes and launch parameters that many kernels share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BwdParams:
    """Launch parameters of a backward pass; None leaves a choice to the kernel."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclass(frozen=True)
class FwdParams:
    """Launch parameters of a forward pass; None leaves a choice to the kernel."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
