"""Where a budget of tuning pays: each call's share of the program's time, measured with its heuristic cfg."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..config.tiers import Off
from ..config.tunability import untunable_because
from ..config.tuning_job import job_for
from ..core.candidates import candidates
from ..core.cfg import distinct
from ..core.errors import TuningError
from ..core.key import Key
from ..core.record import Objective
from ..core.request import ask
from ..settings import default_folder
from ..tuning.budget import spending
from ..tuning.device_lock import device_lock
from ..tuning.tuner import Tuner
from .found_call import FoundCall


@dataclass(frozen=True)
class Share:
    """What a call costs a run of the program, and what one candidate of it costs a tuning."""

    seconds: float
    # Less than this would measure nothing but the heuristic cfg.
    least: float = 0.0


def share_of(call: FoundCall, left: float) -> Share:
    """Times the heuristic cfg in the seconds that are left; a call with nothing to measure costs nothing."""
    selector = call.selectors[0]
    # Settings have turned tuning off, or the process has had its share.
    if isinstance(selector._unless_off(), Off):
        return Share(0.0)
    with call.restored():
        objective: Objective = "forward+backward" if selector.policy.validate_backward else "forward"
        request = ask(replace(call.inv, override_cfg=None), call.kernel, objective)
        cfgs = candidates(request)
        if len(distinct(cfgs)) == 1 or untunable_because(request, cfgs[0]) is not None:
            return Share(0.0)
        job = replace(job_for(request, cfgs[:1]), seconds=left)

        def lock(wait: float) -> AbstractContextManager[None]:
            return device_lock(request.key.device, default_folder() / "locks", wait)

        start = time.perf_counter()
        try:
            with spending(), jax.default_device(request.device):
                record = _tuner(selector).tune(job, device_lock=lock)
        # Its candidates may do better; what it costs is not known.
        except TuningError:
            return Share(math.nan)
    return Share((record.trials[0].seconds or 0.0) * call.count, 2 * (time.perf_counter() - start))


def _tuner(selector: Any) -> Any:
    # A tuner of the user's own measures in its own way, and says nothing about it.
    return selector.tuner if isinstance(selector.tuner, Tuner) else Tuner()


def known_shares(shares: Mapping[Key, Share]) -> dict[Key, Share]:
    """The shares with a middling one for each call whose cost is not known."""
    known = sorted(share.seconds for share in shares.values() if not math.isnan(share.seconds))
    middling = known[len(known) // 2] if known else 1.0
    return {key: replace(s, seconds=middling) if math.isnan(s.seconds) else s for key, s in shares.items()}


def in_order(calls: Sequence[FoundCall], shares: Mapping[Key, Share]) -> list[FoundCall]:
    """The costliest first; a kernel inside another one before that one, whatever it costs itself."""
    by_key = {call.key: call for call in calls}

    def weight(key: Key) -> float:
        return max([shares[key].seconds, *(weight(outer) for outer in by_key[key].outer if outer in by_key)])

    return sorted(calls, key=lambda call: (-weight(call.key), call.order))


def allotted(call: FoundCall, rest: Sequence[FoundCall], shares: Mapping[Key, Share], left: float) -> float | None:
    """The seconds of a call among those still to do; None where what is left is not enough for it."""
    mine = shares[call.key]
    if left <= 0 or left < mine.least:
        return None
    total = sum(shares[other.key].seconds for other in rest)
    return max(mine.least, left * mine.seconds / total) if total else left
