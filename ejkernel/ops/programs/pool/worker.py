"""The other end of a pool: tunes the calls of a task in this process, and answers with text."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...core.errors import ConfigTypeError, RecordFormatError, SignatureError
from ...core.key import Key
from ...core.record import Record
from .client import said
from .task import PROTOCOL, AskedCall, Reply, Task, TaskOutcome, asked_by

if TYPE_CHECKING:
    import jax

# The longest reason that is sent back.
_LONGEST = 500


def run_task(text: str) -> str:
    """The reply to a task.

    This function's name and text are all that crosses to a worker. What goes wrong here is a sentence in the reply,
    never an exception: its class may be unknown on the other side.
    """
    start = time.perf_counter()
    here = f"{platform.node()}:{os.getpid()}"
    keys: Sequence[Key] = ()
    try:
        keys, version, protocol = asked_by(text)
        if (version, protocol) != (__version__, PROTOCOL):
            return _refused(
                here, keys, f"the worker {here} has ejkernel-ops {__version__}, and the task is of {version}"
            )
        task = Task.loads(text)
    except RecordFormatError as error:
        return _refused(here, keys, f"the worker {here} cannot read the task: {error}")
    device, why = _device_for(task)
    if device is None:
        time.sleep(task.pause)
        return _refused(here, keys, f"the worker {here} {why}")
    return Reply(here, tuple(_outcomes(task, device, here)), task.device, time.perf_counter() - start).dumps()


def _refused(here: str, keys: Sequence[Key], why: str) -> str:
    return Reply(here, tuple(TaskOutcome(key, why=why[:_LONGEST], refused=True) for key in keys)).dumps()


def _device_for(task: Task) -> tuple[jax.Device | None, str]:
    """The device of this process that the task is for, or the reason why there is none."""
    import jax
    import jaxlib.version

    from ...core.device import device_fingerprint

    mine = jaxlib.version.__version__
    if task.jaxlib and mine.split(".")[:2] != task.jaxlib.split(".")[:2]:
        return None, f"has jaxlib {mine}, and entries are kept for {task.jaxlib}"
    found: list[jax.Device] = []
    # JAX knows no such platform here, or finds no device of it.
    with contextlib.suppress(RuntimeError):
        found = jax.local_devices(backend=task.device.partition("|")[0])
    for device in found:
        if device_fingerprint(device) == task.device:
            return device, ""
    try:
        there = sorted({device_fingerprint(device) for device in found or jax.local_devices()})
    except RuntimeError as error:
        return None, f"has no device at all: {said(error)}"
    return None, f"has no {task.device}; it has {', '.join(there)}"


def _outcomes(task: Task, device: jax.Device, here: str) -> list[TaskOutcome]:
    from ...tuning.progress import told_elsewhere
    from ...tuning.worker.process import kept_workers

    found: list[TaskOutcome] = []
    with kept_workers(), told_elsewhere(), _without_warnings():
        for asked in task.calls:
            start = time.perf_counter()
            try:
                outcome = _tuned(task, asked, device)
            except SignatureError as error:
                if not found:
                    time.sleep(task.pause)
                outcome = TaskOutcome(asked.key, why=f"the worker {here}: {error}"[:_LONGEST], refused=True)
            # Whatever a kernel raises: the call is named, and the others are tuned.
            except Exception as error:
                outcome = TaskOutcome(asked.key, why=said(error))
            found.append(TaskOutcome(**{**vars(outcome), "seconds": time.perf_counter() - start}))
    return found


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences warnings of tunings that left no candidate: the reply has the reasons."""
    from ...config.tuning_budget import TuningWarning

    # Python's filters belong to all threads, so another thread must leave them alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        yield


def _tuned(task: Task, asked: AskedCall, device: jax.Device) -> TaskOutcome:
    from ...config.cache import ConfigCache, Plain, overlay_cache
    from ...config.selection import AutotunePolicy, ConfigSelectorChain
    from ...core.request import ask
    from ..found_call import FoundCall
    from .serialization import rebuilt_call, rebuilt_tuner, revived_all

    kernel, inv, trace_context = rebuilt_call(asked, task.device)
    policy = AutotunePolicy(validate_backward=asked.objective == "forward+backward")
    selector: Any = ConfigSelectorChain[Any, Any](ConfigCache(), policy)
    call = FoundCall(asked.key, kernel, inv, (selector,), device, trace_context)
    inside: dict[tuple[str, str, str], Any] = {
        Key(task.device, op_id, call_key): Plain(cfg) for op_id, call_key, cfg in asked.inside
    }
    with call.restored(), overlay_cache(inside):
        request = ask(inv, kernel, asked.objective)
        if request.key != asked.key:
            raise SignatureError(f"makes the key {request.key} of {asked.key}")
        selector.tuner = rebuilt_tuner(task.tuner, revived_all(request, asked.seeds))
        decision = selector.tune(inv, kernel, asked.repetitions, seconds=asked.seconds)
    if decision.record is None:
        why = dict(decision.misses).get("autotune", "") or "nothing was measured"
        return TaskOutcome(asked.key, failed=_plain(decision.failed), why=why[:_LONGEST])
    return TaskOutcome(asked.key, _plain(decision.record))


def _plain(record: Record | None) -> dict[str, Any] | None:
    try:
        return None if record is None else record.as_json()
    except ConfigTypeError as error:
        raise SignatureError(f"a cfg cannot be sent: {error}") from error
