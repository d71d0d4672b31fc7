"""Programs of a tuning: a candidate's forward pass, or forward and backward as one program, and the check's own.

Programs of our own, such as those that compare outputs, are compiled once for each form of their arguments, ahead of
their use where that is known.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..core.device import default_device
from ..core.record import Objective
from ..core.stable import jax_dtype, short_hash
from .compiler_timing import has_kernel, has_large_products
from .inputs import FlatCall, draw, is_float

# A computation that looks at values while it is traced; the others are no reason to run it without jit.
UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    # A traced value in `nondiff_argnums`.
    jax.errors.UnexpectedTracerError,
)
# On GPUs the compiler compiles reductions and transposes in two ways each, and times them. Beside a kernel they are a
# small part, and many processes that compile would run them on the device that candidates are measured on.
_BESIDE_A_KERNEL = {"xla_gpu_experimental_enable_fusion_autotuner": False}
# It times its own ways to multiply too, which pays for what runs often: an attention's reference took 8 s to compile on
# an H200, and 0.3 s so.
_UNTUNED = {**_BESIDE_A_KERNEL, "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# Of large products cuBLAS's kernels are as fast as those that XLA compiles of its own and chooses from by timing them:
# eight on an H200 took 0.89 to 1.01 of the time, and in a warm process a thirtieth of the processor time to compile.
# Where other processes compile as well that time is missing, and XLA chooses worse by timing: a cross entropy took 4.69
# ms by its choice, and 4.37 by cuBLAS's. There a candidate with such products may be measured up to a ninth faster than
# it runs in its user's program.
_OF_LARGE_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
# What JAX says where a function was compiled beforehand.
_COMPILED = "lowered and compiled for a particular signature"
# What JAX raises where a function has no derivative, or not one of this kind.
UNDIFFERENTIABLE = (TypeError, ValueError, NotImplementedError)
# So many programs of our own are kept; one of longer ago is compiled again.
_MOST_OWN = 128


@dataclass(frozen=True)
class CompiledProgram:
    """A program to call with concrete arrays again and again; `notes` says where it is less than was asked for."""

    call: Callable[..., Any]
    objective: Objective
    notes: str = ""
    # JAX's compiled object; None for what runs as it is.
    executable: Any = None
    # For a program that runs in another process: what that one gets.
    portable: Any = None
    # False: compiled quickly, to see whether it can be among the fastest.
    for_speed: bool = True
    # What its compilation took, where that was before it was asked for.
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Staged:
    """A traced program: what is left to do, lowering and compiling, any thread can."""

    name: str
    objective: Objective
    notes: str
    traced: Any
    # From the executable to a function of the call's arrays.
    finish: Callable[[Any], Callable[..., Any]]
    # Instead of all that: what cannot be jitted runs as it is.
    as_it_is: Callable[..., Any] | None = None
    # The jitted function and what it was traced with, to write the program down for another process.
    function: Any = None
    arguments: tuple[Any, ...] = ()
    portable: Any = None

    def lower(self) -> tuple[Any, str]:
        """The lowered program, and a hash of its text that is equal for equal programs."""
        lowered = self.traced.lower()
        text = lowered.as_text()
        # Which function a callback calls does not stand in the text: then every program is its own.
        own = self.name if "callback" in text else ""
        return lowered, own + short_hash(text.replace(self.name, ""))

    def compile(self, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """The program, ready to run."""
        executable = compiled_for_speed(lowered) if for_speed else compiled_quickly(lowered)
        return CompiledProgram(self.finish(executable), self.objective, self.notes, executable, for_speed=for_speed)

    def build(self, *, quickly: bool = False) -> CompiledProgram:
        """Lowers and compiles at once, as users' programs are compiled; `quickly`: one that runs a few times."""
        if self.as_it_is is not None:
            return CompiledProgram(self.as_it_is, self.objective, self.notes)
        lowered = self.traced.lower()
        if quickly:
            return self.compile(lowered, for_speed=False)
        executable = lowered.compile()
        return CompiledProgram(self.finish(executable), self.objective, self.notes, executable)


