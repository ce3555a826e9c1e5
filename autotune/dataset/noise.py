"""The noise floor of a domain, and the share of stalled steps, which medians do not show.

The noise is the difference of two trials of one plan, as a relative standard deviation of their
medians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from autotune.dataset.trials import DatasetTrial, Domain, histories
from autotune.tuning.statistics import NORMAL_MEDIAN, neighbour_noise

FEWEST = 4
"""Least number of references, or of pairs of repeats, for a meaningful spread."""
STALL = 1.4
"""A step above this multiple of its trial's median has stalled."""


def reference_noise(domain: Domain) -> float | None:
    """Noise of the references' medians.

    It uses the differences of neighbours within a session, so slow drifts do not count.
    """
    logs = [
        np.log([median_s for _, median_s in history.references])
        for history in histories(domain.trials)
    ]
    differences = np.concatenate([np.diff(values) for values in logs]) if logs else np.empty(0)
    if len(differences) < FEWEST - 1:
        return None
    return float(np.median(np.abs(differences))) / (NORMAL_MEDIAN * math.sqrt(2))


def repeat_noise(domain: Domain) -> float | None:
    """Noise of undisturbed trials of one plan, which no model can explain.

    Each trial is corrected by the references around it (`Domain.steady_s`).
    """
    return noise_of_repeats(domain.plan_steady_s.values())


def noise_of_repeats(repeats: Iterable[Sequence[float]]) -> float | None:
    """Noise of trials, given the times of each plan in their order."""
    differences = [
        math.log(after / before) for values in repeats for before, after in pairwise(values)
    ]
    if len(differences) < FEWEST:
        return None
    return float(np.median(np.abs(differences))) / (NORMAL_MEDIAN * math.sqrt(2))


def step_noise(domain: Domain) -> float | None:
    """Noise of single steps within a trial, as the median over the trials."""
    noises = [neighbour_noise(trial.step_s) for trial in domain.trials if len(trial.step_s) > 2]
    return float(np.median(noises)) if noises else None


def stalled_share(trials: Iterable[DatasetTrial]) -> float | None:
    """Share of all steps that stalled; None without any step."""
    stalled = [step_s > STALL * trial.median_s for trial in trials for step_s in trial.step_s]
    return sum(stalled) / len(stalled) if stalled else None
