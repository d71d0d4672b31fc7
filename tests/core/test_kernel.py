"""What a kernel class may and must define, and what it is called.

Covers `core/typevars.py`.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Invocation, Kernel, OpsError, device_fingerprint
from ejkernel.ops.core.kernel import check_cfg_type, kernel_path, key_builder_of, versioned


class Plain(Kernel[int, object]):
    """The least that a kernel needs, without a name of its own."""

    def run(self, x, *, cfg):
        return x * cfg

    def heuristic_cfg(self, inv):
        return 7


class Named(Plain):
    """A kernel with a name."""

    op_id = "named"


def call(op_id: str = "named") -> Invocation:
    """One call of it."""
    return Invocation(op_id, (jnp.ones(3),), {})


def test_the_version_is_0_unless_the_class_says_otherwise():
    """A kernel that names no version has version "0", and its key name says so."""
    assert Named().version == "0"
    assert versioned(Named()) == "named@v0"


def test_the_version_of_the_class_is_part_of_the_key_name():
    """A kernel of version 2 has the key name `op@v2`."""

    class Second(Named):
        version = "2"

    assert versioned(Second()) == "named@v2"


def test_there_is_no_key_builder_by_default():
    """A kernel that defines no key builder has none."""
    assert Plain.key_builder is None
    assert key_builder_of(Plain()) is None


def test_the_optional_declarations_are_empty_by_default():
    """Without a word from its author a kernel declares no cfg type and no tolerance."""
    kernel = Plain()
    assert kernel.cfg_type is None
    assert kernel.tolerance is None


def test_a_class_without_op_id_is_called_by_its_module_and_name():
    """Without any op_id a kernel is called `module.ClassName`."""
    assert Plain().op_id == f"{__name__}.Plain"


def test_the_class_attribute_names_the_kernel():
    """The class attribute is used where the constructor is given no name."""
    assert Named().op_id == "named"


def test_the_constructor_names_the_kernel_before_the_class():
    """A name given to the constructor goes before the class attribute."""
    assert Named("other").op_id == "other"
    assert Named(op_id="third").op_id == "third"


def test_a_constructor_name_belongs_to_one_instance():
    """Naming one instance leaves the class and its other instances as they were."""
    Named("other")
    assert Named().op_id == "named"


def test_a_subclass_inherits_the_class_attribute():
    """A subclass of a named kernel that gives no name of its own keeps the inherited one."""

    class Child(Named):
        pass

    assert Child().op_id == "named"


def test_a_subclass_of_an_unnamed_kernel_is_called_by_its_own_name():
    """Two unnamed classes in one family do not share a name."""

    class Child(Plain):
        pass

    assert Child().op_id == f"{__name__}.Child"


def test_a_kernel_may_replace_the_constructor_without_calling_super():
    """A constructor that never reaches Kernel's own still leaves a named kernel."""

    class Own(Plain):
        def __init__(self, scale):
            self.scale = scale

    kernel = Own(3)
    assert (kernel.op_id, kernel.version, kernel.scale) == (f"{__name__}.Own", "0", 3)


def test_a_constructor_without_super_may_still_name_the_instance():
    """Setting op_id by hand in an own constructor names the kernel."""

    class Own(Plain):
        def __init__(self):
            self.op_id = "by.hand"

    assert versioned(Own()) == "by.hand@v0"


@pytest.mark.parametrize("name", ["matmul", "a", "A-b_c.D9", "flash-attention.v2", "0"])
def test_letters_digits_and_three_marks_make_a_name(name):
    """Names of letters, digits, `_`, `.` and `-` are taken."""
    assert Plain(name).op_id == name


@pytest.mark.parametrize("name", ["", "mat mul", "a@v1", "a|b", "a/b", "a:b", "a#b", "é", "a\n", " a", 7, ("a",)])
def test_a_bad_name_given_to_the_constructor_is_refused(name):
    """Any other name is a ValueError that names the class and the name."""
    with pytest.raises(ValueError, match="Plain") as caught:
        Plain(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, OpsError)


@pytest.mark.parametrize("name", ["", "mat mul", "a@v1", "a|b", 7])
def test_a_bad_name_on_the_class_is_refused(name):
    """A bad class attribute is found when the first instance is made."""
    bad = type("Bad", (Plain,), {"op_id": name})
    with pytest.raises(ValueError, match="Bad"):
        bad()


