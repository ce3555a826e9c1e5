"""A job without trials of its own learns from earlier jobs how wrong the replay is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from synthetic_cluster import cluster
from synthetic_job import SyntheticWorld, decided, job_spec

from autotune.features.extract import Extractor, job_extractor
from autotune.jobs.past_jobs import NEWEST, past_jobs
from autotune.optimizer.budget import Budget, Deadline
from autotune.records import CURRENT_SETUP, Accelerators, Measured, Role, TrialRequest
from autotune.sampler.past_jobs import MOST_TRIALS, PastJob, past_residuals
from autotune.sampler.proposer import Proposer
from autotune.sampler.ranking import Candidate
from autotune.sampler.scoring import FEWEST_CALIBRATED, Scorer
from autotune.storage.store import Store
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.space import SearchSpace
from autotune.tuning.events import Profiled, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Variable, Workload

EVEN, MIXED = cluster(*[(1, 400)] * 4), cluster((1, 2000), (1, 1000), (1, 1000), (1, 500))
LONGER = 1.2
"""Every trial of the earlier jobs takes this much longer than replayed."""
SOFTWARE = {"torch": "2.13.0"}
HERE = job_spec().conditions.accelerators


def model(variables: int) -> Workload:
    return Workload(
        "m", tuple(Variable(f"v{i}", (300, 200)) for i in range(variables)), (), 0.1, 0.2
    )


def predictor(workload: Workload, on: object = EVEN) -> Extractor:
    return job_extractor(workload, on, Accelerators.REAL, SOFTWARE)  # type: ignore[arg-type]


def past_job(extractor: Extractor, longer: float = LONGER) -> PastJob:
    workload, on = extractor.workload, extractor.cluster
    seeds = [strategy for _, strategy in seed_strategies(workload, on, SearchSpace.default())]
    replayed = [extractor.steps.step_s(plan(each, workload, on.world_size)) for each in seeds]
    return PastJob(
        extractor,
        tuple((each, longer * step_s) for each, step_s in zip(seeds, replayed, strict=True)),
    )


@cache  # and not where every process of a test run collects
def earlier_jobs() -> tuple[PastJob, PastJob]:
    return past_job(predictor(model(9))), past_job(predictor(model(14), MIXED))


def test_residuals_of_earlier_trials_are_those_of_their_own_replays() -> None:
    residuals, complete = past_residuals(earlier_jobs())
    assert complete
    np.testing.assert_allclose(residuals.r, np.log(LONGER))
    counts = [min(len(job.trials), MOST_TRIALS) for job in earlier_jobs()]
    assert np.bincount(residuals.domain).tolist() == counts
    many = replace(earlier_jobs()[0], trials=earlier_jobs()[0].trials * 5)
    assert len(past_residuals([many])[0].r) == MOST_TRIALS
    gone = replace(earlier_jobs()[0], extractor=predictor(model(8)))  # of other variables
    assert len(past_residuals([gone])[0].r) == 0
    over = Deadline.after(-1.0, lambda: 0.0)
    residuals, complete = past_residuals(earlier_jobs(), over)
    assert len(residuals.r) == 0 and not complete
    assert past_residuals([], over)[1]


def first_round(past: Sequence[PastJob], measured: int = 0) -> tuple[float, str]:
    """Median of predicted over replayed steps in the next round, and its reason."""
    workload = model(6)
    spec = JobSpec(("torchrun", "train.py"), 4, EVEN, samples_per_round=20)
    extractor = predictor(workload)
    history = History((Profiled(workload, EVEN, 1.0, SOFTWARE),), 0.1)
    proposer = Proposer(spec, {}, budgets=(Budget(100), Budget(50)), past=lambda software: past)
    proposed = proposer.propose(history, 0, 8)
    if measured:
        history = history.then(_finished(0, CURRENT_SETUP, None, 1.0)).then(proposed)
        for number, proposal in enumerate(proposed.proposals[:measured], start=1):
            planned = plan(proposal.strategy, workload, 4)
            step_s = extractor.steps.step_s(planned)
            history = history.then(_finished(number, proposal.strategy.id, planned.id, step_s))
        proposed = proposer.propose(history, 1, 8)
    ratios = [
        proposal.predicted_s / extractor.steps.step_s(plan(proposal.strategy, workload, 4))
        for proposal in proposed.proposals
        if proposal.predicted_s is not None
    ]
    return float(np.median(ratios)), proposed.reason


def _finished(number: int, key: str, plan_id: str | None, step_s: float) -> TrialFinished:
    role = Role.REFERENCE if plan_id is None else Role.CANDIDATE
    request = TrialRequest(number, key, role, 0, 3)
    return TrialFinished(request, Measured(((step_s,) * 3,)), plan_id, float(number))


def test_a_first_round_predicts_what_earlier_jobs_measured() -> None:
    alone, reason = first_round(())
    assert alone == pytest.approx(1.0) and "earlier jobs" not in reason
    ratio, reason = first_round(earlier_jobs())
    assert 1.1 < ratio < 1.25
    trials = len(past_residuals(earlier_jobs())[0].r)
    assert reason.endswith(f"corrected by {trials} strategies of earlier jobs")


def test_earlier_jobs_for_which_a_round_has_no_time_are_read_in_the_next_one() -> None:
    workload, loaded = model(6), list[str]()
    spec = JobSpec(("torchrun", "train.py"), 4, EVEN)
    history = History((Profiled(workload, EVEN, 1.0, SOFTWARE),), 0.1)
    pool = [Candidate(PlannedStrategy.of(ddp_default(workload), workload, 4), "built")]

    def past(software: Mapping[str, str]) -> Sequence[PastJob]:
        loaded.append(software["torch"])
        return earlier_jobs()

    scorer = Scorer(spec, {}, past=past)
    cut = scorer.score(history, pool, Deadline.after(-1.0, lambda: 0.0))
    assert cut.cut_short and "earlier jobs" not in cut.reason
    for _ in range(2):
        complete = scorer.score(history, pool)
        assert not complete.cut_short and "strategies of earlier jobs" in complete.reason
    assert len(loaded) == 1


def test_a_job_that_is_calibrated_trusts_its_own_trials() -> None:
    ratio, reason = first_round(earlier_jobs(), FEWEST_CALIBRATED)
    assert ratio == pytest.approx(1.0, abs=0.03) and "earlier jobs" not in reason


def recorded(store: Store, *job_ids: str) -> History:
    """Create jobs with the same events; return their history."""
    history, _ = decided(job_spec(), SyntheticWorld(noise=0.02))
    for job_id in job_ids:
        store.create_job(job_id, job_spec())
        for seq, event in enumerate(history.events):
            store.append(job_id, seq, event)
    return history


def test_repeated_trials_of_a_strategy_of_an_earlier_job_count_once(tmp_path: Path) -> None:
    with Store.open(tmp_path / "autotune.db") as store:
        history = recorded(store, "one")
        trials = store.past_trials_of("one")
        (job,) = past_jobs(store, "two", HERE, trials[0].software)
    ids = [strategy.id for strategy, _ in job.trials]
    assert sorted(ids) == sorted({trial.strategy.id for trial in trials})
    assert len(ids) < len(trials)
    measured_s = [history.measured_s[id_] for id_ in ids]
    assert [step_s for _, step_s in job.trials] == pytest.approx(measured_s)


def test_earlier_jobs_of_a_store_are_those_of_the_same_runtime(tmp_path: Path) -> None:
    with Store.open(tmp_path / "autotune.db") as store:
        recorded(store, "one", "two", "three")
        software = store.past_trials()[0].software
        assert len(past_jobs(store, "three", HERE, software)) == 2
        for other in set(Accelerators) - {HERE}:
            assert past_jobs(store, "three", other, software) == []
        assert past_jobs(store, "three", HERE, {"tensorflow": "2.21"}) == []


def test_jobs_without_trials_and_unreadable_ones_hide_no_other_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(tmp_path / "autotune.db") as store:
        recorded(store, "one", "two")
        software = store.past_trials()[0].software
        for number in range(NEWEST):
            store.create_job(f"empty{number}", job_spec())
        assert len(past_jobs(store, "new", HERE, software)) == 2
        store.database.connection.execute("DELETE FROM events WHERE job = 'two' AND seq > 0")
        with caplog.at_level(logging.WARNING, "autotune"):
            assert len(past_jobs(store, "new", HERE, software)) == 1
        assert "this job does not learn from two: a trial must be among" in caplog.text


def test_no_more_jobs_than_the_newest_are_learned_from(tmp_path: Path) -> None:
    with Store.open(tmp_path / "autotune.db") as store:
        recorded(store, *[f"job{number}" for number in range(NEWEST + 1)])
        software = store.past_trials_of("job0")[0].software
        assert len(past_jobs(store, "new", HERE, software)) == NEWEST
