"""A cfg as JSON and back: equal after the trip, or an error that names the field."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops import BwdParams, FwdParams, from_json, to_json
from ejkernel.ops.core.codec import decode, encode


def trip(kind, cfg):
    """The cfg after JSON text and back."""
    return decode(kind, json.loads(json.dumps(encode(cfg), allow_nan=False)))


class Order(enum.Enum):
    """An enum of strings."""

    ROW = "row"
    COLUMN = "column"


class Level(enum.IntEnum):
    """An enum of numbers."""

    LOW = 1
    HIGH = 2


class Layout(enum.Enum):
    """An enum whose values are tuples."""

    ROWS = (0, 1)
    COLUMNS = (1, 0)


class Tile(NamedTuple):
    """A named tuple with types."""

    m: int
    n: int = 8


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A nested dataclass."""

    stages: int = 2
    warps: tuple[int, ...] = (4, 8)


@dataclasses.dataclass(frozen=True)
class Config:
    """A cfg of everything."""

    block: int = 64
    scale: float = 1.0
    name: str = "a"
    fast: bool = False
    shape: tuple[int, float] = (1, 2.0)
    grid: tuple[tuple[int, int], ...] = ((1, 2),)
    order: Order = Order.ROW
    level: Level | None = None
    tile: Tile = dataclasses.field(default_factory=lambda: Tile(1))
    pipeline: Pipeline = Pipeline()
    backup: Pipeline | None = None
    many: list[Pipeline] = dataclasses.field(default_factory=list)
    table: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    either: int | str | tuple[int, ...] = 1
    mode: Literal["x", 1, True] = "x"


numbers = st.integers(-(2**40), 2**40)
pipelines = st.builds(Pipeline, stages=numbers, warps=st.lists(numbers, max_size=3).map(tuple))
configs = st.builds(
    Config,
    block=numbers,
    scale=st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(max_size=5),
    fast=st.booleans(),
    shape=st.tuples(numbers, st.floats(allow_nan=False, allow_infinity=False)),
    grid=st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
    order=st.sampled_from(Order),
    level=st.none() | st.sampled_from(Level),
    tile=st.builds(Tile, numbers, numbers),
    pipeline=pipelines,
    backup=st.none() | pipelines,
    many=st.lists(pipelines, max_size=2),
    table=st.dictionaries(st.text(max_size=3), st.lists(numbers, max_size=2).map(tuple), max_size=2),
    either=numbers | st.text(max_size=3) | st.lists(numbers, max_size=2).map(tuple),
    mode=st.sampled_from(["x", 1, True]),
)


@given(configs)
@settings(max_examples=80, deadline=None)
def test_a_dataclass_comes_back_equal(cfg):
    """Nested dataclasses, tuples, optionals, unions, enums, named tuples, lists and dicts come back as they were."""
    back = trip(Config, cfg)
    assert back == cfg
    assert repr(back) == repr(cfg)


@given(configs)
@settings(max_examples=20, deadline=None)
def test_json_text_comes_back_equal(cfg):
    """`to_json` and `from_json` are the same trip as text."""
    assert from_json(to_json(cfg), Config) == cfg


def test_json_text_without_a_type_comes_back_as_plain_data():
    """`from_json` without a type gives what JSON holds."""
    assert from_json(to_json(Pipeline())) == {"stages": 2, "warps": [4, 8]}


@pytest.mark.parametrize("cfg", [FwdParams(blocksize_m=64, num_warps=4), BwdParams(q_blocksize=32)])
def test_the_shared_parameters_come_back_equal(cfg):
    """FwdParams and BwdParams are cfgs like any other."""
    assert trip(type(cfg), cfg) == cfg


class Inner(pydantic.BaseModel):
    """A nested model."""

    depth: int = 2
    sizes: tuple[int, ...] = (1, 2)


