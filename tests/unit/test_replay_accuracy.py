"""`benchmarks.replay_accuracy` counts exactly the strategies that its seed draws."""

from __future__ import annotations

from collections import Counter

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.dataset.trials import DatasetTrial, Domain, Environment, Session
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.records import Accelerators, Conditions, Failed, FailureKind, Measured, Network
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Strategy
from benchmarks.replay_accuracy.__main__ import parsed
from benchmarks.replay_accuracy.predicted_steps import Counts, steps_of
from benchmarks.replay_accuracy.trials import strategies

CLUSTER = Cluster.local(2)
BEGAN_AT = "2026-11-22T00:00:00+00:00"
CRASHED = Failed(FailureKind.CRASH, "rank 1 left")


def domain_of(*trials: DatasetTrial) -> Domain:
    conditions = Conditions(Network.EMULATED, Accelerators.EMULATED)
    sessions = tuple(
        Session(name, BEGAN_AT, Environment(conditions, {}, 2, "x86_64", "6.1", commit))
        for name, commit in (("first", "aaa"), ("second", "bbb"))
    )
    return Domain("layers.two", "layers", "two", WORKLOAD, CLUSTER, {}, 2, sessions, trials)


def trial_of(
    number: int,
    strategy: Strategy,
    outcome: Measured | Failed,
    session: str = "first",
    disturbed: bool = False,
    enacted: Plan | None = None,
) -> DatasetTrial:
    """Return a trial of the strategy's plan, or of the one `enacted`."""
    enacted = enacted or plan(strategy, WORKLOAD, CLUSTER.world_size)
    return DatasetTrial(
        number, "random:lossless", strategy, enacted, outcome, 1.0, 0.0, session, disturbed
    )


def test_rows_are_of_the_drawn_strategies_and_all_else_is_counted() -> None:
    drawn = strategies(WORKLOAD, CLUSTER, 8, seed=1)
    other = next(
        one
        for _, one in strategies(WORKLOAD, CLUSTER, 8, seed=2)
        if one.id not in {strategy.id for _, strategy in drawn}
    )

    fast, slow = Measured(((0.1, 0.1),), 0.0), Measured(((0.3, 0.3),), 0.0)
    steps = steps_of(
        domain_of(
            trial_of(0, drawn[0][1], fast),
            trial_of(1, drawn[0][1], slow, disturbed=True),
            trial_of(2, drawn[1][1], CRASHED),
            trial_of(3, drawn[2][1], CRASHED),
            trial_of(4, drawn[2][1], fast),
            trial_of(5, other, fast, session="second"),
        ),
        drawn,
    )
    assert [row.measured_s for row in steps.rows] == [pytest.approx(0.2), pytest.approx(0.1)]
    counts = Counts.of([steps])
    assert counts.failed == {"layers.two, random:lossless (2)": "crash: rank 1 left"}
    assert (counts.missing, counts.disturbed, counts.others) == (5, 1, 1)
    assert counts.commits == ["aaa"]
    assert counts.lines() == [
        "failed: layers.two, random:lossless (2): crash: rank 1 left",
        "1 strategies failed, 5 have no trial, 1 rows were disturbed, 1 trials of other strategies "
        "are left out; measured at aaa",
    ]


def test_a_trial_is_predicted_for_the_plan_that_it_enacted() -> None:
    """Today's planner may make another plan of its strategy."""
    drawn = strategies(WORKLOAD, CLUSTER, 8, seed=1)[:1]
    strategy = drawn[0][1]
    today = plan(strategy, WORKLOAD, CLUSTER.world_size)
    earlier = plan(per_variable(WORKLOAD), WORKLOAD, CLUSTER.world_size)
    assert earlier.enacted_id != today.enacted_id
    measured = Measured(((0.1, 0.1),), 0.0)
    domain = domain_of(
        trial_of(0, strategy, measured, enacted=earlier), trial_of(1, strategy, measured)
    )
    replays = domain_extractor(domain).steps
    assert [row.replayed_s for row in steps_of(domain, drawn).rows] == [
        replays.step_s(earlier),
        replays.step_s(today),
    ]


def test_seven_strategies_are_mixed_as_the_results_state() -> None:
    kinds = Counter(source.partition(":")[0] for source, _ in strategies(WORKLOAD, CLUSTER, 7, 3))
    sources = Counter(source for source, _ in strategies(WORKLOAD, CLUSTER, 7, 3))
    assert kinds["builder"] == 1
    assert {name: count for name, count in sources.items() if name.startswith("random")} == {
        "random:direct": 1,
        "random:lossless": 3,
        "random:lossy": 2,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frameworks", "horovod", "--seed", "1"], "--seed applies to --frameworks torch alone"),
        (["--frameworks", "tensorflow", "--any-commit"], "--any-commit applies to --frameworks"),
        (["--strategies", "0"], "--strategies must be at least 1, but is 0"),
        (["--only-evaluate", "--any-commit"], "--any-commit is for a collection"),
    ],
)
def test_options_that_do_not_apply_are_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert message in capsys.readouterr().err


def test_options_of_torch_have_their_defaults() -> None:
    options = parsed(["--frameworks", "tensorflow", "torch"])
    assert (options.strategies, options.seed) == (12, 0)
    assert len(options.models) == len(options.clusters) == 3
