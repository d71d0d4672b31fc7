"""Which of a kernel's variants is used: the most specific that the class defines."""

from __future__ import annotations

import itertools

import pytest

from ejkernel.ops import Kernel
from ejkernel.ops.core.kernel import gradient, variant

METHODS = ("run", "fwd_with_residuals", "vjp", "candidate_cfgs", "heuristic_cfg")
PLATFORMS = ("gpu", "tpu", "cpu")


def kernel_with(*names: str) -> Kernel:
    """A kernel whose methods return their own names."""

    def method(name):
        return lambda self, *args, **kwargs: name

    required = {"run": method("run"), "heuristic_cfg": method("heuristic_cfg")}
    return type("Variants", (Kernel,), {**required, **{name: method(name) for name in names}})()


def halves(*suffixes: str) -> list[str]:
    """Both halves of a gradient on these levels."""
    return [name + suffix for suffix in suffixes for name in ("fwd_with_residuals", "vjp")]


def levels(name: str, platform: str) -> list[str]:
    """The four spellings, most specific first, as the contract lists them."""
    return [f"{name}_shard_map_{platform}", f"{name}_shard_map", f"{name}_{platform}", name]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", METHODS)
def test_the_most_specific_variant_wins(name, platform):
    """Of any set of spellings that a class defines the most specific that applies is used."""
    spellings = levels(name, platform)
    for count in range(1, 5):
        for defined in itertools.combinations(spellings, count):
            # Both halves on each level, so that the class keeps the contract.
            names = [n.replace(name, half) for n in defined for half in ("fwd_with_residuals", "vjp")]
            kernel = kernel_with(*(names if name in ("fwd_with_residuals", "vjp") else defined))
            assert variant(kernel, name, platform=platform, method="shard_map")() == defined[0]


@pytest.mark.parametrize("name", ["run", "candidate_cfgs", "heuristic_cfg"])
def test_a_sharded_variant_is_for_sharded_calls_alone(name):
    """Without shard_map the sharded spellings are not used."""
    kernel = kernel_with(*levels(name, "gpu"))
    assert variant(kernel, name, platform="gpu", method=None)() == f"{name}_gpu"


@pytest.mark.parametrize("name", ["run", "candidate_cfgs", "heuristic_cfg"])
def test_a_variant_of_another_platform_is_not_used(name):
    """A GPU variant is not for a TPU."""
    kernel = kernel_with(name, f"{name}_gpu", f"{name}_shard_map_gpu")
    assert variant(kernel, name, platform="tpu", method="shard_map")() == name


def test_shard_map_goes_before_the_platform():
    """`run_shard_map` is more specific than `run_gpu` for a sharded call."""
    kernel = kernel_with("run_shard_map", "run_gpu")
    assert variant(kernel, "run", platform="gpu", method="shard_map")() == "run_shard_map"


def test_an_inherited_variant_counts():
    """What a parent class defines, the class defines."""

    class Child(type(kernel_with("run_gpu"))):
        pass

    assert variant(Child(), "run", platform="gpu")() == "run_gpu"


def test_the_default_candidates_give_way_to_any_variant():
    """`candidate_cfgs_gpu` goes before the default that every kernel has."""
    kernel = kernel_with("candidate_cfgs_gpu")
    assert variant(kernel, "candidate_cfgs", platform="gpu")() == "candidate_cfgs_gpu"


def test_a_method_that_is_missing_for_a_platform_is_named():
    """A kernel for GPUs alone, asked on a CPU, is a TypeError naming the kernel, the method and the platform."""

    class GpuOnly(Kernel):
        def run_gpu(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return 1

    with pytest.raises(TypeError, match=r"GpuOnly.*run.*cpu"):
        variant(GpuOnly(), "run", platform="cpu")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_forward_and_vjp_come_from_the_most_specific_common_level(platform):
    """Of the levels that have both halves the most specific is used."""
    suffixes = [spelling.removeprefix("vjp") for spelling in levels("vjp", platform)]
    for count in range(1, 5):
        for defined in itertools.combinations(suffixes, count):
            forward, vjp = gradient(kernel_with(*halves(*defined)), platform=platform, method="shard_map")
            assert (forward(), vjp()) == ("fwd_with_residuals" + defined[0], "vjp" + defined[0])


@pytest.mark.parametrize("half", ["fwd_with_residuals", "vjp"])
@pytest.mark.parametrize("suffix", ["_gpu", "_shard_map", "_shard_map_gpu"])
def test_half_a_gradient_on_a_level_is_passed_over(half, suffix):
    """A more specific forward without its vjp, or a vjp without its forward, never mixes with another level."""
    kernel = kernel_with(*halves(""), half + suffix)
    forward, vjp = gradient(kernel, platform="gpu", method="shard_map")
    assert (forward(), vjp()) == ("fwd_with_residuals", "vjp")


def test_there_is_no_own_gradient_without_the_methods():
    """A kernel that defines neither half has no own gradient."""
    assert gradient(kernel_with(), platform="cpu") is None


def test_a_gradient_of_another_platform_is_not_used():
    """A kernel with a gradient for GPUs alone has none on a CPU."""
    assert gradient(kernel_with(*halves("_gpu")), platform="cpu") is None