def compiled_for_speed(lowered: Any, *, beside_others: bool = False) -> Any:
    """The executable of a lowered program as it runs in users' programs, or about as fast, in less time.

    `beside_others`: other processes compile meanwhile.
    """
    text = lowered.as_text()
    options = _BESIDE_A_KERNEL if has_kernel(text) else {}
    if beside_others and _has_cublas(default_device()) and has_large_products(text):
        options = options | _OF_LARGE_PRODUCTS
    return _compiled(lowered, options)


def _has_cublas(device: jax.Device) -> bool:
    return device.platform == "gpu" and "rocm" not in str(device.client.platform_version).lower()


def compiled_quickly(lowered: Any) -> Any:
    """The executable of a lowered program that will run a few times."""
    return _compiled(lowered, _UNTUNED)


def _compiled(lowered: Any, options: Mapping[str, Any]) -> Any:
    while options:
        try:
            return lowered.compile(compiler_options=dict(options))
        # Another compiler's options may have other names: those that this one does not know are left out.
        except jax.errors.JaxRuntimeError as error:
            if "compile option" not in str(error):
                raise
            known = {name: value for name, value in options.items() if name not in str(error)}
            options = known if len(known) < len(options) else {}
    return lowered.compile()


def stage(
    fn: Callable[..., Any],
    call: FlatCall,
    leaves: Sequence[Any],
    objective: Objective,
    *,
    seed: int = 0,
    name: str = "measured",
    cotangents: Cotangents | None = None,
) -> Staged:
    """Traces what is to be timed, on this thread and in its context; do this in a clean room.

    Candidates of one tuning share their cotangents, which are then drawn once.
    """
    run = forward(fn, call)
    notes = ""
    if objective == "forward+backward":
        try:
            return _with_gradients(run, call, leaves, cotangents or Cotangents(seed), name)
        except UNTRACEABLE:
            # The forward pass, below, will find and say the same.
            pass
        except UNDIFFERENTIABLE as error:
            notes = f"cannot be differentiated, timed forward: {first_line(error)}"
    try:
        function = jax.jit(_named(run, name))
        traced = function.trace(*leaves)
    except (*UNTRACEABLE, TypeError) as error:
        if not isinstance(error, UNTRACEABLE) and _COMPILED not in str(error):
            raise
        why = f"cannot be jitted, timed as it is: {first_line(error)}"
        return Staged(name, "forward", why, None, lambda executable: executable, as_it_is=run)
    return Staged(
        name, "forward", notes, traced, lambda executable: executable, function=function, arguments=tuple(leaves)
    )


def forward(fn: Callable[..., Any], call: FlatCall) -> Callable[..., Any]:
    """The function of the call's arrays alone."""

    def run(*leaves: Any) -> Any:
        args, kwargs = call.rebuild(leaves)
        return fn(*args, **kwargs)

    return run


def forward_and_backward(run: Callable[..., Any], floats: Sequence[int]) -> Callable[..., Any]:
    """Output and gradients of these arrays, as a function of all arrays and the outputs' cotangents."""

    def both(leaves: Sequence[Any], cotangents: Any) -> Any:
        def of_floats(*values: Any) -> Any:
            whole = list(leaves)
            for place, value in zip(floats, values, strict=True):
                whole[place] = value
            return run(*whole)

        out, pull = jax.vjp(of_floats, *(leaves[i] for i in floats))
        return out, pull(jax.tree_util.tree_map(_cotangent, out, cotangents))

    return both


def _cotangent(out: Any, given: Any) -> Any:
    return given if is_float(out) else np.zeros(out.shape, jax.dtypes.float0)


