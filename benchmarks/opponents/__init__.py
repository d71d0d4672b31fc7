"""Ways of other packages to compute the library's operations: JAX's own kernels, torch's, tokamax's."""

from __future__ import annotations

from . import by_tokamax, by_torch, pallas_attention, pallas_products, pallas_rows
from .opponent import Call, Opponent, Source

# By the package that a line about a missing one names.
SOURCES: dict[str, Source] = {
    "JAX's kernels for rows": pallas_rows.opponents,
    "JAX's kernels for products": pallas_products.opponents,
    "JAX's kernels for attention": pallas_attention.opponents,
    "torch": by_torch.opponents,
    "tokamax": by_tokamax.opponents,
}


def collected(call: Call, without: tuple[str, ...] = ()) -> tuple[list[Opponent], dict[str, str]]:
    """The opponents of a call, without those with such a prefix, and the reason for each package left out."""
    found: list[Opponent] = []
    left_out: dict[str, str] = {}
    for package, source in SOURCES.items():
        if package in without:
            left_out[package] = "left out by --without"
            continue
        try:
            found += [one for one in source(call) if not one.name.startswith(without)]
        # A package may fail in more ways than that it is missing: a library of another version, for one.
        except Exception as error:
            left_out[package] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return found, left_out
