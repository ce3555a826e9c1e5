"""Costs of collectives and of hosts' own links, from the raw measurements of a probe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from autotune.cluster import CollectiveFit
from autotune.profiling.fits.link_fit import fit_alpha_beta, fit_curve, uncertainty_of
from autotune.recordings.probe import HostPair, LinkCost, ProbeSeries

FEWEST_SIZES = 2
FEWEST_LOADED_SIZES = 3
"""Under load, a line through two points shows the scheduler more than the link."""
CPU_CLOCK_S = 1e-6
"""Resolution of the clock of CPU time: it may not tick within a small message."""


def collective_fits(series: Iterable[ProbeSeries]) -> tuple[CollectiveFit, ...]:
    """One fit per series that has enough sizes."""
    return tuple(
        _fit(one)
        for one in series
        if len(one.points) >= (FEWEST_LOADED_SIZES if one.loaded else FEWEST_SIZES)
    )


def _fit(series: ProbeSeries) -> CollectiveFit:
    points = series.points
    sizes = [point.size_bytes for point in points]
    uncertainty = [uncertainty_of(point.spread, point.repeats) for point in points]
    curve = fit_curve(sizes, [point.seconds for point in points], uncertainty)
    cpu_s = [max(point.cpu_s, CPU_CLOCK_S) for point in points]
    cpu_alpha_s, cpu_beta_s_per_byte, _ = fit_alpha_beta(sizes, cpu_s)
    return CollectiveFit(
        series.primitive,
        series.group_size,
        curve.alpha_s,
        curve.beta_s_per_byte,
        curve.relative_error,
        min(sizes),
        max(sizes),
        cpu_alpha_s,
        cpu_beta_s_per_byte,
        where=series.where,
        loaded=series.loaded,
        bends=curve.bends,
        large_error=curve.large_error,
        spread=median(point.spread for point in points),
        sizes=len(sizes),
    )


def own_links(hosts: int, costs: Mapping[HostPair, LinkCost]) -> dict[int, tuple[LinkCost, int]]:
    """The own link of every host that was probed, and the number of its pairs.

    Errors and spread are those of the pair that shows the bandwidth. The latency is the least of
    all pairs.
    """
    links = {}
    for host in range(hosts):
        of_host = [cost for pair, cost in costs.items() if host in pair]
        if of_host:
            best = max(of_host, key=lambda cost: cost.bytes_per_s)
            latency_s = min(cost.latency_s for cost in of_host)
            link = LinkCost(best.bytes_per_s, latency_s, best.relative_error, best.spread)
            links[host] = (link, len(of_host))
    return links
