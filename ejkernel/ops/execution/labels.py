"""Names of kernel calls inside programs: written into the lowered text, found again in it and in profiles."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

PREFIX = "ejkernel_ops"

# Everything up to the first character that JAX or XLA puts behind a name.
_LABEL = re.compile(r"""[A-Za-z0-9_.-]+\#[A-Za-z0-9_.-]+:v[A-Za-z0-9_.%-]+:[A-Za-z0-9_.%-]+""")


def label(op_id: str, call_hash: str, prefix: str | None = None) -> str:
    """`prefix#op:vN:call_key` for an operation `op@vN`; `@` itself would end a name in XLA."""
    op, _, version = op_id.partition("@v")
    return f"{prefix or PREFIX}#{op}:v{_plain(version or '0')}:{_plain(call_hash)}"


def _plain(text: str) -> str:
    return quote(text, safe="")


def parse_label(text: str) -> tuple[str, str]:
    """The `(op@vN, call_key)` behind a label."""
    op, version, call_key = text.partition("#")[2].split(":")
    return f"{op}@{unquote(version)}", unquote(call_key)


def extract_labels_from_hlo_text(text: str, prefix: str | None = None) -> list[str]:
    """The labels in a program's text, each once, in order."""
    found = dict.fromkeys(_LABEL.findall(text))
    return [name for name in found if prefix is None or name.startswith(f"{prefix}#")]


def find_labels_in_lowered(lowered: Any, prefix: str | None = None) -> list[str]:
    """The labels in what `jax.jit(f).lower(...)` gave, or in its compiled form."""
    try:
        text = lowered.as_text(debug_info=True)
    # A compiled program has no debug_info switch: its text always has the names.
    except TypeError:
        text = lowered.as_text()
    return extract_labels_from_hlo_text(text, prefix)


def labels_to_configs(lowered: Any, selector: Any) -> dict[str, Any]:
    """The cfg of each labelled call in a program, as far as the selector's caches know it."""
    from ..core.device import device_fingerprint

    device = device_fingerprint()
    found = {}
    for name in find_labels_in_lowered(lowered):
        op_id, call_key = parse_label(name)
        cfg = selector.cache.get(device, op_id, call_key)
        if cfg is None and selector.persistent is not None:
            cfg = selector.persistent.get(device, op_id, call_key)
        if cfg is not None:
            found[name] = cfg
    return found
