"""Exports a traced candidate to bytes that a worker compiles."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import jax

from ... import _jax
from ...core.errors import NotExportedError
from ...core.record import Objective
from ...core.stable import short_hash
from ...timing.compiler_timing import compiler_timing
from ...timing.program import CompiledProgram, Staged, first_line

if TYPE_CHECKING:
    from .tracing import ReadyMade

# JAX's own: every process has them. Exported programs run minutes later under the same version, so that the promise of
# compatibility that JAX does not make for these is not needed.
_OWN_TARGETS = (
    *("__gpu$xla.gpu.triton", "triton_kernel_call"),
    *("mosaic_gpu", "mosaic_gpu_v2", "mosaic_gpu_create_tma_descriptor", "tpu_custom_call"),
    # One that is not named here is found by exporting the program in vain.
    *("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"),
)
# The compiler's own, by the beginning of their names: they are part of it, and no process has to register them.
_COMPILERS = ("__cudnn$", "__cublas$", "__cub$", "__gpu$", "__onednn$")
# The name of every exported candidate, so that equal programs are equal bytes.
EXPORTED = "exported_candidate"
# No kernel calls more foreign functions than that; each is found in one attempt.
_ATTEMPTS = 16


@dataclass(frozen=True)
class PortableProgram:
    """A program as bytes, a function of flat arrays; the first `outputs` of its results are the output's."""

    data: bytes
    # Beside the call's arrays: random cotangents, where there are gradients.
    extra: Sequence[Any]
    outputs: int
    structure: Any
    objective: Objective = "forward"
    # A hash of the program that is equal for equal programs.
    text: str = ""
    # A name for what compiling it for a GPU runs there, as `compiler_timing` gives it.
    compiler_timing: str = ""


@final
@dataclass
class ExportingBuilder:
    """Programs written down for another process; what cannot be is refused, with the reason."""

    platform: str
    # Modules that the other process imports, and that register foreign functions.
    imports: Sequence[str] = ()
    refused: list[str] = field(default_factory=list)
    # Candidates that other processes trace.
    elsewhere: ReadyMade | None = None
    one_by_one: bool = False
    is_instant: bool = True

    def ready_made(self, cfg: Any, name: str, until: float) -> Staged | None:
        """One that another process has traced and exported."""
        return None if self.elsewhere is None else self.elsewhere.staged(cfg, name, until)

    def traced(self, staged: Staged, cfg: Any) -> Staged:
        """Exports a candidate, on the thread that traced it, since JAX may trace again."""
        try:
            program = export(staged, self.platform, self.imports)
            if self.elsewhere is not None:
                self.elsewhere.exported_here(cfg, program)
            return replace(staged, portable=program)
        except NotExportedError as error:
            self.refused.append(str(error))
            raise

    def lower(self, staged: Staged) -> tuple[Any, str]:
        """Gives the exported program: exporting has lowered it."""
        return staged.portable, staged.portable.text

    def compiler_timing(self, staged: Staged, lowered: Any) -> str:
        """The name that exporting found in the program's text."""
        return str(staged.portable.compiler_timing)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Holds nothing back: nothing is compiled in this process."""
        return contextlib.nullcontext()

    def await_parts(self, staged: Staged) -> None:
        """Returns at once: no part is needed to write a program down."""

    def build(self, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """The program as bytes, which the other process compiles."""
        return CompiledProgram(_elsewhere, staged.objective, staged.notes, portable=staged.portable)


def _elsewhere(*leaves: Any) -> Any:
    raise NotExportedError("this program was written down for another process and does not run in this one")


def export(staged: Staged, platform: str, imports: Sequence[str]) -> PortableProgram:
    """A traced program as bytes; a `NotExportedError` says why not."""
    if staged.as_it_is is not None:
        raise NotExportedError(staged.notes)
    leaves, tree = jax.tree_util.tree_flatten(staged.arguments)
    for leaf in leaves:
        _refuse_leaf(leaf)
    found: list[Any] = []

    def candidate(*values: Any) -> Any:
        out = staged.function(*jax.tree_util.tree_unflatten(tree, values))
        found[:] = [out]
        return jax.tree_util.tree_leaves(out)

    # One name for all.
    exported = _exported(jax.jit(candidate), leaves, platform, imports)
    try:
        data = bytes(exported.serialize())
    # What JAX cannot write down: callbacks, its own and foreign types of trees, or flatbuffers are not installed.
    except (NotImplementedError, ValueError, TypeError, ImportError) as error:
        raise NotExportedError(f"cannot be written down for another process: {first_line(error)}") from error
    out = found[0]
    # Flat arrays have no structure, and outputs of another one are wrong.
    written = exported.mlir_module()
    text = short_hash(f"{written}{jax.tree_util.tree_structure(out)}"), compiler_timing(written)
    if staged.objective == "forward":
        return PortableProgram(data, (), *_shape(out), "forward", *text)
    given = len(jax.tree_util.tree_leaves(staged.arguments[0]))
    return PortableProgram(data, leaves[given:], *_shape(out[0]), "forward+backward", *text)


def _shape(out: Any) -> tuple[int, Any]:
    return len(jax.tree_util.tree_leaves(out)), jax.tree_util.tree_structure(out)


def _refuse_leaf(leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        raise NotExportedError("an array lies on several devices, and another process would need them too")
    if hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise NotExportedError(f"an array of {leaf.dtype} cannot be sent to another process")


def _exported(jitted: Any, leaves: Sequence[Any], platform: str, imports: Sequence[str]) -> Any:
    allowed = list(_OWN_TARGETS)
    for _ in range(_ATTEMPTS):
        checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in allowed]
        try:
            # Equal programs are equal bytes, whichever process exports them and from where it is called.
            with _jax.reproducible_lowering():
                return jax.export.export(jitted, platforms=[platform], disabled_checks=checks)(*leaves)
        # Whatever it raises, the candidate cannot be sent.
        except Exception as error:
            targets = re.findall(r"custom_call @([\w.$]+)", str(error))
            foreign = [target for target in targets if not target.startswith(_COMPILERS)]
            if (foreign and not imports) or not set(targets) - set(allowed):
                raise NotExportedError(_why(error, foreign or targets)) from error
            allowed += targets
    raise NotExportedError(f"calls over {_ATTEMPTS} foreign functions")


def _why(error: Exception, targets: Sequence[str]) -> str:
    if not targets:
        return f"cannot be written down for another process: {first_line(error)}"
    return (
        f"calls {', '.join(sorted(set(targets)))}, which a fresh process does not have; "
        "name the modules that register it, Isolation(imports=[...])"
    )
