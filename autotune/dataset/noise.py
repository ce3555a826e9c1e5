"""How far two trials of the same thing differ: the noise floor of a domain, as relative standard deviations of a trial's median; and how
often a step takes much longer than its trial's others, which medians do not show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from autotune.dataset.trials import DatasetTrial, Domain, histories
from autotune.tuning.statistics import NORMAL_MEDIAN, neighbour_noise

FEWEST = 4
"""References or pairs of repeats below which their spread says nothing."""
STALL = 1.4
"""A step that takes so many times its trial's median has stalled."""


def reference_noise(domain: Domain) -> float | None:
    """Of the references' medians, from the differences of neighbours within a session, so that slow drifts do not count."""
    logs = [
        np.log([median_s for _, median_s in history.references])
        for history in histories(domain.trials)
    ]
    differences = np.concatenate([np.diff(values) for values in logs]) if logs else np.empty(0)
    if len(differences) < FEWEST - 1:
        return None
    return float(np.median(np.abs(differences))) / (NORMAL_MEDIAN * math.sqrt(2))


def repeat_noise(domain: Domain) -> float | None:
    """Of undisturbed trials of one plan, each corrected by the references around it (`Domain.steady_s`): what no model can explain."""
    differences = [
        math.log(after / before)
        for values in domain.plan_steady_s.values()
        for before, after in pairwise(values)
    ]
    if len(differences) < FEWEST:
        return None
    return float(np.median(np.abs(differences))) / (NORMAL_MEDIAN * math.sqrt(2))


def step_noise(domain: Domain) -> float | None:
    """Of single steps within a trial: the median over the trials."""
    found = [neighbour_noise(trial.step_s) for trial in domain.trials if len(trial.step_s) > 2]
    return float(np.median(found)) if found else None


def stalled_share(trials: Iterable[DatasetTrial]) -> float | None:
    """Of all their steps; None without any."""
    steps = [(step_s, trial.median_s) for trial in trials for step_s in trial.step_s]
    return (
        sum(step_s > STALL * median_s for step_s, median_s in steps) / len(steps) if steps else None
    )
