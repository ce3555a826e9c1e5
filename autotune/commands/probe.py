"""`autotune probe`: what the links of a cluster really cost, as a table and as a cluster file for `autotune tune --cluster`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune import __version__
from autotune.canonical import to_data
from autotune.cluster import Cluster, CollectiveFit, Host, LinkFit
from autotune.cluster_file import cluster_yaml
from autotune.commands.emulation import read_setting, scheduled
from autotune.commands.render.tables import table_text
from autotune.commands.settings import read_ports
from autotune.errors import InvalidInput
from autotune.export import write_whole
from autotune.jobs.places import Ranks, Where, placed_world
from autotune.jobs.results import taken_under
from autotune.jobs.signals import terminable
from autotune.jobs.workspace import Workspace
from autotune.profiling.fits.host_links import Pair, PairCost, own_links
from autotune.records import Accelerators, Conditions
from autotune.units import format_bytes, format_rate, format_seconds, parse_seconds
from runtime_rewriter.world.command import ScriptCommand

SCRIPT = "runtime_rewriter.probe.script"
UNSEEN_ABOVE = 1.1
"""So much faster than what pairs show a link must be by the file, and no other one, to count as not seen."""
LEAST_BUDGET_S = 5.0
"""Below that not even the small messages are probed on a slow network."""
WIDTH = 150
FIT_COLUMNS = (
    "primitive",
    "ranks",
    "sizes",
    "alpha",
    "bandwidth",
    "pieces",
    "error",
    "from 1 MiB",
    "spread",
    "loaded",
    "cpu at 1 MiB",
)


class ProbedLink(Protocol):
    @property
    def host(self) -> int: ...
    @property
    def inside(self) -> bool: ...
    @property
    def cost(self) -> PairCost: ...
    @property
    def probes(self) -> int: ...
    @property
    def told(self) -> tuple[tuple[int, PairCost], ...]: ...


class ProbeOutcome(Protocol):
    """What the world measured; `links` count hosts as `hosts` does."""

    @property
    def fits(self) -> tuple[CollectiveFit, ...]: ...
    @property
    def links(self) -> Sequence[ProbedLink]: ...
    @property
    def software(self) -> dict[str, str]: ...
    @property
    def cores(self) -> tuple[int, ...]: ...
    @property
    def hosts(self) -> tuple[tuple[str, int], ...]: ...


@dataclass(frozen=True)
class _Request:
    """`given` is the cluster of a file, or None: then the hosts are those that are found."""

    given: Cluster | None
    workers: int
    budget_s: float
    ranks: Ranks
    where: Where
    conditions: Conditions


def probe(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Probe, write the cluster file, and return what was found."""
    request = _request(options)
    with terminable():
        outcome = _probe(request)
    cluster, remark = measured_cluster(
        request.given, outcome, datetime.now(UTC), request.conditions.label
    )
    write_whole(options.output, cluster_yaml(cluster), "the cluster file")
    data = {
        "cluster": cluster.to_data(),
        "output": str(options.output),
        "remark": remark,
        "conditions": to_data(request.conditions),
    }
    return data, _tables(
        cluster
    ) + remark + f"cluster file: {options.output}{taken_under(request.conditions)}"


def _request(options: argparse.Namespace) -> _Request:
    setting = read_setting(options, None)
    given = setting.cluster
    workers = (
        options.workers
        if options.workers is not None
        else given.world_size
        if given is not None
        else None
    )
    if workers is None:
        raise InvalidInput(
            "the number of ranks to probe with is not known; use --workers N, --cluster or --testbed cluster.yaml"
        )
    if workers < 2:
        raise InvalidInput(
            f"a link has two ends, so a probe needs at least 2 workers, but has {workers}"
        )
    if given is not None and workers != given.world_size:
        raise InvalidInput(
            f"--workers must be the {given.world_size} devices of cluster {given.name!r}, but is {workers}; leave --workers out"
        )
    budget_s = parse_seconds(options.budget_time, "--budget-time")
    if budget_s < LEAST_BUDGET_S:
        raise InvalidInput(
            f"--budget-time must be at least {LEAST_BUDGET_S:g}s, but is {options.budget_time}"
        )
    step_timeout_s, start_timeout_s = (
        parse_seconds(getattr(options, name), f"--{name.replace('_', '-')}")
        for name in ("step_timeout", "start_timeout")
    )
    # Of this probe alone: another one may run beside it.
    logs = (
        Workspace.create(options.directory).job("probe")
        / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        / "logs"
    )
    ranks = Ranks(
        ScriptCommand(SCRIPT, (), True, workers), workers, logs, step_timeout_s, start_timeout_s
    )
    where = Where(options.address, False, read_ports(options.master_ports), bare=True)
    return _Request(given, workers, budget_s, ranks, where, scheduled(setting.conditions, workers))


