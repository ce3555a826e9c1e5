"""Replays that are wrong about a domain, and the share of the lost accuracy that trials give back.

The trials are real; the replay is given something else than what the domain's campaign measured:

- `assumed`: nothing was probed. Links as in the cluster file, assumed costs of the runtime.
- `bandwidth`: every link is stated twice as fast as it is, and so are the fits.
- `traffic`: the probe ran with background traffic that took half of one host's link, and the
  trials ran without it.
- `framework`: the runtime is not modelled. Only links and fits cost anything, and nothing limits
  the collectives that run at once.

The process knows other domains with replays that are right. Accuracy is over all pairs:

    recovered share = sum(corrected - wrong) / sum(right - wrong)    over domains and test parts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.features.extract import Extractor
from autotune.lowering.costs import EMULATED_COSTS, Constant, RuntimeCosts
from autotune.lowering.traffic import Collective, Ports
from benchmarks.ranking.corrections import (
    JUDGED,
    corrected,
    held_out,
    kernel_for,
    replayed_of,
    supported_strength,
    tested_of,
)
from benchmarks.ranking.decisions import decision_figures
from benchmarks.ranking.trials import Campaign, Point

_CALLS = {
    "push_pull": (Collective.GATHER, Collective.SCATTER),
    "reduce_scatter_all_gather": (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
}
"""The collectives of a probed operation that is none itself."""
_SHAPE = frozenset({"threads", "star_threads", "star_turns", "payload"})
"""Constants that are no seconds."""
_NO_MODEL = "no model of the framework's runtime"


def assumed(extractor: Extractor) -> Extractor:
    cluster = replace(extractor.cluster, fits=(), link_fits=(), source="assumed")
    return Extractor(extractor.workload, cluster, EMULATED_COSTS)


def twice_the_bandwidth(extractor: Extractor) -> Extractor:
    cluster = with_link_rates(extractor.cluster, [2.0] * len(extractor.cluster.hosts))
    return Extractor(extractor.workload, cluster, extractor.costs)


def traffic_on_one_host(extractor: Extractor) -> Extractor:
    rates = [1.0] * len(extractor.cluster.hosts)
    rates[-1] = 0.5
    cluster = with_link_rates(extractor.cluster, rates)
    return Extractor(extractor.workload, cluster, extractor.costs)


def unknown_framework(extractor: Extractor) -> Extractor:
    costs = extractor.costs or RuntimeCosts()
    nothing = {
        field.name: Constant(0.0, _NO_MODEL) for field in fields(costs) if field.name not in _SHAPE
    }
    unbounded = {name: Constant(2**20, _NO_MODEL) for name in ("threads", "star_threads")}
    costs = replace(costs, **nothing, **unbounded, star_turns=Constant(0, _NO_MODEL))
    return Extractor(extractor.workload, extractor.cluster, costs)


WRONG: Mapping[str, Callable[[Extractor], Extractor]] = {
    "assumed": assumed,
    "bandwidth": twice_the_bandwidth,
    "traffic": traffic_on_one_host,
    "framework": unknown_framework,
}


def with_link_rates(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    """Return the cluster with each host's link at this multiple of its rate, the fits in keeping.

    The bytes of a fit cost as much more as the collective's slowest port allows.
    """
    hosts = tuple(
        replace(host, link_bytes_per_s=host.link_bytes_per_s * factor)
        for host, factor in zip(cluster.hosts, factors, strict=True)
    )
    changed = replace(cluster, hosts=hosts)
    before, after = Ports(cluster), Ports(changed)
    fits = tuple(_scaled(fit, _port_s(fit, after) / _port_s(fit, before)) for fit in cluster.fits)
    return replace(changed, fits=fits)


def _port_s(fit: CollectiveFit, ports: Ports) -> float:
    """Return the seconds per byte of the fit's collectives on the links alone."""
    if fit.where is Where.HOST:
        return 1.0  # no link of a host is involved
    calls = _CALLS.get(fit.primitive)
    members = tuple(range(ports.cluster.world_size))
    if fit.where is Where.ACROSS:
        members = tuple(int(rank) for rank in np.unique(ports.host_of_rank, return_index=True)[1])
    each = calls or (Collective(fit.primitive),)
    return sum(ports.traffic(call, members, members[0]).alone_s_per_byte for call in each) or 1.0


def _scaled(fit: CollectiveFit, factor: float) -> CollectiveFit:
    bends = tuple(replace(bend, s_per_byte=bend.s_per_byte * factor) for bend in fit.bends)
    return replace(fit, beta_s_per_byte=fit.beta_s_per_byte * factor, bends=bends)


@dataclass(frozen=True)
class Recovery:
    """Accuracy over all pairs of one test part under a wrong replay, alone and corrected."""

    case: str
    domain: str
    right: float
    wrong: float
    corrected: float


def recoveries(
    campaigns: Sequence[Campaign],
    points: Sequence[Point],
    domains: Sequence[str],
    seeds: int,
    points_of: Callable[[Sequence[Campaign]], list[Point]],
    began: Callable[[str], None],
) -> list[Recovery]:
    """Return a row per case, domain and seed, after `JUDGED` own trials.

    `points`: with right replays. `points_of` replays campaigns.
    """
    rows = []
    for domain in domains:
        kernel = kernel_for(points, domain)
        supported = supported_strength(points, domain, kernel)
        for case, make_wrong in WRONG.items():
            began(f"{case}, {domain}")
            wrongly = [
                replace(campaign, extractor=make_wrong(campaign.extractor))
                for campaign in campaigns
                if campaign.domain == domain
            ]
            mixed = _replaced(points, points_of(wrongly))
            for seed in range(seeds):
                held = held_out(mixed, domain, seed, kernel)
                tested = tested_of(points, held.parts.test)
                correction, _ = corrected(mixed, held, JUDGED)
                wrong_s = replayed_of(mixed, held.parts.test)
                right, wrong, regained = (
                    decision_figures(guess, tested)["all_pairs"]
                    for guess in (
                        replayed_of(points, held.parts.test),
                        wrong_s,
                        wrong_s * np.exp(supported * correction.mean),
                    )
                )
                rows.append(Recovery(case, domain, right, wrong, regained))
    return rows


def recovered_share(rows: Iterable[Recovery]) -> float:
    """Return the regained share of the accuracy that wrong replays lose; NaN if they lose none."""
    given = list(rows)
    lost = sum(row.right - row.wrong for row in given)
    return sum(row.corrected - row.wrong for row in given) / lost if lost > 0 else math.nan


def _replaced(points: Sequence[Point], wrong: Sequence[Point]) -> list[Point]:
    """Return the points in their order, those of `wrong` in place of their originals."""
    known = {(point.example.domain, point.plan_id): point for point in wrong}
    return [known.get((point.example.domain, point.plan_id), point) for point in points]