class Cotangents:
    """Random cotangents for the outputs of a tuning's candidates, which have the same shapes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # Shapes of the outputs, and arrays like them: of the candidate that was traced last.
        self._known: tuple[Any, Any] | None = None

    @property
    def latest(self) -> Any:
        """The cotangents of the candidate that was traced last, or None."""
        return None if self._known is None else self._known[1]

    def like(self, shapes: Any) -> Any:
        """Random, never ones: the gradient of a sum lets the compiler drop work. Integers have none."""
        if self._known is None or self._known[0] != _signature(shapes):
            leaves, tree = jax.tree_util.tree_flatten(shapes)
            floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
            drawn = dict(zip(floats, draw([leaves[i] for i in floats], self._seed), strict=True))
            made = jax.tree_util.tree_unflatten(tree, [drawn.get(i, 0) for i in range(len(leaves))])
            self._known = _signature(shapes), made
        return self._known[1]


class CotangentShapes(Cotangents):
    """Cotangents without values, for programs that are exported: the process that runs them draws its own."""

    def __init__(self) -> None:
        super().__init__(seed=0)

    def like(self, shapes: Any) -> Any:
        """Shapes like these outputs; integers have none."""
        made = jax.tree_util.tree_map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype)) if is_float(leaf) else 0, shapes
        )
        self._known = None, made
        return made


def _signature(shapes: Any) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(shapes)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def _with_gradients(
    run: Callable[..., Any], call: FlatCall, leaves: Sequence[Any], shared: Cotangents, name: str
) -> Staged:
    floats = [i for i, leaf in enumerate(call.leaves) if is_float(leaf)]
    if not floats:
        raise TypeError("no argument is a floating-point array")
    function = jax.jit(_named(forward_and_backward(run, floats), name))
    # Cotangents are arguments, since the compiler would fold constants.
    cotangents = shared.latest
    try:
        # Outputs of another shape than the last candidate's are an error here, and looked at below.
        traced = None if cotangents is None else function.trace(tuple(leaves), cotangents)
    except UNDIFFERENTIABLE:
        traced = None
    if traced is None:
        cotangents = shared.like(jax.eval_shape(run, *leaves))
        traced = function.trace(tuple(leaves), cotangents)

    def finish(executable: Any) -> Callable[..., Any]:
        return lambda *values: executable(values, cotangents)

    arguments = (tuple(leaves), cotangents)
    return Staged(name, "forward+backward", "", traced, finish, function=function, arguments=arguments)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return function


class _Coming:
    """A program on its way: the thread that holds the mutex compiles it."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.program: Any = None


_own_lock = threading.Lock()
_own_programs: OrderedDict[Any, _Coming] = OrderedDict()


def run_own_program(
    function: Callable[..., Any], device: jax.Device, arguments: tuple[Any, ...], static: Hashable = ()
) -> Any:
    """Calls it with arrays of one device, and what else it depends on last; the result is under way."""
    try:
        return own_program(function, device, arguments, static)(*arguments)
    # In memory an array may lie in another way than its shape says, such as 4-bit integers on JAX 0.10.
    except ValueError as error:
        if "layout" not in str(error):
            raise
        return _jitted(function, static)(*arguments)


def own_program(
    function: Callable[..., Any], device: jax.Device, arguments: tuple[Any, ...], static: Hashable = ()
) -> Any:
    """The program for arrays, or shapes, like these; the first thread that asks compiles it, and others wait."""
    leaves, tree = jax.tree_util.tree_flatten(arguments)
    key = (function, static, device, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    with _own_lock:
        coming = _own_programs.setdefault(key, _Coming())
        _own_programs.move_to_end(key)
        while len(_own_programs) > _MOST_OWN:
            _own_programs.popitem(last=False)
    with coming.mutex:
        if coming.program is None:
            sharding = jax.sharding.SingleDeviceSharding(device)
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves]
            lowered = _jitted(function, static).lower(*jax.tree_util.tree_unflatten(tree, shapes))
            coming.program = compiled_quickly(lowered)
        return coming.program


@functools.lru_cache(maxsize=_MOST_OWN)
def _jitted(function: Callable[..., Any], static: Hashable) -> Any:
    return jax.jit(lambda *given: function(*given, static))


def first_line(error: BaseException) -> str:
    """An error as one line of a record."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
