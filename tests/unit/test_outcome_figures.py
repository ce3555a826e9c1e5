"""Statistics of the outcome benchmark: ratios, the best rival, whole rounds, trials until near."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, job_spec, strategy

from autotune.cluster import Cluster
from autotune.dataset.folder import read_domain
from autotune.dataset.trials import REFERENCE, DatasetTrial
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor
from autotune.records import CURRENT_SETUP, Failed, FailureKind, Measured
from autotune.rng import generator
from autotune.strategy_space.plan import Plan, plan
from autotune.tuning.history import History
from autotune.tuning.tuner import search_instruction
from benchmarks.outcome.figures import (
    failures_of,
    first_within,
    geomean,
    ratio_to_best,
    ratio_to_bound,
    whole_rounds,
)
from benchmarks.outcome.kept import CLOSING, SWEEP, Group, Side, Stop, rounds_of
from benchmarks.outcome.results import _replayed_s
from benchmarks.outcome.searches import incumbents, near_the_last
from benchmarks.stated_clusters import as_shaped

ROOT = Path(__file__).parents[2]


def block(step_s: float) -> Measured:
    return Measured(((step_s,),))


def blocks(count: int, **steps_s: float) -> list[dict[str, Measured]]:
    return [{name: block(step_s) for name, step_s in steps_s.items()} for _ in range(count)]


def empty(name: str) -> Plan:
    """Return a plan with nothing but an id of its own."""
    return Plan(name, 1, ())


A, B, C, SMALL, LARGE, BROKEN = (
    empty(name).id for name in ("a", "b", "c", "small", "large", "broken")
)


def rival(name: str, plan: str | None = None) -> Side:
    return Side(name, Group.RIVAL, plan or name, None)


def trial(number: int, plan: str, step_s: float | None, phase: str = CLOSING) -> DatasetTrial:
    """Return a trial of round `number`, of the script's own DDP for the current setup's plan."""
    outcome = Failed(FailureKind.CRASH, "rank 1", 1) if step_s is None else block(step_s)
    source, enacted = f"{phase}:{number}:{plan}: again", (strategy(0), empty(plan))
    if plan == CURRENT_SETUP:
        source, enacted = f"{phase}:{number}:{REFERENCE}", (None, None)
    return DatasetTrial(0, source, *enacted, outcome, 0.0, 0.0, "0")


def medians_s(rounds):
    return [{key: outcome.median_s for key, outcome in measured.items()} for measured in rounds]


def test_a_geometric_mean_is_the_root_of_the_product():
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert geomean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    for values in ([], [1.0, 0.0]):
        with pytest.raises(InvalidInput, match="above 0"):
            geomean(values)


def test_a_ratio_above_one_means_that_ours_is_faster_and_has_an_interval():
    drift = np.linspace(1.0, 1.5, 8)
    rounds = [{"ours": block(0.1 * at), "ddp": block(0.12 * at)} for at in drift]
    ratio = ratio_to_best(rounds, [rival("ddp")], "ours")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.2, 1.2, 1.2))
    assert (ratio.rounds, ratio.rival) == (8, "ddp")
    assert ratio_to_bound(blocks(6, ours=0.11), "ours", 0.1).value == pytest.approx(1.1)
    with pytest.raises(InvalidInput, match="at least 6 whole rounds, but there are 5"):
        ratio_to_best(rounds[:5], [rival("ddp")], "ours")


def test_the_best_rival_is_the_fastest_one_and_a_side_that_failed_is_left_out():
    rivals = [rival("slow"), rival("fast"), rival("failed")]
    ratio = ratio_to_best(blocks(6, ours=0.1, slow=0.3, fast=0.15), rivals, "ours")
    assert ratio.value == pytest.approx(1.5) and ratio.rival == "fast"


@pytest.mark.parametrize("others", [1.0, 1.04])
def test_the_luck_of_the_best_of_many_rivals_is_on_their_side(others: float):
    """One of eight rivals is as fast as ours, others too or slower: ours seldom leads."""
    names = [f"r{i}" for i in range(8)]
    speeds = np.array([1.0, 1.0, *[others] * 7])
    ratios = []
    for seed in range(150):
        noise = speeds * np.exp(0.05 * generator(seed, "equal").standard_normal((6, 9)))
        rounds = [dict(zip(["ours", *names], map(block, row), strict=True)) for row in noise]
        ratios.append(ratio_to_best(rounds, list(map(rival, names)), "ours"))
    expected = 150 * 0.025
    assert sum(ratio.low > 1 for ratio in ratios) <= expected + 3 * math.sqrt(expected)
    assert np.mean([math.log(ratio.value) for ratio in ratios]) < 0


def test_only_whole_rounds_count_and_a_side_that_failed_is_not_waited_for():
    sides = [rival("a", A), rival("b", B), Side("b again", Group.OURS, B, None)]
    steps = [(0, "a", 0.1), (0, "b", 0.2), (1, "b", 0.2), (2, "b", 0.3), (2, "a", 0.4)]
    trials = [trial(*step) for step in steps] + [trial(2, "b", 9.9, SWEEP)]
    rounds = rounds_of(trials, CLOSING)
    assert medians_s(whole_rounds(rounds, sides)) == [{A: 0.1, B: 0.2}, {B: 0.3, A: 0.4}]
    once = rounds_of([*trials, trial(3, "a", None)], CLOSING)
    assert len(whole_rounds(once, sides)) == 2 and not failures_of(once)
    failed = rounds_of([*trials, trial(3, "a", None), trial(4, "a", None)], CLOSING)
    assert len(whole_rounds(failed, sides)) == 3 and failures_of(failed) == {A: "crash: rank 1"}
    assert whole_rounds(rounds, [*sides, rival("c", C)]) == []


def test_a_side_is_replayed_by_the_plan_of_its_closing_trials():
    """Today's planner may make another plan of its strategy."""
    enacted = plan(strategy(31), WORKLOAD, 2)
    closing = [
        trial(0, CURRENT_SETUP, 0.2),
        replace(trial(0, "a", 0.1), plan=enacted, strategy=strategy(0)),
    ]
    extractor = Extractor(WORKLOAD, Cluster.local(2))
    side = Side("a", Group.OURS, enacted.id, strategy(0))
    assert _replayed_s(side, closing, extractor) == extractor.steps.step_s(enacted)
    ddp = Side("DDP", Group.TODAY, CURRENT_SETUP, None)
    assert _replayed_s(ddp, closing, extractor) is None


