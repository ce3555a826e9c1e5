"""Proposals for models of 20,000 variables: bounded time and memory, and no learned shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from small_worlds import cluster
from test_search_deadline import SLACK, blocks

from autotune.arrays import FloatArray
from autotune.features.extract import StrategyFeatures
from autotune.lowering.kept import Kept
from autotune.optimizer.budget import Budget, Deadline
from autotune.records import CURRENT_SETUP, Measured, Role, TrialRequest
from autotune.sampler import scoring
from autotune.sampler.pool import CUT_SHORT
from autotune.sampler.proposer import FINISH, ROUND, Proposer
from autotune.sampler.random import sample_many
from autotune.sampler.ranking import Candidate
from autotune.sampler.scoring import Scorer
from autotune.simulators.interface import Example, FitReport
from autotune.strategy_space.builders.collectives import all_reduce_chunks
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.job import DEFAULT_S, NO_LIMIT_S, JobSpec, Search
from autotune.workload import Workload

HOSTS = cluster(100, 100, 100, 100)
VARIABLES = 20_000
LARGE = blocks(VARIABLES)
SMALL = blocks(20)
TINY = blocks(2)


def job(**settings) -> JobSpec:
    return JobSpec(("torchrun", "train.py"), 4, HOSTS, **settings)


def counting() -> Callable[[], float]:
    """A clock that moves by 1 s at each look."""
    looks = count()
    return lambda: float(next(looks))


def finished(number: int, key: str, plan_id: str | None, step_s: float) -> TrialFinished:
    role = Role.REFERENCE if plan_id is None else Role.CANDIDATE
    request = TrialRequest(number, key, role, 0, 3)
    return TrialFinished(request, Measured(((step_s,) * 3,)), plan_id, 2.0 + number)


def measured(spec: JobSpec, workload: Workload, strategies: Sequence[Strategy]) -> History:
    """A job that has profiled `workload` and measured these strategies."""
    history = History((Profiled(workload, spec.cluster, 1.0, {}),), 0.1)
    history = history.then(finished(0, CURRENT_SETUP, None, 0.5))
    proposals = tuple(Proposal(strategy, "sampled") for strategy in strategies)
    history = history.then(Proposed(0, proposals, "random", "", 9, (), 2.0))
    for number, strategy in enumerate(strategies, 1):
        planned = history.planned(strategy.id)
        assert planned is not None
        history = history.then(finished(number, strategy.id, planned.plan.id, 0.4 + 0.01 * number))
    return history


class Clock:
    """A clock that stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


