"""Which device a call is for, what it is called, and what else may change the best cfg there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Invocation, device_fingerprint, device_kind, get_device_platform, target_device
from ejkernel.ops.core.device import device_of, environment, platform_of, read_cpu_kind, same_environment

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
stepping\t: 8
flags\t\t: fpu vme sse4_2 avx f16c avx2 avx512f avx512dq avx512_bf16 amx_bf16 amx_tile amx_int8
bugs\t\t: spectre_v1

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
"""

AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7B13   64-Core  Processor
flags\t\t: fpu sse4_2 avx avx2 sha_ni
"""

NEOVERSE = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes atomics asimddp sve asimdfhm uscat
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


def device_for(*args, **fields):
    """The device of a call with these arguments."""
    return device_of(Invocation("op", args, {}, **fields))


def traced(*args, **fields):
    """The device that the same call has while it is traced."""
    seen = []

    def body(*inner):
        seen.append(device_for(*inner, **fields))
        return 0.0

    jax.jit(body).trace(*args)
    return seen[0]


def on(index, value=1.0):
    """An array that is committed to a device."""
    return jax.device_put(jnp.full(4, value), jax.devices()[index])


# What a device is called.


def test_a_fingerprint_is_platform_and_kind():
    """A device is spelled `platform|kind`."""
    assert device_fingerprint() == f"{get_device_platform()}|{device_kind()}"
    assert device_fingerprint().count("|") == 1


def test_the_fingerprint_of_a_cpu_names_the_hardware():
    """A CPU is never called `cpu|cpu`: it has a model and a vector set."""
    platform, kind = device_fingerprint(jax.devices("cpu")[0]).split("|")
    assert platform == "cpu"
    assert kind != "cpu"
    assert len(kind.split()) >= 2


def test_all_cores_of_a_host_are_one_kind():
    """The devices of one CPU have one fingerprint: what is tuned on one holds for all."""
    assert len({device_fingerprint(d) for d in jax.devices()}) == 1


class FakeGpu:
    """A device of another platform, as far as its name goes."""

    device_kind = "NVIDIA H200"

    def __init__(self, platform):
        self.platform = platform


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_a_gpu_is_called_gpu_whatever_its_runtime_calls_it(platform):
    """CUDA and ROCm devices are `gpu|kind`."""
    assert device_fingerprint(FakeGpu(platform)) == "gpu|NVIDIA H200"
    assert device_kind(FakeGpu(platform)) == "NVIDIA H200"


def test_an_intel_cpu_is_named_by_model_and_widest_vector_set():
    """Of several vector sets the widest is named."""
    assert read_cpu_kind(INTEL, machine="x86_64", processor="") == "Intel(R) Xeon(R) Platinum 8480+ amx"


def test_avx512_is_wider_than_avx2():
    """Without matrix tiles, AVX-512 is the widest."""
    text = INTEL.replace("amx_tile", "").replace("amx_bf16", "").replace("amx_int8", "")
    assert read_cpu_kind(text, machine="x86_64", processor="") == "Intel(R) Xeon(R) Platinum 8480+ avx512"


def test_an_amd_cpu_is_named_by_model_and_widest_vector_set():
    """Spaces in a row in the model's name count as one."""
    assert read_cpu_kind(AMD, machine="x86_64", processor="x86_64") == "AMD EPYC 7B13 64-Core Processor avx2"


def test_a_neoverse_cpu_is_named_by_its_numbers_and_vector_set():
    """An ARM server core, which has no model name, is named by implementer and part."""
    kind = read_cpu_kind(NEOVERSE, machine="aarch64", processor="")
    assert kind.endswith(" sve")
    assert "0x41" in kind
    assert "0xd40" in kind


def test_two_arm_cores_have_two_names():
    """Another part number is another kind."""
    other = NEOVERSE.replace("0xd40", "0xd0c").replace("sve", "")
    one, two = (read_cpu_kind(text, machine="aarch64", processor="") for text in (NEOVERSE, other))
    assert one != two
    assert two.endswith(" neon")


@pytest.mark.parametrize(
    ("machine", "processor"), [("arm64", "arm"), ("AMD64", "Intel64 Family 6 Model 85"), ("riscv64", ""), ("", "")]
)
def test_without_cpuinfo_the_host_names_its_processor(machine, processor):
    """Where there is no /proc/cpuinfo the name is made of what Python knows, and is never empty or `cpu`."""
    kind = read_cpu_kind("", machine=machine, processor=processor)
    assert (processor or machine or "unknown") in kind
    assert kind.strip() == kind
    assert kind not in ("", "cpu")


