"""Keys are the same in every process, under every hash seed, from every folder and after lines have moved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ejkernel

SOURCE = textwrap.dedent(
    """
    import collections, dataclasses, enum, functools, json, re
    import jax, jax.numpy as jnp, numpy as np, pydantic
    from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
    from ejkernel.ops.core import Invocation


    def function(x):
        return x


    class Color(enum.Enum):
        RED = 1


    class Level(enum.IntEnum):
        LOW = 1


    class Bits(enum.Flag):
        A = 1
        B = 2


    @dataclasses.dataclass(frozen=True)
    class Inner:
        names: frozenset = frozenset({"a", "b", "c", "d"})


    @dataclasses.dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()
        by: object = function


    class Model(pydantic.BaseModel):
        names: set[str] = {"a", "b", "c", "d"}
        mode: Color = Color.RED


    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

        def method(self, x):
            return x


    Pair = collections.namedtuple("Pair", "a b")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x = jnp.ones((4, 8))
    values = {
        "array": x,
        "numpy": np.ones((2, 3)),
        "nested arrays": {"b": [x, (x, 1)], "a": {"z": np.int8(1), "y": None}},
        "numbers": (1, 1.0, True, None, -0.0, float("nan"), float("inf"), 2**70, 1j, b"bytes"),
        "strings": ["", "a", "\\u00e9", "\\U0001f600", "line\\nbreak"],
        "function": function,
        "lambda": lambda x: x,
        "partial": functools.partial(function, 1, names={"a", "b", "c"}),
        "partial of lambda": functools.partial(lambda x, y: x, 1),
        "method": Scale(2).method,
        "callable object": Scale({"a", "b", "c"}),
        "jax function": jax.nn.relu,
        "jax numpy function": jnp.sin,
        "jitted function": jax.jit(function),
        "builtin": len,
        "class": Scale,
        "np.dtype": np.dtype("float32"),
        "jnp.bfloat16": jnp.bfloat16,
        "np.float32": np.float32,
        "enum": Color.RED,
        "int enum": Level.LOW,
        "flag": Bits.A | Bits.B,
        "precision": jax.lax.Precision.HIGHEST,
        "dataclass": Inner(),
        "nested dataclass": Outer(),
        "pydantic": Model(),
        "named tuple": Pair(1, "b"),
        "mesh": mesh,
        "abstract mesh": mesh.abstract_mesh,
        "spec": P("x", ("x", "y"), None),
        "sharding": NamedSharding(mesh, P("x")),
        "sharded array": jax.device_put(x, NamedSharding(mesh, P("x"))),
        "random key": jax.random.key(0),
        "set": {"a", "b", "c", "d", "e", 1, None},
        "frozenset": frozenset({"a", "b", "c", "d", "e"}),
        "set of tuples": {("a", 1), ("b", 2), ("c", 3)},
        "dict": {"b": 1, "a": 2, 3: {"c", "d"}},
        "slice": slice(1, None, 2),
        "range": range(3),
        "ellipsis": ...,
        "pattern": re.compile("a+", re.I),
        "shape": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
    }


    def keys():
        found = {name: Invocation("op", (value,), {}).call_key for name, value in values.items()}
        found["keywords"] = Invocation("op", (x,), {"b": {"q", "r"}, "a": function}).call_key
        found["fields"] = Invocation(
            "op", (x,), {}, batch_axes=((8, 0),), method="shard_map", mesh=mesh, in_specs=P("x"), out_specs=(P(), None)
        ).call_key
        return found


    if __name__ == "__main__":
        import keys_of_calls

        print(json.dumps(keys_of_calls.keys()))
    """
)

# Written once: a change here means that every store on every machine loses its entries. Then the scheme's number in
# core/invocation.py moves too, and these are written again.
PINNED = {
    "array": "7977bcc229d02cf7",
    "numpy": "7f5f2607953ce15a",
    "nested arrays": "27556236be230b83",
    "numbers": "faf23cc5c6176113",
    "strings": "1448d46ca7e5f0b1",
    "function": "0bbe467960a1ad7e",
    "partial": "69cd74fd05c754c7",
    "jax numpy function": "85e4014baa493178",
    "builtin": "c38c2b1a3e7dc57c",
    "class": "5ce128a79d673dd5",
    "np.dtype": "de17e7f09e401c5e",
    "jnp.bfloat16": "573ad29c65e7c6d7",
    "np.float32": "de17e7f09e401c5e",
    "enum": "76c9d59d878920a4",
    "int enum": "55c037228b449737",
    "precision": "cdd6db9ceeee7b73",
    "dataclass": "03bf7d046853fe25",
    "nested dataclass": "dbf36f3f416e27bb",
    "named tuple": "d562289075eb2508",
    "mesh": "9bd1f13cf3267527",
    "spec": "4ad92820803bb848",
    "sharding": "504ea5ba7aec64ea",
    "sharded array": "da944abeae465adf",
    "random key": "1dfad285b08f9adb",
    "set": "c846039897561163",
    "frozenset": "0f13b92059d3790f",
    "set of tuples": "1d7ebaf07135610f",
    "dict": "6d95b7bebec486c4",
    "slice": "d51809ccf2a893c9",
    "range": "14dcde4d90d01c8d",
    "ellipsis": "8d8429809e96a29e",
    "pattern": "af8ede376f8d947d",
    "shape": "8479bbdf4ba7436c",
    "keywords": "6df803c5e3ca8ce7",
    "fields": "2e69d477909648b5",
}

NAMES = [line.split('"')[1] for line in SOURCE.splitlines() if line.startswith('    "')] + ["keywords", "fields"]


def printed(folder: Path, source: str, seed: str) -> dict[str, str]:
    """The keys that a fresh process makes."""
    folder.mkdir()
    (folder / "keys_of_calls.py").write_text(source, encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(ejkernel.__file__).parents[1]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "keys_of_calls.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same calls in three processes: other hash seeds, folders and line numbers."""
    root = tmp_path_factory.mktemp("keys")
    moved = '"""Moved."""\n' + "# a line\n" * 40 + SOURCE.replace("\n\n\n", "\n\n\n\n\n# more\n\n")
    return [
        printed(root / "one", SOURCE, "0"),
        printed(root / "two", SOURCE, "4242"),
        printed(root / "moved lines", moved, "7"),
    ]


def test_the_processes_made_every_key(runs):
    """Each process printed a key for every case below."""
    assert set(runs[0]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_the_same_in_every_process(runs, name):
    """Hash seed, folder and line numbers do not reach a key."""
    assert runs[0][name] == runs[1][name] == runs[2][name]


def test_no_two_cases_share_a_key(runs):
    """All cases but the two spellings of one dtype and of one mesh are different calls."""
    spellings = {"np.float32": "np.dtype", "abstract mesh": "mesh", "jitted function": "function"}
    kept = {name: key for name, key in runs[0].items() if name not in spellings}
    assert len(set(kept.values())) == len(kept)


@pytest.mark.parametrize("name", sorted(PINNED))
def test_a_key_is_the_one_that_was_written_down(runs, name):
    """Keys on disk outlive versions of Python, of JAX and of this package."""
    assert runs[0][name] == PINNED[name]
