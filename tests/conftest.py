"""What every test shares: no test touches the user's own caches or settings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import threading

# Before JAX starts: several CPU devices, for tests of sharding and of more than one device. Most of the suite's time
# is compiling, of programs that run once: they are not optimised, and the emitters that take longest are left out
# (a third of it with JAX 0.10, and three quarters with JAX 0.12; a version that does not know the names ignores them).
# A program is one piece: JAX 0.10 sets up a compiler for each of up to 32 pieces, a third of what a gradient takes.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_tiled_emitter",
)

# Threads of small matrix products wait for each other by spinning: with several test processes that costs most.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Compilers free small pieces by the million: each is merged with its neighbours at once, and not all of them again and
# again (3% of what compiling takes). 1 is M_MXFAST of glibc; other libraries of C need not have it.
with contextlib.suppress(AttributeError):
    ctypes.CDLL(None).mallopt(1, 0)

# A run that was started in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import forked_python
import hypothesis
import jax
import numpy as np
import pytest
import skips
from jax._src import core, dtypes, literals
from jax._src.interpreters import mlir
from jax._src.lax import lax
from kept_programs import PROGRAMS, keep_programs, name_alike
from thinning import mark_at_length, of_later_legs

from ejkernel.ops import registry
from ejkernel.ops.execution.default import forget_default
from ejkernel.ops.tuning import compile as tuning_compile

# How long an example takes, or its drawing, says something about the machine alone.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

MOST_BYTES = 500_000_000

name_alike(tuning_compile, numbered=False)


def pytest_configure(config):
    """Compiled programs are shared by the processes that run tests, and those that are forked for them."""
    config.pluginmanager.register(skips)
    forked_python.fork_workers()
    # Until all tests are collected: next to nothing of what that makes is garbage.
    gc.disable()
    is_worker = hasattr(config, "workerinput")
    if not is_worker and os.access(PROGRAMS.parent, os.W_OK) and sum(map(_size, PROGRAMS.glob("*/*"))) > MOST_BYTES:
        shutil.rmtree(PROGRAMS)
    keep_programs()
    # Nearly no test reads compiled text: programs are shared whatever their labels and lines.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def pytest_collection_finish():
    """Modules and collected tests, a million objects, are not looked at again by each collection of garbage."""
    gc.collect()
    gc.freeze()
    # A trace makes garbage by the thousand: looking for it as often as Python does takes 2% of a run.
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def _size(file):
    # Another run may be renaming its files.
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


class _Contexts(threading.local):
    """The MLIR context that a thread uses, and how often it may still be used."""

    context = None
    left = 0


def _reused(make):
    """Has a thread use a context ten times, as JAX 0.11 does: an older one makes one for each program, for 3 ms."""
    contexts = _Contexts()

    def make_ir_context():
        if not contexts.left:
            contexts.context, contexts.left = make(), 10
        contexts.left -= 1
        return contexts.context

    return make_ir_context


if jax.__version_info__ < (0, 11):
    mlir.make_ir_context = _reused(mlir.make_ir_context)


def _outside_traces():
    return core.trace_state_clean() and jax.sharding.get_abstract_mesh().empty


def _from_numpy(full):
    """Has zeros and ones that are made outside a trace come from numpy: JAX compiles a program for each shape."""

    def made(shape, fill_value, dtype=None, *, sharding=None):
        is_plain = (
            sharding is None
            and type(fill_value) in (bool, int, float)
            and fill_value in (0, 1)
            and isinstance(dtype, np.dtype)
            and dtype != dtypes.float0
            and isinstance(shape, tuple)
            and all(type(size) is int and size >= 0 for size in shape)
        )
        if is_plain and _outside_traces():
            return jax.device_put(np.full(shape, fill_value, dtype), may_alias=False)
        return full(shape, fill_value, dtype, sharding=sharding)

    return made


lax.full = _from_numpy(lax.full)


def _put(impl):
    """Has values of numpy put on the device, as JAX 0.11 does: a newer one compiles a program for each shape."""

    def value_of(operand, **params):
        is_plain = isinstance(operand, literals.TypedNdArray) and not operand.weak_type
        if is_plain and params in ({}, {**_KEPT, "new_dtype": operand.dtype}) and _outside_traces():
            return jax.device_put(np.asarray(operand), may_alias=False)
        return impl(operand, **params)

    return value_of


_KEPT = {"weak_type": False, "sharding": None}
if hasattr(lax, "stage_p"):
    for primitive in (lax.stage_p, lax.convert_element_type_p):
        primitive.def_impl(_put(primitive.impl))


@pytest.fixture
def fresh_workers(monkeypatch):
    """Workers of tunings import JAX themselves: for tests of what is missing, or in the way, while they start."""
    monkeypatch.setattr(subprocess.Popen, "_execute_child", forked_python.started_afresh)


@pytest.fixture
def own_text():
    """Compiled text has the labels of this very program: for tests that read it."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="a short version of each campaign that has none elsewhere")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Cases are thinned before the marks count. With --short, a test runs with the first and last that are left.

    It does not run at all where the suite has it shorter. After an earlier leg, tests of one leg are left out, or all
    but their first cases.
    """
    mark_at_length(items)
    if os.environ.get("EARLIER_LEG"):
        left = of_later_legs(items)
        chosen = set(left)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = left
    yield
    if not config.getoption("--short"):
        return
    cases = {}
    for item in items:
        if not any(mark.kwargs.get("at_length") for mark in item.iter_markers("slow")):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for found in cases.values() for item in (found[0], found[-1])}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture
def count(request):
    """How long a campaign is: `count(200, short=10)`."""
    is_short = request.config.getoption("--short")
    return lambda long, *, short: short if is_short else long


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory):
    """Turns on a device are taken in the user's own cache folder too: test processes do not wait for each other."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Every test has its own cache folder and none of the variables that steer the library."""
    for name in list(os.environ):
        if name.startswith("EJKERNEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "cache"))
    registry.forget_invocations()
    forget_default()