def test_a_model_name_cannot_break_the_key():
    """A `|` in a model's name does not end the fingerprint's first part twice."""
    assert "|" not in read_cpu_kind(AMD.replace("EPYC", "EP|YC"), machine="x86_64", processor="")


def test_an_empty_model_name_is_no_name():
    """A virtual machine that hides its model is named by the host, not by the next line of the file."""
    text = "processor\t: 0\nmodel name\t: \nstepping\t: 1\nflags\t\t: avx2\n"
    assert read_cpu_kind(text, machine="x86_64", processor="") == "x86_64 avx2"


# The device of a call.


def test_a_committed_array_decides():
    """A call's device is that of its committed array."""
    assert device_for(on(2)) == jax.devices()[2]


def test_the_first_committed_array_decides():
    """Uncommitted arrays, numpy arrays and static values before it are passed over; later ones do not count."""
    assert device_for(jnp.ones(4), np.ones(4), 3, on(3), on(1)) == jax.devices()[3]


def test_a_committed_array_inside_a_structure_decides():
    """Arrays are looked for inside arguments and keywords."""
    assert device_of(Invocation("op", ({"a": [1, on(1)]},), {})) == jax.devices()[1]
    assert device_of(Invocation("op", (2,), {"x": on(3)})) == jax.devices()[3]


def test_without_a_committed_array_the_default_device_decides():
    """Uncommitted arrays, or none at all, are for the default device."""
    assert device_for(jnp.ones(4)) == jax.devices()[0]
    assert device_for(np.ones(4)) == jax.devices()[0]
    assert device_for(3) == jax.devices()[0]


def test_the_default_device_may_be_set():
    """`jax.default_device` decides where no array is committed, and a committed array goes before it."""
    with jax.default_device(jax.devices()[2]):
        assert device_for(jnp.ones(4)) == jax.devices()[2]
        assert device_for(np.ones(4)) == jax.devices()[2]
        assert device_for(on(1)) == jax.devices()[1]


def test_the_default_device_may_be_a_platform():
    """`jax.default_device("cpu")` is the first device of that platform."""
    with jax.default_device("cpu"):
        assert device_for(jnp.ones(4)) == jax.devices("cpu")[0]


def test_a_deleted_array_decides_nothing():
    """An array without a buffer has no device any more, and asking is no error."""
    gone = on(2)
    gone.delete()
    assert device_for(gone, on(1)) == jax.devices()[1]


def test_a_sharded_array_decides_by_its_first_device():
    """An array over several devices gives one of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("x",))
    assert device_for(jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x")))) == jax.devices()[2]


def test_a_trace_is_for_the_target_device():
    """Inside `target_device` a trace is for that one."""
    with target_device(jax.devices()[3]):
        assert traced(jnp.ones(4)) == jax.devices()[3]


def test_a_trace_of_committed_arrays_is_for_the_target_device():
    """A tracer does not show its array's device: inside `target_device` that one decides."""
    with target_device(jax.devices()[3]):
        assert traced(on(1)) == jax.devices()[3]


def test_a_trace_that_holds_a_constant_is_for_the_target_device():
    """An uncommitted array that a traced function closes over does not make the trace a plain call."""
    constant = jnp.ones(4)
    seen = []
    with target_device(jax.devices()[3]):
        jax.jit(lambda x: seen.append(device_for(constant, x))).trace(jnp.ones(4))
    assert seen == [jax.devices()[3]]


def test_a_call_of_committed_arrays_is_not_for_the_target_device():
    """Outside a trace the committed array decides, also inside `target_device`."""
    with target_device(jax.devices()[3]):
        assert device_for(on(1)) == jax.devices()[1]


def test_an_eager_call_of_uncommitted_arrays_is_not_for_the_target_device():
    """Outside a trace the default device decides, also inside `target_device`."""
    with target_device(jax.devices()[3]):
        assert device_for(jnp.ones(4)) == jax.devices()[0]


def test_target_devices_nest_and_end():
    """The innermost target decides, and leaving a block, by an exception too, restores the outer one."""
    with target_device(jax.devices()[1]):
        with contextlib.suppress(KeyError), target_device(jax.devices()[2]):
            assert traced(jnp.ones(4)) == jax.devices()[2]
            raise KeyError
        assert traced(jnp.ones(4)) == jax.devices()[1]
    assert traced(jnp.ones(4)) == jax.devices()[0]


