"""Differences between two runs: other cfgs, other times, calls that only one of them has. No JAX here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import cfg as cfgs
from ..core import formatting
from ..core.description import one_line
from .gather import CallFacts, Subject

# Less than this between two runs is what a machine does by itself.
_SAME = 0.02


@dataclass(frozen=True)
class Difference:
    """One call in both runs, or in one of them."""

    name: str
    before: CallFacts | None
    after: CallFacts | None

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """The times before and after, as far as they are known."""
        return (
            None if self.before is None else self.before.seconds,
            None if self.after is None else self.after.seconds,
        )

    @property
    def ratio(self) -> float | None:
        """Time before over time after; None where one of them is not known."""
        then, now = self.seconds
        return then / now if then and now else None

    @property
    def what(self) -> str:
        """The difference in a few words; empty where there is none."""
        if self.before is None:
            return "new"
        if self.after is None:
            return "gone"
        said = []
        if not cfgs.same_kept(self.before.cfg, self.after.cfg):
            said.append(f"{formatting.short(self.before.cfg)} became {formatting.short(self.after.cfg)}")
        ratio = self.ratio
        if ratio is not None and abs(ratio - 1) > _SAME:
            said.append(f"{ratio:.2f} times as fast" if ratio > 1 else f"{1 / ratio:.2f} times as slow")
        return ", ".join(said)


def differences(before: Subject, after: Subject) -> list[Difference]:
    """The calls that differ, the largest change of time first."""
    then, now = ({one.key: one for one in subject.calls} for subject in (before, after))
    found = [Difference(_name(now.get(key) or then[key]), then.get(key), now.get(key)) for key in {**then, **now}]
    return sorted((one for one in found if one.what), key=lambda one: (-abs((one.ratio or 1.0) - 1), one.name))


def environments(before: Subject, after: Subject) -> Sequence[str]:
    """Versions and platforms in which the two runs differ."""
    names: dict[str, tuple[set[str], set[str]]] = {}
    for side, subject in enumerate((before, after)):
        for one in subject.calls:
            for name, value in one.environment.items():
                names.setdefault(name, (set(), set()))[side].add(str(value))
    return [
        f"{name}: {', '.join(sorted(then)) or 'unknown'} before, {', '.join(sorted(now)) or 'unknown'} now"
        for name, (then, now) in names.items()
        if then != now
    ]


def _name(facts: CallFacts) -> str:
    return one_line(facts.key.op_id, facts.call) if facts.call else f"{facts.key.op_id} {facts.key.call_key}"
