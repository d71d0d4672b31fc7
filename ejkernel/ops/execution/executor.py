"""Running a kernel with its best cfg, chosen while JAX traces: a warm call is one look-up and JAX's dispatch."""

from __future__ import annotations

import contextlib
import copy
import enum
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import FunctionType, NoneType
from typing import Any, Generic, Protocol

import jax

from .. import _jax
from ..config import call_log, policy
from ..config.cache import is_shadowed
from ..config.selection import ConfigSelectorChain, objective_of
from ..core import invalidation
from ..core.abstract import abstractify
from ..core.batch import BatchAxes, array_leaves, find_batch
from ..core.bind import bind
from ..core.device import default_device, device_fingerprint, device_of, get_device_platform, target_device
from ..core.errors import SettingError
from ..core.gradients import forward_mode_error
from ..core.invocation import Cfg, Invocation, Out
from ..core.kernel import Kernel, check_kernel, key_builder_of, versioned
from ..core.kernel_names import KernelNames
from ..core.key import Key
from ..core.request import Decision
from ..core.trace_context import TraceContext
from ..core.variants import gradient
from ..registry import copied, record_call
from ..settings import Settings
from ..timing.inputs import is_concrete, is_float
from ..timing.program import UNTRACEABLE, first_line
from .arguments import RESERVED, Options, Taken, kernel_key, split, take
from .compiled import Compiled
from .invocation_of import invocation_of
from .labels import PREFIX, json_label, label
from .recording import Recording
from .static_values import as_it_is_now
from .table import Chosen, CompiledEntry, CompiledTable, Traced, entries_being_traced, signature, tracing

# Static values that are their own key: cheap to hash, never equal across types once the type stands beside them.
_ARRAY = _jax.ArrayImpl
_frames = policy.frames.get
_SHORT = frozenset((int, bool, str, NoneType))
# So many different values of one static argument mean that it should have been an array.
_MANY_STATICS = 64


class ExecutorWarning(UserWarning):
    """A call that works, but not as well as it could."""


