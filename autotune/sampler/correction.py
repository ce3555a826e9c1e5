"""Correct the replayed times of candidates by the trials of the job so far.

The Gaussian process of `autotune.simulators.gaussian_process` with fixed constants, which
`benchmarks.ranking` learned from other domains. Times and intervals that are shown have the whole
correction. The ranking has it at the strength that other domains support. A candidate whose time
is uncertain ranks as if it were a little faster, so that trials also go where the replay is least
known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.features.extract import StrategyFeatures
from autotune.features.timeline import TIMELINE_FEATURES
from autotune.simulators.gaussian_process import Correction, Experience, Kernel, Residuals
from autotune.simulators.interface import Example

KERNEL = Kernel(
    offset_sd=0.02,
    shared_sd=0.13,
    own_sd=0.077,
    noise_sd=0.029,
    lengths=(0.19, 1.6, 2.8, 0.25, 0.55),
)
"""Maximum likelihood on the residuals of nine domains (`datasets/outcome` until 552637da), with a
larger `offset_sd`: jobs on other machines may be off by more than those domains."""
STRENGTH = 0.25
"""Strength in the ranking that these domains support, by the same command."""
OPTIMISM = 0.5
"""Standard deviations by which an uncertain candidate ranks as if it were faster; assumed."""


@dataclass(frozen=True, eq=False)
class CorrectedTimes:
    """Seconds of candidates, shape (m,): to show, and to rank by.

    `sd`: relative standard deviation of a measurement around `shown_s`, with the noise of trials.
    """

    shown_s: FloatArray
    sd: FloatArray
    ranking_s: FloatArray


def experience(residuals: Residuals) -> Experience:
    """Learn from the trials of other jobs, by the fixed kernel."""
    return Experience(KERNEL, residuals)


NO_EXPERIENCE = experience(
    Residuals(np.zeros((0, len(TIMELINE_FEATURES))), np.zeros(0), np.zeros(0, dtype=np.int64))
)


def corrected_times(
    examples: Sequence[Example],
    candidates: Sequence[StrategyFeatures],
    others: Experience = NO_EXPERIENCE,
) -> CorrectedTimes:
    """Correct candidates, at least one, by this job's examples; all are replayed with timelines.

    `others`: what earlier jobs teach. It must be of replays with the same kind of constants.
    """
    replayed_s = _replayed_s(candidates)
    correction = _correction(examples, candidates, others)
    # The offset of the whole job leaves the order alone, and so does a common uncertainty.
    favoured = STRENGTH * (correction.mean - OPTIMISM * correction.sd)
    return CorrectedTimes(
        replayed_s * np.exp(correction.mean),
        np.hypot(correction.sd, others.kernel.noise_sd),
        replayed_s * np.exp(favoured),
    )


def _correction(
    examples: Sequence[Example], candidates: Sequence[StrategyFeatures], others: Experience
) -> Correction:
    own_x = _rows([example.features for example in examples])
    x = _rows(candidates)
    measured_s = np.array([example.step_s for example in examples])
    own_r = np.log(measured_s / _replayed_s([example.features for example in examples]))
    return others.correct(x, own_x, own_r)


def _rows(features: Sequence[StrategyFeatures]) -> FloatArray:
    """Features of the replayed steps, shape (n, F)."""
    rows = [one.timeline.row for one in features if one.timeline is not None]
    assert len(rows) == len(features), "candidates and examples are replayed with their timeline"
    return np.array(rows).reshape(len(rows), len(KERNEL.lengths))


def _replayed_s(features: Sequence[StrategyFeatures]) -> FloatArray:
    return np.array([one.replayed_step_s for one in features], dtype=np.float64)
