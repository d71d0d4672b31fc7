"""A worker of `LocalPool`: runs functions that it imports by their names, on text, until its parent is gone."""

from __future__ import annotations

import os
import queue
import threading

from ...tuning.worker.child_setup import set_up_child
from ...tuning.worker.protocol import Message, Receiver, Sender
from .by_name import named
from .client import said


def main() -> None:
    """Serves until the other side is gone."""
    set_up_child()
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
            answer = named(message.head["function"])(*message.head["texts"])
        # Of any class: the other side gets its words.
        except Exception as error:
            sender.send("failed", message=said(error))
        else:
            sender.send("done", [answer.encode()])


def _listen(receiver: Receiver, inbox: queue.SimpleQueue[Message]) -> None:
    while (message := receiver.receive()) is not None:
        inbox.put(message)
    # Whatever still runs goes with it, without a word.
    os._exit(0)
