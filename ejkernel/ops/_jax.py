"""The only file that touches private JAX names, and the places where JAX versions differ."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir

from .core.errors import JaxChangedError


def _private(module: str, name: str) -> Any:
    try:
        # Runs at every choice: a look into `sys.modules` costs less than an import of what is imported already.
        return getattr(sys.modules.get(module) or importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _changed(f"there is no {module}.{name}") from error


def _changed(what: str) -> JaxChangedError:
    return JaxChangedError(
        f"jax {jax.__version__} is not as ejkernel.ops needs it: {what}; "
        "install a supported JAX (>=0.10,<0.13) or report this with the version"
    )


# The innermost frame of a thread inside the compiler is of this file.
COMPILER: str = _private("jax._src.compiler", "__file__")
ArrayImpl: Any = _private("jax._src.array", "ArrayImpl")
_BatchTracer: Any = _private("jax._src.interpreters.batching", "BatchTracer")
_JVPTracer: Any = _private("jax._src.interpreters.ad", "JVPTracer")
_LinearizeTracer: Any = _private("jax._src.interpreters.ad", "LinearizeTracer")
JaxprTracer: Any = _private("jax._src.interpreters.partial_eval", "DynamicJaxprTracer")


# Is no transformation around this thread? Then no array of a call is a tracer.
at_top_level: Callable[[], bool] = _private("jax._src.core", "trace_ctx").is_top_level


def forget_failures(jitted: Any) -> None:
    """Lets a jitted function dispatch fast again where the first trace of a signature raised; its programs stay.

    JAX serves such a signature in Python ever after, ten times as slowly, also once it was traced and compiled.
    """
    try:
        jitted._clear_cache()
    except AttributeError as error:
        raise _changed(f"a jitted function: {error}") from error


@dataclass(frozen=True)
class Peeled:
    """A tracer taken apart: the innermost value, and the transformations around it."""

    core: Any
    # (identity of the vmap, its size, its name or None, the axis), innermost first.
    batches: tuple[tuple[Any, int, str | None, int], ...] = ()
    forward_mode: bool = False

    @property
    def is_staged(self) -> bool:
        """Is a program being written, rather than run?"""
        return isinstance(self.core, JaxprTracer)


def peel(value: Any) -> Peeled:
    """The array, or the staged value, under the tracers of vmap, grad and jvp."""
    batches = []
    forward_mode = False
    while isinstance(value, jax.core.Tracer):
        tracer: Any = value
        if isinstance(value, _BatchTracer):
            if tracer.batch_dim is not None:
                trace = tracer._trace
                axis = trace.axis_data
                name = axis.name if isinstance(axis.name, str) else None
                batches.append((trace.tag, int(axis.size), name, int(tracer.batch_dim)))
            value = tracer.val
        elif isinstance(value, (_JVPTracer, _LinearizeTracer)):
            forward_mode = forward_mode or isinstance(value, _JVPTracer)
            value = tracer.primal
        else:
            break
    return Peeled(value, tuple(batches), forward_mode)


# A linear identity that can only be transposed: reverse mode passes, any other use of it raises.
_reverse_only_p: Any = _private("jax._src.core", "Primitive")("ejkernel_reverse_only")


def _refuse(*args: Any, error: Callable[[], Exception], **params: Any) -> Any:
    raise error()


_reverse_only_p.def_impl(_refuse)
_reverse_only_p.def_abstract_eval(lambda tangent, **params: tangent)
jax.interpreters.ad.deflinear2(_reverse_only_p, lambda cotangent, tangent, **params: [cotangent])
jax.interpreters.batching.primitive_batchers[_reverse_only_p] = lambda args, dims, **params: (
    _reverse_only_p.bind(*args, **params),
    dims[0],
)
jax.interpreters.mlir.register_lowering(_reverse_only_p, lambda context, *args, **params: _refuse(*args, **params))


def _is_differentiable(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def reverse_only(value: Any, error: Callable[[], Exception]) -> Any:
    """The value unchanged; forward-mode differentiation of it raises."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return primals[0], _reverse_only_p.bind(tangents[0], error=error)

    return same(value) if _is_differentiable(value) else value


