"""Fingerprints of kernels' code: which edits change one, and that it is the same on every Python.

Covers `core/source.py`.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types

import pytest
from fakes_core import SCALING, imported, replaced

from ejkernel.ops import tunable
from ejkernel.ops.core.kernel_code import code_of, function_code
from ejkernel.ops.core.source import meaning


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """What a test imports is gone after it."""
    monkeypatch.setitem(sys.modules, "edited_kernels", types.ModuleType("edited_kernels"))


def code(folder, text):
    """The fingerprint of the kernel in a text."""
    linecache.clearcache()
    return code_of(imported(folder, text).Scaling())


def test_a_fingerprint_is_the_same_on_every_python_and_machine(tmp_path):
    """This one was computed on Python 3.11: the legs of the suite compare it on their own."""
    assert code(tmp_path, SCALING) == "87ddcd42643b742e"


LAYOUT = {
    "comments": ("# a comment", "# another one"),
    "docstrings": ('"""Twice."""', '"""The product."""'),
    "no docstring": ('    """A kernel."""\n\n', ""),
    "lines": ("return self.run(x, cfg=cfg), ()", "return (\n            self.run(x,\n cfg=cfg,), (),\n        )"),
    "quotes": ('f"a{cfg.size!r:>4}" "b" == ""', "f'a{cfg.size!r:>4}b' == ''"),
    "annotations": ("def helper(x, factor):", "def helper(x: jax.Array, factor: float) -> jax.Array:"),
    "underscores": ("BLOCKS = (1, 2)", "BLOCKS: tuple[int, ...] = (0x1, 0x2)"),
    "code that is not used": ("return x - 1", "return x - 2"),
    "constants that are not used": ("UNUSED = 3", "UNUSED = 4"),
    "the guess": ("return Blocks(1)", "return Blocks(2)"),
    "the reference": ("return x * 2.0\n", "return 2.0 * x\n"),
    "place": ('"""A module with a kernel."""\n', '"""A module."""\n\n\ndef first(x):\n    return x\n\n'),
}


@pytest.mark.parametrize("edit", LAYOUT)
def test_a_change_of_layout_or_of_other_code_leaves_the_fingerprint(edit, tmp_path):
    """What was measured computes the same among the same candidates."""
    assert code(tmp_path, replaced(SCALING, *LAYOUT[edit])) == code(tmp_path, SCALING)


def test_the_order_of_definitions_does_not_count(tmp_path):
    """Methods and functions may be sorted."""
    first, second = SCALING.index("def deeper"), SCALING.index("def unrelated")
    moved = SCALING[:first] + SCALING[second:] + "\n\n" + SCALING[first:second]
    assert code(tmp_path, moved) == code(tmp_path, SCALING)


MEANING = {
    "run": ("return super().run(x, cfg=cfg)", "return super().run(x, cfg=cfg) * 1"),
    "what run inherits": ("return helper(own(x), self.factor)", "return helper(own(x), self.factor + 0)"),
    "the forward pass": ("return self.run(x, cfg=cfg), ()", "return self.run(x, cfg=cfg), (x,)"),
    "the gradient": ("return (dy * 2.0,)", "return (2.0 * dy,)"),
    "candidates": ("[Blocks(size) for size in BLOCKS]", "[Blocks(size + 1) for size in BLOCKS]"),
    "a function": ("return deeper(x) * factor", "return factor * deeper(x)"),
    "a function's function": ("return x + 0.0", "return x"),
    "a method": ("and 1.0 or 0.0", "and 2.0 or 0.0"),
    "a constant": ("BLOCKS = (1, 2)", "BLOCKS = (1, 2, 4)"),
    "an attribute": ("factor = 2.0", "factor = 3.0"),
    "a registered gradient": ("return (dy * 1.0,)", "return (dy,)"),
    "which gradient": ("own.defvjp(forward, backward)", "own.defvjp(forward, forward)"),
    "a decorator": ("nondiff_argnums=()", "nondiff_argnums=(0,)"),
    "the cfg": ("return self.size + 1", "return self.size + 2"),
    "a variant": ("    def shift", "    def run_gpu(self, x, *, cfg):\n        return x\n\n    def shift"),
    "what is prepared": ("    def shift", "    def prepare(self, x):\n        return (x,), {}\n\n    def shift"),
}


@pytest.mark.parametrize("edit", MEANING)
def test_a_change_of_what_is_measured_changes_the_fingerprint(edit, tmp_path):
    """The computation, its gradient, its candidates, and what they use of their module."""
    assert code(tmp_path, replaced(SCALING, *MEANING[edit])) != code(tmp_path, SCALING)


@pytest.mark.parametrize("spelling", ["type(self)", "Scaling", "self.__class__", "self"])
def test_a_member_of_the_class_counts_however_it_is_reached(spelling, tmp_path):
    """By the instance, by its class, or by the name of the class."""
    text = replaced(SCALING, "for size in BLOCKS]", f"for size in {spelling}.sizes]")
    texts = [
        replaced(text, "cfg_type = Blocks", f"cfg_type = Blocks\n    sizes = {sizes}") for sizes in ("(1,)", "(2,)")
    ]
    assert code(tmp_path, texts[0]) != code(tmp_path, texts[1])


def test_a_version_of_the_kernels_own_rules(tmp_path):
    """Then its author says when entries stop to fit."""
    assert code(tmp_path, replaced(SCALING, 'op_id = "scaling"', 'op_id = "scaling"\n    version = "7"')) == ""


def test_without_its_source_a_kernel_has_no_fingerprint(tmp_path):
    """Code that was made by `exec`, or a file that is gone."""
    module = imported(tmp_path, SCALING)
    (tmp_path / "edited_kernels.py").unlink()
    linecache.clearcache()
    assert code_of(module.Scaling()) == ""


def test_a_reloaded_module_has_the_fingerprint_of_its_new_text(tmp_path):
    """Nothing of the older file is kept."""
    before = code_of(imported(tmp_path, SCALING).Scaling())
    edited = replaced(SCALING, "return x + 0.0", "return x + 1.0 - 1.0")
    assert code_of(imported(tmp_path, edited).Scaling()) not in ("", before)


LOCAL = """
def made():
    def inner(x):
        return x

    class Local(Scaling):
        def run(self, x, *, cfg):
            return inner(x)

    return Local
