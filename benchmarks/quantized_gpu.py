"""Products of 64 rows with weights of 8 and 4 bits: device time of every variant of the Mosaic kernel, and of probes.

A probe is the kernel without some of its works, and shows what the others take: "copies" multiplies nothing, "products"
copies nothing, "tensor" makes nothing wide either, "barriers" neither copies nor multiplies. Each width runs in a
process of its own with a time limit, since blocks that wait for each other might wait for ever: the line before the end
names the variant.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from new_ops_gpu import compiled, finished, off, timed

# Seconds that a width may take.
EACH = 45.0
# Columns, depth of a step, steps that are held, parts of the depth and warpgroups.
VARIANTS = {
    "int8": [
        ("mosaic_ahead", (256, 128, 4, 4, 2)),
        ("mosaic_joined", (256, 128, 4, 4, 2)),
        ("mosaic_joined_once", (256, 128, 4, 4, 2)),
        ("mosaic_joined_once", (384, 128, 3, 6, 3)),
        ("mosaic_joined_light", (256, 128, 4, 4, 2)),
        ("mosaic_joined_light", (256, 64, 9, 4, 2)),
        ("mosaic_joined_light", (384, 128, 3, 6, 3)),
        ("mosaic_joined_light", (384, 64, 7, 6, 3)),
        ("mosaic_joined_light", (256, 128, 4, 4, 4)),
        ("mosaic_joined_light", (128, 128, 7, 2, 2)),
    ],
    "int4": [
        ("mosaic_ahead", (256, 128, 7, 4, 2)),
        ("mosaic_joined", (256, 128, 7, 4, 2)),
        ("mosaic_joined_once", (256, 128, 7, 4, 2)),
        ("mosaic_joined_once", (256, 128, 7, 4, 4)),
        ("mosaic_joined_light", (256, 128, 7, 4, 2)),
        ("mosaic_joined_light", (256, 128, 7, 4, 4)),
        ("mosaic_joined_light", (256, 256, 3, 4, 2)),
        ("mosaic_joined_light", (256, 64, 12, 4, 4)),
    ],
}
PROBES = {
    "int8": [("mosaic_joined_once", (256, 128, 4, 4, 2)), ("mosaic_joined_light", (256, 128, 4, 4, 2))],
    "int4": [("mosaic_joined_once", (256, 128, 7, 4, 2)), ("mosaic_joined_light", (256, 128, 7, 4, 2))],
}
WORKS = ("copies", "products", "tensor", "barriers")


@contextlib.contextmanager
def without(probe: str) -> Iterator[None]:
    """Kernels that are traced meanwhile lack what the probe leaves out."""
    from ejkernel.library.mosaic import quantized_ahead
    from ejkernel.library.mosaic.launch import plgpu

    places = [(plgpu, "wgmma"), (plgpu, "copy_gmem_to_smem"), (quantized_ahead, "widened")]
    before = [getattr(*place) for place in places]
    instead: list[Any] = [
        (lambda *_: None) if probe in ("copies", "barriers") else before[0],
        before[1] if probe == "copies" else lambda _, __, barrier: plgpu.barrier_arrive(barrier),
        narrow if probe == "tensor" else before[2],
    ]
    for place, function in zip(places, instead, strict=True):
        setattr(*place, function)
    try:
        yield
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(*place, function)


def narrow(found: Any, number: int, bits: int, *, interpret: bool) -> Any:
    """Something of the shape of widened words, by one instruction for two."""
    import jax.numpy as jnp
    import numpy as np
    from jaxlib.mlir import ir

    from ejkernel.library.mosaic.words import arith, mosaic, plgpu

    layout = plgpu.Layout.WGMMA

    def instructions(_: Any, words: Any) -> Any:
        whole = ir.IntegerType.get_signless(32)
        made = np.empty_like(words.registers)
        for index, pair in np.ndenumerate(words.registers):
            word = arith.xori(mosaic.utils.bitcast(pair, whole), arith.constant(whole, 0x10001 << number))
            made[index] = mosaic.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))
        return mosaic.FragmentedArray(_registers=made, _layout=words.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(found.shape, jnp.bfloat16, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(instructions)(found)


def one_width(kind: str, probes: bool, seconds: float) -> int:
    """Waits for its turn, and prints a line for each variant."""
    import jax
    import jax.numpy as jnp

    from ejkernel import library

    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdin.readline()
    start = time.perf_counter()
    kernel = library.QuantizedMatmul()
    weight = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.float32) / 90
    q, scales = library.quantize(weight, kind)
    arrays = (jax.random.normal(jax.random.key(0), (64, 8192), jnp.bfloat16), q, scales)
    todo = [(way, sizes, "") for way, sizes in VARIANTS[kind]]
    todo += [(way, sizes, work) for way, sizes in PROBES[kind] for work in WORKS if probes]
    names, waiting = [], []
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for at, (way, (n, k, stages, parts, workers), work) in enumerate(todo):
            cfg = library.QuantizedMatmulConfig(way, n, k, None, stages, parts, workers)
            names.append(f"{way}/{n}/{k}/{stages}/{parts}/{workers}" + (f" {work} alone" if work else ""))
            with without(work) if work else contextlib.nullcontext():
                made = compiled(f"{kind}_{at}", lambda *given, cfg=cfg: kernel.run(*given, cfg=cfg), arrays)
            waiting.append(pool.submit(finished, made))
        right = jax.jit(kernel.reference)(*arrays)
        programs = {at: one.result() for at, one in enumerate(waiting)}
    print(f"{kind}: compiled after {time.perf_counter() - start:.0f} s", flush=True)
    errors: dict[int, float] = {}
    for at, program in list(programs.items()):
        print(f"   running {names[at]}", end="\r", flush=True)
        try:
            if isinstance(program, Exception):
                raise program
            # Three times: the counters of a launch are as the one before left them.
            for _ in range(3):
                errors[at] = max(off(jax.block_until_ready(program(*arrays)), right), errors.get(at, 0.0))
        # Whatever a variant raises is its result here.
        except Exception as error:
            del programs[at]
            print(f"{names[at]} FAILED {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    for at, found in timed(programs, arrays, kind, seconds).items():
        wrong = "" if todo[at][2] else f", off {errors[at]:.1e}" + (" WRONG" if not errors[at] < 0.01 else "")
        print(f"{kind} {names[at]}: {found * 1e6:.1f} us{wrong}", flush=True)
    print(f"   {kind}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def main() -> int:
    """Runs the widths one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="widths")
    parser.add_argument("--no-probes", action="store_true", help="variants alone")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each width")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one_width(options.one, not options.no_probes, options.seconds)
    command = [sys.executable, __file__, "--seconds", str(options.seconds)]
    command += (["--no-probes"] if options.no_probes else []) + ["--one"]
    # Both start at once, so that the second one's imports take no time; each waits for its turn.
    children = {kind: subprocess.Popen([*command, kind], stdin=subprocess.PIPE, text=True) for kind in options.only}
    print("us of device time; off is the error's RMS over the result's", flush=True)
    for kind, child in children.items():
        try:
            child.communicate("go\n", timeout=EACH)
            if child.returncode:
                print(f"   {kind}: the process ended with status {child.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"\n   {kind}: stopped after {EACH:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
