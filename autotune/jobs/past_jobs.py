"""The earlier jobs of a store, from whose trials a new job learns."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from autotune.errors import InvalidInput
from autotune.features.extract import Extractor, job_extractor
from autotune.records import Accelerators
from autotune.sampler.past_jobs import PastJob
from autotune.storage.store import PastTrial, Store

NEWEST = 12
"""Jobs to learn from. Their trials are replayed in the first round, in two seconds."""
_log = logging.getLogger("autotune")


def past_jobs(
    store: Store, job_id: str, accelerators: Accelerators, software: Mapping[str, str]
) -> list[PastJob]:
    """The newest other jobs, newest first, that ran in the same kind of runtime.

    Jobs that cannot be read are no reason to refuse a new one, which then learns from none.
    """
    kind = accelerators, "tensorflow" in software
    try:
        trials = store.past_trials(excluding=job_id, newest=NEWEST)
    except InvalidInput as error:
        _log.warning("this job learns from no earlier one: %s", error)
        return []
    of_jobs: dict[tuple[str, str, str], list[PastTrial]] = {}
    for trial in trials:
        if (trial.accelerators, "tensorflow" in trial.software) == kind:
            key = (trial.job_id, trial.workload.id, trial.cluster.id)
            of_jobs.setdefault(key, []).append(trial)
    jobs = [
        PastJob(as_predicted(each[0]), tuple((trial.strategy, trial.steady_s) for trial in each))
        for each in of_jobs.values()
    ]
    return jobs[::-1]


def as_predicted(trial: PastTrial) -> Extractor:
    """The extractor that predicted this trial before its job's first one."""
    return job_extractor(
        trial.workload, trial.cluster, trial.accelerators, trial.software, trial.op_fusions
    )