def _probe(request: _Request) -> ProbeOutcome:
    console = Console(stderr=True)
    cluster = request.given or Cluster.local(request.workers)
    with console.status("starting the ranks", spinner="dots") as status:
        progress = _Progress(console, request.budget_s, status.update)
        under = escape(taken_under(request.conditions))
        console.print(
            f"probing {request.workers} ranks for {request.budget_s:.0f} s{under}", highlight=False
        )
        with placed_world(
            request.where, cluster, request.conditions, request.ranks, status.update
        ) as world:
            world.model_id()  # the ranks are up
            progress.begin()
            computing = request.conditions.accelerators is Accelerators.REAL
            return world.probe(request.budget_s, progress.said, computing)


class _Progress:
    """What is probed now, and the time left. Off a terminal a line every `LINE_EVERY_S`."""

    LINE_EVERY_S = 10.0

    def __init__(self, console: Console, budget_s: float, update: Any) -> None:
        self._console, self._budget_s, self._update = console, budget_s, update
        self._began_s = self._printed_s = 0.0

    def begin(self) -> None:
        self._began_s = self._printed_s = time.monotonic()

    def said(self, what: str) -> None:
        now_s = time.monotonic()
        left_s = max(0.0, self._budget_s - (now_s - self._began_s))
        line = f"{escape(what)}  [dim](ETA {int(left_s) // 60}:{int(left_s) % 60:02d})[/dim]"
        self._update(line)
        if not self._console.is_terminal and now_s - self._printed_s >= self.LINE_EVERY_S:
            self._printed_s = now_s
            self._console.print(line, highlight=False, soft_wrap=True)


def measured_cluster(
    given: Cluster | None, found: ProbeOutcome, now: datetime, measured_on: str = ""
) -> tuple[Cluster, str]:
    """The cluster with what was measured, and a remark for people ("" or a line). `measured_on`: the label of the conditions.

    Hosts come from the file where there is one. If the ranks did not run on hosts like these (on one machine, say), the
    file's bandwidths stay, since nothing was learned of them.
    """
    layout = tuple(ranks for _, ranks in found.hosts)
    base = given or Cluster(
        "probed",
        tuple(
            replace(Cluster.local(ranks).hosts[0], name=name, address="")
            for name, ranks in found.hosts
        ),
    )
    remark = ""
    if tuple(host.devices for host in base.hosts) == layout:
        hosts, link_fits = _with_links(base, found)
        if given is not None:
            hosts = tuple(
                _at_least_as_given(number, host, given) for number, host in enumerate(hosts)
            )
    else:
        hosts, link_fits = base.hosts, ()
        remark = (
            f"The ranks ran on {len(layout)} host(s) with {', '.join(map(str, layout))}, and not on the {len(base.hosts)} of the file: "
            "the bandwidths of its hosts stay as they were.\n"
        )
    software = tuple(sorted({"autotune": __version__, **found.software}.items()))
    cluster = replace(
        base,
        hosts=hosts,
        link_fits=link_fits,
        measured_at=now.isoformat(timespec="seconds"),
        software=software,
        fits=(),
    )
    machine_cores = (
        max(found.cores, default=0) if measured_on else 0
    )  # what stood for a cluster is one machine
    return replace(cluster, measured_on=measured_on, machine_cores=machine_cores).with_fits(
        found.fits
    ), remark


