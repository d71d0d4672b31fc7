"""The small public functions around keys: shapes of calls, fingerprints, hashes, canonical text, shared parameters.

Covers `core/abstract.py` and `core/params.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    BwdParams,
    FwdParams,
    Invocation,
    abstractify,
    sharding_fingerprint,
    short_hash,
    stable_json,
)

SHARED = ("blocksize_m", "blocksize_k", "blocksize_n", "q_blocksize", "kv_blocksize", "num_warps", "num_stages")
FORWARD = (
    *SHARED[:5],
    *("blocksize_heads", "blocksize_keys", "num_key_splits"),
    *SHARED[5:],
)


def test_abstractify_keeps_shapes_and_drops_values():
    """Every array becomes its shape and dtype; structure and static values stay."""
    made = abstractify({"a": jnp.ones((2, 3), jnp.bfloat16), "b": [np.zeros(4, np.int8), 3, "mode", None]})
    assert isinstance(made["a"], jax.ShapeDtypeStruct)
    assert (made["a"].shape, made["a"].dtype) == ((2, 3), jnp.bfloat16)
    assert (made["b"][0].shape, made["b"][0].dtype) == ((4,), np.int8)
    assert made["b"][1:] == [3, "mode", None]


@pytest.mark.parametrize(
    "array",
    [jnp.ones(3), np.ones(3), np.float64(2), jnp.asarray(1.0) * 1, jax.random.key(0)],
    ids=["jax", "numpy float64", "numpy scalar", "weak", "random key"],
)
def test_an_abstract_call_has_the_key_of_the_call(array):
    """What the registry keeps instead of a call has the call's key."""
    assert Invocation("op", abstractify((array,)), {}).call_key == Invocation("op", (array,), {}).call_key


def test_an_abstract_sharded_call_has_the_key_of_the_call():
    """The sharding that an array's type shows is kept."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    array = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("x")))
    assert Invocation("op", abstractify((array,)), {}).call_key == Invocation("op", (array,), {}).call_key


def test_abstractify_works_on_tracers_and_shapes():
    """Inside a trace, and on shapes themselves, the same comes out."""
    seen = []
    jax.eval_shape(lambda x: seen.append(abstractify(x)), jnp.ones((2, 3)))
    assert (seen[0].shape, seen[0].dtype) == ((2, 3), jnp.float32)
    assert abstractify(seen[0]) is seen[0]


def test_a_sharding_fingerprint_names_axes_and_spec():
    """Two layouts have two fingerprints, one layout over other devices has one."""
    devices = jax.devices()
    one, other = (jax.sharding.Mesh(np.array(d), ("x",)) for d in (devices[:2], devices[2:]))
    x = jnp.ones((4, 4))
    rows, again = (jax.device_put(x, NamedSharding(mesh, P("x"))) for mesh in (one, other))
    columns = jax.device_put(x, NamedSharding(one, P(None, "x")))
    assert sharding_fingerprint(rows) == sharding_fingerprint(again) == sharding_fingerprint(rows.sharding)
    assert len({sharding_fingerprint(v) for v in (rows, columns, x)}) == 3


def test_what_is_not_sharded_has_one_fingerprint():
    """Arrays on one device, numpy arrays and anything else are alike."""
    assert sharding_fingerprint(jnp.ones(2)) == sharding_fingerprint(np.ones(2)) == sharding_fingerprint(3)


def test_short_hash_is_a_part_of_sha256():
    """The hash is the same everywhere, 16 hex digits unless asked for another length."""
    assert short_hash("text") == hashlib.sha256(b"text").hexdigest()[:16]
    assert short_hash("text", 8) == hashlib.sha256(b"text").hexdigest()[:8]


def test_stable_json_does_not_depend_on_order():
    """Equal values give equal text, whatever the order of their items."""
    assert stable_json({"a": 1, "b": {2, 3}}) == stable_json({"b": {3, 2}, "a": 1})
    assert stable_json({"a": 1}) != stable_json({"a": 1.0})


def test_the_forward_parameters_are_all_open():
    """FwdParams has the documented fields, each None."""
    assert dataclasses.asdict(FwdParams()) == dict.fromkeys(FORWARD)


def test_the_backward_parameters_are_all_open():
    """BwdParams has the same fields without heads, keys and key splits."""
    assert dataclasses.asdict(BwdParams()) == dict.fromkeys(SHARED)


@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
def test_parameters_can_be_hashed(kind):
    """Equal parameters are one key of a dict."""
    assert len({kind(blocksize_m=64), kind(blocksize_m=64), kind(blocksize_m=128)}) == 2


def structure(tree):
    return jax.tree_util.tree_structure(tree)


def test_the_structure_of_a_tree_has_a_stable_form():
    """Frameworks keep it in static values: containers, their keys and the places of leaves count, leaves do not."""
    same = stable_json(structure({"a": [1, (2, None)]}))
    assert stable_json(structure({"a": [3.0, (jnp.ones(2), None)]})) == same
    others = [{"b": [1, (2, None)]}, {"a": [1, (2, 3)]}, {"a": [1, [2, None]]}, {"a": (1, (2, None))}, [1, 2]]
    assert len({same, *(stable_json(structure(tree)) for tree in others)}) == 1 + len(others)


class OddlyNamed:
    """A class with a property that JAX's dtypes have too."""

    @property
    def type(self):
        return "odd"


def test_a_class_with_an_attribute_named_type_is_a_class():
    """It counts by its name, as every class does."""
    assert "OddlyNamed" in stable_json(OddlyNamed)
