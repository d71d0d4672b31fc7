"""A kernel's run while JAX traces: its cfg is chosen, noted for what was compiled with it, recorded and labelled.

`EntryBuilder` makes the functions that JAX jits for calls, with such a run inside. What a trace needs beyond its
tracers, the arrays of the call or its plan, is at hand for the thread that makes the call; a trace that comes without
it raises `NeedsValues`, and the call takes the long way once.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from .. import _jax
from ..config import call_log
from ..config.cache import is_shadowed
from ..config.selection import ConfigSelectorChain, objective_of
from ..core import invalidation
from ..core.abstract import abstractify
from ..core.bind import bind
from ..core.device import device_fingerprint, device_of, get_device_platform, target_device
from ..core.invocation import BatchAxes, Invocation, array_leaves
from ..core.kernel import Kernel, KernelNames, key_builder_of, versioned
from ..core.key import Key
from ..core.request import Decision
from ..core.stable import is_array
from ..core.trace_context import TraceContext
from ..registry import copied, record_call
from ..settings import Settings
from ..timing.inputs import is_concrete, is_float
from .arguments import PLAIN, Options, Taken, invocation_of
from .labels import json_label, label
from .plan import Plan, Program
from .recording import Recording
from .static_values import as_it_is_now
from .table import Chosen, CompiledEntry, NeedsValues, Traced, entries_being_traced, signature, tracing, tree_signature

if TYPE_CHECKING:
    from .executor import ConfigChooser


class KernelRun:
    """Runs kernels for one executor, with the chooser and the labels that it has now."""

    def __init__(self, chooser: ConfigChooser, stamp_prefix: str) -> None:
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix
        self._settings = Settings.read()
        file = self._settings.record_file
        self._recording = None if file is None else Recording(file)
        # Of a chooser of the user's own; a selector has its own.
        self._kernel_names = KernelNames()

    def __call__(
        self,
        kernel: Kernel[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        *,
        batch: BatchAxes | None = None,
        concrete: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        fixed: bool = False,
    ) -> Any:
        """Prepares, chooses and runs; here JAX traces. A fixed cfg is the options' own: the chooser is not asked."""
        inv = invocation_of(kernel, args, kwargs, options, batch)
        asked = inv if concrete is None else self._with_values(kernel, inv, concrete, options)
        # Taken before the choice: a change that comes between it and its recording must not be overlooked.
        epoch = invalidation.epoch
        decision = Decision(options.cfg, "override") if fixed else self._decide(asked, kernel)
        cfg, key = decision.cfg, decision.key
        device = decision.device or device_of(asked)
        around = entries_being_traced()
        if key is None and (around or self._settings.record or (inv.stamp and self._settings.stamp != "none")):
            key = Key(device_fingerprint(device), versioned(kernel), inv.make_key(key_builder_of(kernel)))
        # An overlay's answers are under a key of their own in JAX, and say nothing about what the caches hold.
        if key is not None and not is_shadowed(key) and options.cfg is None:
            # A kernel inside a kernel is part of both programs.
            for traced in around:
                traced.entry.learn(key, Chosen(cfg, traced.signature, epoch))
        if self._settings.record and key is not None:
            self._record(key, kernel, _abstract(inv))
        fn = bind(kernel, cfg, inv, get_device_platform(device))
        with self._stamp(inv, key, cfg):
            return fn(*inv.args, **inv.kwargs)

    def _decide(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Decision:
        """The chooser's cfg; a selector gives the key and the device of the call with it."""
        chooser: object = self.chooser
        # The executor looks behind no chooser of the user's own, nor behind a `choose` that replaces the selector's.
        if isinstance(chooser, ConfigSelectorChain) and _method(chooser.choose) is ConfigSelectorChain.choose:
            return chooser.decide(inv, kernel)
        if inv.override_cfg is None:
            self._kernel_names.claim(kernel)
        return Decision(self.chooser.choose(inv, kernel), "")

    def _record(self, key: Key, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
        trace_context = TraceContext.now()
        record_call(key, kernel, inv, trace_context)
        if self._recording is not None:
            chooser: object = self.chooser
            # A chooser of the user's own does not say what it tunes for.
            objective = objective_of(chooser.policy) if isinstance(chooser, ConfigSelectorChain) else None
            self._recording.add(key, kernel, inv, trace_context, objective)

    def _with_values(
        self,
        kernel: Kernel[Any, Any],
        inv: Invocation[Any, Any],
        concrete: tuple[tuple[Any, ...], dict[str, Any]],
        options: Options,
    ) -> Invocation[Any, Any]:
        """The call with the caller's own arrays, where their values or places matter for measuring."""
        leaves = array_leaves(*concrete)
        if not all(is_concrete(leaf) for leaf in leaves) or all(_is_plain(leaf) for leaf in leaves):
            return inv
        with _jax.clean_room():
            return invocation_of(kernel, *concrete, options)

    def _stamp(self, inv: Invocation[Any, Any], key: Key | None, cfg: Any) -> contextlib.AbstractContextManager[Any]:
        finder = call_log.in_force()
        if finder is not None:
            return finder.scope(inv)
        style = self._settings.stamp
        if key is None or not inv.stamp or style == "none":
            return contextlib.nullcontext()
        if style == "json":
            return jax.named_scope(json_label(key.op_id, key.call_key, cfg, self.stamp_prefix))
        return jax.named_scope(label(key.op_id, key.call_key, self.stamp_prefix))


def _method(bound: Any) -> Any:
    """The function behind a method."""
    return getattr(bound, "__func__", None)


def _is_plain(leaf: Any) -> bool:
    """Does a random array serve as well as this one: floats on one device?"""
    return is_float(leaf) and not (isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1)


def _abstract(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call without its arrays, to be kept."""
    args, kwargs = abstractify((inv.args, dict(inv.kwargs)))
    return replace(inv, args=args, kwargs=kwargs)


class _Now(threading.local):
    """The call that this thread is making, for the time that JAX may trace it: its arrays, or its plan."""

    given: Any = None


class EntryBuilder:
    """Makes the entries of one executor's table."""

    def __init__(self, run: KernelRun) -> None:
        self._run = run
        self.now = _Now()

    def of_call(
        self,
        kernel: Kernel[Any, Any],
        taken: Taken,
        options: Options,
        batch: BatchAxes | None,
        device: jax.Device,
    ) -> CompiledEntry:
        """The entry of calls with these static values and so many arrays."""
        rebuild = taken.with_copied_statics()
        # As it is now: the caller may change its own, and other kernels with these attributes share the entry.
        kernel = snapshot(kernel)

        def body(*leaves: Any) -> Any:
            concrete, self.now.given = self.now.given, None
            if concrete is None and not all(map(_serves_as_shape, leaves)):
                raise NeedsValues
            own = None if concrete is None else rebuild(concrete)
            with target_device(device), tracing(Traced(entry, signature(leaves))):
                return self._run(kernel, *rebuild(leaves), options, batch=batch, concrete=own)

        body.__name__ = body.__qualname__ = kernel.op_id
        entry = CompiledEntry(kernel, body)
        return entry

    def of_trees(
        self, kernel: Kernel[Any, Any], names: tuple[str, ...], count: int, device: jax.Device
    ) -> CompiledEntry:
        """The entry of calls with trees of arrays alone, whatever their structure: so many by position, and by name."""
        kept = snapshot(kernel)

        def body(*parts: Any) -> Any:
            given, self.now.given = self.now.given, None
            leaves = jax.tree_util.tree_leaves(parts)
            if given is None and not all(is_array(leaf) and is_concrete(leaf) for leaf in leaves):
                raise NeedsValues
            own = None if given is None else (given[:count], dict(zip(names, given[count:], strict=True)))
            with target_device(device), tracing(Traced(made, tree_signature(parts))):
                keywords = dict(zip(names, parts[count:], strict=True))
                return self._run(kept, parts[:count], keywords, PLAIN, concrete=own)

        body.__name__ = body.__qualname__ = kernel.op_id
        made = CompiledEntry(kept, body, tree_signature)
        return made

    def of_plan(
        self, executor: Any, front: Callable[..., Any], kernel: Kernel[Any, Any], taken: Taken, device: jax.Device
    ) -> CompiledEntry:
        """The entry of a function that plans its calls, which holds the function itself."""
        rebuild = taken.with_copied_statics()

        def body(*leaves: Any) -> Any:
            plan, self.now.given = self.now.given, None
            if plan is None and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                raise NeedsValues
            own = (plan.args, dict(plan.kwargs)) if type(plan) is Plan else None
            with target_device(device), tracing(Traced(entry, signature(leaves))):
                args, kwargs = rebuild(leaves)
                inside = front(*args, **kwargs, executor=executor)
                if type(inside) is Program:
                    return inside.compute(executor)
                return inside.then(self._run(inside.kernel, inside.args, dict(inside.kwargs), PLAIN, concrete=own))

        body.__name__ = body.__qualname__ = kernel.op_id
        entry = CompiledEntry(kernel, body)
        return entry


def _serves_as_shape(leaf: Any) -> bool:
    """Does a random array serve as well as this tracer? Arrays themselves have their values with them."""
    if not isinstance(leaf, jax.core.Tracer):
        return True
    return is_float(leaf) and jax.typeof(leaf).sharding.mesh.empty


def snapshot(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel with its attributes as they are now."""
    same = copy.copy(kernel)
    vars(same).update({name: as_it_is_now(copied(value)) for name, value in vars(kernel).items()})
    return same