class Model(pydantic.BaseModel):
    """A pydantic model of everything."""

    width: int = 1
    order: Order = Order.COLUMN
    inner: Inner = Inner()
    maybe: Inner | None = None
    pipeline: Pipeline = Pipeline()


@pytest.mark.parametrize("cfg", [Model(), Model(width=3, maybe=Inner(depth=9), order=Order.ROW), Inner(sizes=())])
def test_a_pydantic_model_comes_back_equal(cfg):
    """Models, nested ones included, come back as they were."""
    assert trip(type(cfg), cfg) == cfg


class Strict(pydantic.BaseModel):
    """A model that takes nothing but the exact types."""

    model_config = pydantic.ConfigDict(strict=True)

    sizes: tuple[int, ...] = (1, 2)
    order: Order = Order.ROW


def test_a_strict_pydantic_model_comes_back_equal():
    """A strict model that JSON holds as lists and strings is rebuilt all the same."""
    assert trip(Strict, Strict()) == Strict()


class Aliased(pydantic.BaseModel):
    """A model whose field has another name outside."""

    block: int = pydantic.Field(alias="blockM")


def test_a_pydantic_model_with_aliases_comes_back_equal():
    """A field's alias does not stand in the way."""
    assert trip(Aliased, Aliased(blockM=4)) == Aliased(blockM=4)


@dataclasses.dataclass(frozen=True)
class Holder:
    """A dataclass that holds a model."""

    model: Model = dataclasses.field(default_factory=Model)
    models: tuple[Inner, ...] = ()


def test_a_model_inside_a_dataclass_comes_back_equal():
    """Dataclasses and models mix."""
    cfg = Holder(Model(width=5), (Inner(depth=1), Inner()))
    assert trip(Holder, cfg) == cfg


@dataclasses.dataclass(frozen=True)
class Derived:
    """A dataclass with a field that it computes itself."""

    block: int
    double: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "double", 2 * self.block)


def test_a_computed_field_comes_back_equal():
    """A field that the constructor does not take is computed again."""
    assert trip(Derived, Derived(3)) == Derived(3)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slotted:
    """A dataclass without a __dict__."""

    block: int
    shape: tuple[int, int] = (1, 2)


def test_a_slotted_keyword_only_dataclass_comes_back_equal():
    """Slots and keyword-only fields make no difference."""
    assert trip(Slotted, Slotted(block=3)) == Slotted(block=3)


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        (int | float, 1),
        (int | float, 1.0),
        (float | int, 1),
        (bool | int, 1),
        (int | bool, True),
        (int | None, None),
        (str | int, "1"),
        (Tile | Pipeline, Pipeline(3)),
        (Pipeline | Tile | None, Tile(3)),
        (Annotated[int, "documented"], 3),
        (tuple[()], ()),
        (dict[str, Any], {"a": [1, None]}),
        (Mapping[str, int], {"a": 1}),
    ],
    ids=str,
)
def test_a_value_comes_back_with_its_type(kind, cfg):
    """A value of a union or of a generic type comes back equal and of the same type."""
    back = trip(kind, cfg)
    assert back == cfg
    assert type(back) is type(cfg)


@dataclasses.dataclass(frozen=True)
class WithSequence:
    """A field that is declared as a sequence."""

    warps: Sequence[int] = dataclasses.field(default_factory=lambda: [4, 8])


def test_a_sequence_field_comes_back_equal():
    """A list in a field that is declared as a Sequence comes back."""
    assert trip(WithSequence, WithSequence()) == WithSequence()


@dataclasses.dataclass(frozen=True)
class WithLayout:
    """A field that is an enum of tuples."""

    layout: Layout = Layout.COLUMNS


def test_an_enum_of_tuples_comes_back_equal():
    """An enum whose values JSON changes (tuples become lists) comes back as the same member."""
    assert trip(WithLayout, WithLayout()) == WithLayout()


