"""What became of one input, and the sum over a campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """The last three are faults."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    TRACEBACK = "tracebacks"
    HANG = "hangs"
    OVER_MEMORY = "over_memory"


FAULTS = (Outcome.TRACEBACK, Outcome.HANG, Outcome.OVER_MEMORY)


@dataclass(frozen=True)
class Result:
    """One input: `key` repeats it (`--repeat KEY`); `detail` is the end of a traceback."""

    key: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Tally:
    """Counts by reader and outcome, the faults themselves, and the slowest input."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    faults: list[Result] = field(default_factory=list)
    slowest: Result = Result("", Outcome.ACCEPTED)

    def add(self, result: Result) -> None:
        reader = result.key.rpartition(":")[0]
        self.counts.setdefault(reader, Counter())[result.outcome] += 1
        if result.outcome in FAULTS:
            self.faults.append(result)
        if result.seconds > self.slowest.seconds:
            self.slowest = result

    def total(self, outcome: Outcome) -> int:
        return sum(count[outcome] for count in self.counts.values())

    @property
    def inputs(self) -> int:
        return sum(count.total() for count in self.counts.values())
