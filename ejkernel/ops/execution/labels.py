"""Names of kernel calls inside programs: how they are spelled, and found again in lowered texts and profiles."""

from __future__ import annotations

import functools
import json
import re
from typing import Any
from urllib.parse import quote, unquote

from ..core.device import device_fingerprint
from ..core.errors import RecordFormatError, SettingError

PREFIX = "ejkernel_ops"

# Everything up to the first character that JAX or XLA puts behind a name.
_HASH = re.compile(r"[A-Za-z0-9_.-]+#[A-Za-z0-9_.-]+:v[A-Za-z0-9_.%-]+:[A-Za-z0-9_.%-]+")
_JSON = re.compile(r"[A-Za-z0-9_.-]+#(?=\{)")


def label(op_id: str, call_hash: str, prefix: str | None = None) -> str:
    """`prefix#op:vN:call_key` for an operation `op@vN`; `@` itself would end a name in XLA."""
    return _label(op_id, call_hash, prefix)


# The same calls are traced again and again.
@functools.lru_cache(maxsize=4096)
def _label(op_id: str, call_hash: str, prefix: str | None) -> str:
    op, _, version = op_id.partition("@v")
    return f"{prefix or PREFIX}#{op}:v{_plain(version or '0')}:{_plain(call_hash)}"


def json_label(op_id: str, call_hash: str, cfg: Any, prefix: str | None = None) -> str:
    """A label with a JSON object behind the `#`, the cfg included."""
    op, _, version = op_id.partition("@v")
    payload = {"op": op, "version": version or "0", "call_key": call_hash, "cfg": repr(cfg)}
    text = json.dumps(payload, separators=(",", ":"))
    # XLA ends names at '@', JAX joins them with '/': both are as good in JSON's other spelling.
    return f"{prefix or PREFIX}#{text.replace('@', chr(92) + 'u0040').replace('/', chr(92) + 'u002f')}"


def _plain(text: str) -> str:
    # Python leaves '~' as it is; a label has letters, digits and '_.-%' alone.
    return quote(text, safe="").replace("~", "%7E")


def parse_label(text: str) -> tuple[str, str]:
    """The `(op@vN, call_key)` behind a label of either kind."""
    rest = text.partition("#")[2]
    try:
        if rest.startswith("{"):
            payload = json.loads(rest)
            return f"{payload['op']}@v{payload['version']}", payload["call_key"]
        op, version, call_key = rest.split(":")
    except (ValueError, KeyError) as error:
        raise RecordFormatError(f"{text!r} is no label of a kernel call") from error
    return f"{op}@{unquote(version)}", unquote(call_key)


def extract_labels_from_hlo_text(text: str, prefix: str | None = None) -> list[str]:
    """The labels in a program's text, each once, in order."""
    # Both printers escape quotes and backslashes, each in its way.
    plain = text.replace("\\22", '"').replace('\\"', '"').replace("\\5C", "\\").replace("\\\\", "\\")
    found = [(match.start(), match.group()) for match in _HASH.finditer(plain)]
    for match in _JSON.finditer(plain):
        try:
            _, end = json.JSONDecoder().raw_decode(plain, match.end())
        # The program that printed the text cut it off.
        except ValueError:
            continue
        found.append((match.start(), plain[match.start() : end]))
    names = dict.fromkeys(name for _, name in sorted(found))
    return [name for name in names if prefix is None or name.startswith(f"{prefix}#")]


def find_labels_in_lowered(lowered: Any, prefix: str | None = None) -> list[str]:
    """The labels in what `jax.jit(f).lower(...)` gave, or in its compiled form."""
    if not callable(getattr(lowered, "as_text", None)):
        raise SettingError(f"{lowered!r} is no program; give what `jax.jit(f).lower(...)` gave, or its compiled form")
    try:
        text = lowered.as_text(debug_info=True)
    # A compiled program has no debug_info switch: its text always has the names.
    except TypeError:
        text = lowered.as_text()
    return extract_labels_from_hlo_text(text, prefix)


def labels_to_configs(lowered: Any, selector: Any) -> dict[str, Any]:
    """The cfg of each labelled call in a program, as far as the selector's caches know it."""
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