def test_a_trace_without_target_is_for_its_mesh():
    """A traced call with a mesh is for the mesh's devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("x",))
    assert traced(jnp.ones(4), mesh=mesh) == jax.devices()[2]


def test_the_target_goes_before_the_mesh():
    """Inside `target_device` the mesh of a trace does not decide."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("x",))
    with target_device(jax.devices()[1]):
        assert traced(jnp.ones(4), mesh=mesh) == jax.devices()[1]


def test_a_trace_of_sharded_arrays_is_for_a_device_of_their_kind():
    """The mesh in a tracer's type names a kind of device, and one of that kind is found."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    found = traced(jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x"))))
    assert device_fingerprint(found) == device_fingerprint()


def test_a_trace_without_target_and_mesh_is_for_the_default_device():
    """Nothing else given, a trace is for the default device."""
    assert traced(jnp.ones(4)) == jax.devices()[0]
    with jax.default_device(jax.devices()[2]):
        assert traced(jnp.ones(4)) == jax.devices()[2]


def test_shapes_are_a_trace():
    """A call of shapes is for the target; with a sharding of its own, for a device of that."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    with target_device(jax.devices()[3]):
        assert device_for(shape) == jax.devices()[3]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("x",))
    placed = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    assert device_for(placed) == jax.devices()[2]


def test_the_platform_of_a_call_is_that_of_its_device():
    """A call's variants are chosen by the platform of its device."""
    assert platform_of(Invocation("op", (on(2),), {})) == "cpu"


@pytest.mark.parametrize("given", ["cpu", None, 0])
def test_a_target_that_is_no_device_is_refused(given):
    """Anything but a device is a ValueError that says what to give."""
    with pytest.raises(ValueError, match=r"jax\.devices"), target_device(given):
        pass


# The environment.


def test_the_environment_names_versions():
    """The environment of a device names JAX, jaxlib and the runtime."""
    found = environment(jax.devices()[0])
    assert found["jax"] == jax.__version__
    assert re.match(r"\d+\.\d+", found["jaxlib"])
    assert found["platform"]
    assert all(isinstance(value, str) for value in found.values())


def test_the_environment_of_a_fingerprint_is_that_of_the_device():
    """A device and its fingerprint have one environment in a process that has the device."""
    assert environment(device_fingerprint()) == environment(jax.devices()[0])


def test_the_environment_of_another_device_leaves_the_runtime_open():
    """What this process cannot know is left out."""
    assert "platform" not in environment("tpu|TPU v9")


def test_asking_by_name_starts_no_backend():
    """The environment of a named device is known without starting JAX's backends."""
    code = (
        "from ejkernel.ops.core.device import environment\n"
        "from ejkernel.ops import _jax\n"
        "found = environment('gpu|NVIDIA H200')\n"
        "assert found['jaxlib'], found\n"
        "assert not _jax.backend_is_up()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NOW = {"jax": "0.10.2", "jaxlib": "0.10.2", "platform": "cuda 13", "driver": "580.1"}


@pytest.mark.parametrize(
    "changed",
    [{}, {"jaxlib": "0.10.7"}, {"jax": "0.11.0"}, {"jaxlib": "0.10"}],
    ids=["same", "patch", "jax alone", "short"],
)
def test_a_patch_release_is_the_same_environment(changed):
    """Only the minor version of jaxlib counts, and jax's own version does not."""
    assert same_environment({**NOW, **changed}, NOW)


@pytest.mark.parametrize(
    "changed",
    [{"jaxlib": "0.11.0"}, {"jaxlib": "1.10.2"}, {"platform": "cuda 12"}, {"driver": "570.2"}],
    ids=["minor", "major", "runtime", "driver"],
)
def test_another_jaxlib_runtime_or_driver_is_another_environment(changed):
    """A cfg tuned with another jaxlib minor version, runtime or driver is not believed."""
    assert not same_environment({**NOW, **changed}, NOW)


def test_what_one_side_does_not_know_is_no_difference():
    """An entry that was put before a backend had started lacks the runtime, and is believed."""
    assert same_environment({"jax": "0.10.2", "jaxlib": "0.10.2"}, NOW)


def test_an_unknown_environment_is_another_one():
    """An entry without any environment is not believed."""
    assert not same_environment({}, NOW)
