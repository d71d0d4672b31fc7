"""Values at a prompt and in a notebook: every public one is one short line, and has an HTML form.

Covers `core/shown.py`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from fakes import Blocks, Doubling, call_of, key_of
from fakes_reporting import record, result

from ejkernel.ops import (
    AgreementReport,
    AutotuneData,
    AutotuneOptions,
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Measurement,
    OperationStores,
    PersistentCache,
    Record,
    Trial,
    counters,
    explain,
)
from ejkernel.ops.core.key import Key
from ejkernel.ops.fleet.report import Agreed
from ejkernel.ops.programs.confirm import Confirmation

X = jnp.ones((64, 64))
LONG = {f"a_long_name_of_a_field_{i}": "x" * 50 for i in range(20)}


def values():
    """One of each, and some with very long content."""
    kernel = Doubling((1, 2))
    selector = ConfigSelectorChain(ConfigCache())
    inv = call_of(kernel, X)
    key = Key(*key_of(kernel, inv))
    yield record()
    yield record(candidates=200, note="a long note " * 50)
    yield Record()
    yield Trial(LONG, "wrong", "a long message " * 90)
    yield Trial(1, samples_s=(1.0, 2.0))
    yield result(40)
    yield result(0)
    yield Entry("matmul@v1", "abc", LONG)
    yield Measurement(LONG, 1e-3)
    yield AutotuneData([Measurement(LONG, 1e-3)] * 50)
    yield explain(kernel, X, selector=selector)
    yield explain(kernel, X, selector=selector, cfg=Blocks(2))
    yield selector.decide_untuned(inv, kernel)
    yield inv
    yield counters()
    yield AutotunePolicy(allow_autotune=False)
    yield AutotuneOptions(seconds=3, selector=selector)
    yield Confirmation(2e-3, 1e-3, (2.0, 1.9, 2.1), 20, (key,) * 30)
    yield Agreed(key, "forward", LONG, 0, "autotune")
    yield AgreementReport(0, 2, (Agreed(key, "forward", LONG, 0, "autotune"),) * 9)
    yield PersistentCache("ops")
    yield OperationStores()


@pytest.mark.parametrize("number", range(22))
def test_a_public_value_is_one_short_line_and_html(number):
    """Under 200 characters, and without what would break a page."""
    value = list(values())[number]
    assert "\n" not in repr(value)
    assert 10 < len(repr(value)) < 200
    assert value._repr_html_().startswith(("<code>", "<table>", "<p>"))


def test_every_kind_of_value_has_its_turn():
    """The list above is as long as it says."""
    assert len(list(values())) == 22


def test_a_record_says_what_was_found():
    """The operation, the winner and the verdict."""
    assert repr(record()) == (
        "<Record: library.matmul@v4 0000000000000000, triton block_m=16 block_n=32, 12 candidates, "
        "2.00 times as fast as the heuristic cfg (1.90 to 2.10 with 95%)>"
    )


def test_a_policy_shows_what_is_not_as_by_default():
    """And nothing else."""
    assert repr(AutotunePolicy()) == "<AutotunePolicy: all as by default>"
    assert repr(AutotunePolicy(allow_autotune=False)) == "<AutotunePolicy: allow_autotune=False>"


def test_markup_in_a_value_is_escaped():
    """In tables and lines alike."""
    bad = Record(trials=(Trial({"way": "<b>"}, samples_s=(1.0,)),), winner=0)
    for value in (bad, bad.trials[0], dataclasses.replace(result(1), notes=("<b>",))):
        assert "<b>" not in value._repr_html_()
