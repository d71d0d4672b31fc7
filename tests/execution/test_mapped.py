"""`vmap_with_config` and `pmap_with_config`: over a batch or over devices, each call with its own cfg."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, OwnCubic, Picking, Product, Times, close, executor_with

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner, pmap_with_config, vmap_with_config

ROWS = jnp.arange(12.0).reshape(4, 3) / 6


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_vmap_maps_the_kernel_over_the_first_axis(wrap):
    """The default `in_axes` is 0."""
    mapped = vmap_with_config(executor_with(), Times.fresh()())
    close(wrap(mapped)(ROWS), ROWS * 2)


def test_vmap_takes_in_axes():
    """As `jax.vmap` does: numbers, None, a tuple of them."""
    executor, kernel = executor_with(), Product.fresh()()
    close(vmap_with_config(executor, kernel, in_axes=1)(ROWS, ROWS), (ROWS * ROWS).T)
    close(vmap_with_config(executor, kernel, in_axes=(0, None))(ROWS, ROWS[0]), ROWS * ROWS[0])


def test_vmap_tunes_the_batched_call():
    """The batch is part of what is chosen for, and is measured whole."""
    tuner = Picking()
    mapped = vmap_with_config(executor_with(tuner), Times.fresh()())
    close(mapped(ROWS), ROWS * 5)
    close(mapped(ROWS), ROWS * 5)
    assert tuner.shapes == [[(4, 3)]]


def test_vmap_shows_the_batch_to_the_chooser():
    """One question, with the size of the batch."""
    chooser = Asked(2)
    mapped = vmap_with_config(Executor(chooser), Times.fresh()())
    mapped(ROWS), mapped(ROWS)
    assert [question.batch_sizes for question in chooser.questions] == [[4]]


class Scaled(Counting):
    """A kernel with keywords."""

    op_id = "scaled"

    def run(self, x, *, by, offset=0.0, cfg):
        self.log.append(by)
        return x * by + offset


@pytest.mark.parametrize("mapping", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_keywords_reach_the_kernel_unmapped(mapping):
    """Static ones as they are, arrays whole."""
    mapped = mapping(executor_with(), Scaled.fresh()())
    close(mapped(ROWS, by=3), ROWS * 3)
    close(mapped(ROWS, by=2, offset=jnp.ones(3)), ROWS * 2 + 1)


@pytest.mark.parametrize("mapping", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_a_cfg_can_be_given(mapping):
    """The executor's own keywords work."""
    close(mapping(executor_with(), Times.fresh()())(ROWS, cfg=11), ROWS * 11)


@pytest.mark.parametrize("mapping", [vmap_with_config, pmap_with_config], ids=["vmap", "pmap"])
def test_gradients_of_mapped_kernels(mapping):
    """Reverse mode through the map."""
    mapped = mapping(executor_with(), OwnCubic.fresh()())
    close(jax.grad(lambda x: mapped(x).sum())(ROWS), 1.5 * ROWS * ROWS + 1)


def test_pmap_maps_the_kernel_over_devices():
    """One row for each device; the result is spread over them."""
    mapped = pmap_with_config(executor_with(), Times.fresh()())
    out = mapped(ROWS)
    close(out, ROWS * 2)
    assert len(out.devices()) == 4


def test_pmap_takes_in_axes():
    """None for what every device gets whole."""
    mapped = pmap_with_config(executor_with(), Product.fresh()(), in_axes=(0, None))
    close(mapped(ROWS, ROWS[0]), ROWS * ROWS[0])


@pytest.mark.parametrize("name", ["devices", "elsewhere"])
def test_pmap_names_its_axis(name):
    """Collectives inside the kernel use the name, `devices` unless given, also while it is measured."""

    class Centred(Counting):
        op_id = f"centred_{name}"

        def run(self, x, *, cfg):
            return x - jax.lax.pmean(x, name)

    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    keywords = {} if name == "devices" else {"axis_name": name}
    mapped = pmap_with_config(Executor(selector), Centred(), **keywords)
    close(mapped(ROWS), ROWS - np.mean(ROWS, axis=0))
    assert selector.cache.size() == 1


def test_pmap_tunes_one_device_s_share_once():
    """The key is that of a device's part."""
    tuner = Picking()
    mapped = pmap_with_config(executor_with(tuner), Times.fresh()())
    mapped(ROWS), mapped(ROWS)
    assert tuner.shapes == [[(3,)]]


def test_a_warm_pmap_is_not_traced_again():
    """Calls of one shape share a program."""
    kernel = Scaled.fresh()()
    mapped = pmap_with_config(executor_with(), kernel)
    for _ in range(3):
        mapped(ROWS, by=3)
    assert len(kernel.log) == 1


def test_a_warm_vmap_is_not_traced_again():
    """Calls of one shape share a program."""
    kernel = Scaled.fresh()()
    mapped = vmap_with_config(executor_with(), kernel)
    for _ in range(3):
        mapped(ROWS, by=3)
    assert len(kernel.log) == 1


def test_a_put_reaches_a_mapped_kernel():
    """A mapped eager call is an eager call: it sees what is put at its next call."""
    executor, kernel = executor_with(), Times.fresh()()
    mapped = vmap_with_config(executor, kernel)
    close(mapped(ROWS), ROWS * 2)
    chooser = Asked()
    vmap_with_config(Executor(chooser), kernel)(ROWS)
    from ejkernel.ops import device_fingerprint

    executor.chooser.cache.put(device_fingerprint(), "times@v0", chooser.last.call_key, 7)
    close(mapped(ROWS), ROWS * 7)
