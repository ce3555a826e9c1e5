"""The ranking benchmark on a real trial store and on a dataset, against a slow reference."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
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
from autotune.lowering.costs import EMULATED_COSTS, TENSORFLOW_COSTS, Constant, RuntimeCosts
from autotune.records import (
    CURRENT_SETUP,
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
from autotune.tuning.history import History
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
CRASHED = Failed(FailureKind.CRASH, "out of luck", 0)
UNTRAINED = ("analytic", "paper", "replay", "random")
LEARNED = ("linear", "linear without replay", "gat", "gat without replay")
OPTIONS = ["--rankers", "linear", "gat", "--epochs", "2", "--sizes", "25"]
OPTIONS += ["--transfers", "cluster", "--seeds", str(SEEDS)]


def distinct_plans(cluster: Cluster) -> list[Strategy]:
    """Return `PLANS` sampled strategies, no two of which enact the same."""
    by_plan: dict[str, Strategy] = {}
    for strategy in sample_many(WORKLOAD, cluster, SearchSpace.default(), 3 * PLANS[cluster.id], 7):
        by_plan.setdefault(plan(strategy, WORKLOAD, cluster.world_size).enacted_id, strategy)
    return list(by_plan.values())[: PLANS[cluster.id]]


def true_s(cluster: Cluster, strategies: list[Strategy]) -> dict[str, float]:
    """Return `Plan.enacted_id` -> step time, of which the analytic estimate is a part."""
    noise = generator(3, "noise", cluster.id)
    times = {}
    for strategy in strategies:
        planned = PlannedStrategy.of(strategy, WORKLOAD, cluster.world_size)
        analytic_s = extract(planned, WORKLOAD, cluster).analytic_step_s
        times[planned.plan.enacted_id] = analytic_s * math.exp(0.3 * noise.standard_normal())
    return times


def record(store: Store, cluster: Cluster) -> dict[str, float]:
    """Measure each plan, the first again at thrice the time; return the medians."""
    strategies, job = distinct_plans(cluster), f"job-{cluster.world_size}"
    times = true_s(cluster, strategies)
    store.create_job(job, JobSpec(("torchrun", "train.py"), cluster.world_size, cluster))
    proposals = tuple(Proposal(strategy, "sampled") for strategy in strategies)
    events: list[Event] = [
        Profiled(WORKLOAD, cluster, 1.0, {"torch": "2.13.0"}),
        Proposed(0, proposals, "none", "test", len(strategies), (), 2.0),
    ]
    trials = [(strategy, 1.0) for strategy in strategies]
    trials += [(strategies[0], 3.0), (strategies[1], None)]
    for number, (strategy, factor) in enumerate(trials):
        enacted = plan(strategy, WORKLOAD, cluster.world_size)
        request = TrialRequest(number, strategy.id, Role.CANDIDATE, 1, 2)
        step_s = times[enacted.enacted_id]
        outcome = Measured(((step_s * factor,) * 2,), 0.0) if factor else CRASHED
        events.append(TrialFinished(request, outcome, enacted.id, 3.0 + number))
    for seq, event in enumerate(events):
        store.append(job, seq, event)
    first = next(iter(times))
    return {**times, first: 2 * times[first]}


@dataclass(frozen=True)
class Output:
    stdout: str
    stderr: str


def run(directory: Path, *arguments: str) -> Output:
    out, err = io.StringIO(), io.StringIO()
    folders = ["--directory", str(directory), "--output", str(directory / "report")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*folders, *arguments])
    assert code == 0, err.getvalue()
    return Output(out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Jobs:
    directory: Path
    medians: dict[str, dict[str, float]]  # cluster id -> plan id -> seconds
    output: Output

    @property
    def result(self) -> dict[str, Any]:
        return json.loads(self.output.stdout.splitlines()[-1])

    @property
    def report(self) -> Path:
        return self.directory / "report"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Run the benchmark on a store with two domains large enough and one that is a plan short."""
    directory = tmp_path_factory.mktemp("jobs")
    with Store.open(directory / "autotune.db") as store:
        medians = {cluster.id: record(store, cluster) for cluster in (LARGE, OTHER, SMALL)}
    return Jobs(directory, medians, run(directory, *OPTIONS))


@pytest.fixture(scope="module")
def points(jobs: Jobs) -> list[Point]:
    replayed = ReplayedTimes(jobs.report / "replayed-times.jsonl")
    return points_of(of_store(jobs.directory), replayed)


def replayed_s(points: list[Point]):
    return [point.example.features.replayed_step_s for point in points]


