"""The constants of the replay that a job's own trials correct."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from autotune.arrays import FloatArray
from autotune.cluster import Cluster, CollectiveFit, Host, LinkFit, Where
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor
from autotune.jobs.driver import probed
from autotune.lowering.costs import ASSUMED, Constant, RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.parsing import parse
from autotune.recordings.probe import ProbePoint, ProbeSeries
from autotune.records import Constants
from autotune.rng import generator
from autotune.sampler.random import samples
from autotune.simulators.calibration import Calibration, OutOfTime, calibrate
from autotune.simulators.constants import (
    COLLECTIVE_CPU,
    LIMITS,
    LINKS,
    MOST_HOSTS,
    OF_COSTS,
    START,
    link_of,
    widths,
    with_constants,
)
from autotune.simulators.contradictions import contradicted
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import Variable, Workload
from runtime_rewriter.world.results import Profile

MODEL = Workload(
    "m", tuple(Variable(f"v{i}", (300, 200 + 40 * i)) for i in range(8)), (), 0.01, 0.02
)
HOSTS = tuple(Host(name, 1, 50e6, 1e-4, 1e10, 1e-6, cores=2) for name in "abc")
FITS = tuple(
    CollectiveFit(name, 3, 4e-4, cost / 50e6, 0.01, 1, 10**7, 2e-4, 1e-10)
    for name, cost in (
        ("all_reduce", 4 / 3),
        ("reduce_scatter", 4 / 3),
        ("all_gather", 2 / 3),
        ("gather", 2.0),
        ("scatter", 2.0),
        ("reduce", 4 / 3),
        ("broadcast", 2.0),
        ("all_to_all", 2 / 3),
    )
)
PROBED = Cluster("c", HOSTS, fits=FITS, source="measured")
DESCRIBED = Cluster("c", HOSTS)
NOISE = 0.01


def extractor(cluster: Cluster = PROBED, costs: RuntimeCosts | None = None) -> Extractor:
    return Extractor(MODEL, cluster, costs or RuntimeCosts())


def trials(count: int = 12, seed: int = 0) -> list[PlannedStrategy]:
    drawn = samples(MODEL, PROBED, SearchSpace.default(lossy=True), seed)
    return [
        PlannedStrategy.of(strategy, MODEL, PROBED.world_size) for strategy in islice(drawn, count)
    ]


def test_no_calibration_lets_a_gpu_wait_for_threads() -> None:
    costs = with_constants(extractor(costs=costs_of("cuda")), Constants({"issue": 0.5})).costs
    assert costs is not None
    assert costs["lane_s"] > costs_of("cuda")["lane_s"]
    assert costs["lane_first_s"] == 0


def telling_trials() -> list[PlannedStrategy]:
    """Servers on each rank and rings, for all or half of the variables: they tell links apart."""

    def shard(rank: int | None) -> Shard:
        if rank is None:
            return Shard(Synchronizer.ALL_REDUCE)
        return Shard(Synchronizer.PARAMETER_SERVER, placement=rank)

    kinds = (None, 0, 1, 2)
    pairs = [(kind, kind) for kind in kinds] + [(None, rank) for rank in (0, 1, 2)]
    strategies = [
        Strategy(
            tuple(
                VariableStrategy(variable.name, (shard(pair[number % 2]),))
                for number, variable in enumerate(MODEL.variables)
            )
        )
        for pair in (*pairs, *((second, first) for first, second in pairs[4:]))
    ]
    return [PlannedStrategy.of(strategy, MODEL, PROBED.world_size) for strategy in strategies]


def measured(truth: Extractor, of: list[PlannedStrategy], noise: float = NOISE) -> FloatArray:
    times_s = np.array([truth.steps.step_s(planned.plan) for planned in of])
    return times_s * np.exp(noise * generator(0, "noise").standard_normal(len(of)))


def test_the_link_of_one_slow_host_is_found_despite_an_outlier() -> None:
    stated, of = extractor(), telling_trials()
    times_s = measured(with_constants(stated, Constants({link_of("b"): math.log(2.0)})), of)
    times_s[3] *= 3.0
    calibration = calibrate(stated, of, times_s)
    logs = calibration.fitted.logs
    assert math.exp(logs[LINKS] + logs[link_of("b")]) == pytest.approx(2.0, rel=0.05)
    for host in "ac":  # a link that is faster than that of host b matters little
        assert math.exp(logs[LINKS] + logs[link_of(host)]) == pytest.approx(1.0, rel=0.15)
    (line,) = contradicted(stated, calibration)
    assert line.startswith("the link of host b behaves as ")
    assert line.endswith("; the cluster is described with 400 Mbit/s")


@pytest.fixture(scope="module")
def slower_links() -> Calibration:
    """The calibration on telling trials in a cluster whose links have half of their bandwidth."""
    stated, of = extractor(), telling_trials()
    truth = with_constants(stated, Constants({LINKS: math.log(2.0)}))
    return calibrate(stated, of, measured(truth, of))


def test_a_bandwidth_that_is_stated_twice_too_high_is_found(slower_links: Calibration) -> None:
    logs = slower_links.fitted.logs
    rates = [math.exp(logs[LINKS] + logs[link_of(host)]) for host in "abc"]
    assert rates == pytest.approx([2.0] * 3, rel=0.06)
    assert len(contradicted(extractor(), slower_links)) == 3


def link_lines(cluster: Cluster, slower: float, sd: float = 0.01) -> tuple[str, ...]:
    """Lines of a calibration that found this logarithm for all links."""
    stated = extractor(cluster)
    calibration = Calibration(Constants({LINKS: slower}), dict.fromkeys(widths(stated), sd))
    return contradicted(stated, calibration)


def test_only_a_link_that_was_probed_has_a_figure_of_the_probe() -> None:
    """A job's own probe times collectives only, and leaves the links as they were described."""
    measured_links = (LinkFit("a", False, 50e6, 1e-4, 0.01, 0.01),)
    in_b = (LinkFit("b", True, 50e6, 1e-4, 0.01, 0.01),)
    slower_pair = (LinkFit("c", False, 40e6, 1e-4, 0.01, 0.01),)  # c kept the file's figure
    described = Cluster("c", HOSTS, link_fits=(*measured_links, *in_b, *slower_pair))
    points = tuple(ProbePoint(4**n, 1e-3 + 4**n * 1e-8, 0.01, 5, 0.0) for n in range(6, 12))
    series = (ProbeSeries("all_reduce", 3, Where.WORLD, False, points),)
    profile = Profile(MODEL, series, {}, 8, "", tuple((name, 1) for name in "abc"))
    cluster = probed(described, profile, one_machine=False)
    assert cluster.source == "measured"
    assert link_lines(cluster, math.log(2.0)) == (
        "the link of host a behaves as 200 Mbit/s; the probe has 400 Mbit/s",
        "the link of host b behaves as 200 Mbit/s; the cluster is described with 400 Mbit/s",
        "the link of host c behaves as 200 Mbit/s; the cluster is described with 400 Mbit/s",
    )


