"""The part of the ranking benchmark about the plans among which the tuner decides."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autotune.cluster import Cluster, CollectiveFit, Host, PeerFit
from autotune.features.extract import Extractor
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.link_rates import with_link_rates
from autotune.rng import generator
from autotune.workload import Variable, Workload
from benchmarks.ranking import decisions
from benchmarks.ranking.decision_report import decision_keys, decision_page
from benchmarks.ranking.decisions import (
    DecisionRow,
    ceilings,
    decision_figures,
    mean_and_worst,
    mean_bias,
)
from benchmarks.ranking.trials import Campaign
from benchmarks.ranking.wrong_replays import WRONG, Recovery, recovered_share


def measured_plans(
    measured_s: list[float], noise: float, lossless: list[int]
) -> decisions.TestedPlans:
    times = np.array(measured_s)
    kinds = np.isin(np.arange(len(times)), lossless)
    return decisions.TestedPlans(
        times, np.full(len(times), noise), kinds, np.zeros(len(times), dtype=bool)
    )


def test_the_figures_are_of_all_pairs_and_of_the_fastest_quarter():
    plans = measured_plans([1.0, 1.1, 1.2, 1.3, 2, 3, 4, 5, 6, 7, 8, 9], 0.0, [0, 2])
    predicted = np.array([3.0, 1.0, 2.0, *range(4, 13)])
    figures = decision_figures(predicted, plans)
    assert figures["all_pairs"] == pytest.approx(64 / 66)
    assert figures["fastest_quarter"] == pytest.approx(1 / 3)  # only 1.1 before 1.2 is right
    assert figures["lossless_quarter"] == 0.0
    assert figures["regret_top_1"] == pytest.approx(0.1)


def test_a_figure_without_pairs_is_unknown():
    plans = measured_plans([1.0, 1.001, 2, 3, 4, 5, 6, 7], 0.0, [0])
    figures = decision_figures(np.arange(8.0), plans)
    assert math.isnan(figures["fastest_quarter"]) and math.isnan(figures["lossless_quarter"])


def test_noise_lowers_the_ceiling_where_plans_are_alike():
    times = [1 + 0.01 * place for place in range(20)]
    quiet = ceilings(measured_plans(times, 0.0, [0, 1, 2]), generator(0))
    loud = ceilings(measured_plans(times, 0.02, [0, 1, 2]), generator(0))
    assert quiet["fastest_quarter"] == 1.0 and quiet["regret_top_1"] == 0.0
    assert loud["fastest_quarter"] < 0.85 < loud["all_pairs"] < 1.0
    assert loud["regret_top_1"] > 0.005


def row(domain: str, value: float, bias: float, seed: int = 0) -> DecisionRow:
    figures = dict.fromkeys(("all_pairs", "fastest_quarter", "lossless_quarter"), value)
    figures["regret_top_1"] = 1 - value
    limits = dict.fromkeys(figures, 1.0)
    return DecisionRow(domain, seed, "replay", 25, figures, limits, bias)


def test_without_a_known_noise_the_ceiling_is_unknown():
    known = measured_plans([1.0 + 0.1 * place for place in range(12)], 0.01, [0, 1, 2])
    plans = replace(known, noise=np.array([math.nan, *known.noise[1:]]))
    assert all(math.isnan(value) for value in ceilings(plans, generator(0)).values())
    unknown = replace(row("b", 0.5, 0.01), ceilings=dict.fromkeys(decisions.FIGURES, math.nan))
    rows = [row("a", 0.9, 0.02), unknown]
    assert math.isnan(mean_and_worst(rows, "replay", 25, "all_pairs")[2])
    keys = decision_keys(rows, {}, "replay")
    assert keys["all_pairs"] == 0.7 and keys["fastest_quarter_below_ceiling"] is None
    shown = [replace(each, own=0) for each in rows]
    ceiling = decision_page(shown, {}).splitlines()[-3]
    assert ceiling.startswith("| noise ceiling") and ceiling.count("unknown") == 4


def test_domains_have_equal_weight_whatever_their_parts():
    rows = [row("a", 0.9, 0.02), row("a", 0.7, 0.04, seed=1), row("b", 0.4, math.nan)]
    assert mean_and_worst(rows, "replay", 25, "all_pairs") == pytest.approx((0.6, 0.4, 1.0))
    assert mean_and_worst(rows, "replay", 25, "regret_top_1")[:2] == pytest.approx((0.4, 0.6))
    assert mean_bias(rows, "replay", 25) == pytest.approx(0.03)


def test_the_recovered_share_is_of_all_lost_accuracy():
    rows = [
        Recovery("assumed", "a", 0.95, 0.85, 0.88, 0.9),
        Recovery("traffic", "b", 0.9, 0.9, 0.9, 0.92),
    ]
    assert recovered_share(rows) == pytest.approx(0.7)
    assert math.isnan(recovered_share(rows[1:]))


HOSTS = tuple(Host(name, 1, 1e8, 1e-4, 1e10, 1e-6) for name in "abc")
FIT = CollectiveFit("all_reduce", 3, 1e-3, 2e-8, 0.0, 1, 10**7)
CLUSTER = Cluster("c", HOSTS, fits=(FIT,), source="measured")


def test_the_fits_follow_the_links():
    faster = with_link_rates(CLUSTER, [2.0, 2.0, 2.0])
    assert [host.link_bytes_per_s for host in faster.hosts] == [2e8] * 3
    assert faster.fits[0].beta_s_per_byte == pytest.approx(1e-8)
    assert faster.fits[0].alpha_s == FIT.alpha_s
    one = with_link_rates(CLUSTER, [1.0, 1.0, 0.5])
    assert one.fits[0].beta_s_per_byte == pytest.approx(4e-8)  # the slowest link decides a ring


def test_the_fits_of_direct_exchanges_follow_the_links():
    exchange = CollectiveFit("direct_exchange", 3, 1e-3, 2e-8, 0.0, 1, 10**7)
    sends = tuple(PeerFit(name, 2, True, 9e7, 1e-4, 0.0, 0.0) for name in "ab")
    cluster = Cluster("c", HOSTS, fits=(exchange,), source="measured", peer_fits=sends)
    slower = with_link_rates(cluster, [0.5, 1.0, 1.0])
    assert slower.fits[0].beta_s_per_byte == pytest.approx(4e-8)
    assert [fit.bytes_per_s for fit in slower.peer_fits] == [4.5e7, 9e7]


def test_wrong_replays_know_nothing_that_is_right():
    model = Workload("m", (Variable("v", (100, 100)),), (), 0.1, 0.2)
    extractor = Extractor(model, CLUSTER, RuntimeCosts())
    campaign = Campaign("d", "m", "c", extractor, Extractor(model, Cluster("c", HOSTS)), ())
    wrong = {case: make(campaign) for case, make in WRONG.items()}
    assert wrong["assumed"] is campaign.unprobed
    assert wrong["framework"].costs is not None and wrong["framework"].costs["issue_s"] == 0.0
    assert wrong["framework"].costs["threads"] > 1000
    assert wrong["framework"].cluster == CLUSTER
    for case in ("bandwidth", "traffic"):
        assert wrong[case].cluster.fits[0].beta_s_per_byte != FIT.beta_s_per_byte
        assert wrong[case].costs == extractor.costs
