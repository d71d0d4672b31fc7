"""Agreement: every process of a `jax.distributed` program runs the same cfg for a call.

Processes with different cfgs would run different programs, and their collectives would hang. So each call is decided
once. The program's key-value service holds one verdict for each topic (platform, operation, call and objective), and
it is set once: the service takes the first write and refuses all later ones. A process that is refused reads the
standing verdict and follows it.

A process that knows a cfg publishes it at once. Otherwise one process claims the topic, tunes and publishes; the
others wait for the verdict and watch the heartbeat of the claimant. If the heartbeat stops, or the wait is too long, a
waiting process publishes the heuristic cfg, so no process waits for ever. A process with other code than the claimant
publishes a conflict, which stops every process with an error. A verdict stands until `jax.distributed` ends.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._jax import Distributed, distributed
from ..core import invalidation
from ..core.cfg import same
from ..core.errors import AgreementError
from ..core.kernel import check_cfg_type
from ..core.key import Key
from ..core.request import Decision, Hit, Keep, Request
from ..core.single_flight import SingleFlight
from ..fleet.proposal import Proposal
from .heartbeat import LEASE, Heartbeat, beat_key
from .kv_store import KeyValueStore
from .protocol import ROOT, Member, Participation, Topic, topic_of
from .report import Agreed, AgreementReport


class AgreementWarning(UserWarning):
    """A decision that fell back on the heuristic cfg, or one that this process's caches contradict."""


class Agreement:
    """The decisions that this process shares with the others of its program."""

    def __init__(
        self,
        service: KeyValueStore,
        process: int,
        processes: int,
        *,
        lease: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        life = uuid.uuid4().hex
        heartbeat = Heartbeat(service, beat_key(ROOT, process), life, lease)
        self.member = Member(service, process, processes, heartbeat, life, lease, clock)
        self._agreed: dict[Topic, Agreed] = {}
        self._flights = SingleFlight()
        self._tunings: Counter[Topic] = Counter()
        self._told: set[Key] = set()
        self._lock = threading.Lock()

    def decide(self, proposal: Proposal, seconds: float) -> Decision:
        """The cfg that all processes of the program run this call with."""
        topic = self._topic(proposal)
        agreed = self._agreed.get(topic)
        if agreed is None:
            with self._flights.hold(topic):
                agreed = self._agreed.get(topic)
                if agreed is None:
                    return self._agree(Participation(self.member, proposal, topic, seconds, self.report))
        return self._again(proposal, agreed)

    def standing(self, request: Request) -> Hit | None:
        """The agreed cfg of a request, or None where this process has not asked for it yet."""
        agreed = self._agreed.get(topic_of(request))
        return None if agreed is None else _hit(agreed, first=False)[0]

    def report(self) -> AgreementReport:
        """The decisions so far, with the waits of all processes."""
        rows = [replace(agreed, waited=self._waits(topic)) for topic, agreed in list(self._agreed.items())]
        return AgreementReport(self.member.process, self.member.processes, tuple(rows))

    def _topic(self, proposal: Proposal) -> Topic:
        topic = topic_of(proposal.request)
        if not proposal.is_tuning:
            return topic
        with self._lock:
            self._tunings[topic] += 1
            return replace(topic, tuning=self._tunings[topic])

    def _agree(self, asking: Participation) -> Decision:
        start = self.member.clock()
        verdict, decision = asking.agree()
        key = asking.request.key
        waited = 0.0 if decision is not None else self.member.clock() - start
        agreed = Agreed(
            *(key, asking.request.objective, verdict.cfg, verdict.process, verdict.tier, verdict.tuned_for),
            why=verdict.why,
            measured=verdict.measured,
        )
        self.member.service.set(f"{ROOT}/waited/{asking.topic.name}/{self.member.process}", f"{waited:.6f}")
        self._agreed[asking.topic] = agreed
        if verdict.why:
            warnings.warn(
                f"{key} runs with its heuristic cfg on all processes: {verdict.why}. Tune it before the program "
                "starts, or raise EJKERNEL_OPS_AGREE_SECONDS",
                AgreementWarning,
                stacklevel=2,
            )
        return decision or asking.proposal.keep(*_hit(agreed, first=True))

    def _again(self, proposal: Proposal, agreed: Agreed) -> Decision:
        request = proposal.request
        if agreed.key.op_id != request.key.op_id:
            raise AgreementError(
                f"this process has two versions of one kernel, {agreed.key.op_id} and {request.key.op_id}, and the "
                "processes agree by operation; give one of them an op_id of its own"
            )
        check_cfg_type(request.kernel, agreed.cfg, "the agreed cfg")
        other = proposal.known()
        if other is not None and not same(other.cfg, agreed.cfg) and request.key not in self._told:
            self._told.add(request.key)
            warnings.warn(
                f"{request.key} has another cfg in this process's caches by now, {other.cfg!r}, but the processes of "
                f"this program agreed on {agreed.cfg!r} and keep it until jax.distributed ends; use cfg= or an overlay "
                "on all processes to change it",
                AgreementWarning,
                stacklevel=2,
            )
        return proposal.keep(*_hit(agreed, first=False))

    def _waits(self, topic: Topic) -> dict[int, float]:
        found = self.member.service.under(f"{ROOT}/waited/{topic.name}")
        return {int(process): float(seconds) for process, seconds in found.items()}


def _hit(agreed: Agreed, *, first: bool) -> tuple[Hit, tuple[tuple[str, str], ...]]:
    """An agreed cfg as the hit that a selector keeps, with the reason why nothing was tuned where that is so."""
    data = {"process": agreed.process, "tier": agreed.tier}
    if not agreed.measured:
        reason = agreed.why or f"process {agreed.process} decided so for all"
        return Hit(agreed.cfg, "heuristics", "heuristics", data), (("autotune", reason),)
    # Only the first choice writes to memory: the user may have put another cfg there since.
    keep = Keep.MEMORY if first else Keep.NOTHING
    data = {"level": "memory", **data}
    return Hit(agreed.cfg, "memory", "cache_hit", data, keep, measured=True, objective=agreed.tuned_for), ()


# The agreement of the `jax.distributed` that runs now, with the client that tells it from an earlier one.
_session: tuple[Any, Agreement] | None = None
_session_lock = threading.Lock()


def agree(proposal: Proposal, seconds: float) -> Decision:
    """The decision of all processes of this program."""
    now = distributed()
    # `jax.distributed` ended after the caller found it running: this process decides alone.
    if now is None:
        return proposal.make()
    return _agreement(now).decide(proposal, seconds)


def standing(request: Request) -> Hit | None:
    """The cfg that the processes of this program agreed on for a request, or None where this one has not asked."""
    now = distributed()
    return None if now is None else _agreement(now).standing(request)


def _agreement(now: Distributed) -> Agreement:
    global _session
    with _session_lock:
        if _session is None or _session[0] is not now.client:
            if _session is not None:
                # Other processes, or restarted ones, may decide otherwise: every choice is made again.
                invalidation.note_everything()
            service = KeyValueStore(now.client, now.coordinator)
            _session = (now.client, Agreement(service, now.process, now.processes))
        return _session[1]


def agreement_report() -> AgreementReport:
    """The decisions of this program's processes, as far as this process asked; empty in a program of one process."""
    now = distributed()
    return AgreementReport(0, 1) if now is None else _agreement(now).report()
