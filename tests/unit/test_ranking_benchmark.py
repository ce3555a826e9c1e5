"""The ranking benchmark on a real trial store and on a dataset, against a slow reference."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster, Host
from autotune.dataset.trials import DatasetTrial, Domain, Environment, Session
from autotune.features.extract import Extractor, extract
from autotune.lowering.costs import Constant, RuntimeCosts
from autotune.records import (
    Accelerators,
    Conditions,
    Failed,
    FailureKind,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.storage.store import Store
from autotune.strategy_space.plan import PlannedStrategy, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.job import JobSpec
from benchmarks.ranking.__main__ import limited, main
from benchmarks.ranking.tasks import parts_of
from benchmarks.ranking.trials import (
    Point,
    ReplayedTimes,
    of_domain,
    of_store,
    plans_by_domain,
    points_of,
)


def slow_links(workers: int) -> Cluster:
    """Return links on which 26 kB of gradients take longer than computing, so strategies differ."""
    return Cluster("slow", (Host("localhost", workers, 1e6, 5e-4, 1e6, 5e-4),))


LARGE, OTHER, SMALL = slow_links(4), slow_links(2), slow_links(3)
LARGE_NAME, OTHER_NAME, SMALL_NAME = (
    f"{WORKLOAD.id}/{cluster.id}" for cluster in (LARGE, OTHER, SMALL)
)
PLANS = {LARGE.id: 120, OTHER.id: 60, SMALL.id: 19}
SEEDS = 2
UNTRAINED = ("analytic", "paper", "replay", "random")
LEARNED = ("linear", "linear without replay", "gat", "gat without replay")
OPTIONS = (
    "--rankers",
    "linear",
    "gat",
    "--epochs",
    "2",
    "--seeds",
    str(SEEDS),
    "--sizes",
    "25",
    "--transfers",
    "cluster",
)


def distinct_plans(cluster: Cluster) -> list[Strategy]:
    """Return `PLANS` sampled strategies, no two with the same plan."""
    by_plan: dict[str, Strategy] = {}
    for strategy in sample_many(WORKLOAD, cluster, SearchSpace.default(), 3 * PLANS[cluster.id], 7):
        by_plan.setdefault(plan(strategy, WORKLOAD, cluster.world_size).id, strategy)
    return list(by_plan.values())[: PLANS[cluster.id]]


def true_s(cluster: Cluster, strategies: list[Strategy]) -> dict[str, float]:
    """Return plan id -> step time, of which the analytic estimate is a part."""
    noise = generator(3, "noise", cluster.id)
    times = {}
    for strategy in strategies:
        planned = PlannedStrategy.of(strategy, WORKLOAD, cluster.world_size)
        analytic_s = extract(planned, WORKLOAD, cluster).analytic_step_s
        times[planned.plan.id] = analytic_s * math.exp(0.3 * noise.standard_normal())
    return times


def record(store: Store, cluster: Cluster) -> dict[str, float]:
    """Measure each plan, the first again at thrice the time; return the medians."""
    strategies = distinct_plans(cluster)
    times = true_s(cluster, strategies)
    store.create_job(
        f"job-{cluster.world_size}", JobSpec(("torchrun", "train.py"), cluster.world_size, cluster)
    )
    events: list[Event] = [
        Profiled(WORKLOAD, cluster, 1.0, {"torch": "2.13.0"}),
        Proposed(
            0,
            tuple(Proposal(strategy, "sampled") for strategy in strategies),
            "none",
            "test",
            len(strategies),
            (),
            2.0,
        ),
    ]
    tried = [(strategy, 1.0) for strategy in strategies] + [
        (strategies[0], 3.0),
        (strategies[1], None),
    ]
    for number, (strategy, factor) in enumerate(tried):
        plan_id = plan(strategy, WORKLOAD, cluster.world_size).id
        request = TrialRequest(number, strategy.id, Role.CANDIDATE, 1, 2)
        outcome = (
            Measured(((times[plan_id] * factor,) * 2,), 0.0)
            if factor
            else Failed(FailureKind.CRASH, "out of luck", 0)
        )
        events.append(TrialFinished(request, outcome, plan_id, 3.0 + number))
    for seq, event in enumerate(events):
        store.append(f"job-{cluster.world_size}", seq, event)
    first = next(iter(times))
    return {**times, first: 2 * times[first]}


@dataclass(frozen=True)
class Told:
    """Output of a run of the benchmark."""

    stdout: str
    stderr: str


def run(directory: Path, *arguments: str) -> Told:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(
            ["--directory", str(directory), "--output", str(directory / "report"), *arguments]
        )
    assert code == 0, err.getvalue()
    return Told(out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Jobs:
    directory: Path
    medians: dict[str, dict[str, float]]  # cluster id -> plan id -> seconds
    done: Told

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Run the benchmark on a store with two domains large enough and one that is a plan short."""
    directory = tmp_path_factory.mktemp("jobs")
    with Store.open(directory / "autotune.db") as store:
        medians = {cluster.id: record(store, cluster) for cluster in (LARGE, OTHER, SMALL)}
    return Jobs(directory, medians, run(directory, *OPTIONS))