def test_a_bad_name_set_in_an_own_constructor_is_refused():
    """A name that is set by hand must keep to the same letters before it can enter a key."""

    class Own(Plain):
        def __init__(self):
            self.op_id = "bad name"

    with pytest.raises(ValueError, match="Own"):
        ConfigSelectorChain(ConfigCache()).choose(call("bad name"), Own())


def test_a_kernel_without_run_is_refused_by_name():
    """A class without `run` is a TypeError that names it and says what to define."""

    class NoRun(Kernel):
        def heuristic_cfg(self, inv):
            return 1

    with pytest.raises(TypeError, match=r"NoRun.*has no run; define run\(") as caught:
        NoRun()
    assert isinstance(caught.value, OpsError)


def test_a_kernel_without_heuristic_cfg_is_refused_by_name():
    """A class without `heuristic_cfg` is a TypeError that names it and says what to define."""

    class NoHeuristic(Kernel):
        def run(self, x, *, cfg):
            return x

    with pytest.raises(TypeError, match=r"NoHeuristic.*has no heuristic_cfg; define heuristic_cfg\("):
        NoHeuristic()


def test_a_kernel_without_run_and_with_an_own_constructor_is_refused_when_it_is_used():
    """The check does not depend on Kernel's own constructor: the first use of the kernel finds it."""

    class NoRun(Kernel):
        def __init__(self):
            pass

        def heuristic_cfg(self, inv):
            return 1

    with pytest.raises(TypeError, match=r"NoRun.*has no run"):
        ConfigSelectorChain(ConfigCache()).choose(call(f"{__name__}.NoRun"), NoRun())


def test_a_kernel_for_one_platform_alone_is_a_kernel():
    """`run_gpu` and `heuristic_cfg_gpu` are enough where a kernel exists for one platform."""

    class GpuOnly(Kernel):
        def run_gpu(self, x, *, cfg):
            return x

        def heuristic_cfg_gpu(self, inv):
            return 1

    assert GpuOnly().op_id.endswith("GpuOnly")


def test_a_forward_without_vjp_is_refused():
    """Only `fwd_with_residuals` is a TypeError that names the class and the missing half."""

    class Half(Plain):
        def fwd_with_residuals(self, x, *, cfg):
            return x, ()

    with pytest.raises(TypeError, match=r"Half.*fwd_with_residuals without vjp"):
        Half()


def test_a_vjp_without_forward_is_refused():
    """Only `vjp` is a TypeError that names the class and the missing half."""

    class Half(Plain):
        def vjp(self, residuals, y, dy, x, *, cfg):
            return (dy,)

    with pytest.raises(TypeError, match=r"Half.*vjp without fwd_with_residuals"):
        Half()


def test_a_forward_and_a_vjp_that_share_no_level_are_refused():
    """A gradient whose two halves never meet on one level would never be used: that is an error, not silence."""

    class Split(Plain):
        def fwd_with_residuals_gpu(self, x, *, cfg):
            return x, ()

        def vjp(self, residuals, y, dy, x, *, cfg):
            return (dy,)

    with pytest.raises(TypeError, match="Split"):
        Split()


def test_prepare_changes_nothing_by_default():
    """The default `prepare` gives positional and keyword arguments back as they came."""
    x = jnp.ones(2)
    args, kwargs = Plain().prepare(x, 2, mode="a")
    assert args[0] is x
    assert args[1:] == (2,)
    assert kwargs == {"mode": "a"}


def test_the_heuristic_is_the_only_candidate_by_default():
    """A kernel that defines no candidates may be measured with its heuristic cfg alone."""
    assert list(Named().candidate_cfgs(call())) == [7]


def test_the_default_candidate_is_that_of_the_platform():
    """The default candidates come from the heuristic of the call's own platform."""

    class ForCpu(Named):
        def heuristic_cfg_cpu(self, inv):
            return 9

    assert list(ForCpu().candidate_cfgs(call())) == [9]


def by_shape(inv):
    """A key builder as users write it."""
    return f"shape {inv.args[0].shape}"


def test_a_plain_function_in_the_class_body_builds_keys():
    """A function of the invocation alone that is assigned in the class body is called with the invocation."""

    class Own(Named):
        key_builder = by_shape

    assert key_builder_of(Own())(call()) == "shape (3,)"


def test_a_function_defined_in_the_class_body_with_one_parameter_builds_keys():
    """`def key_builder(inv)` without self works as written."""

    class Own(Named):
        def key_builder(inv):
            return f"def {inv.op_id}"

    assert key_builder_of(Own())(call()) == "def named"


