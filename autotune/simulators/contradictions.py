"""Which stated constants a job's trials contradict, in words for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autotune.cluster import Cluster
from autotune.features.extract import Extractor
from autotune.lowering.costs import RuntimeCosts
from autotune.simulators.calibration import Calibration
from autotune.simulators.constants import (
    COLLECTIVE_CPU,
    LINKS,
    OF_COSTS,
    START,
    link_of,
    stated_costs,
)
from autotune.units import format_rate

SURE = 3.0
"""Standard deviations by which a constant must differ."""
LINK_RATIO, COST_RATIO = 1.15, 2.0
"""Smallest ratio that is worth a line: a link decides which plans are fast, a cost of the runtime
is only roughly what a probe finds in isolation."""
UNLIMITED = 1000
"""A larger number of collectives at once is no limit."""
WORDS: Mapping[str, str] = MappingProxyType(
    {
        START: "starting a collective",
        COLLECTIVE_CPU: "CPU time of collectives",
        "issue": "issuing a message",
        "fill": "the hook of a gradient",
        "pack": "packing gradients",
        "settle": "flushing a message across the step",
        "int8": "int8 compression",
        "top_k": "top-k compression",
        "low_rank": "PowerSGD compression",
        "rows": "sorting and adding sparse rows",
    }
)


def contradicted(extractor: Extractor, calibration: Calibration) -> tuple[str, ...]:
    """Return a line for each constant of `extractor` that the trials clearly contradict."""
    costs = stated_costs(extractor)
    return (
        *_links(extractor.cluster, calibration),
        *_limits(costs, calibration.fitted.limits),
        *_costs(costs, calibration),
    )


def _links(cluster: Cluster, calibration: Calibration) -> Iterator[str]:
    logs = calibration.fitted.logs
    who = "the cluster file" if cluster.source == "assumed" else "the probe"
    for host in cluster.hosts:
        slower = logs.get(LINKS, 0.0) + logs.get(link_of(host.name), 0.0)
        sd = calibration.sd.get(link_of(host.name), math.inf)
        if abs(slower) > max(SURE * sd, math.log(LINK_RATIO)):
            behaves = format_rate(host.link_bytes_per_s * math.exp(-slower))
            stated = format_rate(host.link_bytes_per_s)
            yield f"the link of host {host.name} behaves as {behaves}; {who} has {stated}"


def _limits(costs: RuntimeCosts, limits: Mapping[str, int]) -> Iterator[str]:
    if "threads" in limits:
        stated = costs["threads"]
        then = "any number" if stated > UNLIMITED else f"{stated:.0f}"
        now = "any number" if limits["threads"] > UNLIMITED else f"{limits['threads']}"
        yield f"collectives behave as if {now} of them ran at once; {then} was assumed"
    if "star_turns" in limits:
        turns = "take turns" if limits["star_turns"] else "use both directions at once"
        yield f"gathers and scatters between two hosts {turns}, against what was assumed"


def _costs(costs: RuntimeCosts, calibration: Calibration) -> Iterator[str]:
    for factor, words in WORDS.items():
        more = calibration.fitted.logs.get(factor, 0.0)
        sd = calibration.sd.get(factor, math.inf)
        if abs(more) > max(SURE * sd, math.log(COST_RATIO)):
            stated = (getattr(costs, name) for name in OF_COSTS.get(factor, ()))
            how = "assumed" if any(one.is_assumed for one in stated) else "measured"
            yield f"{words} costs {math.exp(more):.2g} times what was {how}"
