"""The earlier jobs of a store, from whose trials a new job learns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median

from autotune.errors import InvalidInput
from autotune.features.extract import Extractor, job_extractor
from autotune.records import Accelerators
from autotune.sampler.past_jobs import PastJob
from autotune.storage.store import PastTrial, Store
from autotune.strategy_space.strategy import Strategy

NEWEST = 12
"""Jobs to learn from. Their trials are replayed in the first round, in two seconds."""
MOST_READ = 4 * NEWEST
"""Jobs that are read to find these; the others of a large store are too old."""
_log = logging.getLogger("autotune")


def past_jobs(
    store: Store, job_id: str, accelerators: Accelerators, software: Mapping[str, str]
) -> list[PastJob]:
    """The newest other jobs with past trials, newest first, that ran in the same kind of runtime.

    Jobs that cannot be read are no reason to refuse a new one, which then learns from the others.
    """
    try:
        rows = store.jobs()
    except InvalidInput as error:
        _log.warning("this job learns from no earlier one: %s", error)
        return []
    others = [row.id for row in reversed(rows) if row.id != job_id and row.trials]
    jobs: list[PastJob] = []
    for other in others[:MOST_READ]:
        try:
            job = _past_job(store, other, accelerators, "tensorflow" in software)
        except InvalidInput as error:
            _log.warning("this job does not learn from %s: %s", other, error)
            continue
        if job is not None:
            jobs.append(job)
        if len(jobs) == NEWEST:
            break
    return jobs


def _past_job(
    store: Store, job_id: str, accelerators: Accelerators, tensorflow: bool
) -> PastJob | None:
    """The job's strategies; None for a job in another kind of runtime or without past trials."""
    profiled = store.profiled(job_id)  # first, since the whole history takes longer to read
    if profiled is None or ("tensorflow" in profiled.software) != tensorflow:
        return None
    if store.job(job_id).conditions.accelerators is not accelerators:
        return None
    trials = store.past_trials_of(job_id)
    return PastJob(as_predicted(trials[0]), _medians(trials)) if trials else None


def _medians(trials: list[PastTrial]) -> tuple[tuple[Strategy, float], ...]:
    """Each strategy with the median of its trials, as in `History.measured_s`.

    Repeated trials share what is wrong with the replay of their strategy.
    """
    strategies = {trial.strategy.id: trial.strategy for trial in trials}
    times_s: dict[str, list[float]] = {}
    for trial in trials:
        times_s.setdefault(trial.strategy.id, []).append(trial.steady_s)
    return tuple((strategies[id_], median(each_s)) for id_, each_s in times_s.items())


def as_predicted(trial: PastTrial) -> Extractor:
    """The extractor that predicted this trial before its job's first one."""
    return job_extractor(
        trial.workload, trial.cluster, trial.accelerators, trial.software, trial.op_fusions
    )
