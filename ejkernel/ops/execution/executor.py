"""Running a kernel with its best cfg, chosen while JAX traces: a warm call is one look-up and JAX's dispatch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol

import jax

from .. import _jax
from ..config import policy
from ..core import invalidation
from ..core.device import default_device, device_fingerprint, get_device_platform
from ..core.errors import SettingError
from ..core.gradients import forward_mode_error
from ..core.invocation import Cfg, Invocation, Out, find_batch
from ..core.kernel import Kernel, check_kernel, gradient, versioned
from ..core.stable import is_array
from ..registry import copied
from ..timing.inputs import is_concrete
from ..timing.program import UNTRACEABLE, first_line
from .advice import Advice
from .advice import ExecutorWarning as ExecutorWarning
from .arguments import RESERVED, Options, Taken, invocation_of, kernel_key, split, take
from .bound import bound
from .compiled import Compiled
from .kernel_run import EntryBuilder, KernelRun, snapshot
from .labels import PREFIX
from .plan import Plan, Program
from .short_key import ARRAY, PLAIN_KINDS, frames_in_force, group_key, place_of, short_key_of, tree_key, with_keywords
from .static_values import as_it_is_now
from .table import CompiledEntry, CompiledTable, NeedsValues


class ConfigChooser(Protocol):
    """An object that can choose a cfg for a call."""

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The cfg."""


