"""Residuals of earlier jobs, for a job that has measured little (AutoSync, sec. 4.3).

An earlier job's trial is replayed as that job predicted it before its first trial. How much longer
it took is a residual, from which `autotune.simulators.gaussian_process` learns where replays tend
to be wrong, whatever the model and the cluster are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor
from autotune.features.timeline import TIMELINE_FEATURES
from autotune.optimizer.budget import NO_DEADLINE, Deadline
from autotune.simulators.gaussian_process import Residuals
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import Strategy

MOST_TRIALS = 30
"""Strategies of an earlier job to learn from. One is replayed in about 5 ms."""


@dataclass(frozen=True, eq=False)
class PastJob:
    """Trials of an earlier job: each strategy once, with its step time in seconds.

    `extractor` predicts them with the constants that were stated, as a job does that has measured
    nothing.
    """

    extractor: Extractor
    trials: tuple[tuple[Strategy, float], ...]


PastJobs = Callable[[Mapping[str, str]], Sequence[PastJob]]
"""Loads the earlier jobs for a job with this software, newest first."""


def no_past_jobs(software: Mapping[str, str]) -> Sequence[PastJob]:
    return ()


def past_residuals(
    jobs: Sequence[PastJob], deadline: Deadline = NO_DEADLINE
) -> tuple[Residuals, bool]:
    """Replay the jobs' trials, in this order until the deadline; also return whether all were.

    Trials whose strategies cannot be planned any more are left out.
    """
    complete = True
    rows: list[FloatArray] = []
    residuals: list[float] = []
    numbers: list[int] = []
    for number, job in enumerate(jobs):
        for strategy, step_s in _spread(job.trials):
            if deadline.passed():
                complete = False
                break
            workload, cluster = job.extractor.workload, job.extractor.cluster
            try:
                planned = PlannedStrategy.of(strategy, workload, cluster.world_size)
            except InvalidInput:
                continue
            described = job.extractor.features(planned, with_shards=False)
            described = job.extractor.described(described, planned.plan)
            replayed_s = described.replayed_step_s
            assert described.timeline is not None and replayed_s is not None
            rows.append(described.timeline.row)
            residuals.append(float(np.log(step_s / replayed_s)))
            numbers.append(number)
    x = np.array(rows, dtype=np.float64).reshape(len(rows), len(TIMELINE_FEATURES))
    return Residuals(x, np.array(residuals), np.array(numbers, dtype=np.int64)), complete


def _spread(trials: Sequence[tuple[Strategy, float]]) -> list[tuple[Strategy, float]]:
    """At most `MOST_TRIALS`, evenly from the fastest to the slowest."""
    ranked = sorted(trials, key=lambda trial: (trial[1], trial[0].id))
    places = evenly(len(ranked), MOST_TRIALS)
    return [ranked[place] for place in places]


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, the first and the last among them."""
    if count <= most:
        return list(range(count))
    places: list[int] = np.linspace(0, count - 1, most).round().astype(np.int64).tolist()
    return places