"""


def test_a_class_in_a_function_knows_what_is_around_it(tmp_path):
    """Local helpers count as those of the module do."""

    codes = []
    for body in ("x", "(x)", "x * 2"):
        linecache.clearcache()
        module = imported(tmp_path, SCALING + replaced(LOCAL, "return x", f"return {body}"))
        codes.append(code_of(module.made()()))
    assert codes[0] == codes[1] != codes[2]


TUNABLE = '''
from ejkernel.ops import tunable

def helper(x):
    return x * 2

def allowed(x, *, rows):
    return rows < 100

@tunable(rows=[1, 2], constraint=allowed, heuristic={"rows": 1})
def doubled(x, *, rows):
    """Twice."""
    return helper(x)
'''


def test_a_tunable_function_is_known_by_its_code_and_its_values(tmp_path):
    """The function, its constraint, what they call, and the declared values; not the heuristic."""

    def code_with(*edit):
        linecache.clearcache()
        text = replaced(TUNABLE, *edit) if edit else TUNABLE
        return code_of(imported(tmp_path, text).doubled.kernel)

    same = code_with()
    assert same
    assert code_with('"""Twice."""', '"""Two times."""') == same
    assert code_with('heuristic={"rows": 1}', 'heuristic={"rows": 2}') == same
    others = [
        code_with("return x * 2", "return x + x"),
        code_with("return helper(x)", "return helper(x) + 0"),
        code_with("rows < 100", "rows < 101"),
        code_with("rows=[1, 2]", "rows=[1, 2, 4]"),
    ]
    assert len({same, *others}) == 5


def test_a_tunable_function_with_a_version_is_known_by_that():
    """As a kernel is."""

    @tunable(rows=[1, 2], version="2")
    def doubled(x, *, rows):
        return x * 2

    assert code_of(doubled.kernel) == ""


def test_a_function_behind_decorators_is_found():
    """Partials, methods and what keeps its `__wrapped__`."""

    def plain(x):
        return x

    wrapped = functools.lru_cache(functools.partial(plain, 1))
    assert function_code([wrapped]) == function_code([plain]) != ""


def test_texts_of_an_f_string_are_one_however_they_are_written():
    """Python 3.11 and later join them, and this does so whatever they do."""

    def one(text):
        return meaning(ast.parse(text, mode="eval").body)

    assert one("f'a' 'b{c}' f'{d}e' 'f'") == one('"a" f"b{{c}}{d}ef"')
