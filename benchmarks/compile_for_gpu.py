"""Compiles every candidate of a program's calls for an H200, without a GPU, and tells the processor time it takes.

It needs XLA for CUDA beside jax, of the same version, and no driver:

    pip install --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc
    PATH=$(python -c "import nvidia.cu13; print(nvidia.cu13.__path__[0])")/bin:$PATH JAX_PLATFORMS=cpu \
        python benchmarks/compile_for_gpu.py moe --only ragged_dot

A line a candidate: seconds of processor time for tracing, writing down, XLA, and the assembler that it starts. What XLA
times on a device is left out, and what needs cuDNN is no candidate. With MOSAIC_GPU_DUMP_PTXAS=1 the assembler says how
many registers each Mosaic kernel has, and whether it spills.
"""

from __future__ import annotations

import argparse
import resource
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax._src.pallas.triton import pallas_call_registration
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parent))
import program_calls
from programs import PROGRAMS
from programs.operations import Library

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, default_selector, policy_override
from ejkernel.ops.core.device import target_device
from ejkernel.ops.programs.find import find
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import CotangentShapes, compiled_quickly, stage
from ejkernel.ops.tuning.worker.executables import loaded
from ejkernel.ops.tuning.worker.export import EXPORTED, export

H200 = Path(__file__).parent / "data" / "h200.txtpb"
STEPS = ("traced", "exported", "compiled", "assembled")


def spent() -> tuple[float, float]:
    """Processor seconds of this process, and of those that it has started."""
    own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, theirs.ru_utime + theirs.ru_stime


def compiled(call: Any, cfg: Any, device: Any, cotangents: CotangentShapes) -> Counter[str]:
    """The seconds of each step, as a process that traces and compiles takes them."""
    run = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, call.inv.args)
    flat = flatten_call(args, dict(call.inv.kwargs))
    found, before = Counter[str](), spent()[0]

    def done(step: str) -> None:
        nonlocal before
        now = spent()[0]
        found[step], before = now - before, now

    objective = "forward+backward" if call.is_differentiated else "forward"
    staged = stage(
        lambda *a, **k: run(call.kernel, *a, cfg=cfg, **k),
        *(flat, flat.leaves, objective),
        name=EXPORTED,
        cotangents=cotangents,
    )
    done("traced")
    program = export(staged, "cuda", ())
    done("exported")
    exported, assembled = loaded(program.data), spent()[1]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in exported.in_avals]
    compiled_quickly(jax.jit(lambda *leaves: exported.call(*leaves)).trace(*shapes).lower(lowering_platforms=("cuda",)))
    done("compiled")
    found["assembled"] = spent()[1] - assembled
    return found


def main() -> int:
    """Compiles them one after the other; 1 where one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=list(PROGRAMS))
    parser.add_argument("--only", nargs="*", default=[], help="operations, such as ragged_dot")
    parser.add_argument("--cfg", default="", help="a part of the text of the cfgs that are compiled")
    parser.add_argument("--set", nargs="*", default=[], dest="sizes", help="sizes, such as width=1024")
    parser.add_argument("--target", type=Path, default=H200, help="the GPU, as XLA describes it")
    options = parser.parse_args()
    target = options.target.read_text(encoding="utf-8")
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=target)
    device = topology.devices[0]
    # Triton's lowering asks for the GPU of this process.
    capability = types.SimpleNamespace(compute_capability=int(str(device.compute_capability).replace(".", "")))
    pallas_call_registration.gpu_info_lib.get_gpu_info = lambda *args, **kwargs: capability
    program, failed = PROGRAMS[options.program], 0
    changes = {name: int(value) for name, _, value in (one.partition("=") for one in options.sizes)}
    unknown = sorted(changes.keys() - program.sizes.keys())
    if unknown:
        parser.error(f"{program.name} has no size {', '.join(unknown)}; it has {', '.join(program.sizes)}")
    sizes = program.sized(changes=changes)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device)),
        jax.eval_shape(lambda: program.make(sizes)),
    )
    with target_device(device), policy_override(default_selector(), allow_autotune=False):
        before = spent()[0]
        calls = find(program.build(Library(), sizes), shapes, {}).calls
        print(f"the calls were found in {spent()[0] - before:.2f} s", flush=True)
        for call in calls:
            name = call.key.op_id.partition("@")[0].rpartition(".")[2]
            if options.only and name not in options.only:
                continue
            cotangents, whole = CotangentShapes(), Counter[str]()
            cfgs = [cfg for cfg in program_calls.candidates(call.kernel, call.inv, "gpu") if options.cfg in repr(cfg)]
            print(f"{call.key.op_id} {call.key.call_key}, {len(cfgs)} candidates: {', '.join(STEPS)}")
            for cfg in cfgs:
                try:
                    found = compiled(call, cfg, device, cotangents)
                # A candidate that cannot be compiled so is named, and the others go on.
                except Exception as error:
                    failed += 1
                    print(f"   {cfg}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                    continue
                whole.update(found)
                print("   " + " ".join(f"{found[step]:5.2f}" for step in STEPS) + f"  {cfg}", flush=True)
            print("   " + " ".join(f"{whole[step]:5.1f}" for step in STEPS) + "  all of them", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
