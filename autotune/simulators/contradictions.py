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
    START,
    is_assumed,
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
        *_costs(extractor.cluster, costs, calibration),
    )


def _links(cluster: Cluster, calibration: Calibration) -> Iterator[str]:
    """Name each host's link, or all of them at once if the calibration has one factor for all."""
    logs, sd = calibration.fitted.logs, calibration.sd
    together = logs.get(LINKS, 0.0)
    # A probe keeps a file's bandwidth where no pair of hosts can show it.
    fitted = {(fit.host, fit.bytes_per_s) for fit in cluster.link_fits if not fit.inside}
    probed = [host for host in cluster.hosts if (host.name, host.link_bytes_per_s) in fitted]
    with_factors = [host for host in cluster.hosts if link_of(host.name) in sd]
    for host in with_factors:
        slower = together + logs.get(link_of(host.name), 0.0)
        if _differs(slower, sd[link_of(host.name)], LINK_RATIO):
            behaves = format_rate(host.link_bytes_per_s * math.exp(-slower))
            stated = format_rate(host.link_bytes_per_s)
            origin = _origin(host in probed)
            yield f"the link of host {host.name} behaves as {behaves}; {origin} {stated}"
    if not with_factors and _differs(together, sd.get(LINKS, math.inf), LINK_RATIO):
        origin = _origin(len(probed) == len(cluster.hosts))
        behave = f"{math.exp(-together):.2g} times the bandwidths"
        yield f"the links of the {len(cluster.hosts)} hosts behave as {behave} that {origin}"


def _origin(probed: bool) -> str:
    """Name the origin of a bandwidth that a probe of the link itself found, or of another one."""
    return "the probe has" if probed else "the cluster is described with"


def _differs(more: float, sd: float, ratio: float) -> bool:
    """Return whether a change of a logarithm is sure, and large enough for a line."""
    return abs(more) > max(SURE * sd, math.log(ratio))


def _limits(costs: RuntimeCosts, limits: Mapping[str, int]) -> Iterator[str]:
    if "threads" in limits:
        stated = costs["threads"]
        then = "any number" if stated > UNLIMITED else f"{stated:.0f}"
        now = "any number" if limits["threads"] > UNLIMITED else f"{limits['threads']}"
        yield f"collectives behave as if {now} of them ran at once; {then} was assumed"
    if "star_turns" in limits:
        turns = "take turns" if limits["star_turns"] else "use both directions at once"
        yield f"gathers and scatters between two hosts {turns}, against what was assumed"


def _costs(cluster: Cluster, costs: RuntimeCosts, calibration: Calibration) -> Iterator[str]:
    for factor, words in WORDS.items():
        more = calibration.fitted.logs.get(factor, 0.0)
        if _differs(more, calibration.sd.get(factor, math.inf), COST_RATIO):
            how = "assumed" if is_assumed(factor, cluster, costs) else "measured"
            yield f"{words} costs {math.exp(more):.2g} times what was {how}"
