"""Everything that one run of `autotune what-if` found, for its output and its report."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.whatif.answers.answers import Answer
from autotune.whatif.answers.curves import Curve
from autotune.whatif.answers.limits import Limits
from autotune.whatif.answers.slow_rank import SlowRank
from autotune.whatif.base import Base, Steady


@dataclass(frozen=True)
class MeasuredChange:
    """A change that was measured against the baseline in turns of the same run.

    `predicted`: the predicted speed-up with its interval, None without a prediction. `measured`:
    the median of the ratios of neighbouring turns, with its interval (95 %; None below six pairs).
    `baseline_s`, `changed_s`: median step times. `notes`: what the enacted change left out.
    """

    name: str
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    measured: float
    measured_low: float | None
    measured_high: float | None
    baseline_s: float
    changed_s: float
    pairs: int
    steps_per_turn: int
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Relative error of the predicted step time; None without a prediction."""
        return None if self.predicted is None else self.measured / self.predicted - 1


@dataclass(frozen=True, eq=False)
class Answered:
    """`base`: the step that what-ifs start from; `before`, `before_limits`: its replay.

    `recorded_s`: the replayed step as recorded. `least_s`: the base's without waits of unknown
    cause.
    `refusals`: what-ifs that were checked but not measured, with the reason.
    """

    source: str
    rank: int
    base: Base
    before: Steady
    before_limits: Limits
    recorded_s: float
    least_s: float
    answers: tuple[Answer, ...]
    slow: SlowRank | None = None
    over_workers: tuple[Curve, ...] = ()
    over_bandwidth: tuple[Curve, ...] = ()
    checked: tuple[MeasuredChange, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> tuple[Answer, ...]:
        """The answers with a prediction, the fastest step first."""
        predicted = [one for one in self.answers if one.prediction is not None]
        return tuple(sorted(predicted, key=_after_s))

    @property
    def refused(self) -> tuple[Answer, ...]:
        return tuple(one for one in self.answers if one.prediction is None)


def _after_s(answer: Answer) -> float:
    assert answer.prediction is not None
    return answer.prediction.after_s