def _with_links(base: Cluster, found: ProbeOutcome) -> tuple[tuple[Host, ...], tuple[LinkFit, ...]]:
    """The hosts with the figures of their own links, and the fits behind these.

    A pair of hosts with a link of its own says nothing about theirs; a host that only such pairs told of keeps its figures.
    """
    known = [
        replace(host, cores=cores or host.cores)
        for host, cores in zip(base.hosts, found.cores, strict=True)
    ]
    own = own_links(len(known), _pairs_over_own_links(base, found)) if base.pair_links else None
    fits = []
    for link in found.links:
        cost, probes, host = link.cost, link.probes, known[link.host]
        if own is not None and not link.inside:
            if link.host not in own:
                continue
            cost, probes = own[link.host]
        if link.inside:
            known[link.host] = replace(
                host, inner_bytes_per_s=cost.bytes_per_s, inner_latency_s=cost.latency_s
            )
        else:
            known[link.host] = replace(
                host, link_bytes_per_s=cost.bytes_per_s, latency_s=cost.latency_s
            )
        fits.append(
            LinkFit(
                host.name,
                link.inside,
                cost.bytes_per_s,
                cost.latency_s,
                cost.relative_error,
                cost.spread,
                probes,
            )
        )
    return tuple(known), tuple(fits)


def _at_least_as_given(number: int, measured: Host, given: Cluster) -> Host:
    """Pairs show the slower of two links, so nothing of a link that is faster than all others: there the file's bandwidth stays."""
    own_bytes_per_s = given.hosts[number].link_bytes_per_s
    most = UNSEEN_ABOVE * measured.link_bytes_per_s
    others = [host.link_bytes_per_s for at, host in enumerate(given.hosts) if at != number]
    unseen = own_bytes_per_s > most and others and max(others) <= most
    return replace(measured, link_bytes_per_s=own_bytes_per_s) if unseen else measured


def _pairs_over_own_links(base: Cluster, found: ProbeOutcome) -> dict[Pair, PairCost]:
    """Every pair of hosts that was probed, without those that `base` names a link for."""
    named = {frozenset(link.between) for link in base.pair_links}
    pairs = {
        (link.host, other): cost
        for link in found.links
        for other, cost in link.told
        if link.host < other
    }
    return {
        (a, b): cost
        for (a, b), cost in pairs.items()
        if {base.hosts[a].name, base.hosts[b].name} not in named
    }


def _tables(cluster: Cluster) -> str:
    text = ""
    if cluster.link_fits:
        links = Table("host", "link", "bandwidth", "latency", "fit error", "spread", box=SIMPLE)
        for link in cluster.link_fits:
            where, rate = "inside" if link.inside else "own", format_rate(link.bytes_per_s)
            latency = format_seconds(link.latency_s)
            links.add_row(
                escape(link.host),
                where,
                rate,
                latency,
                f"{link.relative_error:.1%}",
                f"{link.spread:.1%}",
            )
        text += table_text(links, WIDTH)
    fits = Table(*FIT_COLUMNS, box=SIMPLE)
    for fit in cluster.fits:
        fits.add_row(*_fit_row(fit))
    return text + table_text(fits, WIDTH)


def _fit_row(fit: CollectiveFit) -> tuple[str, ...]:
    return (
        fit.primitive,
        f"{fit.group_size} ({fit.where.value})",
        f"{format_bytes(fit.smallest_bytes)} - {format_bytes(fit.largest_bytes)}",
        format_seconds(fit.alpha_s),
        f"{format_bytes(1 / fit.beta_s_per_byte)}/s"
        if fit.beta_s_per_byte > 0
        else "no limit seen",
        str(len(fit.bends) + 1),
        f"{fit.relative_error:.1%}",
        "" if fit.large_error is None else f"{fit.large_error:.1%}",
        f"{fit.spread:.1%}",
        "yes" if fit.loaded else "",
        format_seconds(fit.cpu_s(2**20)),
    )
