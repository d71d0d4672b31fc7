"""The programs of the benchmark: what is compared computes one thing."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel.ops import default_selector, policy_override

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from programs import PROGRAMS
from programs.operations import Library, Plain


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_forms_of_a_program_give_the_same_value(name):
    """Plain JAX and the library, untuned, agree on the loss (or what stands for it) after two steps."""
    program = PROGRAMS[name]
    sizes = program.sized(tiny=True)
    with policy_override(default_selector(), allow_autotune=False):
        found = {}
        for form in (Plain(), Library()):
            step, args = jax.jit(program.build(form, sizes)), program.make(sizes)
            out = step(*args)
            following = program.following(args, out) if program.donated else (out[0], *args[1:])
            found[type(form)] = [float(program.value(out)), float(program.value(step(*following)))]
    np.testing.assert_allclose(found[Library], found[Plain], rtol=2e-2)
    # A step that changed nothing would agree, too.
    assert found[Plain][0] != found[Plain][1] or program.donated


def test_sizes_are_changed_by_name():
    """A size that is given replaces the program's own, tiny or not; the others stay."""
    dense = PROGRAMS["dense"]
    sizes = dense.sized(changes={"width": 1024, "experts": 8})
    assert (sizes.width, sizes.layers) == (1024, 4)
    assert not hasattr(sizes, "experts")
    assert dense.sized(tiny=True, changes={"words": 64}).words == 64
