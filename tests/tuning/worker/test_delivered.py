"""Executables that other processes compile: waited for by threads of a worker, and never the end of a candidate."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import Staged
from ejkernel.ops.tuning.candidates import CandidateSet
from ejkernel.ops.tuning.compile import CandidateCompiler
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker.ahead_compiler import AheadCompiler
from ejkernel.ops.tuning.worker.delivered import Deliveries, Delivery, NotDelivered
from ejkernel.ops.tuning.worker.executables import compiled, written_down
from ejkernel.ops.tuning.worker.limits import Isolation
from ejkernel.ops.tuning.worker.main import ImportingBuilder, _listen
from ejkernel.ops.tuning.worker.protocol import Message
from ejkernel.ops.tuning.worker.session import WorkerSession, _deliver

X = jnp.arange(6.0)


@pytest.fixture(scope="module")
def program():
    """A program as bytes."""
    return bytes(jax.export.export(jax.jit(lambda x: [x + 1]))(X).serialize())


@pytest.fixture(scope="module")
def executable(program):
    """The same, compiled."""
    return written_down(compiled(program, for_speed=True).executable)


class Waiting(threading.Thread):
    """A thread that takes an executable, and what came of it."""

    def __init__(self, delivered, program, name="a"):
        super().__init__(daemon=True)
        self.outcome = None
        self.work = lambda: delivered.take(name, program, for_speed=True)
        self.start()
        # It holds no lock once it waits.
        while not delivered._changed._waiters and self.is_alive():
            time.sleep(0.001)

    def run(self):
        """Takes it."""
        try:
            self.outcome = self.work()
        except NotDelivered as error:
            self.outcome = error

    def ended(self):
        """The outcome; a thread that waits for ever is a failure."""
        self.join(30)
        assert not self.is_alive()
        return self.outcome


def test_an_executable_is_loaded_once_it_is_there(program, executable):
    """And taken once: then it is compiled."""
    delivered = Deliveries()
    waiting = Waiting(delivered, program)
    delivered.arrive("a", Delivery(executable))
    found = waiting.ended()
    assert (found.executable(X)[0] == X + 1).all()
    assert delivered.take("a", program, for_speed=True) is None
    assert not delivered.refused


def test_two_threads_that_wait_for_one_executable_both_go_on(program):
    """Two candidates may have one program: it comes twice, perhaps before any of them has looked."""
    delivered = Deliveries()
    both = [Waiting(delivered, program) for _ in range(2)]
    with delivered._changed:
        delivered.arrive("a", Delivery())
        delivered.arrive("a", Delivery())
    assert [one.ended() for one in both] == [None, None]
    # What comes after it was taken is not kept.
    delivered.arrive("a", Delivery(b"large"))
    assert not delivered._arrived


def test_what_cannot_be_loaded_is_compiled_here(program):
    """As for another version or device; the reason goes with the program."""
    delivered = Deliveries()
    delivered.arrive("a", Delivery(b"of another version"))
    about = {"number": 0, "compiler_timing": "", "outputs": 1, "objective": "forward", "compiled_as": "a"}
    builder = ImportingBuilder({0: (program, about)}, AheadCompiler(), delivered, one_by_one=False)
    staged = Staged("x", "forward", "", None, lambda executable: executable, portable=builder.programs[0])
    made = builder.build(staged, staged)
    assert (made.call(X)[0] == X + 1).all()
    assert "cannot be loaded (UnpicklingError" in made.notes


def test_what_took_processes_down_is_not_compiled_here(program):
    """It would take this one down."""
    delivered = Deliveries()
    delivered.arrive("a", Delivery(why="SIGSEGV"))
    with pytest.raises(NotDelivered, match="SIGSEGV"):
        delivered.take("a", program, for_speed=True)


@pytest.mark.parametrize("then", ["wait", "begin"])
def test_no_thread_waits_for_an_earlier_tuning(program, then):
    """Also where the next one begins before the thread has looked."""
    delivered = Deliveries()
    waiting = Waiting(delivered, program)
    with delivered._changed:
        delivered.stop_waiting()
        getattr(delivered, then)()
    assert "time was up" in str(waiting.ended())


def test_a_candidate_that_waits_for_an_executable_is_not_at_work(program, executable):
    """A worker that dies meanwhile, or a process that does not come to an end, is not its doing."""
    delivered, told = Deliveries(), []
    about = {
        "number": 0,
        "compiler_timing": "",
        "outputs": 1,
        "objective": "forward",
        "compiled_as": "a",
        "arguments": None,
    }
    builder = ImportingBuilder({0: (program, about)}, AheadCompiler(), delivered, one_by_one=False)
    observer = SimpleNamespace(
        trying=lambda cfg, doing, program="": told.append(doing), came_back=lambda cfg, doing: told.append(f"{doing}d")
    )
    job = TuningJob(lambda cfg: lambda x: [x + 1], (X,), {}, ())
    compiler = CandidateCompiler(
        *(job, CandidateSet(), flatten_call((X,), {}), [X]),
        seed=0,
        device=jax.devices()[0],
        builder=builder,
        observer=observer,
    )
    compiler.open(1)
    compiler.add(*compiler.candidates.enter([0]))
    while not delivered._changed._waiters:
        time.sleep(0.001)
    assert told == ["lower", "lowerd"]
    delivered.arrive("a", Delivery(executable))
    compiler.until(math.inf)
    compiler.finish()
    assert told[2:] == ["compile", "compiled"]
    compiler.close()


def test_what_a_worker_cannot_prepare_does_not_stop_it_from_listening():
    """Its tuning compiles it, and says why not."""
    ahead, inbox = AheadCompiler(), []
    ahead.begin()
    messages = [Message({"verb": "prepare", "draws": [[["no dtype", [1]]]]}, [b"no program"]), Message({"verb": "run"})]

    class Ended(BaseException):
        pass

    def receive():
        if not messages:
            raise Ended
        return messages.pop(0)

    with pytest.raises(Ended):
        _listen(SimpleNamespace(receive=receive), SimpleNamespace(put=inbox.append), ahead, Deliveries())
    assert [message.verb for message in inbox] == ["run"]


def test_a_worker_is_not_silent_while_its_candidates_wait_for_other_processes():
    """With nothing to wait for it is, and is ended."""
    coming, said = Future(), [None] * 3
    session = WorkerSession(
        TuningJob(None, (), {}, ()), CandidateSet(), list, None, Isolation(), warmup=1, iters=1, seed=0
    )
    session._coming = [coming]
    seen = []
    session.watchdog.poll = lambda *args, **how: seen.append(session.watchdog._heard) and None

    def hear():
        if said:
            session.watchdog._heard = 0.0
            return said.pop()
        coming.set_result(Delivery())
        session.watchdog._heard = 0.0
        session.watchdog.poll = lambda *args, **how: seen.append(session.watchdog._heard) or pytest.fail("stop")
        return None

    with pytest.raises(pytest.fail.Exception):
        session._follow(SimpleNamespace(hear=hear, memory=lambda: 0))
    assert all(seen[:3])
    assert seen[3] == 0.0


def test_a_worker_that_has_ended_gets_no_executable():
    """It would stay in a queue that is never read."""
    coming, sent = Future(), []
    coming.set_result(Delivery(b"large"))
    for is_alive in (False, True):
        worker = SimpleNamespace(is_alive=lambda is_alive=is_alive: is_alive, send=lambda *a, **how: sent.append(how))
        _deliver(worker, "a", coming)
    assert json.loads(json.dumps(sent)) == [{"name": "a", "why": "", "for_speed": True, "seconds": 0.0}]
