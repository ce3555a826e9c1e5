"""What a trial yields: a measurement or a failure, never a magic number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.errors import InvalidInput

CURRENT_SETUP = "current-setup"
"""Strategy id of the script as it is: the user's own DDP with the user's own arguments."""


class FailureKind(StrEnum):
    CRASH = "crash"
    HANG = "hang"
    OUT_OF_MEMORY = "out-of-memory"
    NUMERICS = "numerics"
    REFUSED = "refused"  # the runtime cannot enact the plan for this model


class Role(StrEnum):
    """Why a trial was run."""

    CANDIDATE = "candidate"
    REFERENCE = "reference"  # the current setup again, to see whether the machine was disturbed
    AB = "ab"  # a block of the closing A/B comparison


@dataclass(frozen=True)
class Measured:
    """`step_s[rank][step]`: duration of every timed step on every rank, in seconds.

    `gradient_error` is the numerics gate's figure: the largest relative difference of a synchronized
    gradient from the reference reduction (0.0 where they are bitwise equal); None if it was not run.
    """

    __pydantic_config__ = {"extra": "forbid"}

    step_s: tuple[tuple[float, ...], ...]
    gradient_error: float | None = None

    def __post_init__(self) -> None:
        if not self.step_s or not self.step_s[0] or len({len(row) for row in self.step_s}) != 1:
            raise InvalidInput("a measurement needs the same number of steps, at least one, from every rank")

    @cached_property
    def slowest_s(self) -> NDArray[np.float64]:
        """Duration of each step on the rank that was slowest in it, shape (steps,)."""
        slowest: NDArray[np.float64] = np.asarray(self.step_s, dtype=np.float64).max(axis=0)
        return slowest

    @cached_property
    def median_s(self) -> float:
        return float(np.median(self.slowest_s))

    @cached_property
    def quartiles_s(self) -> tuple[float, float]:
        low, high = np.quantile(self.slowest_s, [0.25, 0.75])
        return float(low), float(high)


@dataclass(frozen=True)
class Failed:
    """Why there is no measurement. `rank` is the first rank that failed, if it is known."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: FailureKind
    message: str
    rank: int | None = None


Outcome = Measured | Failed


@dataclass(frozen=True)
class TrialRequest:
    """One trial: `warmup_steps` untimed, then `timed_steps` timed steps of the running training.

    `strategy_id` is `CURRENT_SETUP` or the id of a strategy. `attempt` counts repeats of a disturbed trial.
    """

    __pydantic_config__ = {"extra": "forbid"}

    number: int
    strategy_id: str
    role: Role
    warmup_steps: int
    timed_steps: int
    round: int = 0
    attempt: int = 0
    predicted_s: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The closing A/B: time(tuned) / time(current setup) over `pairs` interleaved pairs of blocks.

    `ratio` is the Hodges-Lehmann estimate and the interval the exact one of the Wilcoxon signed-rank test, both on the
    logarithms of the ratios of the blocks' medians (Hollander and Wolfe, Nonparametric Statistical Methods, ch. 3): a pair
    during which the machine changed counts by its rank and not by its size.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    confidence: float


@dataclass(frozen=True)
class Decision:
    """What is exported. `strategy_id` is `CURRENT_SETUP` unless the tuned strategy is significantly faster."""

    strategy_id: str
    reason: str
    comparison: Comparison | None
    best_candidate_id: str | None
