"""Do all candidates of a kernel compute the same thing? For kernel authors' own tests."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from ..config.tuning_job import job_for
from ..core.cfg import distinct
from ..core.kernel import Kernel, check_kernel
from ..core.record import Trial
from ..core.request import ask, candidates
from ..tuning.runner import InProcessRunner
from .arguments import invocation_of, split


def check(kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> tuple[Trial, ...]:
    """Runs every candidate of a call as a tuning would, values and gradients, and says what became of each.

    The heuristic cfg, which comes first, or the kernel's `reference` says what is right. Nothing is timed or kept.
    """
    check_kernel(kernel)
    options, keywords = split(kernel, kwargs)
    inv = invocation_of(kernel, args, keywords, options)
    request = ask(inv, kernel, "forward+backward")
    job = job_for(request, distinct(candidates(request)))
    with job.room(), contextlib.closing(InProcessRunner(job, seed=0, device=request.device)) as runner:
        runner.candidates.enter(job.candidates)
        runner.compile(math.inf)
        runner.check()
    return runner.candidates.trials()
