"""One process's part in one decision: publish a known cfg, or claim the topic and decide, or wait within limits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import AgreementError, NoConfigError
from ..core.request import Decision, Hit, Request
from ..core.stable import short_hash
from ..fleet.proposal import Proposal
from .heartbeat import LEASE, Heartbeat, HeartbeatWatch, beat_key
from .kv_store import KeyValueStore
from .manifest import Manifest, difference, manifest_of
from .messages import Claim, Verdict, by_this_process

# Moves with the format of what travels, so that processes with another one do not misread it.
ROOT = "ejkernel.ops/2"


@dataclass(frozen=True)
class Member:
    """A process among those that must agree."""

    service: KeyValueStore
    process: int
    processes: int
    heartbeat: Heartbeat
    # New at every start of the process.
    life: str
    lease: float = LEASE
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Topic:
    """Subject of one decision: equal in all processes that must run the same cfg."""

    platform: str
    op_id: str
    call_key: str
    objective: str
    # Explicit tunings of one key follow each other; a choice is made once.
    tuning: int = 0

    @property
    def folder(self) -> str:
        """The topic's folder in the service."""
        return f"{ROOT}/topic/{self.name}"

    @property
    def name(self) -> str:
        """A short name that is safe in a path."""
        parts = [self.platform, self.op_id, self.call_key, self.objective, self.tuning]
        return short_hash(json.dumps(parts))


def topic_of(request: Request, tuning: int = 0) -> Topic:
    """The topic of a request.

    Neither the kernel's version nor the kind of device is part of it: processes that differ there must meet, to be told
    so or to follow one of them, and not decide side by side.
    """
    return Topic(request.platform, request.kernel.op_id, request.key.call_key, request.objective, tuning)


# A verdict, and this process's own decision where that became the verdict.
VerdictAndDecision = tuple[Verdict, Decision | None]


class Participation:
    """One process's part in the decision on one topic."""

    def __init__(
        self, member: Member, proposal: Proposal, topic: Topic, seconds: float, report: Callable[[], object]
    ) -> None:
        self.member = member
        self.service = member.service
        self.proposal = proposal
        self.request = proposal.request
        self.topic = topic
        self.manifest = manifest_of(self.request)
        self.claim = f"{topic.folder}/claim"
        self.verdict = f"{topic.folder}/verdict"
        self.seconds = seconds
        self.end = member.clock() + seconds
        # Gives the earlier decisions, for messages.
        self.report = report

    def agree(self) -> VerdictAndDecision:
        """The verdict for all processes, and this process's decision where that became the verdict, kept already."""
        self._stop_at_a_conflict()
        found = self.service.under(self.topic.folder)
        if "verdict" in found:
            return self._follow(found["verdict"]), None
        # A process that knows a cfg publishes it at once, even while another one is tuning: the first verdict holds.
        known = self.proposal.known()
        if known is not None:
            verdict, is_ours = self._publish(known)
            return verdict, self.proposal.keep(known) if is_ours else None
        while True:
            agreed = self._wait(Claim.loads(found["claim"])) if "claim" in found else self._lead()
            if agreed is not None:
                return agreed
            found = self.service.under(self.topic.folder)

    def _lead(self) -> VerdictAndDecision | None:
        """Claims the topic and decides for all; None where another process claimed it first."""
        mine = Claim(self.member.process, self.member.life, self.manifest)
        with self.member.heartbeat.beating():
            if not self.service.set_once(self.claim, mine.dumps()):
                return None
            # A process that knew a cfg may have published it since this one asked: then nothing is measured.
            standing = self.service.get(self.verdict)
            if standing is not None:
                return self._follow(standing), None
            try:
                decision = self.proposal.make(self.seconds)
                self._stop_at_a_conflict()
                verdict, is_ours = self._publish(decision)
            # After any error the other processes must not wait for this one.
            except BaseException:
                self.service.remove(self.claim)
                raise
        # If this process was too slow, the verdict of another one stands, and holds here, too.
        return verdict, decision if is_ours else None

    def _wait(self, claim: Claim) -> VerdictAndDecision | None:
        """The verdict of the process that claimed the topic; None where the claim is gone."""
        self._compare(claim.process, claim.manifest)
        if claim.process == self.member.process:
            # The claim of a former life of this process: single flight keeps the threads of one life apart.
            self.service.remove(self.claim)
            return None
        key = beat_key(ROOT, claim.process)
        watch = HeartbeatWatch(self.service, key, claim.life, self.member.lease, self.member.clock)
        while True:
            left = self.end - self.member.clock()
            if left <= 0:
                return self._fall_back(f"process {claim.process} had not decided after {self.seconds:g} s")
            text = self.service.wait(self.verdict, min(watch.pause, left))
            if text is not None:
                return self._follow(text), None
            self._stop_at_a_conflict()
            if self.service.get(self.claim) is None:
                return None
            if not watch.alive():
                return self._fall_back(f"process {claim.process} stopped answering while it was deciding")

    def _fall_back(self, why: str) -> VerdictAndDecision:
        try:
            guess = self.proposal.guess()
        except NoConfigError as error:
            raise AgreementError(f"{why}, and there is nothing to fall back on: {error}") from error
        return self._publish(guess, why)[0], None

    def _publish(self, found: Decision | Hit, why: str = "") -> tuple[Verdict, bool]:
        """Publishes this process's verdict, and gives it with True; where one stands already, that one with False."""
        verdict = by_this_process(self.member.process, self.manifest, found, self.request.objective, why)
        if self.service.set_once(self.verdict, verdict.dumps(self.request)):
            return verdict, True
        standing = self.service.get(self.verdict)
        if standing is None:
            raise AgreementError(f"the verdict on {self.request.key} vanished from the service of jax.distributed")
        return self._follow(standing), False

    def _follow(self, text: str) -> Verdict:
        verdict = Verdict.loads(text)
        self._compare(verdict.process, verdict.manifest)
        return verdict.rebuilt(self.request)

    def _compare(self, process: int, there: Manifest) -> None:
        names = (f"process {process}", f"process {self.member.process}")
        found = difference(there, self.manifest, names)
        if found:
            message = f"processes of this program run different code for {self.request.key}: {found}"
            # Told to all processes: the others would wait for this one in their next collective.
            self.service.set_once(f"{ROOT}/conflict", message)
            raise self._conflict(message)

    def _stop_at_a_conflict(self) -> None:
        message = self.service.get(f"{ROOT}/conflict")
        if message is not None:
            raise self._conflict(message)

    def _conflict(self, message: str) -> AgreementError:
        return AgreementError(f"{message}. Run the same code on all processes\n{self.report()}")