def test_a_class_of_a_function_comes_back_equal_or_is_refused():
    """A dataclass whose annotations cannot be read from outside is never rebuilt as something else silently."""

    @dataclasses.dataclass(frozen=True)
    class Part:
        n: int = 1

    @dataclasses.dataclass(frozen=True)
    class Whole:
        part: Part = Part()
        shape: tuple[int, ...] = (1, 2)

    try:
        back = trip(Whole, Whole())
    except TypeError:
        return
    assert back == Whole()


@pytest.mark.parametrize(
    ("cfg", "path"),
    [
        (object(), "object"),
        ({"a": [1, object()]}, r"\['a'\]\[1\]"),
        (Config(pipeline=Pipeline(stages=object())), r"\.pipeline\.stages"),
        (Config(table={"k": (1, object())}), r"\.table\['k'\]\[1\]"),
        (Config(tile=Tile(object())), r"\.tile\.m"),
        (Config(scale=float("nan")), r"\.scale is nan"),
        (Config(scale=float("inf")), r"\.scale is inf"),
        (Config(name={1, 2}), r"\.name is a set"),
        (Config(name=b"bytes"), r"\.name is a bytes"),
        (Config(table={3: ()}), r"\.table has the key 3"),
        (Config(name=jnp.ones(2)), r"\.name is a "),
    ],
    ids=["object", "list", "nested", "dict", "named tuple", "nan", "inf", "set", "bytes", "key", "array"],
)
def test_what_json_cannot_hold_is_named_with_its_path(cfg, path):
    """A value that is not JSON is a TypeError that names the field's path."""
    with pytest.raises(TypeError, match=path):
        encode(cfg)


def test_a_cfg_that_holds_itself_is_an_error():
    """A cycle is a clear TypeError."""
    loop = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    ("kind", "data", "path"),
    [
        (Config, 3, "Config"),
        (Config, [1], "Config"),
        (Config, {"block": "64"}, r"Config\.block"),
        (Config, {"block": 1.5}, r"Config\.block"),
        (Config, {"block": True}, r"Config\.block"),
        (Config, {"block": None}, r"Config\.block"),
        (Config, {"scale": "1"}, r"Config\.scale"),
        (Config, {"name": 1}, r"Config\.name"),
        (Config, {"fast": 1}, r"Config\.fast"),
        (Config, {"shape": [1]}, r"Config\.shape"),
        (Config, {"shape": {"a": 1}}, r"Config\.shape"),
        (Config, {"grid": [[1, 2], [1, "2"]]}, r"Config\.grid\[1\]\[1\]"),
        (Config, {"order": "diagonal"}, r"Config\.order"),
        (Config, {"pipeline": {"stages": []}}, r"Config\.pipeline\.stages"),
        (Config, {"pipeline": None}, r"Config\.pipeline"),
        (Config, {"either": 1.5}, r"Config\.either"),
        (Config, {"mode": 1.0}, r"Config\.mode"),
        (Config, {"unknown": 1}, "unknown"),
        (Derived, {}, "block"),
        (Tile, {"m": "1"}, r"Tile\.m"),
        (Model, {"width": "wide"}, "width"),
        (dict[str, int], {"a": "b"}, r"\['a'\]"),
    ],
    ids=str,
)
def test_data_of_another_type_is_refused_with_its_path(kind, data, path):
    """JSON that does not fit the type is a TypeError that names the field's path."""
    with pytest.raises(TypeError, match=path):
        decode(kind, data)


def test_fields_that_the_data_lacks_have_their_defaults():
    """An entry that was written before a field existed is still read."""
    assert decode(Config, {"block": 3}) == Config(block=3)


def test_a_hostile_depth_is_an_error():
    """Data that is nested far deeper than any cfg does not crash the reader."""

    @dataclasses.dataclass
    class Chain:
        inner: Any = None

    deep: Any = None
    for _ in range(100):
        deep = Chain(deep)
    with pytest.raises(TypeError, match="nested deeper"):
        encode(deep)