def test_a_lambda_builds_keys():
    """A lambda in the class body is called with the invocation."""

    class Own(Named):
        key_builder = lambda inv: inv.op_id.upper()  # noqa: E731 - the form under test

    assert key_builder_of(Own())(call()) == "NAMED"


def test_a_lambda_with_a_default_builds_keys():
    """A second parameter with a default does not turn a lambda into a method."""

    class Own(Named):
        key_builder = lambda inv, suffix="!": inv.op_id + suffix  # noqa: E731 - the form under test

    assert key_builder_of(Own())(call()) == "named!"


def test_a_method_builds_keys():
    """A method gets the kernel and the invocation."""

    class Own(Named):
        prefix = "mine"

        def key_builder(self, inv):
            return f"{self.prefix} {inv.op_id}"

    assert key_builder_of(Own())(call()) == "mine named"


def test_a_staticmethod_builds_keys():
    """A staticmethod gets the invocation."""

    class Own(Named):
        @staticmethod
        def key_builder(inv):
            return f"static {inv.op_id}"

    assert key_builder_of(Own())(call()) == "static named"


def test_a_classmethod_builds_keys():
    """A classmethod gets the class and the invocation."""

    class Own(Named):
        @classmethod
        def key_builder(cls, inv):
            return f"{cls.__name__} {inv.op_id}"

    assert key_builder_of(Own())(call()) == "Own named"


def test_a_partial_builds_keys():
    """A partial of a function of the invocation is called with the invocation."""

    def build(suffix, inv):
        return inv.op_id + suffix

    class Own(Named):
        key_builder = functools.partial(build, "?")

    assert key_builder_of(Own())(call()) == "named?"


def test_an_instance_attribute_builds_keys():
    """A key builder that the constructor sets is called with the invocation."""

    class Own(Named):
        def __init__(self):
            super().__init__()
            self.key_builder = by_shape

    assert key_builder_of(Own())(call()) == "shape (3,)"


def test_an_inherited_key_builder_builds_keys():
    """A subclass builds keys as its parent does."""

    class Parent(Named):
        key_builder = by_shape

    class Child(Parent):
        pass

    assert key_builder_of(Child())(call()) == "shape (3,)"


def test_a_subclass_may_drop_the_key_builder():
    """A subclass that sets it to None has the usual keys again."""

    class Parent(Named):
        key_builder = by_shape

    class Child(Parent):
        key_builder = None

    assert key_builder_of(Child()) is None


def test_the_built_key_is_used_as_it_is():
    """A selector keeps a cfg under the very string that the key builder returned."""

    class Own(Named):
        key_builder = by_shape

        def candidate_cfgs(self, inv):
            return [1, 2]

    cache = ConfigCache()
    selector = ConfigSelectorChain(cache, tuner=First())
    selector.choose(call(), Own())
    assert cache.keys() == [(device_fingerprint(), "named@v0", "shape (3,)")]


class First:
    """A tuner that takes the first candidate."""

    def autotune(self, make_fn, args, kwargs, candidates):
        return candidates[0]


@pytest.mark.parametrize("made", [None, 3, b"key", ("a",)])
def test_a_key_builder_that_returns_no_string_is_named(made):
    """Anything but a string is a TypeError that names the kernel and what was returned, and stores nothing."""

    class Own(Named):
        @staticmethod
        def key_builder(inv):
            return made

    cache = ConfigCache()
    with pytest.raises(TypeError, match="named") as caught:
        ConfigSelectorChain(cache).choose(call(), Own())
    assert repr(made) in str(caught.value)
    assert cache.size() == 0


def test_the_path_of_a_kernel_says_where_to_import_it_from():
    """A record names a kernel by module and qualified name."""
    assert kernel_path(Plain()) == f"{__name__}:Plain"


def test_a_cfg_of_the_declared_type_is_taken():
    """A cfg of the type that the kernel declares goes through as it is."""

    class Typed(Named):
        cfg_type = int

    assert check_cfg_type(Typed(), 3, "cfg=") == 3


def test_a_cfg_of_another_type_is_refused_by_name():
    """A cfg of another type is a TypeError naming the kernel, the cfg and the declared type."""

    class Typed(Named):
        cfg_type = int

    with pytest.raises(TypeError, match=r"named@v0.*'three'.*int"):
        check_cfg_type(Typed(), "three", "cfg=")
