"""Probe the links of a cluster, and turn the measurements into a `Cluster` with fitted costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from autotune import __version__
from autotune.cluster import Cluster, Host, LinkFit, PeerFit
from autotune.errors import InvalidInput
from autotune.jobs.places import Ranks, Where, placed_world
from autotune.profiling.fits.probe_fits import collective_fits, own_links
from autotune.recordings.probe import HostPair, LinkCost, NoCost, PeerCost
from autotune.records import Accelerators, Conditions
from runtime_rewriter.world.results import Probe

SCRIPT = "runtime_rewriter.probe.script"
UNSEEN_ABOVE = 1.1
"""A link counts as not seen if its given bandwidth exceeds the measured one by this factor.

No other link may be that fast.
"""
LEAST_BUDGET_S = 5.0
"""A shorter probe does not even finish the small messages on a slow network."""
SHOWN_LINKS = 4
REASONS = {
    NoCost.TIME: "the time did not suffice for messages that show the bandwidth; use a longer "
    "--budget-time",
    NoCost.FLAT: "larger messages took no longer than smaller ones; probe again on idle hosts",
}


class ProbeProgress(Protocol):
    def waiting(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def probing(self, text: str) -> None: ...


@dataclass(frozen=True)
class ProbeRequest:
    """`given` is the cluster of a file; None: the hosts are discovered."""

    given: Cluster | None
    workers: int
    budget_s: float


def probe_request(given: Cluster | None, workers: int | None, budget_s: float) -> ProbeRequest:
    """Check and complete a request; raises `InvalidInput`."""
    if workers is None:
        if given is None:
            raise InvalidInput(
                "the number of ranks to probe with is not known; use --workers N, --cluster or "
                "--testbed cluster.yaml"
            )
        workers = given.world_size
    if workers < 2:
        raise InvalidInput(
            f"a link has two ends, so a probe needs at least 2 workers, but has {workers}"
        )
    if given is not None and workers != given.world_size:
        raise InvalidInput(
            f"--workers must be the {given.world_size} devices of cluster {given.name!r}, "
            f"but is {workers}; leave --workers out"
        )
    if budget_s < LEAST_BUDGET_S:
        raise InvalidInput(
            f"--budget-time must be at least {LEAST_BUDGET_S:g}s, but is {budget_s:g}s"
        )
    return ProbeRequest(given, workers, budget_s)


def run_probe(
    request: ProbeRequest,
    conditions: Conditions,
    where: Where,
    ranks: Ranks,
    progress: ProbeProgress,
) -> Probe:
    """Start the ranks and probe. Raises `LaunchError` if they cannot start or fail."""
    cluster = request.given or Cluster.local(request.workers)
    with placed_world(where, cluster, conditions, ranks, progress.waiting) as world:
        world.model_id()  # wait until the ranks are up
        progress.begin()
        computing = conditions.accelerators is Accelerators.REAL
        return world.probe(request.budget_s, progress.probing, computing)


def measured_cluster(
    given: Cluster | None, probe: Probe, now: datetime, measured_on: str = ""
) -> tuple[Cluster, str]:
    """Return the cluster with the measured costs, and a remark for people ("" or lines).

    `measured_on` is the label of the conditions. Hosts come from the file if there is one, and get
    the addresses of the nodes that were measured. If the ranks ran on other hosts (on more than
    the file has, for example), the file's bandwidths stay.
    """
    layout = tuple(ranks for _, ranks in probe.hosts)
    base = given or Cluster("probed", _discovered_hosts(probe))
    remark = ""
    hosts = base.hosts
    link_fits: tuple[LinkFit, ...] = ()
    peer_fits: tuple[PeerFit, ...] = ()
    if tuple(host.devices for host in base.hosts) == layout:
        base = base.at_addresses(probe.addresses)
        hosts, link_fits = _with_links(base, probe)
        peer_fits = tuple(_peer_fit(base.hosts[cost.host].name, cost) for cost in probe.links.peers)
        if given is not None:
            hosts = tuple(_at_least_as_given(at, host, given) for at, host in enumerate(hosts))
        remark = _missing_links(base, link_fits, probe.links.missing)
    else:
        remark = (
            f"The ranks ran on {len(layout)} host(s) with {', '.join(map(str, layout))}, not on "
            f"the {len(base.hosts)} of the file: the bandwidths of its hosts stay.\n"
        )
    cluster = replace(
        base,
        hosts=hosts,
        link_fits=link_fits,
        measured_at=now.isoformat(timespec="seconds"),
        software=tuple(sorted({"autotune": __version__, **probe.software}.items())),
        fits=(),
        measured_on=measured_on,
        # Emulated hosts share the cores of one machine.
        machine_cores=max(probe.cores, default=0) if measured_on else 0,
        peer_fits=peer_fits,
    )
    return cluster.with_fits(collective_fits(probe.series)), remark


def _discovered_hosts(probe: Probe) -> tuple[Host, ...]:
    return tuple(
        replace(Cluster.local(ranks).hosts[0], name=name, address="") for name, ranks in probe.hosts
    )


def _with_links(base: Cluster, probe: Probe) -> tuple[tuple[Host, ...], tuple[LinkFit, ...]]:
    """Return the hosts with the measured costs of their own links, and the fits of these links.

    A pair of hosts with a link of its own is no evidence about theirs. A host that only such pairs
    were probed for keeps its costs.
    """
    hosts = [
        replace(host, cores=cores or host.cores)
        for host, cores in zip(base.hosts, probe.cores, strict=True)
    ]
    fits = []
    for number, cost in probe.links.inside:
        host = hosts[number]
        hosts[number] = replace(
            host, inner_bytes_per_s=cost.bytes_per_s, inner_latency_s=cost.latency_s
        )
        fits.append(_link_fit(host.name, True, cost, 1))
    for number, (cost, pairs) in own_links(len(hosts), _pairs_over_own_links(base, probe)).items():
        host = hosts[number]
        hosts[number] = replace(host, link_bytes_per_s=cost.bytes_per_s, latency_s=cost.latency_s)
        fits.append(_link_fit(host.name, False, cost, pairs))
    return tuple(hosts), tuple(fits)


def _missing_links(
    base: Cluster, link_fits: Sequence[LinkFit], missing: Sequence[tuple[HostPair, NoCost]]
) -> str:
    """A line per reason that links have no measured cost, and one for hosts without any."""
    names = [host.name for host in base.hosts]
    text = ""
    for reason, why in REASONS.items():
        links = [
            f"inside {names[a]}" if a == b else f"{names[a]} - {names[b]}"
            for (a, b), one in missing
            if one is reason
        ]
        if links:
            text += f"No cost of {len(links)} link(s) ({_first_of(links)}): {why}.\n"
    measured = {fit.host for fit in link_fits if not fit.inside}
    missed = {names[host] for (a, b), _ in missing if a != b for host in (a, b)}
    if unknown := [name for name in names if name in missed - measured]:
        text += f"The links of {_first_of(unknown)} keep given or assumed figures.\n"
    return text


def _first_of(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_LINKS
    return ", ".join(names[:SHOWN_LINKS]) + (f" and {more} more" if more > 0 else "")


def _link_fit(host: str, inside: bool, cost: LinkCost, probes: int) -> LinkFit:
    return LinkFit(
        host, inside, cost.bytes_per_s, cost.latency_s, cost.relative_error, cost.spread, probes
    )


def _peer_fit(host: str, cost: PeerCost) -> PeerFit:
    return PeerFit(
        host=host,
        peers=cost.peers,
        outwards=cost.outwards,
        bytes_per_s=cost.bytes_per_s,
        message_s=cost.message_s,
        relative_error=cost.relative_error,
        spread=cost.spread,
    )


def _at_least_as_given(number: int, measured: Host, given: Cluster) -> Host:
    """Keep the given bandwidth of the one link that is faster than all others.

    A pair of hosts shows the slower of two links, so no pair measures that link.
    """
    given_bytes_per_s = given.hosts[number].link_bytes_per_s
    seen_bytes_per_s = UNSEEN_ABOVE * measured.link_bytes_per_s
    others = [host.link_bytes_per_s for at, host in enumerate(given.hosts) if at != number]
    unseen = given_bytes_per_s > seen_bytes_per_s and others and max(others) <= seen_bytes_per_s
    return replace(measured, link_bytes_per_s=given_bytes_per_s) if unseen else measured


def _pairs_over_own_links(base: Cluster, probe: Probe) -> dict[HostPair, LinkCost]:
    """Every probed pair of hosts, without those that `base` names a link for."""
    named = {frozenset(link.between) for link in base.pair_links}
    return {
        (a, b): cost
        for (a, b), cost in probe.links.between
        if frozenset((base.hosts[a].name, base.hosts[b].name)) not in named
    }
