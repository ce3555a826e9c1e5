"""The ranking benchmark on a real trial store: what it reads, what it leaves out, and its figures against a slow twin."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster, Host
from autotune.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.features.extract import extract
from autotune.job import JobSpec
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.simulators.evaluation import hold_out
from autotune.store import Store
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy

ROOT = Path(__file__).parents[2]


def slow_links(workers: int) -> Cluster:
    """So slow that the model's 26 kB of gradients take longer than its computation, and strategies differ."""
    return Cluster("slow", (Host("localhost", workers, 1e6, 5e-4, 1e6, 5e-4),))


LARGE, OTHER, SMALL = slow_links(4), slow_links(2), slow_links(3)
PLANS = {LARGE.id: 120, OTHER.id: 60, SMALL.id: 19}
SEEDS = 2
UNTRAINED = ("analytic", "paper", "replay", "random")
RANKERS = {*UNTRAINED, "linear", "rnn", "gat"}


def distinct_plans(cluster: Cluster) -> list[Strategy]:
    """So many sampled strategies as `PLANS` says, no two with the same plan."""
    by_plan: dict[str, Strategy] = {}
    for strategy in sample_many(WORKLOAD, cluster, SearchSpace.default(), 3 * PLANS[cluster.id], 7):
        by_plan.setdefault(plan(strategy, WORKLOAD, cluster.world_size).id, strategy)
    return list(by_plan.values())[: PLANS[cluster.id]]


def true_s(cluster: Cluster, strategies: list[Strategy]) -> dict[str, float]:
    """Plan id -> step time, of which the analytic estimate knows a part."""
    noise = generator(3, "noise", cluster.id)
    times = {}
    for strategy in strategies:
        enacted = plan(strategy, WORKLOAD, cluster.world_size)
        times[enacted.id] = extract(strategy, enacted, WORKLOAD, cluster).analytic_step_s * math.exp(0.3 * noise.standard_normal())
    return times


def record(store: Store, cluster: Cluster) -> dict[str, float]:
    """A job that measures every plan once, the first one again at thrice the time, and fails once; the medians by plan."""
    strategies = distinct_plans(cluster)
    times = true_s(cluster, strategies)
    store.create_job(f"job-{cluster.world_size}", JobSpec(("torchrun", "train.py"), cluster.world_size, cluster))
    events: list[Event] = [
        Profiled(WORKLOAD, cluster, 1.0, {"torch": "2.13.0"}),
        Proposed(0, tuple(Proposal(strategy, "sampled") for strategy in strategies), "none", "test", len(strategies), (), 2.0),
    ]
    tried = [(strategy, 1.0) for strategy in strategies] + [(strategies[0], 3.0), (strategies[1], None)]
    for number, (strategy, factor) in enumerate(tried):
        plan_id = plan(strategy, WORKLOAD, cluster.world_size).id
        request = TrialRequest(number, strategy.id, Role.CANDIDATE, 1, 2)
        outcome = Measured(((times[plan_id] * factor,) * 2,), 0.0) if factor else Failed(FailureKind.CRASH, "out of luck", 0)
        events.append(TrialFinished(request, outcome, plan_id, 3.0 + number))
    for seq, event in enumerate(events):
        store.append(f"job-{cluster.world_size}", seq, event)
    first = next(iter(times))
    return {**times, first: 2 * times[first]}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.ranking", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@dataclass(frozen=True)
class Jobs:
    directory: Path
    medians: dict[str, dict[str, float]]  # cluster id -> plan id -> seconds
    done: subprocess.CompletedProcess[str]

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """A store with two domains that are large enough and one that is one plan short, and the benchmark on it."""
    directory = tmp_path_factory.mktemp("jobs")
    with Store.open(directory / "autotune.db") as store:
        medians = {cluster.id: record(store, cluster) for cluster in (LARGE, OTHER, SMALL)}
    done = run("--directory", str(directory), "--epochs", "2", "--seeds", str(SEEDS))
    assert done.returncode == 0, done.stderr
    return Jobs(directory, medians, done)