@pytest.fixture(scope="module")
def points(jobs: Jobs) -> list[Point]:
    return points_of(
        of_store(jobs.directory), ReplayedTimes(jobs.directory / "report" / "replayed-times.jsonl")
    )


def test_the_last_line_is_one_json_object_with_every_ranker(jobs: Jobs) -> None:
    result = jobs.result
    figures = {"pairwise_accuracy", "kendall_tau", "regret_top_1", "regret_top_5", "regret_top_10"}
    assert set(result) == figures | {"domains", "plans", "learning_curve", "train_cpu_s", "seconds"}
    trained = {
        *(f"{name}, own trials" for name in (*LEARNED, "chosen")),
        *(f"{name}, other domains, cluster" for name in LEARNED),
    }
    assert all(
        set(result[figure]) == {*(f"{name}, nothing" for name in UNTRAINED), *trained}
        for figure in figures
    )
    assert result["domains"] == 2 and result["plans"] == PLANS[LARGE.id] + PLANS[OTHER.id]
    assert set(result["learning_curve"]) == {
        "replay",
        "overlap estimate",
        "max(T_comp, T_sync)",
        *LEARNED,
        "chosen",
    }
    assert result["seconds"] > 0 and result["train_cpu_s"] > 0


def test_chance_orders_half_of_the_pairs_and_the_analytic_ranker_more(jobs: Jobs) -> None:
    accuracy, tau = jobs.result["pairwise_accuracy"], jobs.result["kendall_tau"]
    assert accuracy["random, nothing"] == pytest.approx(
        0.5, abs=0.12
    )  # 2 x (36 + 18) strategies: a standard error of 0.04
    assert tau["random, nothing"] == pytest.approx(0.0, abs=0.25)
    assert accuracy["analytic, nothing"] > 0.65
    assert tau["analytic, nothing"] > 0.3


def test_the_report_has_tables_a_plot_and_every_row_and_names_too_small_domains(jobs: Jobs) -> None:
    folder = jobs.directory / "report"
    page = (folder / "ranking.md").read_text()
    assert (
        f"| {SMALL_NAME} | no | 1 | 20 | 19 |" in page
        and f"| {LARGE_NAME} | yes | 1 | {PLANS[LARGE.id] + 1} | {PLANS[LARGE.id]} |" in page
    )
    assert f"not tested: {SMALL_NAME} has 19 plans, but at least 20" in jobs.done.stdout
    assert ElementTree.parse(folder / "learning-curve.svg").getroot().tag.endswith("svg")
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["ranker"] for row in rows} == {*UNTRAINED, *LEARNED, "chosen"}
    assert all(
        int(row["plans"]) > 0 and float(row["train_cpu_s"]) > 0
        for row in rows
        if row["learned"] == "own trials"
    )


def test_progress_goes_to_stderr_with_the_time_left(jobs: Jobs) -> None:
    lines = [line for line in jobs.done.stderr.splitlines() if " trainings) " in line]
    folds = 2 * 4  # of each kind of simulator, for the choice
    assert len(lines) == SEEDS * 2 * (
        2 * (len(LEARNED) + folds) + len(LEARNED)
    )  # 25 plans and all of them; and one transfer
    assert (
        "ETA after one training of each" in lines[0]
        and "ETA 0:" in lines[-1]
        and ", 1 trainings)" in lines[-1]
    )


def test_a_plan_that_was_measured_twice_is_one_point_with_the_median(
    jobs: Jobs, points: list[Point]
) -> None:
    for cluster in (LARGE, OTHER, SMALL):
        own = [point for point in points if point.cluster == cluster.id]
        assert sorted(point.example.step_s for point in own) == pytest.approx(
            sorted(jobs.medians[cluster.id].values())
        )
        assert len({point.plan_id for point in own}) == len(own) == PLANS[cluster.id]


def test_the_analytic_figures_equal_a_slow_twin(jobs: Jobs, points: list[Point]) -> None:
    accuracies, regrets = [], []
    for seed in range(SEEDS):
        for name in (LARGE_NAME, OTHER_NAME):
            tested = [points[index].example for index in parts_of(points, name, seed, (), 0.3).test]
            right, pairs = 0.0, 0
            for fast in tested:
                for slow in tested:
                    if slow.step_s > fast.step_s * 1.01:
                        pairs += 1
                        guess = slow.features.analytic_step_s - fast.features.analytic_step_s
                        right += 1.0 if guess > 0 else 0.5 if guess == 0 else 0.0
            top = sorted(tested, key=lambda example: example.features.analytic_step_s)[:5]
            accuracies.append(right / pairs)
            regrets.append(min(e.step_s for e in top) / min(e.step_s for e in tested) - 1)
    assert jobs.result["pairwise_accuracy"]["analytic, nothing"] == pytest.approx(
        statistics.mean(accuracies)
    )
    assert jobs.result["regret_top_5"]["analytic, nothing"] == pytest.approx(
        statistics.mean(regrets)
    )


