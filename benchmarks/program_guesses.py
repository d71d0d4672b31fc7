"""Heuristics that know nothing: every kernel of the library guesses its median candidate, so that the tuner shows."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from statistics import median
from typing import Any

import jax
from program_calls import candidates

from ejkernel import library
from ejkernel.ops.core import codec
from ejkernel.ops.core.kernel import levels, versioned

KERNELS = ("Attention", "LayerNorm", "LinearCrossEntropy", "Matmul", "RaggedDot", "RmsNorm", "Softmax")


def written(path: Path, entries: Any) -> None:
    """Keeps the median candidate of each call that a tuning raced."""
    found = {}
    for entry in entries:
        timed = [t for t in (entry.record.trials if entry.record else ()) if t.seconds]
        if timed:
            middle = median(t.seconds for t in timed)
            cfg = min(timed, key=lambda t: abs(t.seconds - middle)).cfg
            found[f"{entry.op_id_v} {entry.call_key}"] = codec.encode(cfg)
    path.write_text(json.dumps(found), encoding="utf-8")


def install(path: Path | None) -> None:
    """Has every kernel guess what the file says, or the middle of its list where it says nothing."""
    known = json.loads(path.read_text(encoding="utf-8")) if path else {}
    inside = threading.local()
    for name in KERNELS:
        cls = getattr(library, name)
        for suffix in levels(jax.default_backend(), None):
            if f"heuristic_cfg{suffix}" in vars(cls):
                _wrap(cls, f"heuristic_cfg{suffix}", known, inside)
                break


def _wrap(cls: type[Any], name: str, known: dict[str, Any], inside: Any) -> None:
    original, chosen = getattr(cls, name), {}

    def middle(self: Any, inv: Any) -> Any:
        # A kernel's list may begin with its own guess, which is the real one then.
        if getattr(inside, "on", False):
            return original(self, inv)
        key = f"{versioned(self)} {inv.call_key}"
        if key not in chosen:
            inside.on = True
            try:
                cfgs = candidates(self, inv)
            finally:
                inside.on = False
            same = [cfg for cfg in cfgs if key in known and codec.encode(cfg) == known[key]]
            chosen[key] = same[0] if same else cfgs[len(cfgs) // 2]
            print(f"guess of {key}: {chosen[key]}{'' if same else ' (middle of the list)'}", flush=True)
        return chosen[key]

    setattr(cls, name, middle)
