"""A worker of `LocalPool`: runs functions that it imports by their names, on text, until its parent is gone."""

from __future__ import annotations

import importlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from ...tuning.worker.protocol import Message, Receiver, Sender
from ...tuning.worker.settle import settle_in
from .courier import said


def main() -> None:
    """Serves until the other side is gone."""
    settle_in()
    # What libraries print must not get between the messages.
    sender = Sender(os.dup(1))
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(Receiver(os.dup(0)), inbox), daemon=True).start()
    while True:
        message = inbox.get()
        if message.verb == "start":
            sender.send("hello")
            continue
        try:
            answer = _function(message.head["function"])(*message.head["texts"])
        # Of any class: the other side gets its words.
        except Exception as error:
            sender.send("failed", message=said(error))
        else:
            sender.send("done", [answer.encode()])


def _function(path: str) -> Callable[..., str]:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _listen(receiver: Receiver, inbox: queue.SimpleQueue[Message]) -> None:
    while (message := receiver.receive()) is not None:
        inbox.put(message)
    # Whatever still runs goes with it, without a word.
    os._exit(0)
