"""What a trial yields: a measurement or a failure, never a magic number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from autotune.arrays import FloatArray
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


class Stopped(StrEnum):
    """Why a trial with a free number of steps took no more."""

    PRECISE = "precise"  # the interval of its median is as narrow as was asked for
    CAP = "cap"  # it took as many steps as it may
    LOSING = "losing"  # far slower than the best for certain
    ENDED = "script ended"  # what was measured until then counts


class Network(StrEnum):
    """What the gradients of a trial travel over."""

    HOSTS = "hosts"  # the network of a real Ray cluster
    LOOPBACK = "loopback"  # processes of one machine
    EMULATED = "emulated"  # the shaped links of a testbed


class Accelerators(StrEnum):
    """What computes."""

    REAL = "real"
    EMULATED = "emulated"  # timed waits of profiled durations; parameters, gradients and transfers are real


@dataclass(frozen=True)
class Conditions:
    """What in a trial was real, and what stood for something else; shown wherever the trial's figures stand.

    With a `byte_scale` of k, every link has 1/k of its rate and every message carries 1/k of its bytes: the times are those of
    the whole cluster, but for the cost per message. `round_robin`: the ranks ran under real-time round-robin scheduling.
    """

    __pydantic_config__ = {"extra": "forbid"}

    network: Network = Network.HOSTS
    accelerators: Accelerators = Accelerators.REAL
    byte_scale: float = 1.0
    round_robin: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.byte_scale < float("inf"):
            raise InvalidInput(f"byte_scale must be at least 1, but is {self.byte_scale}")
        if self.byte_scale != 1 and self.network is not Network.EMULATED:
            raise InvalidInput(
                f"only a testbed scales links as well as bytes, but the network is {self.network}; use --testbed"
            )

    @cached_property
    def label(self) -> str:
        """For people: what was not a real cluster; empty where everything was."""
        parts = []
        if self.network is not Network.HOSTS:
            parts.append(
                "emulated network"
                if self.network is Network.EMULATED
                else "loopback of one machine"
            )
        if self.accelerators is Accelerators.EMULATED:
            parts.append("emulated accelerators")
        if self.byte_scale != 1:
            parts.append(f"bytes and rates divided by {self.byte_scale:g}")
        return ", ".join(parts)


REAL_CONDITIONS = Conditions()


@dataclass(frozen=True)
class Measured:
    """`step_s[rank][step]`: duration of every timed step on every rank, in seconds.

    `gradient_error` is the numerics gate's figure: the largest relative difference of a synchronized
    gradient from the reference reduction (0.0 where they are bitwise equal); None if it was not run.
    `left_out` counts timed steps that are not in `step_s`, as an evaluation interrupted them. `stopped` is None where the
    number of steps was fixed. `overrun`: how much longer than the profile the real work of emulated accelerators took
    (relative to the profile's step, on the slowest rank, median over steps); None where accelerators were real.
    """

    __pydantic_config__ = {"extra": "forbid"}

    step_s: tuple[tuple[float, ...], ...]
    gradient_error: float | None = None
    left_out: int = 0
    stopped: Stopped | None = None
    overrun: float | None = None

    def __post_init__(self) -> None:
        if not self.step_s or not self.step_s[0] or len({len(row) for row in self.step_s}) != 1:
            raise InvalidInput(
                "a measurement needs the same number of steps, at least one, from every rank"
            )

    @cached_property
    def slowest_s(self) -> FloatArray:
        """Duration of each step on the rank that was slowest in it, shape (steps,)."""
        slowest: FloatArray = np.asarray(self.step_s, dtype=np.float64).max(axis=0)
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

    Up to `most_steps` timed steps follow (0: no further ones), until the relative half width of the median's interval is at most
    `precision` or the interval lies above `losing_s`; see `measurement.stop_reason`.
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
    most_steps: int = 0
    precision: float = 0.0
    losing_s: float | None = None


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


@dataclass(frozen=True)
class RankingQuality:
    """Held-out quality of one ranker of strategies.

    Accuracy is a mean over all test parts weighted by their pairs, the rest weighted by their points.
    `gain`: pairwise accuracy above the replay's (without a replay, the analytic ranker's) on the same
    pairs, and `gain_error` its standard error. Both are None for rankers that are no simulators, and
    where they are unknown.
    """

    __pydantic_config__ = {"extra": "forbid"}

    ranker: str
    pairwise_accuracy: float
    kendall_tau: float
    regret_top_1: float
    regret_top_5: float
    pairs: int
    points: int
    gain: float | None = None
    gain_error: float | None = None