class Executor(Generic[Cfg, Out]):
    """Runs kernels; a cfg is chosen once per trace, by the chooser."""

    def __init__(self, chooser: ConfigChooser, stamp_prefix: str = PREFIX) -> None:
        if not callable(getattr(chooser, "choose", None)):
            raise SettingError(f"{chooser!r} chooses nothing; give a ConfigSelectorChain, or an object with `choose`")
        self._run = KernelRun(chooser, stamp_prefix)
        self._advice = Advice()
        self._table = CompiledTable()
        # Entries by short key.
        self.quick = self._table.quick
        self.find = self.quick.get
        self._builder = EntryBuilder(self._run)
        # Short keys of calls with trees that have held static values, or numbers as arrays.
        self._mixed: set[Hashable] = set()
        # Known once a backend runs: does this process have devices of more than one kind?
        self.several_kinds: bool | None = None

    @property
    def chooser(self) -> ConfigChooser:
        """Chooses the cfgs; another one takes effect at the next call."""
        return self._run.chooser

    @chooser.setter
    def chooser(self, chooser: ConfigChooser) -> None:
        self._run.chooser = chooser
        invalidation.note_everything()

    @property
    def stamp_prefix(self) -> str:
        """The beginning of every label; another one takes effect at the next call."""
        return self._run.stamp_prefix

    @stamp_prefix.setter
    def stamp_prefix(self, prefix: str) -> None:
        self._run.stamp_prefix = prefix
        invalidation.note_everything()

    def __call__(self, kernel: Kernel[Cfg, Out], /, *args: Any, **kwargs: Any) -> Any:
        """The kernel's result for this call; `cfg=`, `stamp=`, `method=`, `mesh=` and specs are the executor's own."""
        # The short way: arrays, and static keywords that are their own key. The long way checked everything else
        # before it registered the short key; `_short_key` says what that is, here it is written out, since this is
        # the path that must cost nothing.
        for arg in args:
            if type(arg) is not ARRAY:
                # Each frame between a program and its operations costs: JAX writes them all down for each operation.
                if type(arg) is _jax.JaxprTracer:
                    return self.call_anew(kernel, args, kwargs)
                return self._call_with_trees(kernel, arg, args, kwargs)
        short: Any = type(kernel)
        leaves: Any = args
        if kwargs:
            # By name and look-up: faster than pairs.
            for name in kwargs:
                value = kwargs[name]
                kind = type(value)
                if kind is ARRAY:
                    short = (short, name)
                    leaves = (*leaves, value)
                elif kind in PLAIN_KINDS:
                    short = (short, name, kind, value)
                else:
                    found = with_keywords(type(kernel), args, kwargs)
                    if found is None:
                        return self._call_with_trees(kernel, None, args, kwargs)
                    short, leaves = found
                    break
        try:
            state = kernel.__dict__
            if state:
                for name in state:
                    value = state[name]
                    short = (short, name, value, type(value))
            if policy.used and (frames := frames_in_force()):
                short = (short, frames)
            if self.several_kinds:
                short = (short, place_of(leaves))
            entry: Any = self.quick[short]
            # The same kernel with another number of arrays is another program.
            if entry.count != len(args):
                entry = self.quick[short, len(args)]
        # A new call, an attribute that cannot be hashed, or no kernel at all: the long way knows what to say.
        except (KeyError, TypeError, AttributeError):
            entry = None
        if entry is None:
            return self.call_anew(kernel, args, kwargs)
        entry.hot = True
        try:
            return entry.fn(*leaves)
        # A new shape that cannot be measured, or traced, without its values.
        except (NeedsValues, *UNTRACEABLE):
            entry.forget_failures()
            return self.call_anew(kernel, args, kwargs)

    def _call_with_trees(self, kernel: Kernel[Cfg, Out], cause: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The short way of trees of arrays, such as a dict of parameters; `cause` is the argument that is no array."""
        if not isinstance(cause, jax.core.Tracer) and RESERVED.isdisjoint(kwargs):
            short = group_key(kernel, args, kwargs, self.several_kinds)
            parts: Sequence[Any] = (*args, *kwargs.values())
            entry = None if short is None else self.find(short)
            if entry is None:
                found = tree_key(kernel, args, kwargs, self.several_kinds)
                if found is not None:
                    entry, parts = self.find(found[0]), found[1]
            elif not _jax.at_top_level():
                entry = None
            if entry is not None:
                entry.hot = True
                try:
                    return entry.fn(*parts)
                # Also what JAX says of a leaf that is no array.
                except (NeedsValues, TypeError, ValueError, *UNTRACEABLE):
                    entry.forget_failures()
        return self.call_anew(kernel, args, kwargs)

    def bind(self, kernel: Kernel[Cfg, Out], /, **static: Any) -> Callable[..., Any]:
        """A function of the arrays alone: the kernel as it is now, with these keywords.

        It costs what a jitted function costs, and notices every change that a call of the executor notices.
        """
        check_kernel(kernel)
        # A wrong keyword is an error here; the caller may change a dict of its own afterwards.
        split(kernel, static)
        static = {name: as_it_is_now(copied(value)) for name, value in static.items()}
        kernel = snapshot(kernel)
        # An executor of the user's own class may call kernels as it likes.
        if type(self).__call__ is not Executor.__call__:
            return lambda *args, **kwargs: self(kernel, *args, **{**static, **kwargs})
        return bound(self, kernel, static)

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

        kernel = snapshot(kernel)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._run(kernel, args, kwargs, options, fixed=True)

        run.__name__ = run.__qualname__ = kernel.op_id
        return Compiled(kernel, run, defaults)

    def call_anew(
        self,
        kernel: Kernel[Cfg, Out],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: Callable[[CompiledEntry, Sequence[Any]], None] | None = None,
    ) -> Any:
        """The long way: any call at all; `keep` is given the entry that served it, and its arrays."""
        check_kernel(kernel)
        options, keywords = split(kernel, kwargs)
        # Nearly every call inside a program: nothing of it needs to be taken apart.
        if _is_in_a_program(args, keywords):
            return self._run(kernel, args, keywords, options)
        taken = take(kernel, args, keywords)
        peeled = [_jax.peel(leaf) for leaf in taken.leaves]
        if any(p.forward_mode for p in peeled):
            _refuse_forward_mode(kernel, options, self._device([p.core for p in peeled]))
        # A program is being written: the kernel becomes part of it, with nothing of ours around it.
        if any(p.is_staged for p in peeled):
            return self._run(kernel, args, keywords, options)
        batch = find_batch(taken.leaves) if any(p.batches for p in peeled) else None
        device = self._device([p.core for p in peeled])
        group = None if all(map(is_array, args)) else group_key(kernel, args, kwargs, self.several_kinds)
        if group is not None and group not in self._mixed:
            if not taken.statics and all(map(_has_no_twin, taken.leaves)):
                return self._call_group(group, kernel, args, keywords, taken, device)
            # From now on such calls are looked at leaf by leaf.
            self._mixed.add(group)
            self._table.lengthen(group)
        key = (kernel_key(kernel), taken.shape, options.key(), batch, frames_in_force(), device)
        entry = self._table.find(key)
        if entry is None:
            if taken.statics:
                self._advice.count_statics(kernel, taken)
            entry = self._table.add(key, self._builder.of_call(kernel, taken, options, batch, device))
        out = self._enter(entry, key, kernel, taken)
        self._shorten(kernel, args, kwargs, key)
        if keep is not None:
            keep(entry, taken.leaves)
        return out

    def _call_group(
        self,
        short: Hashable,
        kernel: Kernel[Cfg, Out],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        taken: Taken,
        device: jax.Device,
    ) -> Any:
        """Runs a call of trees that hold arrays alone by one jitted function for all of their structures.

        JAX takes such trees apart faster than Python can, and tells structures and shapes apart itself. It would also
        take a number for an array: so this function is traced here alone, for arrays that no number is equal to.
        """
        names, count = tuple(kwargs), len(args)
        key = (kernel_key(kernel), "trees", count, names, frames_in_force(), device)
        entry = self._table.find(key)
        if entry is None:
            entry = self._table.add(key, self._builder.of_trees(kernel, names, count, device))
        parts = (*args, *kwargs.values())
        out = self._enter(entry, key, kernel, taken, parts, parts)
        self._table.shorten(short, key, -1)
        return out

    def call_planned(
        self,
        front: Callable[..., Any],
        plan: Plan | Program,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        short: Hashable,
    ) -> Any:
        """Runs what a function planned for a call of arrays, as a program that holds the function itself.

        The short key leads to that program, which never meets a signature that the function has not seen.
        """
        kernel = plan.kernel
        check_kernel(kernel)
        taken = take(kernel, args, kwargs)
        device = self._device(taken.leaves)
        key = (front, taken.shape, frames_in_force(), device)
        entry = self._table.find(key)
        if entry is None:
            if taken.statics:
                self._advice.count_statics(kernel, taken)
            entry = self._table.add(key, self._builder.of_plan(self, front, kernel, taken, device))
        out = self._enter(entry, key, kernel, taken, plan)
        self._table.shorten(short, key, -1)
        return out

    def _enter(
        self,
        entry: CompiledEntry,
        key: Hashable,
        kernel: Kernel[Cfg, Out],
        taken: Taken,
        given: Any = None,
        parts: Sequence[Any] | None = None,
    ) -> Any:
        """Calls an entry's function with what its trace may need at hand: the call's arrays, its trees or its plan."""
        parts = taken.leaves if parts is None else parts
        self._builder.now.given = taken.leaves if given is None else given
        try:
            return entry.fn(*parts)
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
            self._builder.now.given = None
        entry.run_unjitted()
        # A kernel that fails here too, such as one that lets its tracers escape, has nothing to be told about jit.
        out = entry.fn(*parts)
        self._advice.give(
            ("unjitted", type(kernel)),
            f"kernel {versioned(kernel)} looks at values while it is traced, so it runs without jit, slowly: {reason}",
        )
        return out

    def _device(self, cores: Sequence[Any]) -> jax.Device:
        """The device of an eager call."""
        if self.several_kinds is None:
            self.several_kinds = len({device_fingerprint(d) for d in _jax.local_devices_of_every_backend()}) > 1
        for core in cores:
            if isinstance(core, jax.Array) and not isinstance(core, jax.core.Tracer) and core.committed:
                return min(core.devices(), key=lambda d: d.id)
        return default_device()

    def _shorten(self, kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> None:
        """Registers the short key of a call that the short way can serve."""
        found = short_key_of(kernel, args, kwargs, self.several_kinds)
        if found is not None:
            self._table.shorten(found[0], key, found[1])


def _is_in_a_program(args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Are the arguments values of a program that is being written, and the keywords their own key?"""
    for arg in args:
        if type(arg) is not _jax.JaxprTracer:
            return False
    for value in keywords.values():
        if type(value) not in PLAIN_KINDS:
            return False
    return bool(args)


def _has_no_twin(leaf: Any) -> bool:
    """Is no Python value equal to this array in JAX's jit key? Numbers are weakly typed there, truth values are not."""
    if not is_concrete(leaf):
        return False
    return leaf.ndim > 0 or not (getattr(leaf, "weak_type", False) or leaf.dtype == bool)


def _refuse_forward_mode(kernel: Kernel[Any, Any], options: Options, device: jax.Device) -> None:
    """Says so at once, where the tracers show it; what they do not show, the own gradient refuses later."""
    if gradient(kernel, platform=get_device_platform(device), method=options.method) is not None:
        raise forward_mode_error(versioned(kernel))