def test_the_last_line_is_one_json_object_with_every_ranker(jobs: Jobs):
    result = jobs.result
    figures = {"pairwise_accuracy", "kendall_tau", "regret_top_1", "regret_top_5", "regret_top_10"}
    residuals = {"replay_error_mean", "residual_rms", "residual_rms_worst"}
    others = {"domains", "plans", "learning_curve", "train_cpu_s", "seconds"}
    assert set(result) == figures | residuals | others
    rankers = {f"{name}, nothing" for name in UNTRAINED}
    rankers |= {f"{name}, own trials" for name in (*LEARNED, "chosen")}
    rankers |= {f"{name}, other domains, cluster" for name in LEARNED}
    assert all(set(result[figure]) == rankers for figure in figures)
    assert result["domains"] == 2 and result["plans"] == PLANS[LARGE.id] + PLANS[OTHER.id]
    levels = {"replay", "overlap estimate", "max(T_comp, T_sync)"}
    assert set(result["learning_curve"]) == {*levels, *LEARNED, "chosen"}
    assert result["seconds"] > 0 and result["train_cpu_s"] > 0


def test_chance_orders_half_of_the_pairs_and_the_analytic_ranker_more(jobs: Jobs):
    accuracy, tau = jobs.result["pairwise_accuracy"], jobs.result["kendall_tau"]
    # 2 x (36 + 18) strategies: a standard error of 0.04
    assert accuracy["random, nothing"] == pytest.approx(0.5, abs=0.12)
    assert tau["random, nothing"] == pytest.approx(0.0, abs=0.25)
    assert accuracy["analytic, nothing"] > 0.65 and tau["analytic, nothing"] > 0.3


def test_the_report_has_tables_a_plot_every_row_and_the_domains_left_out(jobs: Jobs):
    page = (jobs.report / "ranking.md").read_text()
    assert f"| {SMALL_NAME} | no | 1 | 20 | 19 |" in page
    large = PLANS[LARGE.id]
    assert f"| {LARGE_NAME} | yes | 1 | {large + 1} | {large} |" in page
    assert f"not tested: {SMALL_NAME} has 19 plans, but at least 20" in jobs.output.stdout
    assert ElementTree.parse(jobs.report / "learning-curve.svg").getroot().tag.endswith("svg")
    rows = list(csv.DictReader((jobs.report / "rows.csv").read_text().splitlines()))
    assert {row["ranker"] for row in rows} == {*UNTRAINED, *LEARNED, "chosen"}
    trained = [row for row in rows if row["learned"] == "own trials"]
    assert all(int(row["plans"]) > 0 and float(row["train_cpu_s"]) > 0 for row in trained)


def test_residuals_of_all_plans_are_listed_and_add_up(jobs: Jobs):
    """Also of the domain that is too small for the other parts."""
    rows = list(csv.DictReader((jobs.report / "residuals.csv").read_text().splitlines()))
    assert len(rows) == sum(PLANS.values())
    by_id = {cluster.id: cluster for cluster in (LARGE, OTHER, SMALL)}
    for name, cluster in by_id.items():
        of_domain = {row["plan"]: row for row in rows if row["domain"] == f"{WORKLOAD.id}/{name}"}
        assert {key: float(row["measured_s"]) for key, row in of_domain.items()} == pytest.approx(
            jobs.medians[cluster.id]
        )
    for row in rows:
        ratio = float(row["measured_s"]) / float(row["replayed_s"])
        assert float(row["residual"]) == pytest.approx(math.log(ratio))
    errors = {
        name: [abs(1 - math.exp(-float(row["residual"]))) for row in rows if name in row["domain"]]
        for name in by_id
    }
    expected = statistics.mean(statistics.mean(each) for each in errors.values())
    assert jobs.result["replay_error_mean"] == pytest.approx(expected)
    lines = (jobs.report / "residuals.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| by synchronizer")) + 2
    table = itertools.takewhile(bool, lines[start:])
    cells = [[cell.strip() for cell in line.split("|")] for line in table]
    assert sum(int(row[2]) for row in cells) == len(rows)
    assert sum(float(row[7]) for row in cells) == pytest.approx(100, abs=0.1 * len(cells))


def test_progress_goes_to_stderr_with_the_time_left(jobs: Jobs):
    lines = [line for line in jobs.output.stderr.splitlines() if " trainings) " in line]
    folds = 2 * 4  # of each kind of simulator, for the choice
    own_sizes, transfers = 2, 1  # 25 plans and all of them
    per_domain = own_sizes * (len(LEARNED) + folds) + transfers * len(LEARNED)
    assert len(lines) == SEEDS * 2 * per_domain
    assert "ETA after one training of each" in lines[0]
    assert "ETA 0:" in lines[-1] and ", 1 trainings)" in lines[-1]


