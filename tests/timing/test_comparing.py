"""Where arrays are compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.timing import check, comparing
from ejkernel.ops.timing.comparing import bring, place_of


def test_small_arrays_and_those_of_numpy_are_compared_on_the_host():
    """Compiling takes longer than they do."""
    assert place_of([jnp.ones((64, 64))]) is None
    assert place_of([np.ones((4096, 4096), np.int8)]) is None


def test_large_arrays_are_compared_where_they_are(monkeypatch):
    """All of an answer together: several small arrays can be large."""
    monkeypatch.setattr(comparing, "_CPU_ELEMENTS", 1000)
    device = jax.devices()[-1]
    half = jax.device_put(jnp.ones(500), device)

    assert place_of([half]) is None
    assert place_of([half, half]) == device


def test_arrays_of_several_devices_are_brought_to_one():
    """As candidates under shard_map give them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    spread = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    device = place_of([spread], on_device=True)
    [moved] = bring([spread], device)

    assert moved.devices() == {jax.devices()[0]}
    assert check.compare(spread, np.arange(8.0, dtype=np.float32), on_device=True).reason == ""


def test_keys_come_to_the_host_as_integers():
    """numpy has no type for them."""
    [bits] = bring([jax.random.key(3)], None)

    assert bits.dtype == np.uint32