def test_a_limit_keeps_so_many_plans_of_each_domain(points: list[Point]) -> None:
    kept = plans_by_domain(limited(points, 30))
    assert {name: len(plans) for name, plans in kept.items()} == {
        LARGE_NAME: 30,
        OTHER_NAME: 30,
        SMALL_NAME: 19,
    }


def test_replayed_times_are_kept_by_what_they_follow_from(jobs: Jobs, tmp_path: Path) -> None:
    campaign = next(each for each in of_store(jobs.directory) if each.cluster_name == OTHER.id)
    path = tmp_path / "kept" / "times.jsonl"
    told = [
        point.example.features.replayed_step_s
        for point in points_of([campaign], ReplayedTimes(path))
    ]
    lines = path.read_text()
    assert len(lines.splitlines()) == PLANS[OTHER.id]
    path.write_text(lines + '["cut off')
    again = Extractor(WORKLOAD, OTHER)
    same = points_of([replace(campaign, extractor=again)], ReplayedTimes(path))
    assert [point.example.features.replayed_step_s for point in same] == told
    assert path.read_text().startswith(lines + '["cut off') and again.steps.replayed == 0
    dearer = Extractor(WORKLOAD, OTHER, replace(RuntimeCosts(), issue_s=Constant(0.01, "test")))
    other = points_of([replace(campaign, extractor=dearer)], ReplayedTimes(path))
    assert all(
        (point.example.features.replayed_step_s or 0) > (before or 0)
        for point, before in zip(other, told, strict=True)
    )


def test_of_a_dataset_only_what_was_measured_undisturbed_counts_with_the_plan_of_then() -> None:
    """Times are at the machine's usual speed, and the replay uses the costs of that machine."""
    made = distinct_plans(OTHER)[:4]
    plans = [plan(strategy, WORKLOAD, OTHER.world_size) for strategy in made]
    plans[2] = plans[0]  # as if the planner had changed since
    outcomes: list[Measured | Failed] = [
        Measured(((0.3, 0.3),), 0.0),
        Failed(FailureKind.CRASH, "out of luck", 0),
        *[Measured(((0.5, 0.5),), 0.0)] * 2,
    ]
    reference = Measured(((1.0, 1.0),), 0.0)
    trials = [DatasetTrial(0, "reference", None, None, reference, 0.0, 0.0, "s")]
    for number, (strategy, enacted, outcome) in enumerate(zip(made, plans, outcomes, strict=True)):
        trials.append(
            DatasetTrial(
                number + 1,
                "random:lossless",
                strategy,
                enacted,
                outcome,
                0.0,
                0.0,
                "s",
                disturbed=number == 3,
            )
        )
    trials.append(DatasetTrial(5, "reference", None, None, reference, 0.0, 0.0, "s"))
    environment = Environment(
        Conditions(Network.EMULATED, Accelerators.EMULATED), {}, 2, "x86_64", "6.1"
    )
    session = Session("s", "2026-11-22T00:00:00+00:00", environment)
    domain = Domain("d", "m", "c", WORKLOAD, OTHER, {"issue_s": 0.02}, 2, (session,), tuple(trials))
    campaign = of_domain(domain)
    assert campaign.measured == (
        (made[0], plans[0], pytest.approx(0.3)),
        (made[2], plans[0], pytest.approx(0.5)),
    )
    assert campaign.left_out == "1 failed, 1 disturbed"
    assert campaign.extractor.cluster.machine_cores == 2
    wanted = plans[0]
    assert (
        campaign.extractor.steps.step_s(wanted)
        > Extractor(WORKLOAD, OTHER).steps.step_s(wanted) + 0.015
    )


def test_a_directory_without_jobs_or_without_enough_trials_is_refused_with_the_fix(
    tmp_path: Path, capsys
) -> None:
    folders = ["--directory", str(tmp_path), "--output", str(tmp_path / "report")]
    assert main(folders) == 2
    told = capsys.readouterr()
    assert told.out == "" and "holds no jobs" in told.err and "--directory" in told.err
    with Store.open(tmp_path / "autotune.db") as store:
        record(store, SMALL)
    assert main(folders) == 2
    told = capsys.readouterr()
    assert "the largest of 1 has 19" in told.err and "--budget-trials" in told.err
    assert main([*folders, "--domains", "elsewhere"]) == 2
    assert "'elsewhere' is not" in capsys.readouterr().err