def test_a_plan_that_was_measured_twice_is_one_point_with_the_median(jobs: Jobs, points):
    for cluster in (LARGE, OTHER, SMALL):
        of_cluster = [point for point in points if point.cluster == cluster.id]
        medians = sorted(jobs.medians[cluster.id].values())
        assert sorted(point.example.step_s for point in of_cluster) == pytest.approx(medians)
        assert len({point.plan_id for point in of_cluster}) == len(of_cluster) == PLANS[cluster.id]


def test_the_analytic_figures_equal_a_slow_twin(jobs: Jobs, points: list[Point]):
    accuracies, regrets = [], []
    for seed, name in itertools.product(range(SEEDS), (LARGE_NAME, OTHER_NAME)):
        tested = [points[index].example for index in parts_of(points, name, seed, (), 0.3).test]
        times = [(one.step_s, one.features.analytic_step_s) for one in tested]
        pairs = list(itertools.product(times, times))
        guesses = [slow[1] - fast[1] for fast, slow in pairs if slow[0] > fast[0] * 1.01]
        right = sum(1.0 if guess > 0 else 0.5 if guess == 0 else 0.0 for guess in guesses)
        accuracies.append(right / len(guesses))
        top = sorted(times, key=lambda pair: pair[1])[:5]
        regrets.append(min(top)[0] / min(times)[0] - 1)
    for figure, values in (("pairwise_accuracy", accuracies), ("regret_top_5", regrets)):
        mean = pytest.approx(statistics.mean(values))
        assert jobs.result[figure]["analytic, nothing"] == mean


def test_a_limit_keeps_at_most_so_many_plans_of_each_domain(points: list[Point]):
    counts = {name: len(plans) for name, plans in plans_by_domain(limited(points, 30)).items()}
    assert counts == {LARGE_NAME: 30, OTHER_NAME: 30, SMALL_NAME: 19}


def test_replayed_times_are_stored_by_what_they_depend_on(jobs: Jobs, tmp_path: Path):
    campaign = next(each for each in of_store(jobs.directory) if each.cluster_name == OTHER.id)
    path = tmp_path / "kept" / "times.jsonl"
    before_s = replayed_s(points_of([campaign], ReplayedTimes(path)))
    lines = path.read_text()
    assert len(lines.splitlines()) == PLANS[OTHER.id]
    path.write_text(lines + '["cut off')
    again = Extractor(WORKLOAD, OTHER)
    same = points_of([replace(campaign, extractor=again)], ReplayedTimes(path))
    assert replayed_s(same) == before_s
    assert path.read_text().startswith(lines + '["cut off') and again.steps.replayed == 0
    dearer = Extractor(WORKLOAD, OTHER, replace(RuntimeCosts(), issue_s=Constant(0.01, "test")))
    other = points_of([replace(campaign, extractor=dearer)], ReplayedTimes(path))
    pairs = zip(replayed_s(other), before_s, strict=True)
    assert all((later or 0) > (before or 0) for later, before in pairs)


def test_only_undisturbed_trials_of_a_dataset_count_with_their_enacted_plans():
    """Times are at the machine's usual speed, and the replay uses the costs of that machine."""

    def trial(number, source, strategy, enacted, outcome):
        disturbed = number == 4
        trial = (number, source, strategy, enacted, outcome, 0.0, 0.0, "s")
        return DatasetTrial(*trial, disturbed=disturbed)

    def step(step_s):
        return Measured(((step_s, step_s),), 0.0)

    strategies = distinct_plans(OTHER)[:4]
    plans = [plan(strategy, WORKLOAD, OTHER.world_size) for strategy in strategies]
    plans[2] = plans[0]  # as if the planner had changed since
    outcomes = [step(0.3), CRASHED, step(0.5), step(0.5)]
    reference = ("reference", None, None, step(1.0))
    trials = [trial(0, *reference)]
    for number, enacted in enumerate(zip(strategies, plans, outcomes, strict=True)):
        trials.append(trial(number + 1, "random:lossless", *enacted))
    trials.append(trial(5, *reference))
    emulated = Conditions(Network.EMULATED, Accelerators.EMULATED)
    environment = Environment(emulated, {}, 2, "x86_64", "6.1")
    session = Session("s", "2026-11-22T00:00:00+00:00", environment)
    costs = {"issue_s": 0.02}
    domain = Domain("d", "m", "c", WORKLOAD, OTHER, costs, 2, (session,), tuple(trials))
    campaign = of_domain(domain)
    first, third = pytest.approx(0.3), pytest.approx(0.5)
    expected = ((strategies[0], plans[0], first), (strategies[2], plans[0], third))
    assert campaign.measured == expected
    assert campaign.left_out == "1 failed, 1 disturbed"
    assert campaign.extractor.cluster.machine_cores == 2
    plain_s = Extractor(WORKLOAD, OTHER).steps.step_s(plans[0])
    assert campaign.extractor.steps.step_s(plans[0]) > plain_s + 0.015