class Learner:
    """Remembers what it was given, and predicts the replayed time."""

    def __init__(self, name: str, reads_shards: bool, fit_s: float = 0.0) -> None:
        self.name, self.reads_shards, self.fit_s = name, reads_shards, fit_s
        self.fits: list[Sequence[Example]] = []
        self.limits_s: list[float] = []

    def fit(
        self,
        examples: Sequence[Example],
        seed: int,
        warm_start: bool = False,
        limit_s: float = math.inf,
    ) -> FitReport:
        self.fits.append(examples)
        self.limits_s.append(limit_s)
        CLOCK.now_s += self.fit_s
        return FitReport(1, 1, self.fit_s, "")

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        assert not self.reads_shards or all(len(one.shards) for one in features)
        return np.array([one.replayed_step_s or one.analytic_step_s for one in features])

    def embed(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        return np.ones((len(features), 1))

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> None:
        raise NotImplementedError


def candidates(workload: Workload, strategies: Sequence[Strategy]) -> list[Candidate]:
    return [Candidate(PlannedStrategy.of(one, workload, 4), "sampled") for one in strategies]


def test_a_round_of_20_000_variables_keeps_its_seconds_and_proposes():
    clock = counting()
    spec = job(max_seconds=65.0)  # a round has 16 looks at the clock
    history = History((Profiled(LARGE, HOSTS, 1.0, {}),), 0.1)
    proposed = Proposer(spec, {}, clock=clock).propose(history, 0, 6)
    assert clock() <= ROUND * 64 + SLACK
    assert len(proposed.proposals) <= proposed.considered <= 16
    assert len(proposed.proposals) == 6 or proposed.considered < 6
    assert CUT_SHORT in proposed.reason and proposed.ranker == "replay"
    assert all(len(one.strategy.variables) == VARIABLES for one in proposed.proposals)


def test_simulators_of_shards_are_left_out_with_one_line_and_others_rank(monkeypatch):
    spec = job(simulators=("linear", "rnn", "gat"))
    strategies = sample_many(SMALL, HOSTS, SearchSpace.default(), 9, 0)
    pool = candidates(SMALL, strategies)
    history = measured(spec, SMALL, strategies[:8])
    shards = sum(one.planned.plan.slice_count for one in pool[:8])
    for limit in (shards, shards - 1):
        learners = {name: Learner(name, name != "linear") for name in spec.simulators}
        scorer = Scorer(
            spec, {name: partial(learners.__getitem__, name) for name in learners}, limit
        )
        scores = scorer.score(history, pool)
        assert len(learners["linear"].fits[0]) == 8
        left_out = f"rnn and gat left out: the measured strategies have more than {limit:,} shards"
        assert scores.reason.endswith(f"; {left_out} together") is (limit < shards)
        assert bool(learners["rnn"].fits) is (limit == shards)
        for example in learners["linear"].fits[0]:
            assert bool(len(example.features.shards)) is (limit == shards)
        assert (
            list(scorer.finish(history)) == ["linear", "rnn", "gat"][: 3 if limit == shards else 1]
        )


def test_scoring_ends_at_its_deadline_and_scores_one_at_least():
    spec = job()
    history = measured(spec, SMALL, [])
    pool = candidates(SMALL, sample_many(SMALL, HOSTS, SearchSpace.default(), 50, 0))
    everything = Scorer(spec, {}).score(history, pool)
    assert sorted(everything.ranked.tolist()) == list(range(50))
    for seconds in (0, 40):
        deadline = Deadline.after(seconds, counting())
        scores = Scorer(spec, {}).score(history, pool, deadline)
        scored = len(scores.ranked)
        assert 1 <= scored <= seconds / 2 + 2
        assert sorted(scores.ranked.tolist()) == list(range(scored))
        assert scores.predicted_s is not None and len(scores.predicted_s) == scored


def test_a_simulator_that_takes_too_long_is_left_out_after_one_fit():
    spec = job(simulators=("linear", "rnn"))
    strategies = sample_many(SMALL, HOSTS, SearchSpace.default(), 8, 0)
    history = measured(spec, SMALL, strategies)
    fast, slow = Learner("linear", False, fit_s=0.1), Learner("rnn", True, fit_s=4.0)
    scorer = Scorer(spec, {"linear": lambda: fast, "rnn": lambda: slow})
    deadline = Deadline(CLOCK() + 20.0, CLOCK)
    scores = scorer.score(history, candidates(SMALL, strategies), deadline)
    assert {one.ranker for one in scores.quality} >= {"linear"}
    assert "rnn" not in {one.ranker for one in scores.quality}
    assert fast.limits_s[0] == pytest.approx(scoring.LEARNING * 20 / 5) and len(slow.fits) == 1
    assert list(scorer.finish(history)) == ["linear"]


@pytest.mark.slow  # calibrates twice
def test_trainings_have_the_limits_of_the_default_budget_if_only_trials_are_limited():
    spec = job(simulators=("linear",), samples_per_round=10, max_seconds=NO_LIMIT_S)
    learner, short = Learner("linear", False), Budget(20)
    proposer = Proposer(spec, {"linear": lambda: learner}, CLOCK, budgets=(short, short))
    history = measured(spec, TINY, sample_many(TINY, HOSTS, SearchSpace.default(), 8, 0))
    proposer.propose(history, 1, 2)
    first_s = learner.limits_s[0]
    assert 0 < first_s < ROUND * DEFAULT_S / (1 + scoring.FOLDS)
    proposer.finish(history)
    assert learner.limits_s[-1] == pytest.approx(FINISH * DEFAULT_S)


def test_the_candidates_of_a_round_have_bounded_plans():
    history = measured(job(), SMALL, [])
    proposed = Proposer(job(search=Search.RANDOM), {}, pool_slices=100).propose(history, 1, 6)
    assert 1 <= proposed.considered <= 6 and CUT_SHORT not in proposed.reason


def test_remembered_plans_have_bounded_slices():
    strategies = [all_reduce_chunks(SMALL, number) for number in (1, 2, 3)]
    plans = [one.planned.plan for one in candidates(SMALL, strategies)]
    memory: Kept[int] = Kept(10, 50)
    for number, plan in enumerate(plans):
        memory.put(plan, plan.slice_count, number)
        memory.put(plan, plan.slice_count, number)  # counts once
        assert memory.get(plans[0]) == 0
    assert [memory.get(plan) for plan in plans] == [0, None, 2]
