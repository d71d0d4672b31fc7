"""Small programs of our own, compiled once for each form of their arguments.

Covers `timing/program.py`.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing import program


def counted(monkeypatch):
    """The programs that are compiled from now on."""
    made = []
    real = program.compiled_quickly
    monkeypatch.setattr(program, "compiled_quickly", lambda lowered: (made.append(lowered), real(lowered))[1])
    return made


def test_one_program_serves_all_arguments_of_a_form(monkeypatch):
    """Another shape, dtype or static value is another program."""
    made = counted(monkeypatch)

    def power(x, exponent):
        return x**exponent

    device = jax.devices()[0]
    x = jnp.arange(7.0)
    for _ in range(3):
        np.testing.assert_array_equal(program.run_own_program(power, device, (x,), 2), np.arange(7.0) ** 2)
    assert len(made) == 1
    np.testing.assert_array_equal(program.run_own_program(power, device, (x,), 3), np.arange(7.0) ** 3)
    program.run_own_program(power, device, (jnp.arange(8.0),), 2)
    assert len(made) == 3


def test_shapes_are_enough_to_compile(monkeypatch):
    """The arrays come later."""
    made = counted(monkeypatch)

    def doubled(x, static):
        return 2 * x

    device = jax.devices()[0]
    program.own_program(doubled, device, (jax.ShapeDtypeStruct((5,), np.float32),))
    np.testing.assert_array_equal(program.run_own_program(doubled, device, (jnp.ones(5),)), 2 * np.ones(5))

    assert len(made) == 1


def test_threads_that_ask_at_once_wait_for_one_compilation(monkeypatch):
    """The second gets the first one's program."""
    started, release = threading.Event(), threading.Event()
    made = []
    real = program.compiled_quickly

    def slow(lowered):
        made.append(lowered)
        started.set()
        assert release.wait(60)
        return real(lowered)

    monkeypatch.setattr(program, "compiled_quickly", slow)

    def tripled(x, static):
        return 3 * x

    found = []
    device, shapes = jax.devices()[0], (jax.ShapeDtypeStruct((6,), np.float32),)
    threads = [
        threading.Thread(target=lambda: found.append(program.own_program(tripled, device, shapes))) for _ in range(2)
    ]
    threads[0].start()
    assert started.wait(60)
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join(60)

    assert len(made) == 1
    assert found[0] is found[1]


def test_arrays_that_lie_otherwise_in_memory_are_taken_as_they_are(monkeypatch):
    """A program that was compiled for another layout is not the last word; any other error is."""

    def refuse(message):
        def refusing(*arguments):
            raise ValueError(message)

        return lambda lowered: refusing

    def quadrupled(x, static):
        return 4 * x

    device = jax.devices()[0]
    monkeypatch.setattr(program, "compiled_quickly", refuse("Computation was compiled for input layouts that ..."))
    np.testing.assert_array_equal(program.run_own_program(quadrupled, device, (jnp.ones(9),)), 4 * np.ones(9))
    monkeypatch.setattr(program, "compiled_quickly", refuse("another reason"))
    with pytest.raises(ValueError, match="another reason"):
        program.run_own_program(quadrupled, device, (jnp.ones(10),))


def test_old_programs_are_let_go(monkeypatch):
    """And compiled again when they are asked for."""
    made = counted(monkeypatch)
    monkeypatch.setattr(program, "_MOST_OWN", 1)

    def halved(x, static):
        return x / 2

    device = jax.devices()[0]
    for n in (3, 4, 3):
        program.run_own_program(halved, device, (jnp.ones(n),))

    assert len(made) == 3
