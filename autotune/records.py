"""Results of trials: a measurement or a failure, never a magic number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from autotune.arrays import FloatArray
from autotune.canonical import LATER
from autotune.errors import InvalidInput
from autotune.limits import check_range

CURRENT_SETUP = "current-setup"
"""Strategy id of the unchanged script: the user's own DDP with the user's arguments."""
MAX_LOG = 50.0
"""Largest logarithm of a change of a constant, a factor of 5e21, which no calibration reaches."""


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
    """Why a trial with a variable number of steps ended."""

    PRECISE = "precise"  # the interval of its median is as narrow as was asked for
    CAP = "cap"  # it took as many steps as it may
    LOSING = "losing"  # certainly far slower than the best
    ENDED = "script ended"  # the steps until then count


class Network(StrEnum):
    """The network that carries the gradients of a trial."""

    HOSTS = "hosts"  # the network of a real Ray cluster
    LOOPBACK = "loopback"  # processes of one machine
    EMULATED = "emulated"  # the shaped links of a testbed


class Accelerators(StrEnum):
    """The devices that compute."""

    REAL = "real"
    EMULATED = "emulated"  # waits of profiled durations; gradients and transfers are real


@dataclass(frozen=True)
class Conditions:
    """The real and the emulated parts of a trial; shown with every figure of the trial.

    With a `byte_scale` of k, each link has 1/k of its rate and each message sends 1/k of its bytes.
    Times are those of the whole cluster, except for the cost per message. `round_robin`: the ranks
    ran under real-time round-robin scheduling.
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
                "only a testbed scales links as well as bytes, "
                f"but the network is {self.network}; use --testbed"
            )

    @cached_property
    def label(self) -> str:
        """Everything that was not a real cluster, in words; empty if all was real."""
        parts = []
        if self.network is not Network.HOSTS:
            emulated = self.network is Network.EMULATED
            parts.append("emulated network" if emulated else "loopback of one machine")
        if self.accelerators is Accelerators.EMULATED:
            parts.append("emulated accelerators")
        if self.byte_scale != 1:
            parts.append(f"bytes and rates divided by {self.byte_scale:g}")
        return ", ".join(parts)


REAL_CONDITIONS = Conditions()


@dataclass(frozen=True)
class Measured:
    """`step_s[rank][step]`: duration of each timed step on each rank, in seconds.

    `gradient_error`: the numerics gate's largest relative difference of a synchronized gradient
    from the reference reduction (0.0 if bitwise equal); None if the gate was not run. `left_out`:
    timed steps missing from `step_s` because an evaluation interrupted them. `stopped`: None for a
    fixed number of steps. `overrun`: how much longer than the profile the real work of emulated
    accelerators took (relative to the profile's step, slowest rank, median over steps); None for
    real accelerators.
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
        """Duration of each step on its slowest rank, shape (steps,)."""
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
    """Why there is no measurement. `rank`: the first rank that failed, if known."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: FailureKind
    message: str
    rank: int | None = None


Outcome = Measured | Failed


@dataclass(frozen=True)
class TrialRequest:
    """One trial: `warmup_steps` untimed, then `timed_steps` timed steps of the running training.

    `strategy_id`: `CURRENT_SETUP` or a strategy's id. `attempt` counts repeats of a disturbed
    trial. Up to `most_steps` timed steps follow (0: none), until the relative half width of the
    median's interval is at most `precision`, or the interval lies above `losing_s`. A first look
    ends sooner, at the half width `first_look` (0: none).
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
    first_look: float = field(default=0.0, metadata=LATER)


@dataclass(frozen=True)
class Comparison:
    """The closing A/B: time(tuned) / time(current setup) over `pairs` interleaved pairs of blocks.

    `ratio` is the Hodges-Lehmann estimate, and the interval the exact one of the Wilcoxon
    signed-rank test. Both use the logarithms of the ratios of block medians (Hollander and Wolfe,
    Nonparametric Statistical Methods, ch. 3). So a disturbed pair counts by its rank and not by its
    size.

    `bounded`: whether the interval has its confidence. It has not if the comparison ended since the
    tuned side was clearly slower: the signs of the differences ended it.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    confidence: float
    bounded: bool = field(default=True, metadata=LATER)


@dataclass(frozen=True)
class Decision:
    """The export. `strategy_id` is `CURRENT_SETUP` unless the tuned one is significantly faster.

    `explanation`: prediction and measurement of the best candidate, and why they differ.
    """

    strategy_id: str
    reason: str
    comparison: Comparison | None
    best_candidate_id: str | None
    explanation: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class Constants:
    """Differences of the replay's constants from what was probed or assumed.

    `logs` by factor, `limits` by their name; see `simulators.constants`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    logs: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, log in self.logs.items():
            check_range(log, -MAX_LOG, MAX_LOG, f"the logarithm of the constant {name[:40]!r}")


@dataclass(frozen=True)
class RankingQuality:
    """Quality of one ranker on strategies that no simulator learned from.

    In a job's cross-validation the replay's constants were fitted to all trials, so the figures of
    rankers that use it are better than on new strategies.

    Accuracy is a mean over all test parts weighted by pairs; the rest are weighted by points.
    `regret_top_5` is that of test parts of more than 5 strategies, or None without one: the best of
    5 is always among the 5 predicted fastest.
    `gain`: pairwise accuracy above the replay's (without one, the analytic ranker's) on the same
    pairs, and `gain_error` its standard error. Both are None if unknown, and for rankers that are
    no simulators.
    """

    __pydantic_config__ = {"extra": "forbid"}

    ranker: str
    pairwise_accuracy: float
    kendall_tau: float
    regret_top_1: float
    regret_top_5: float | None
    pairs: int
    points: int
    gain: float | None = None
    gain_error: float | None = None