@pytest.fixture
def ranking(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("benchmarks.ranking")


def test_the_last_line_is_one_json_object_with_every_ranker(jobs: Jobs) -> None:
    result = jobs.result
    assert set(result) == {"domains", "trials", "pairwise_accuracy", "kendall_tau", "regret_top_5", "seconds"}
    assert all(set(result[figure]) == RANKERS for figure in ("pairwise_accuracy", "kendall_tau", "regret_top_5"))
    assert result["domains"] == 2
    assert result["trials"] == PLANS[LARGE.id] + 1 + PLANS[OTHER.id] + 1  # the repeat counts, the failure does not
    assert result["seconds"] > 0


def test_chance_orders_half_of_the_pairs_and_the_analytic_ranker_more(jobs: Jobs) -> None:
    accuracy, tau = jobs.result["pairwise_accuracy"], jobs.result["kendall_tau"]
    assert accuracy["random"] == pytest.approx(0.5, abs=0.15)  # 2 x (18 + 9) strategies: a standard error of 0.055
    assert tau["random"] == pytest.approx(0.0, abs=0.3)
    assert accuracy["analytic"] > 0.65
    assert tau["analytic"] > 0.3


def test_the_table_names_every_ranker_and_a_domain_that_is_too_small_is_skipped_with_the_reason(jobs: Jobs) -> None:
    lines = jobs.done.stdout.splitlines()
    [skipped] = [line for line in lines if line.startswith("skipped")]
    assert f"{SMALL.id}: 20 trials of 19 plans, but at least 20 plans" in skipped
    assert sum(line.startswith("hardware: ") and "torch" in line for line in lines) == 1
    start = next(number for number, line in enumerate(lines) if line.startswith("ranker"))
    assert [line.split()[0] for line in lines[start + 1 : start + 8]] == ["linear", "rnn", "gat", *UNTRAINED]
    assert all(line.count(" ± ") == 4 for line in lines[start + 1 : start + 8])


def test_progress_goes_to_stderr_with_the_time_left(jobs: Jobs) -> None:
    lines = [line for line in jobs.done.stderr.splitlines() if " training " in line]
    assert len(lines) == SEEDS * 2 * 3
    assert lines[-1].endswith("training 12 of 12: gat")
    assert "ETA 0:" in lines[-1] and "ETA after the first round" in lines[0]


def test_with_json_the_same_figures_are_all_that_stands_on_stdout(jobs: Jobs, ranking: ModuleType, capsys) -> None:
    assert ranking.main(["--directory", str(jobs.directory), "--epochs", "2", "--seeds", str(SEEDS), "--json"]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 1, told.err
    assert "skipped" in told.err
    assert {**json.loads(told.out), "seconds": 0} == {**jobs.result, "seconds": 0}


def test_a_plan_that_was_measured_twice_is_one_example_with_the_median(jobs: Jobs, ranking: ModuleType) -> None:
    trials = ranking.read_trials(jobs.directory)
    for domain in ranking.by_domain(trials, None):
        cluster_id = domain.name.split("/")[1]
        assert domain.trials == len(domain.examples) + 1
        assert sorted(example.step_s for example in domain.examples) == pytest.approx(sorted(jobs.medians[cluster_id].values()))
        assert len({example.features.strategy_id for example in domain.examples}) == PLANS[cluster_id]


def test_the_analytic_figures_equal_a_slow_twin(jobs: Jobs, ranking: ModuleType) -> None:
    domains = [domain for domain in ranking.by_domain(ranking.read_trials(jobs.directory), None) if SMALL.id not in domain.name]
    examples = [example for domain in domains for example in domain.examples]
    accuracies, regrets = [], []
    for _, test in hold_out(examples, tuple(range(SEEDS))):
        right, pairs, regret, points = 0.0, 0, 0.0, 0
        for domain in domains:
            tested = [examples[index] for index in test if examples[index].domain == domain.name]
            for fast in tested:
                for slow in tested:
                    if slow.step_s > fast.step_s * 1.01:
                        pairs += 1
                        guess = slow.features.analytic_step_s - fast.features.analytic_step_s
                        right += 1.0 if guess > 0 else 0.5 if guess == 0 else 0.0
            top = sorted(tested, key=lambda example: example.features.analytic_step_s)[:5]
            regret += len(tested) * (min(e.step_s for e in top) / min(e.step_s for e in tested) - 1)
            points += len(tested)
        accuracies.append(right / pairs)
        regrets.append(regret / points)
    assert jobs.result["pairwise_accuracy"]["analytic"] == pytest.approx(statistics.mean(accuracies))
    assert jobs.result["regret_top_5"]["analytic"] == pytest.approx(statistics.mean(regrets))


def test_every_domain_learns_from_itself_alone_and_never_from_what_it_is_tested_on(jobs: Jobs, ranking: ModuleType) -> None:
    domains = ranking.by_domain(ranking.read_trials(jobs.directory), None)
    examples = [example for domain in domains for example in domain.examples]
    splits = ranking.splits_within(examples, 1)
    assert len(splits) == len(domains)
    for training, test in splits:
        assert len({examples[index].domain for index in [*training, *test]}) == 1
        assert not {examples[index].features.strategy_id for index in training} & {examples[index].features.strategy_id for index in test}
    assert sorted(index for split in splits for part in split for index in part) == list(range(len(examples)))


def test_a_limit_draws_so_many_trials_of_each_domain_and_the_same_ones_every_time(jobs: Jobs, ranking: ModuleType) -> None:
    trials = ranking.read_trials(jobs.directory)
    ids = [[[example.features.strategy_id for example in domain.examples] for domain in ranking.by_domain(trials, 30)] for _ in range(2)]
    assert ids[0] == ids[1]
    assert sorted(domain.trials for domain in ranking.by_domain(trials, 30)) == [20, 30, 30]


def test_a_directory_without_jobs_or_without_enough_trials_is_refused_with_the_fix(tmp_path: Path) -> None:
    done = run("--directory", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert "holds no jobs" in done.stderr and "--directory" in done.stderr
    with Store.open(tmp_path / "autotune.db") as store:
        record(store, SMALL)
    done = run("--directory", str(tmp_path))
    assert done.returncode == 2
    assert "the largest of 1 has 19" in done.stderr and "--budget-trials" in done.stderr
