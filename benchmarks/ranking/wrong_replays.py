"""Replays that are wrong about a domain, and the share of the lost accuracy that trials give back.

The trials are real; the replay is given something else than what the domain's campaign measured:

- `assumed`: nothing was probed. Links as in the cluster file, or as the tuner assumes them without
  one; assumed costs of the runtime.
- `bandwidth`: every link is stated twice as fast as it is, and so are the fits.
- `traffic`: the probe ran with background traffic that took half of one host's link, and the
  trials ran without it.
- `framework`: the runtime is not modelled. Only links and fits cost anything, and nothing limits
  the collectives that run at once.

The wrong replay is calibrated on own trials first. The process knows other domains with replays
that are right and calibrated. Accuracy is over all pairs:

    recovered share = sum(corrected - wrong) / sum(right - wrong)    over domains and test parts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from autotune.features.extract import Extractor
from autotune.lowering.costs import ASSUMED, Constant
from autotune.lowering.link_rates import with_link_rates
from autotune.simulators.constants import stated_costs
from benchmarks.ranking.calibrations import Calibrate, replaced
from benchmarks.ranking.corrections import (
    JUDGED,
    Kernels,
    corrected,
    held_out,
    learned_points,
    own_part,
    replayed_of,
    supported_strength,
    tested_of,
)
from benchmarks.ranking.decisions import decision_figures
from benchmarks.ranking.trials import Campaign, Point

_SHAPE = frozenset({"threads", "star_threads", "star_turns", "payload"})
"""Constants that are no seconds."""
_NO_MODEL = f"{ASSUMED}: no model of the framework's runtime"


def assumed(campaign: Campaign) -> Extractor:
    return campaign.unprobed


def twice_the_bandwidth(campaign: Campaign) -> Extractor:
    return _at_rates(campaign.extractor, [2.0] * len(campaign.extractor.cluster.hosts))


def traffic_on_one_host(campaign: Campaign) -> Extractor:
    rates = [1.0] * len(campaign.extractor.cluster.hosts)
    rates[-1] = 0.5
    return _at_rates(campaign.extractor, rates)


def unknown_framework(campaign: Campaign) -> Extractor:
    extractor = campaign.extractor
    costs = stated_costs(extractor)
    nothing = {
        field.name: Constant(0.0, _NO_MODEL) for field in fields(costs) if field.name not in _SHAPE
    }
    unbounded = {name: Constant(2**20, _NO_MODEL) for name in ("threads", "star_threads")}
    costs = replace(costs, **nothing, **unbounded, star_turns=Constant(0, _NO_MODEL))
    return extractor.with_rates(extractor.cluster, costs)


def _at_rates(extractor: Extractor, rates: Sequence[float]) -> Extractor:
    """Return the extractor with each host's link at this multiple of its rate."""
    return extractor.with_rates(with_link_rates(extractor.cluster, rates), stated_costs(extractor))


WRONG: Mapping[str, Callable[[Campaign], Extractor]] = {
    "assumed": assumed,
    "bandwidth": twice_the_bandwidth,
    "traffic": traffic_on_one_host,
    "framework": unknown_framework,
}


@dataclass(frozen=True)
class Recovery:
    """Accuracy over all pairs of one test part under a wrong replay: alone, with calibrated
    constants, and corrected after that."""

    case: str
    domain: str
    right: float
    wrong: float
    calibrated: float
    corrected: float


def recoveries(
    campaigns: Sequence[Campaign],
    points: Sequence[Point],
    domains: Sequence[str],
    seeds: int,
    points_of: Callable[[Sequence[Campaign]], list[Point]],
    calibrations_of: Callable[[Sequence[Campaign], Sequence[Point]], Calibrate],
    began: Callable[[str], None],
) -> list[Recovery]:
    """Return a row per case, domain and seed, after `JUDGED` own trials.

    `points`: with right replays. `points_of` replays campaigns.
    """
    rows = []
    calibrate = calibrations_of(campaigns, points)
    learned = learned_points(points, calibrate)
    kernels = Kernels(learned)
    for domain in domains:
        kernel = kernels.without(domain)
        supported = supported_strength(learned, domain, kernels, calibrate)
        for case, make_wrong in WRONG.items():
            began(f"{case}, {domain}")
            wrongly = [
                replace(campaign, extractor=make_wrong(campaign))
                for campaign in campaigns
                if campaign.domain == domain
            ]
            stated = replaced(points, points_of(wrongly))
            calibrate_wrong = calibrations_of(wrongly, stated)
            for seed in range(seeds):
                held = held_out(learned, domain, seed, kernel)
                test, tested = held.parts.test, tested_of(points, held.parts.test)
                training = own_part(held.parts, JUDGED)
                mixed = replaced(learned, calibrate_wrong(domain, training))
                correction, _ = corrected(mixed, held, JUDGED)
                calibrated_s = replayed_of(mixed, test)
                right, wrong, calibrated, regained = (
                    decision_figures(guess, tested)["all_pairs"]
                    for guess in (
                        replayed_of(points, test),
                        replayed_of(stated, test),
                        calibrated_s,
                        calibrated_s * np.exp(supported * correction.mean),
                    )
                )
                rows.append(Recovery(case, domain, right, wrong, calibrated, regained))
    return rows


def recovered_share(rows: Iterable[Recovery]) -> float:
    """Return the regained share of the accuracy that wrong replays lose; NaN if they lose none."""
    given = list(rows)
    lost = sum(row.right - row.wrong for row in given)
    return sum(row.corrected - row.wrong for row in given) / lost if lost > 0 else math.nan