def constant(value: Any, error: Callable[[], Exception]) -> Any:
    """The value unchanged; any differentiation of it raises."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error()

    return same(value) if _is_differentiable(value) else value


def public_module(module: str) -> str:
    """The public name of a JAX module: without the private part, which moves from version to version."""
    return module.replace("jax._src.", "jax.", 1)


def axis_text(name: Any) -> str:
    """The name of a mesh axis; the axis of a pmap without a name has an object's address, which always differs."""
    text = str(name)
    return "unnamed" if text.startswith("<axis 0x") else text


def key_implementation(dtype: Any) -> str:
    """The generator behind a dtype of PRNG keys, as `jax.random.key` calls it."""
    return str(dtype._impl.name)


def global_value(context: Any) -> Any:
    """The value of a user context in threads that set none of their own."""
    return getattr(context, "_obj", context).get_global()


def set_global_value(context: Any, value: Any) -> None:
    """Sets the value of a user context for such threads; JAX then traces every jitted function again."""
    getattr(context, "_obj", context).set_global(value)


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes over which a value inside shard_map differs."""
    seen = jax.typeof(value)
    found = getattr(seen, "manual_axis_type", None)
    return frozenset(getattr(found, "varying", None) or getattr(seen, "vma", None) or ())


def local_devices_of_every_backend() -> list[jax.Device]:
    """Every device that this process can put an array on; starts the backends."""
    backends = _private("jax._src.xla_bridge", "backends")()
    return [device for backend in backends.values() for device in backend.local_devices()]


def setting(name: str) -> Any:
    """One of JAX's configuration values as it is in force here."""
    return getattr(jax.config, name)


# Is a program lowered by this thread to be the same in every process?
_is_reproducible: ContextVar[bool] = ContextVar("ejkernel_reproducible_lowering", default=False)
# Lowers Mosaic kernels for GPUs, and the number of each in its process, as JAX 0.11 writes it into the kernel.
_MOSAIC = "jax.experimental.mosaic.gpu.core"
_SERIALIZE, _KERNEL_NUMBER = "_run_serde_pass", "mosaic_gpu.dump_basename"


@contextlib.contextmanager
def reproducible_lowering() -> Iterator[None]:
    """Lowers equal programs to equal text inside a `with` block, whichever process and call it is.

    The text says nothing of source lines, of calls that led to them, and of the Mosaic kernels lowered before.
    """
    mosaic = sys.modules.get(_MOSAIC)
    # JAX 0.12 leaves the number out itself.
    if mosaic is not None and jax.__version_info__ < (0, 12):
        _let_kernels_be_unnumbered(mosaic)
    token = _is_reproducible.set(True)
    try:
        with _private("jax._src.config", "traceback_in_locations_limit")(0):
            yield
    finally:
        _is_reproducible.reset(token)


def _let_kernels_be_unnumbered(mosaic: Any) -> None:
    serialize = _private(_MOSAIC, _SERIALIZE)
    if hasattr(serialize, "__wrapped__"):
        return

    @functools.wraps(serialize)
    def unnumbered(module: Any, **how: Any) -> Any:
        attributes = module.operation.attributes
        # The number serves files of dumps alone.
        if _is_reproducible.get() and _KERNEL_NUMBER in attributes:
            del attributes[_KERNEL_NUMBER]
        return serialize(module, **how)

    setattr(mosaic, _SERIALIZE, unnumbered)


def default_platform() -> str:
    """The platform that arrays are made on here: that of `jax.default_device` where one is set."""
    device = setting("jax_default_device")
    if device is None:
        return str(jax.default_backend())
    return str(getattr(device, "platform", device))


def backend_is_up() -> bool:
    """Has this process started a JAX backend?"""
    return bool(_private("jax._src.xla_bridge", "backends_are_initialized")())


@dataclass(frozen=True)
class Distributed:
    """The place of a process in a `jax.distributed` program, and its client of the program's key-value service."""

    client: Any
    process: int
    processes: int
    coordinator: str


def distributed() -> Distributed | None:
    """The place of this process in a program of several processes; None in a program of one."""
    state = _private("jax._src.distributed", "global_state")
    try:
        if state.client is None or state.num_processes == 1:
            return None
        return Distributed(state.client, state.process_id, state.num_processes, str(state.coordinator_address))
    except AttributeError as error:
        raise _changed(f"jax._src.distributed.global_state: {error}") from error