@pytest.mark.parametrize("software", ["torch", "tensorflow"])
def test_the_trials_of_a_store_are_replayed_and_timed_as_the_tuner_does(tmp_path, software):
    """Half of the job ran while the machine was at half its speed."""
    strategies = distinct_plans(OTHER)[:4]
    emulated = Conditions(Network.EMULATED, Accelerators.EMULATED)
    spec = JobSpec(("torchrun", "train.py"), OTHER.world_size, OTHER, conditions=emulated)
    proposals = tuple(Proposal(each, "sampled") for each in strategies)
    events: list[Event] = [
        Profiled(WORKLOAD, OTHER, 1.0, {software: "2.0"}),
        Proposed(0, proposals, "none", "test", 4, (), 2.0),
    ]
    trials: list[tuple[Strategy | None, int]] = []
    for slow, pair in ((1, strategies[:2]), (2, strategies[2:])):
        trials += [(None, slow), *((each, slow) for each in pair), (None, slow)]
    for number, (candidate, slow) in enumerate(trials):
        role = Role.REFERENCE if candidate is None else Role.CANDIDATE
        strategy_id = CURRENT_SETUP if candidate is None else candidate.id
        plan_id = None
        if candidate is not None:
            plan_id = plan(candidate, WORKLOAD, OTHER.world_size).id
        request = TrialRequest(number, strategy_id, role, 1, 2)
        outcome = Measured(((0.1 * slow,) * 2,), 0.0)
        events.append(TrialFinished(request, outcome, plan_id, 3.0))
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", spec)
        for seq, event in enumerate(events):
            store.append("job", seq, event)
    history = History(tuple(events), spec.deviation)
    [campaign] = of_store(tmp_path)
    measured = {strategy.id: step_s for strategy, _, step_s in campaign.measured}
    assert len(measured) == 4 and measured == pytest.approx(history.measured_s)
    assert max(measured.values()) == pytest.approx(min(measured.values()))
    costs = TENSORFLOW_COSTS if software == "tensorflow" else EMULATED_COSTS
    assert campaign.extractor.costs is costs


def test_jobs_of_one_machine_are_one_domain_whatever_speed_their_probes_found(tmp_path: Path):
    """Without a cluster file. One that is held out would otherwise be learned from as another."""
    given = Cluster.local(2)
    (host,) = given.hosts
    fast, slow = (
        replace(given, hosts=(replace(host, link_bytes_per_s=speed, inner_bytes_per_s=speed),))
        for speed in (2e9, 1e9)
    )
    assert fast.id != slow.id
    two_hosts = replace(given, hosts=tuple(replace(host, name=name, devices=1) for name in "ab"))
    strategies = distinct_plans(OTHER)[:2]
    with Store.open(tmp_path / "autotune.db") as store:
        for job, measured in (("first", fast), ("second", slow), ("elsewhere", two_hosts)):
            store.create_job(job, JobSpec(("torchrun", "train.py"), 2, given))
            proposals = tuple(Proposal(strategy, "sampled") for strategy in strategies)
            store.append(job, 0, Profiled(WORKLOAD, measured, 1.0, {"torch": "2.13.0"}))
            store.append(job, 1, Proposed(0, proposals, "none", "test", 2, (), 2.0))
            for number, strategy in enumerate(strategies):
                request = TrialRequest(number, strategy.id, Role.CANDIDATE, 1, 2)
                outcome = Measured(((0.1, 0.1),), 0.0)
                plan_id = plan(strategy, WORKLOAD, 2).id
                store.append(job, 2 + number, TrialFinished(request, outcome, plan_id, 3.0))
    first, second, elsewhere = of_store(tmp_path)
    assert first.domain == second.domain == f"{WORKLOAD.id}/{given.id}" != elsewhere.domain
    assert first.cluster_name == second.cluster_name != elsewhere.cluster_name
    assert (first.extractor.cluster, second.extractor.cluster) == (fast, slow)


def test_a_directory_with_too_few_trials_is_refused_with_the_fix(tmp_path: Path, capsys):
    folders = ["--directory", str(tmp_path), "--output", str(tmp_path / "report")]
    assert main(folders) == 2
    output = capsys.readouterr()
    assert output.out == "" and "holds no jobs" in output.err and "--directory" in output.err
    with Store.open(tmp_path / "autotune.db") as store:
        record(store, SMALL)
    assert main(folders) == 2
    message = capsys.readouterr().err
    assert "the largest of 1 has 19" in message and "--budget-trials" in message
    assert main([*folders, "--domains", "elsewhere"]) == 2
    output = capsys.readouterr()
    assert "'elsewhere' is not" in output.err
    finished = json.loads(output.out.splitlines()[-1])
    assert set(finished) == {"replay_error_mean", "residual_rms", "residual_rms_worst"}
