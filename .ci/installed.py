"""Tries an installed package: where it lies, what it brings along, and one tuned kernel call."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel.library import rms_norm
from ejkernel.ops import counters, tunable

place, tree = Path(ejkernel.__file__).resolve().parent, Path(sys.argv[1]).resolve()
assert place.is_relative_to(Path(sys.prefix).resolve()), f"imported from {place}"
assert not any(Path(entry or ".").resolve().is_relative_to(tree) for entry in sys.path), sys.path
assert (place / "py.typed").exists()


@tunable(rows=[4, 8])
def doubled(x, *, rows):
    return (x.reshape(-1, rows) * 2).reshape(x.shape)


x = jnp.arange(16.0)
np.testing.assert_array_equal(doubled(x), x * 2)
assert counters().autotune >= 1, counters()
np.testing.assert_allclose(rms_norm(x), x / np.sqrt(np.mean(np.square(x)) + 1e-6), rtol=1e-5)
print(f"installed: {place}")