# The methods of the client that agreement calls.
_CLIENT_VERBS = (
    *("key_value_set", "key_value_try_get", "blocking_key_value_get", "key_value_dir_get", "key_value_delete"),
)


def check_client(client: Any) -> None:
    """Raises at once where the service's client lacks a method, rather than when a decision needs it."""
    missing = [verb for verb in _CLIENT_VERBS if not hasattr(client, verb)]
    if missing:
        raise _changed(f"the client of jax.distributed has no {', '.join(missing)}")


@contextlib.contextmanager
def clean_room(mesh: jax.sharding.Mesh | None = None) -> Iterator[None]:
    """Compiles and runs for real from inside any trace: the caller's transformations do not reach in."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.core.eval_context())
        around = jax.sharding.AbstractMesh((), ()) if mesh is None else mesh.abstract_mesh
        stack.enter_context(jax.sharding.use_abstract_mesh(around))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        yield


def runs_of(jaxpr: Any, mark: str) -> dict[int, int]:
    """Runs of each numbered scope `mark<n>` in a program: one for each step of a scan, one in a while loop.

    The backward pass repeats scopes of the forward pass, and a checkpoint computes some again; neither is one more run.
    A scope that is in the backward pass alone counts there.
    """
    runs = _runs_by_pass(jaxpr, mark)
    return {number: runs[part, number] for part in reversed(_PASSES) for known, number in runs if known == part}


def differentiated(jaxpr: Any, mark: str) -> set[int]:
    """The numbered scopes `mark<n>` of a program that have a backward pass in it."""
    runs = _runs_by_pass(jaxpr, mark)
    backward = {number for part, number in runs if part == "backward"}
    # A kernel that another one's own gradient calls is in the backward pass alone, and runs forward there.
    return backward & {number for part, number in runs if part != "backward"}


# The passes of a differentiated program. `again` is the forward pass that a checkpoint computes a second time.
_PASSES = ("forward", "backward", "again")


def _runs_by_pass(jaxpr: Any, mark: str) -> Counter[tuple[str, int]]:
    """Runs of each numbered scope in each of the passes."""
    pattern = re.compile(rf"{mark}(\d+)")
    known: dict[tuple[int, str], Counter[tuple[str, int]]] = {}

    def count(inner: Any, around: str) -> Counter[tuple[str, int]]:
        if (id(inner), around) in known:
            return known[id(inner), around]
        deeper: Counter[tuple[str, int]] = Counter()
        here: set[tuple[str, int]] = set()
        for eqn in inner.eqns:
            names = str(eqn.source_info.name_stack)
            part = _pass_of(names, around)
            here.update((part, int(number)) for number in pattern.findall(names))
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for program in _programs_in(eqn.params.values()):
                for scope, runs in count(program, part).items():
                    deeper[scope] += times * runs
        # JAX moves operations that do not change from step to step out of a loop. They keep their scope, which then
        # stands both in the loop and around it: the larger count is the scope's.
        total = known[id(inner), around] = Counter(dict.fromkeys(here, 1)) | deeper
        return total

    return count(getattr(jaxpr, "jaxpr", jaxpr), "forward")


def _pass_of(names: str, around: str) -> str:
    if "rematted_computation" in names:
        return "again"
    return "backward" if around == "forward" and "transpose(" in names else around


def _programs_in(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _programs_in(value)
        elif hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)


def gpu_interpreter() -> Any:
    """The interpreter of Mosaic GPU kernels on a CPU, for tests: it looks for races between warpgroups."""
    return _private("jax._src.pallas.mosaic_gpu.interpret.params", "InterpretGPUParams")(detect_races=True)


def interpreted_races() -> bool:
    """Has the interpreter seen a race? Newer versions of JAX raise by themselves."""
    return bool(_private("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call", "get_races")().races_found)


def forget_interpreted() -> None:
    """Clears what the interpreter keeps from kernel to kernel; one that failed would be in the way of the next."""
    _private("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call", "reset_gpu_interpret_mode_state")()