class ConfigChooser(Protocol):
    """Whatever can choose a cfg for a call."""

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The cfg."""


class _NeedsValues(Exception):
    """JAX traces a call of the short way that cannot be measured by its shapes: the long way has its arrays at hand."""


class _Now(threading.local):
    """The arrays of the call that this thread is making, for the time that JAX may trace it."""

    leaves: Sequence[Any] | None = None


class Executor(Generic[Cfg, Out]):
    """Runs kernels; a cfg is chosen once per trace, by the chooser."""

    def __init__(self, chooser: ConfigChooser, stamp_prefix: str = PREFIX) -> None:
        if not callable(getattr(chooser, "choose", None)):
            raise SettingError(f"{chooser!r} chooses nothing; give a ConfigSelectorChain, or an object with `choose`")
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix
        self._settings = Settings.read()
        file = self._settings.record_file
        self._recording = None if file is None else Recording(file)
        self._table = CompiledTable()
        self._find = self._table.quick.get
        self._now = _Now()
        self._statics: dict[tuple[str, str], set[Hashable]] = {}
        self._said: set[Hashable] = set()
        # Of a chooser of the user's own; a selector has its own.
        self._kernel_names = KernelNames()
        # Known once a backend runs: does this process have devices of more than one kind?
        self._several_kinds: bool | None = None

    def __call__(self, kernel: Kernel[Cfg, Out], /, *args: Any, **kwargs: Any) -> Any:
        """The kernel's result for this call; `cfg=`, `stamp=`, `method=`, `mesh=` and specs are the executor's own."""
        # The short way: arrays, and static keywords that are their own key. The long way checked everything else
        # before it registered the short key; `_short_key` says what that is, here it is written out, since this is
        # the path that must cost nothing.
        for arg in args:
            if type(arg) is not _ARRAY:
                return self._call(kernel, args, kwargs)
        short: Any = kernel.__class__
        leaves = args
        if kwargs:
            found = _marks(kwargs)
            if found is None:
                return self._call(kernel, args, kwargs)
            marks, arrays = found
            short = (short, marks)
            if arrays:
                leaves = (*args, *arrays)
        try:
            state = kernel.__dict__
            for name, value in state.items():
                short = (short, name, value, type(value))
            frames = _frames()
            if frames:
                short = (short, frames)
            entry = self._find(short)
            if entry is None and self._several_kinds:
                short = (short, _place(leaves))
                entry = self._find(short)
            # The same kernel with another number of arrays is another program.
            if entry is not None and entry.count != len(args):
                entry = self._find((short, len(args)))
        # An attribute that cannot be hashed, or no kernel at all: the long way knows what to say.
        except (TypeError, AttributeError):
            entry = None
        if entry is None or entry.epoch != invalidation.epoch:
            return self._call(kernel, args, kwargs)
        entry.hot = True
        try:
            return entry.fn(*leaves)
        # A new shape that cannot be measured, or traced, without its values.
        except (_NeedsValues, *UNTRACEABLE):
            return self._call(kernel, args, kwargs)

    def choose_config(self, kernel: Kernel[Cfg, Out], /, *args: Any, **kwargs: Any) -> Cfg:
        """The cfg that a call would run with."""
        check_kernel(kernel)
        options, keywords = split(kernel, kwargs)
        taken = take(kernel, args, keywords)
        if all(is_concrete(leaf) or isinstance(leaf, jax.core.Tracer) for leaf in taken.leaves):
            inv = invocation_of(kernel, args, keywords, options)
            return self.chooser.choose(inv, kernel)  # type: ignore[no-any-return]
        # Shapes instead of arrays: what prepare would do with arrays is asked of JAX.
        chosen: list[Cfg] = []

        def ask(*leaves: Any) -> None:
            inv = invocation_of(kernel, *taken.rebuild(leaves), options)
            chosen.append(self.chooser.choose(inv, kernel))

        jax.eval_shape(ask, *taken.leaves)
        return chosen[0]

    def compile(self, kernel: Kernel[Cfg, Out], /, *example_args: Any, **example_kwargs: Any) -> Callable[..., Any]:
        """A jitted function with a cfg chosen now and fixed for good; static example keywords are its defaults."""
        cfg = self.choose_config(kernel, *example_args, **example_kwargs)
        options, keywords = split(kernel, example_kwargs)
        options = replace(options, cfg=cfg)
        defaults = {name: value for name, value in keywords.items() if not take(kernel, (value,), {}).leaves}

        kernel = _snapshot(kernel)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._run(kernel, args, kwargs, options, fixed=True)

        run.__name__ = run.__qualname__ = kernel.op_id
        return Compiled(kernel, run, defaults)

    def _call(self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The long way: any call at all."""
        check_kernel(kernel)
        options, keywords = split(kernel, kwargs)
        taken = take(kernel, args, keywords)
        peeled = [_jax.peel(leaf) for leaf in taken.leaves]
        if any(p.forward_mode for p in peeled):
            _refuse_forward_mode(kernel, options, self._device([p.core for p in peeled]))
        # A program is being written: the kernel becomes part of it, with nothing of ours around it.
        if any(p.is_staged for p in peeled):
            return self._run(kernel, args, keywords, options)
        batch = find_batch(taken.leaves) if any(p.batches for p in peeled) else None
        device = self._device([p.core for p in peeled])
        key = (kernel_key(kernel), taken.shape, options.key(), batch, _frames(), device)
        entry = self._table.find(key)
        if entry is None:
            self._count_statics(kernel, taken)
            entry = self._table.add(key, self._build(kernel, taken, options, batch, device))
        out = self._enter(entry, key, kernel, taken)
        self._shorten(kernel, args, kwargs, key)
        return out

    def _enter(self, entry: CompiledEntry, key: Hashable, kernel: Kernel[Cfg, Out], taken: Taken) -> Any:
        self._now.leaves = taken.leaves
        try:
            return entry.fn(*taken.leaves)
        except BaseException as error:
            cores = [_jax.peel(leaf).core for leaf in taken.leaves]
            looks_at_values = isinstance(error, UNTRACEABLE) and all(map(is_concrete, cores))
            if entry.fn is entry.body or not looks_at_values:
                # What other shapes compiled stays.
                if not entry.decisions:
                    self._table.drop(key)
                raise
            reason = first_line(error)
        finally:
            self._now.leaves = None
        entry.run_unjitted()
        # A kernel that fails here too, such as one that lets its tracers escape, has nothing to be told about jit.
        out = entry.fn(*taken.leaves)
        self._say_once(
            ("unjitted", type(kernel)),
            f"kernel {versioned(kernel)} looks at values while it is traced, so it runs without jit, slowly: {reason}",
        )
        return out

    def _build(
        self,
        kernel: Kernel[Cfg, Out],
        taken: Taken,
        options: Options,
        batch: BatchAxes | None,
        device: jax.Device,
    ) -> CompiledEntry:
        rebuild = taken.settled()
        # As it is now: the caller may change its own, and other kernels with these attributes share the entry.
        kernel = _snapshot(kernel)

        def body(*leaves: Any) -> Any:
            concrete, self._now.leaves = self._now.leaves, None
            if concrete is None and not all(map(_serves_as_shape, leaves)):
                raise _NeedsValues
            own = None if concrete is None else rebuild(concrete)
            with target_device(device), tracing(Traced(entry, signature(leaves))):
                return self._run(kernel, *rebuild(leaves), options, batch=batch, concrete=own)

        body.__name__ = body.__qualname__ = kernel.op_id
        entry = CompiledEntry(kernel, body)
        return entry

    def _run(
        self,
        kernel: Kernel[Cfg, Out],
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

    def _decide(self, inv: Invocation[Any, Any], kernel: Kernel[Cfg, Out]) -> Decision:
        """The chooser's cfg; a selector gives the key and the device of the call with it."""
        chooser: object = self.chooser
        # The executor looks behind no chooser of the user's own, nor behind a `choose` that replaces the selector's.
        if isinstance(chooser, ConfigSelectorChain) and _method(chooser.choose) is ConfigSelectorChain.choose:
            return chooser.decide(inv, kernel)
        if inv.override_cfg is None:
            self._kernel_names.claim(kernel)
        return Decision(self.chooser.choose(inv, kernel), "")

    def _record(self, key: Key, kernel: Kernel[Cfg, Out], inv: Invocation[Any, Any]) -> None:
        surroundings = TraceContext.now()
        record_call(key, kernel, inv, surroundings)
        if self._recording is not None:
            chooser: object = self.chooser
            # A chooser of the user's own does not say what it tunes for.
            objective = objective_of(chooser.policy) if isinstance(chooser, ConfigSelectorChain) else None
            self._recording.add(key, kernel, inv, surroundings, objective)

    def _with_values(
        self,
        kernel: Kernel[Cfg, Out],
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

    def _device(self, cores: Sequence[Any]) -> jax.Device:
        """The device of an eager call."""
        if self._several_kinds is None:
            self._several_kinds = len({device_fingerprint(d) for d in _jax.local_devices_of_every_backend()}) > 1
        for core in cores:
            if isinstance(core, jax.Array) and not isinstance(core, jax.core.Tracer) and core.committed:
                return min(core.devices(), key=lambda d: d.id)
        return default_device()

    def _shorten(self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> None:
        """Registers the short key of a call that the short way can serve."""
        state = vars(kernel)
        if any(type(arg) is not _ARRAY for arg in args) or not RESERVED.isdisjoint(kwargs):
            return
        found = _marks(kwargs)
        if found is None or not all(_is_short(value) for value in state.values()):
            return
        marks, arrays = found
        self._table.shorten(self._short_key(kernel, marks, state, (*args, *arrays)), key, len(args))

    def _short_key(
        self, kernel: Kernel[Cfg, Out], marks: tuple[Any, ...], state: dict[str, Any], leaves: Sequence[Any]
    ) -> Hashable:
        short: Any = type(kernel)
        if marks:
            short = (short, marks)
        for name, value in state.items():
            short = (short, name, value, type(value))
        frames = _frames()
        if frames:
            short = (short, frames)
        return (short, _place(leaves)) if self._several_kinds else short

    def _count_statics(self, kernel: Kernel[Cfg, Out], taken: Taken) -> None:
        for path, value in taken.statics:
            seen = self._statics.setdefault((versioned(kernel), path), set())
            if len(seen) > _MANY_STATICS:
                continue
            seen.add(value)
            if len(seen) > _MANY_STATICS:
                self._say_once(
                    ("statics", versioned(kernel), path),
                    f"{path} of kernel {versioned(kernel)} has had more than {_MANY_STATICS} different static values, "
                    "and each compiles a program of its own; pass it as an array if the kernel can take one",
                )

    def _say_once(self, what: Hashable, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(message, ExecutorWarning, stacklevel=5)


def _method(bound: Any) -> Any:
    """The function behind a method."""
    return getattr(bound, "__func__", None)


def _marks(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Names of array keywords and the static ones whole, as part of a short key; None where one needs the long way."""
    marks: list[Any] = []
    arrays: list[Any] = []
    for name, value in kwargs.items():
        kind = type(value)
        if kind is _ARRAY:
            marks.append(name)
            arrays.append(value)
        elif kind in _SHORT:
            marks.append((name, kind, value))
        elif kind is float and value == value:
            # 0.0 equals -0.0: they are told apart by their text.
            marks.append((name, kind, value or repr(value)))
        else:
            return None
    return tuple(marks), arrays


def _is_short(value: Any) -> bool:
    """May this attribute of a kernel be part of a short key, which tells values by `==` and type alone?"""
    # 0.0 equals -0.0, NaN is not itself, and whatever has parts may hold either.
    if type(value) is float:
        return bool(value) and value == value
    return type(value) in _SHORT or isinstance(value, (type, FunctionType, enum.Enum))


def _place(leaves: Sequence[Any]) -> Any:
    """The place where an eager call runs, for processes with more than one kind of device."""
    for leaf in leaves:
        if leaf._committed:
            return leaf.sharding
    return _jax.setting("jax_default_device")


def _is_plain(leaf: Any) -> bool:
    """Does a random array serve as well as this one: floats on one device?"""
    return is_float(leaf) and not (isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1)


def _serves_as_shape(leaf: Any) -> bool:
    """Does a random array serve as well as this tracer? Arrays themselves have their values with them."""
    if not isinstance(leaf, jax.core.Tracer):
        return True
    return is_float(leaf) and jax.typeof(leaf).sharding.mesh.empty


def _refuse_forward_mode(kernel: Kernel[Any, Any], options: Options, device: jax.Device) -> None:
    """Says so at once, where the tracers show it; what they do not show, the own gradient refuses later."""
    if gradient(kernel, platform=get_device_platform(device), method=options.method) is not None:
        raise forward_mode_error(versioned(kernel))


def _snapshot(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel with its attributes as they are now."""
    same = copy.copy(kernel)
    vars(same).update({name: as_it_is_now(copied(value)) for name, value in vars(kernel).items()})
    return same


def _abstract(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call without its arrays, to be kept."""
    args, kwargs = abstractify((inv.args, dict(inv.kwargs)))
    return replace(inv, args=args, kwargs=kwargs)
