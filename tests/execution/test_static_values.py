"""Static values: which calls share a program, which values may be static, and what is said when there are too many.

Covers `execution/advice.py`.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from fakes_execution import Asked, Counting, close, executor_with

from ejkernel.ops import Executor
from ejkernel.ops.execution import static_values

X = jnp.arange(1.0, 4.0)


class Shows(Counting):
    """Keeps the static value that it was traced with."""

    op_id = "shows"

    def run(self, x, *, value, cfg):
        self.log.append(value)
        return x


@dataclass(frozen=True)
class Setting:
    """A static value of the user's own."""

    by: float


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


def mark(value):
    """What tells static values apart."""
    return type(value).__name__, repr(value)


DIFFERENT = {
    "zeros": [0.0, -0.0],
    "zero of every type": [0, 0.0, -0.0, False],
    "one of every type": [1, 1.0, True, Level.ONE],
    "not a number": [math.nan, 1.0, None],
    "infinities": [math.inf, -math.inf],
    "complex zeros": [complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)],
    "strings": ["a", "b", ""],
    "text and bytes": ["a", b"a"],
    "enums": [Colour.RED, Colour.BLUE],
    "nothing": [None, 0, False, ""],
    "tuples of every type": [(1,), (1.0,), (True,)],
    "tuples of zeros": [(0.0,), (-0.0,)],
    "lists and tuples": [[1, 2], (1, 2)],
    "dicts": [{"a": 1}, {"a": 2}, {"b": 1}],
    "values of their own": [Setting(1.0), Setting(2.0)],
    "zeros inside a value": [Setting(0.0), Setting(-0.0)],
    "one of every type inside a value": [Setting(1), Setting(1.0), Setting(True)],
    "dtypes": [jnp.float32, jnp.float16, np.dtype("float32")],
    "frozensets of every type": [frozenset({1}), frozenset({1.0}), frozenset({True})],
    "ranges": [range(3), range(4)],
    "partials": [functools.partial(int, base=2), functools.partial(int, base=3)],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_static_values_are_never_mixed_up(name):
    """Each call is traced with its own value, in every order and when everything is warm."""
    values = DIFFERENT[name]
    for order in itertools.islice(itertools.permutations(values), 6):
        kernel, executor = Shows.fresh()(), executor_with()
        for value in (*order, *order):
            executor(kernel, X, value=value)
        assert {mark(v) for v in kernel.log} == {mark(v) for v in values}