@pytest.mark.parametrize("measured", [False, True])
def test_the_links_of_more_hosts_than_have_factors_are_named_together(measured: bool) -> None:
    hosts = tuple(replace(HOSTS[0], name=f"h{n}") for n in range(MOST_HOSTS + 1))
    link_fits = [LinkFit(host.name, False, 50e6, 1e-4, 0.01, 0.01) for host in hosts]
    cluster = Cluster("many", hosts, link_fits=tuple(link_fits) if measured else ())
    who = "the probe has" if measured else "the cluster is described with"
    (line,) = link_lines(cluster, 1.5)
    assert line == f"the links of the 17 hosts behave as 0.22 times the bandwidths that {who}"
    assert link_lines(cluster, 1.5, sd=0.6) == link_lines(cluster, 0.1) == ()
    fewer = replace(cluster, hosts=hosts[:-1], link_fits=cluster.link_fits[:-1])
    assert len(link_lines(fewer, 1.5)) == MOST_HOSTS


@pytest.mark.parametrize(("cluster", "how"), [(PROBED, "measured"), (DESCRIBED, "assumed")])
def test_collectives_cost_what_was_measured_if_fits_measured_them(
    cluster: Cluster, how: str
) -> None:
    stated, logs = extractor(cluster), {START: math.log(3.0), COLLECTIVE_CPU: math.log(4.0)}
    calibration = Calibration(Constants(logs), dict.fromkeys(logs, 0.1))
    assert contradicted(stated, calibration) == (
        f"starting a collective costs 3 times what was {how}",
        f"CPU time of collectives costs 4 times what was {how}",
    )


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (Constants({"start": 0.5, "begin": 0.1}), "must be some of links, .*one is 'begin'"),
        (Constants(limits={"treads": 2}), "must be some of links, .* threads, .*one is 'treads'"),
        (Constants({LINKS: 30.0}), "possible cluster, but with the logarithms links 30 bandwidth"),
    ],
)
def test_constants_that_no_replay_knows_are_refused_by_name(
    constants: Constants, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        with_constants(extractor(), constants)


@pytest.mark.parametrize("log", [1000.0, -51.0, math.nan, math.inf])
def test_a_constant_that_no_calibration_finds_is_refused_by_name(log: float) -> None:
    with pytest.raises(InvalidInput, match="logarithm of the constant 'start' must be from -50"):
        Constants({START: log})


def test_stored_constants_with_a_later_field_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown field 'later'"):
        parse(Constants, {"logs": {}, "limits": {}, "later": 1}, "constants")


def test_right_constants_stay_and_nothing_is_contradicted() -> None:
    stated, of = extractor(), trials()
    calibration = calibrate(stated, of, measured(stated, of))
    assert calibration.fitted.limits == {}
    assert contradicted(stated, calibration) == ()
    before = measured(stated, of, 0.0)
    after = measured(with_constants(stated, calibration.constants), of, 0.0)
    assert np.abs(np.log(after / before)).max() < 3 * NOISE


def test_the_number_of_collectives_at_once_is_found() -> None:
    unlimited = {name: Constant(2**20, "stated") for name in ("threads", "star_threads")}
    stated, of = extractor(costs=replace(RuntimeCosts(), **unlimited)), trials()
    one_by_one = Constants(limits=dict.fromkeys(unlimited, 1))
    calibration = calibrate(stated, of, measured(with_constants(stated, one_by_one), of))
    assert calibration.fitted.limits == one_by_one.limits
    assert (
        "as if 1 of them ran at once; any number was assumed"
        in contradicted(stated, calibration)[0]
    )


def test_the_same_trials_give_the_same_constants_in_any_order() -> None:
    stated, of = extractor(), trials(5)
    times_s = measured(with_constants(stated, Constants({"issue": 1.0})), of)
    first, again = (calibrate(stated, of, times_s).fitted for _ in range(2))
    assert first == again
    turned = calibrate(stated, of[::-1], times_s[::-1]).fitted
    assert turned.limits == first.limits
    assert turned.logs == pytest.approx(dict(first.logs), abs=1e-3)


def test_replays_nearly_use_constants_that_are_clearly_right(slower_links: Calibration) -> None:
    assert slower_links.weight > 0.95
    used, fitted = slower_links.constants, slower_links.fitted
    assert used.limits == fitted.limits
    assert used.logs == {name: slower_links.weight * x for name, x in fitted.logs.items()}


def test_lightly_weighted_constants_change_no_limit() -> None:
    assert Calibration(Constants({}, {"threads": 1}), weight=0.4).constants.limits == {}


def test_a_calibration_ends_when_its_time_has_passed() -> None:
    asked = iter(range(100))
    with pytest.raises(OutOfTime):
        calibrate(extractor(), trials(5), np.ones(5), lambda: next(asked) > 50)
    assert next(asked) == 52
    assert calibrate(extractor(), [], np.zeros(0)).constants == Constants()


def test_no_trial_is_replayed_after_the_time_has_passed() -> None:
    given = extractor()
    with pytest.raises(OutOfTime):
        calibrate(given, trials(5), np.ones(5), lambda: True)
    assert given.steps.replayed == 0


def test_no_changed_constant_changes_no_replay() -> None:
    stated = extractor()
    same = with_constants(stated, Constants(dict.fromkeys(widths(stated), 0.0)))
    assert measured(same, trials(8), 0.0).tolist() == measured(stated, trials(8), 0.0).tolist()


@pytest.mark.parametrize("factor", list(widths(extractor())))
def test_a_larger_cost_shortens_no_step_by_much_and_every_factor_matters(factor: str) -> None:
    stated, of = extractor(), trials(14)
    before = measured(stated, of, 0.0)
    after = measured(with_constants(stated, Constants({factor: 1.0})), of, 0.0)
    assert (after >= before * 0.99).all()  # a list schedule may shorten by a little (Graham, 1969)
    assert (after > before).any() or factor == "rows"  # this model has no sparse gradients


def test_costs_that_are_assumed_to_be_nothing_grow_from_the_defaults() -> None:
    nothing = {name: Constant(0.0, f"{ASSUMED}: no model") for name in OF_COSTS["issue"]}
    stated = extractor(costs=replace(RuntimeCosts(), **nothing))
    costs = with_constants(stated, Constants({"issue": math.log(2.0)})).costs
    assert costs is not None
    assert costs["issue_s"] == pytest.approx(RuntimeCosts()["issue_s"])
    unchanged = with_constants(stated, Constants({"issue": -1.0})).costs
    assert unchanged is not None and unchanged["issue_s"] == 0.0
    assert widths(stated)["issue"] > widths(extractor())["issue"]


def test_limits_are_costs_of_the_runtime() -> None:
    for names, values in LIMITS:
        for name in names:
            assert RuntimeCosts()[name] in values