def test_the_current_setup_is_a_side_of_a_round_and_a_search_of_any_name_is_none():
    ddp = trial(0, CURRENT_SETUP, 9.9)
    trials = [trial(0, CURRENT_SETUP, 0.1), trial(0, "a", 0.2)]
    trials.append(replace(trial(0, "a", 9.9), source="tuning:closing:0:sampled"))
    trials += [replace(ddp, source=name) for name in (REFERENCE, "tuning:ours:reference")]
    sides = [Side("DDP", Group.TODAY, CURRENT_SETUP, None), rival("a", A)]
    rounds = whole_rounds(rounds_of(trials, CLOSING), sides)
    assert medians_s(rounds) == [{CURRENT_SETUP: 0.1, A: 0.2}]


def test_near_the_best_is_the_first_stop_within_two_percent_as_measured_again():
    steps = [(40, 90.0, "later"), (3, 9.0, "early"), (12, 30.0, "middle"), (20, 50.0, "failed")]
    stops = [Stop(*step) for step in steps]
    times_s = {"early": 0.1021, "middle": 0.10199, "later": 0.1}
    assert first_within(stops, times_s, 0.1) == stops[2]
    assert first_within(stops, {**times_s, "early": 0.102}, 0.1) == stops[1]
    assert first_within(stops, times_s, 0.09) is None


def test_incumbents_are_the_bests_of_the_search_as_they_came_up():
    spec = job_spec()
    world = SyntheticWorld({0: 0.12, 1: 0.13, 2: 0.09, 4: 0.07, 9: 0.068}, default_s=0.11)
    search = History((), spec.deviation)
    while (instruction := search_instruction(spec, search)) is not None:
        search = search.then(world.answer(spec, search, instruction))
    bests = incumbents(search)
    expected = [(n + 1, strategy(n)) for n in (0, 2, 4, 9)]
    assert [(best.trials, best.strategy) for best in bests] == expected
    ends = {trial.request.strategy_id: trial.elapsed_s for trial in search.candidates}
    assert [best.seconds for best in bests] == [ends[best.strategy.id] for best in bests]
    near = [best.strategy for best in near_the_last(search, bests)]
    assert near == [strategy(4), strategy(9)]  # 0.07 is within 5 % of 0.068


def test_bounds_take_the_rates_that_links_are_shaped_to() -> None:
    domain = read_domain(ROOT / "datasets/outcome_ratios/vgg.four_hosts_mixed.dilated_2.ratio_1")
    shaped = as_shaped(domain)
    assert [host.link_bytes_per_s for host in shaped.hosts] == [125e6, 62.5e6, 62.5e6, 31.25e6]
    assert shaped.hosts != domain.cluster.hosts, "probes come near, but are no bounds"
    assert [one.cores for one in shaped.hosts] == [one.cores for one in domain.cluster.hosts]
    assert as_shaped(replace(domain, cluster_name="of_my_own")) == domain.cluster