SAME = {
    "numbers": lambda: 2.5,
    "not a number": lambda: float("nan"),
    "negative zero": lambda: -0.0,
    "strings": lambda: "".join(["a", "b"]),
    "tuples": lambda: (1, "a", (2.0,)),
    "lists": lambda: [1, 2],
    "dicts": lambda: {"a": 1, "b": [2]},
    "values of their own": lambda: Setting(1.0),
    "None": lambda: None,
    "dtypes": lambda: jnp.dtype("float32"),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_static_values_share_a_program(name):
    """A value that is made anew for each call is traced once."""
    kernel, executor = Shows.fresh()(), executor_with()
    for _ in range(4):
        executor(kernel, X, value=SAME[name]())
    assert len(kernel.log) == 1


class Divides(Counting):
    """A result that shows the sign of a static zero, and whether a static one is an integer."""

    op_id = "divides"

    def run(self, x, *, by, cfg):
        return x / jnp.float32(by) if isinstance(by, float) else x // by


def test_zeros_give_right_results_in_any_order():
    """0.0 and -0.0 as static keywords, warm and cold."""
    expected = {"0.0": math.inf, "-0.0": -math.inf}
    for order in ([0.0, -0.0], [-0.0, 0.0]):
        executor = executor_with()
        for by in order * 3:
            assert float(executor(Divides(), X, by=by)[0]) == expected[repr(by)]


def test_not_a_number_gives_right_results_between_others():
    """NaN as a static keyword."""
    executor = executor_with()
    for by in (math.nan, 2.0, math.nan, -0.0, 2.0):
        close(executor(Divides(), X, by=by), np.asarray(X) / np.float32(by) if by else np.full(3, -np.inf))


@pytest.mark.parametrize("order", list(itertools.permutations([1, 1.0, True])), ids=str)
def test_one_of_three_types_gives_right_results_in_any_order(order):
    """1, 1.0 and True are three static values, whatever came first."""

    class Kinds(Counting):
        op_id = "kinds"

        def run(self, x, *, value, cfg):
            return x * 0 + {int: 1, float: 2, bool: 3}[type(value)]

    executor = executor_with()
    for value in order * 3:
        assert float(executor(Kinds(), X, value=value)[0]) == {int: 1, float: 2, bool: 3}[type(value)]


def test_static_values_by_position():
    """Python scalars, strings and None between arrays are static there too."""

    class Between(Counting):
        op_id = "between"

        def run(self, x, n, y, name, *, cfg):
            assert isinstance(n, int)
            return x * n + y if name == "plus" else x * n - y

    executor = executor_with()
    for n in (2, 3, 2):
        close(executor(Between(), X, n, X, "plus"), X * n + X)
        close(executor(Between(), X, n, X, "minus"), X * n - X)


def test_a_key_tells_one_of_three_types_apart():
    """1, 1.0 and True have keys of their own, equal calls have one."""
    chooser, kernel = Asked(2), Shows.fresh()()
    executor = Executor(chooser)
    for value in (1, 1.0, True):
        executor.choose_config(kernel, X, value=value)
        executor(kernel, X, value=value)
    assert len({question.call_key for question in chooser.questions}) == 3


UNHASHABLE = {
    "a set": {1, 2},
    "a bytearray": bytearray(b"a"),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_an_unhashable_static_keyword_is_named(name):
    """A clear error with the kernel, the argument and what to do."""
    with pytest.raises(TypeError, match=r"(?s)value.*shows@v0.*hash"):
        executor_with()(Shows.fresh()(), X, value=UNHASHABLE[name])


def test_an_unhashable_static_argument_inside_a_tree_is_named():
    """The message has the path to it."""
    with pytest.raises(TypeError, match=r"(?s)value.*'deep'.*\[1\].*shows@v0"):
        executor_with()(Shows.fresh()(), X, value={"deep": [1, {2}]})


def test_an_unhashable_positional_argument_is_named():
    """By its place."""

    class Two(Counting):
        op_id = "two"

        def run(self, x, rest, *, cfg):
            return x

    with pytest.raises(TypeError, match=r"(?s)(args\[1\]|rest).*two@v0"):
        executor_with()(Two(), X, {1, 2})


def test_an_unhashable_static_argument_is_named_under_jit_too():
    """The same error in a user's jitted function."""
    executor, kernel = executor_with(), Shows.fresh()()
    with pytest.raises(TypeError, match=r"(?s)value.*shows@v0"):
        jax.jit(lambda x: executor(kernel, x, value={1, 2}))(X)


def many(executor, kernel, values, **more):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in values:
            executor(kernel, X, value=value, **more)
    return [warning for warning in caught if "static" in str(warning.message)]


def test_over_64_static_values_are_warned_of_once():
    """One warning that names the kernel and the argument, at the caller's line."""
    kernel, executor = Shows.fresh()(), executor_with()
    assert many(executor, kernel, range(64)) == []
    [warning] = many(executor, kernel, range(64, 90))
    assert "value" in str(warning.message)
    assert "shows@v0" in str(warning.message)
    assert warning.filename == __file__
    assert many(executor, kernel, range(200, 230)) == []


def test_the_warning_names_the_argument_that_changes():
    """Others that stay the same are not blamed."""

    class Two(Counting):
        op_id = "two_statics"

        def run(self, x, *, value, steady, cfg):
            return x

    [warning] = many(executor_with(), Two(), range(70), steady=5)
    assert "value" in str(warning.message)
    assert "steady" not in str(warning.message)


def test_64_static_values_again_and_again_are_no_reason_to_warn():
    """It is the number of different ones that counts."""
    kernel, executor = Shows.fresh()(), executor_with()
    assert many(executor, kernel, list(range(64)) * 3) == []


def test_arrays_are_no_static_values():
    """A hundred values of a numpy scalar are one program and no warning."""
    kernel, executor = Shows.fresh()(), executor_with()
    assert many(executor, kernel, [np.float32(i) for i in range(100)]) == []
    assert len(kernel.log) == 1


def test_callables_are_static():
    """A function as an argument: another function is another program."""

    class Applies(Counting):
        op_id = "applies"

        def run(self, x, *, value, cfg):
            self.log.append(value)
            return value(x)

    kernel, executor = Applies.fresh()(), executor_with()
    for function in (jnp.sin, jnp.cos, jnp.sin, lambda x: x * 3, lambda x: x * 4):
        close(executor(kernel, X, value=function), function(X))
    assert len(kernel.log) == 4


@dataclass(eq=False)
class Identified:
    """A static value with an attribute that its fields do not show; it is equal to itself alone."""

    name: str

    def __init__(self, name, by):
        self.name = name
        self.by = by


class Private(pydantic.BaseModel, frozen=True):
    """A static value with a private attribute."""

    name: str = "same"
    _by: int = pydantic.PrivateAttr(0)

    def __init__(self, by):
        super().__init__()
        self._by = by

    @property
    def by(self):
        return self._by


class Labelled(tuple):
    """A tuple that holds more than its items."""

    def __new__(cls, by):
        made = super().__new__(cls, (1,))
        made.by = by
        return made


class Loud(functools.partial):
    """A partial that holds more than its function."""

    def __new__(cls, by):
        made = super().__new__(cls, int)
        made.by = by
        return made


class Scales(Counting):
    """The argument times an attribute of a static value."""

    op_id = "scales"

    def run(self, x, *, value, cfg):
        self.log.append(value)
        return x * value.by


HIDING = [Identified, Private, Labelled, Loud]


@pytest.mark.parametrize("kind", [lambda by: Identified("same", by), *HIDING[1:]], ids=[k.__name__ for k in HIDING])
def test_static_values_that_differ_in_what_their_fields_hide_are_never_mixed_up(kind):
    """The object itself counts, by its own `==`, where it can be hashed; else its attributes do."""
    executor, kernel = executor_with(), Scales.fresh()()
    values = [kind(2), kind(3)]
    for value in values * 2:
        close(executor(kernel, X, value=value), X * value.by)


@dataclass
class Plain:
    """An attribute of a kernel that cannot be hashed and holds more than its field."""

    name: str


class Holds(Counting):
    """The argument times something of an attribute."""

    op_id = "holds"

    def __init__(self, held, read):
        super().__init__()
        self.held = held
        self.read = read

    def run(self, x, *, cfg):
        return x * self.read(self.held)


class Model(pydantic.BaseModel):
    """The same as a model."""

    name: str = "same"
    _by: int = pydantic.PrivateAttr(0)


def by_attribute(held):
    return held.by


def by_private(held):
    return held._by


def test_an_attribute_of_a_kernel_counts_with_what_its_fields_hide():
    """An object that cannot be hashed is known by all of its attributes, declared or not."""
    executor = executor_with()
    for by in (2.0, 3.0):
        plain, model = Plain("same"), Model()
        plain.by = model._by = by
        close(executor(Holds(plain, by_attribute), X), X * by)
        close(executor(Holds(model, by_private), X), X * by)


def first(held):
    return float(np.asarray(held).reshape(-1)[0])


def first_of_field(held):
    return float(held.name[0])


SIZES = {"small": 8, "large": 1 << 17}
HOLDERS = {
    "array": (lambda array: array, first),
    "view": (lambda array: array[::2], first),
    "in a dataclass": (Plain, first_of_field),
    "of objects": (lambda array: array.astype(object), first),
}


CHANGED = [(holder, size) for holder in HOLDERS for size in SIZES if (holder, size) != ("of objects", "large")]


@pytest.mark.parametrize(("holder", "size"), CHANGED)
def test_an_array_of_a_kernel_that_is_changed_in_place_counts_as_it_is(holder, size):
    """The old result would be wrong, and no error would say so."""
    hold, read = HOLDERS[holder]
    array = np.full(SIZES[size], 2.0, np.float32)
    held = hold(array)
    executor, kernel = executor_with(), Holds(held, read)
    close(executor(kernel, X), X * 2)
    (held if holder == "of objects" else array)[:] = 3.0
    close(executor(kernel, X), X * 3)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_program_keeps_the_array_that_it_was_compiled_for(size):
    """An equal kernel with another shape is traced with the array as it was, not as its owner changed it since."""
    executor = executor_with()
    changed, equal = (np.full(size, 2.0, np.float32) for _ in range(2))
    executor(Holds(changed, first), X)
    changed[:] = 3.0
    longer = jnp.arange(5.0)
    close(executor(Holds(equal, first), longer), longer * 2)


@dataclass(frozen=True)
class Table:
    """A static value that holds an array."""

    rows: Any

    @property
    def by(self):
        return float(self.rows[0])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_an_array_inside_a_static_value_counts_as_it_is(size):
    """Changed in place it is another value, and what was compiled before keeps the one that it had."""
    executor, kernel = executor_with(), Scales.fresh()()
    rows, equal = (np.full(size, 2.0, np.float32) for _ in range(2))
    close(executor(kernel, X, value=Table(rows)), X * 2)
    rows[:] = 3.0
    close(executor(kernel, X, value=Table(rows)), X * 3)
    longer = jnp.arange(5.0)
    close(executor(kernel, longer, value=Table(equal)), longer * 2)


def test_a_large_array_that_cannot_change_is_not_read_at_each_call(monkeypatch):
    """One that is marked as read-only is known by itself."""
    monkeypatch.setattr(static_values, "hashlib", None)
    array = np.full(SIZES["large"], 2.0, np.float32)
    array.flags.writeable = False
    close(executor_with()(Holds(array, first), X), X * 2)


def test_a_view_that_cannot_be_written_is_no_constant():
    """The array behind it can still be changed."""
    array = np.full(SIZES["large"], 2.0, np.float32)
    view = array[:]
    view.flags.writeable = False
    executor, kernel = executor_with(), Holds(view, first)
    close(executor(kernel, X), X * 2)
    array[:] = 3.0
    close(executor(kernel, X), X * 3)
