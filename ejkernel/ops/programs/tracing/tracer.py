"""The process that traces and compiles: calls come in as text, programs and executables go out. Nothing runs here."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import jax

from ...config.cache import traced_anew
from ...config.call_log import CallLog, noting_calls
from ...config.tuning_job import job_for
from ...core.device import default_device, device_fingerprint
from ...core.errors import SignatureError
from ...core.key import Key
from ...core.request import Request, ask, revived
from ...core.stable import jax_dtype
from ...core.trace_context import TraceContext
from ...timing.inputs import FlatCall, flatten_call
from ...timing.program import CotangentShapes, first_line, stage
from ...tuning.job import TuningJob
from ...tuning.worker.child_setup import set_up_child
from ...tuning.worker.executables import compiled, written_down
from ...tuning.worker.export import EXPORTED, export
from ...tuning.worker.main import take_device
from ...tuning.worker.protocol import Message, Receiver, Sender
from ...tuning.worker.runner import export_platform
from ...tuning.worker.tracing import shapes_of
from ..pool.serialization import rebuilt_call
from ..pool.task import AskedCall

# What is made while a candidate is traced lives until the next one: looking for garbage in it was an eighth of the time
# for tracing and writing down the candidates of an expert layer.
_OBJECTS_BETWEEN_COLLECTIONS = 200_000
# The last of all: the worker's own compilations, which measuring waits for, took twice as long beside them.
_NICE = 19


def main() -> None:
    """Serves until the other side is gone."""
    set_up_child()
    # What libraries print must not get between the messages.
    tracer = Tracer(Sender(os.dup(1)))
    os.dup2(2, 1)
    receiver = Receiver(os.dup(0))
    while (message := receiver.receive()) is not None:
        tracer.obey(message)
    os._exit(0)


@dataclass(frozen=True)
class RebuiltCall:
    """A call as its kernel makes it here."""

    request: Request
    trace_context: TraceContext
    job: TuningJob
    flat: FlatCall
    cotangents: CotangentShapes

    @staticmethod
    def read(about: Mapping[str, Any], device: jax.Device) -> RebuiltCall:
        """The call behind its text; a `SignatureError` where another key comes out of it here."""
        asked = AskedCall(**{**about, "key": Key(*about["key"])})
        kernel, inv, trace_context = rebuilt_call(asked, device_fingerprint(device))
        with trace_context.entered():
            request = ask(inv, kernel, asked.objective)
            if request.key != asked.key:
                raise SignatureError(f"it has another key here, {request.key}")
            job = job_for(request, ())
        return RebuiltCall(request, trace_context, job, flatten_call(job.args, job.kwargs), CotangentShapes())


@final
class Tracer:
    """Does what it is told."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._imports: list[str] = []
        self._texts: dict[str, str] = {}
        self._calls: dict[str, RebuiltCall] = {}

    def obey(self, message: Message) -> None:
        """One message."""
        head = message.head
        if message.verb == "start":
            self._imports = head["imports"]
            device = take_device(head)
            if device.platform != "cpu":
                # The process that measures goes before those that compile.
                os.nice(_NICE)
            # JAX and the kernels are there for good.
            gc.freeze()
            gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
            self._sender.send("hello", kind=device.device_kind, jax=jax.__version__)
        elif message.verb == "call":
            self._texts[head["name"]] = head["text"]
        else:
            try:
                if message.verb == "compile":
                    verb, made, about = "compiled", *self._compiled(bytes(message.parts[0]), head["quickly"])
                else:
                    verb, made, about = "traced", *self._traced(head["name"], head["cfg"])
            # Whatever it raises: the other process does it, and says why not.
            except Exception as error:
                self._sender.send("refused", why=first_line(error))
                return
            self._sender.send(verb, [made], **about)

    def _compiled(self, data: bytes, quickly: bool) -> tuple[bytes, dict[str, Any]]:
        # Where the compiler would run parts of it on the device, which is being measured on, it does not.
        found = compiled(data, for_speed=not quickly)
        return written_down(found.executable), {"for_speed": found.for_speed, "seconds": found.seconds}

    def _traced(self, name: str, cfg: Any) -> tuple[bytes, dict[str, Any]]:
        device = default_device()
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = RebuiltCall.read(json.loads(self._texts[name]), device)
        log = CallLog()
        with call.trace_context.entered(), call.job.room(), traced_anew(), noting_calls(log):
            fn = call.job.make_fn(revived(call.request, cfg))
            shapes = [jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype)) for leaf in call.flat.leaves]
            staged = stage(fn, call.flat, shapes, call.request.objective, name=EXPORTED, cotangents=call.cotangents)
            program = export(staged, export_platform(device), self._imports)
        if log.sightings or log.unseen:
            raise SignatureError("it calls other kernels, for which the tuning process chooses")
        about = replace(program, data=b"", structure=str(program.structure), extra=shapes_of(program.extra))
        return program.data, {**vars(about), "data": None, "notes": staged.notes}
