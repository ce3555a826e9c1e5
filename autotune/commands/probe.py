"""`autotune probe`: measure the links of a cluster, show their costs, write the cluster file."""

from __future__ import annotations

import argparse
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune.canonical import to_data
from autotune.cluster import Cluster, CollectiveFit
from autotune.cluster_file import cluster_yaml, read_cluster
from autotune.commands.arguments import add_directory, add_ray, add_settings, given_settings
from autotune.commands.render.tables import table_text
from autotune.commands.render.terminal import Terminal
from autotune.errors import InvalidInput
from autotune.files import refuse_unwritable, write_whole
from autotune.jobs.places import Ranks, Where
from autotune.jobs.probe import SCRIPT, measured_cluster, probe_request, run_probe
from autotune.jobs.results import taken_under
from autotune.jobs.settings import read_ports, read_target, scheduled
from autotune.jobs.signals import terminable
from autotune.jobs.workspace import Workspace
from autotune.profiling.fits.table_fits import table_fits
from autotune.profiling.formats.collective_table import read_collective_table
from autotune.units import format_bytes, format_rate, format_seconds, parse_seconds
from runtime_rewriter.world.script_command import ScriptCommand

WIDTH = 150
LINK_COLUMNS = ("host", "link", "bandwidth", "latency", "fit error", "spread")
PEER_COLUMNS = (
    "host",
    "peers at once",
    "messages",
    "bandwidth",
    "per message",
    "fit error",
    "spread",
)
FIT_COLUMNS = (
    *("primitive", "ranks", "sizes", "alpha", "bandwidth", "pieces", "error", "from 1 MiB"),
    *("spread", "loaded", "cpu at 1 MiB"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_ray(parser)
    add_settings(parser, ("workers", "cluster", "testbed", "byte_scale", "accelerators"))
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("probed.yaml"),
        help="the cluster file to write (default probed.yaml)",
    )
    parser.add_argument(
        "--from-table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="probe nothing: fit the times in these files (nccl-tests or CSV) for --cluster",
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks of tables that do not state them (with --from-table)"
    )
    parser.add_argument(
        "--primitive", default="", help="collective of such tables (usually all_reduce)"
    )
    for option, default, purpose in (
        ("--budget-time", "1min", "time for probing, after the ranks have started"),
        ("--step-timeout", "60s", "silence, beyond the budget, after which a rank counts as hung"),
        ("--start-timeout", "2min", "time until the ranks have started"),
    ):
        parser.add_argument(option, default=default, help=f"{purpose} (default {default})")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Probe, or read tables; write the cluster file, and show the costs."""
    refuse_unwritable(options.output)
    if options.from_table:
        return _from_tables(options)
    target = read_target(given_settings(options), options.address)
    budget_s = parse_seconds(options.budget_time, "--budget-time")
    request = probe_request(target.cluster, options.workers, budget_s)
    conditions = scheduled(target.conditions, request.workers)
    step_timeout_s = parse_seconds(options.step_timeout, "--step-timeout")
    start_timeout_s = parse_seconds(options.start_timeout, "--start-timeout")
    where = Where(options.address, False, read_ports(options.master_ports), bare=True)
    # Two probes may run at the same time: each has its own folder.
    folder = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    logs = Workspace.create(options.directory).job("probe") / folder / "logs"
    script = ScriptCommand(SCRIPT, (), True, request.workers)
    ranks = Ranks(script, request.workers, logs, step_timeout_s, start_timeout_s)
    console = Terminal()
    with terminable(), console.status("starting the ranks", spinner="dots") as status:
        under = escape(taken_under(conditions))
        console.print(
            f"probing {request.workers} ranks for {budget_s:.0f} s{under}", highlight=False
        )
        progress = _Progress(console, budget_s, status.update)
        probe = run_probe(request, conditions, where, ranks, progress)
    cluster, remark = measured_cluster(request.given, probe, datetime.now(UTC), conditions.label)
    write_whole(options.output, cluster_yaml(cluster), "the cluster file")
    data = {
        "cluster": cluster.to_data(),
        "output": str(options.output),
        "remark": remark,
        "conditions": to_data(conditions),
    }
    path = f"cluster file: {options.output}{taken_under(conditions)}"
    return data, _tables(cluster) + remark + path


def _from_tables(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Fit tables for the hosts of a cluster file."""
    if options.cluster is None:
        raise InvalidInput(
            "a table states no hosts, so --from-table needs the cluster that it was measured on; "
            "describe it in a file and name this with --cluster"
        )
    given = read_cluster(Path(options.cluster))
    rows = [
        row
        for path in options.from_table
        for row in read_collective_table(path, options.ranks, options.primitive)
    ]
    cluster = given.with_fits(table_fits(rows))
    write_whole(options.output, cluster_yaml(cluster), "the cluster file")
    data = {"cluster": cluster.to_data(), "output": str(options.output), "remark": ""}
    return data, _tables(cluster) + f"cluster file: {options.output}"


class _Progress:
    """The current probe and the time left; without a terminal, a line every `LINE_EVERY_S`."""

    LINE_EVERY_S = 10.0

    def __init__(self, console: Console, budget_s: float, update: Any) -> None:
        self._console, self._budget_s, self.waiting = console, budget_s, update
        self._began_s = self._printed_s = 0.0

    def begin(self) -> None:
        self._began_s = self._printed_s = time.monotonic()

    def probing(self, text: str) -> None:
        now_s = time.monotonic()
        left_s = int(max(0.0, self._budget_s - (now_s - self._began_s)))
        line = f"{escape(text)}  [dim](ETA {left_s // 60}:{left_s % 60:02d})[/dim]"
        self.waiting(line)
        if not self._console.is_terminal and now_s - self._printed_s >= self.LINE_EVERY_S:
            self._printed_s = now_s
            self._console.print(line, highlight=False, soft_wrap=True)


def _tables(cluster: Cluster) -> str:
    text = ""
    if cluster.link_fits:
        links = Table(*LINK_COLUMNS, box=SIMPLE)
        for link in cluster.link_fits:
            links.add_row(
                link.host,
                "inside" if link.inside else "own",
                format_rate(link.bytes_per_s),
                format_seconds(link.latency_s),
                f"{link.relative_error:.1%}",
                f"{link.spread:.1%}",
            )
        text += table_text(links, WIDTH)
    if cluster.peer_fits:
        peers = Table(*PEER_COLUMNS, box=SIMPLE)
        for peer in cluster.peer_fits:
            peers.add_row(
                peer.host,
                str(peer.peers),
                "to them" if peer.outwards else "from them",
                format_rate(peer.bytes_per_s),
                format_seconds(peer.message_s),
                f"{peer.relative_error:.1%}",
                f"{peer.spread:.1%}",
            )
        text += table_text(peers, WIDTH)
    fits = Table(*FIT_COLUMNS, box=SIMPLE)
    for fit in cluster.fits:
        fits.add_row(*_fit_row(fit))
    return text + table_text(fits, WIDTH)


def _fit_row(fit: CollectiveFit) -> tuple[str, ...]:
    rate = "no limit seen"
    if fit.beta_s_per_byte > 0:
        rate = f"{format_bytes(1 / fit.beta_s_per_byte)}/s"
    return (
        fit.primitive,
        f"{fit.group_size} ({fit.where.value})",
        f"{format_bytes(fit.smallest_bytes)} - {format_bytes(fit.largest_bytes)}",
        format_seconds(fit.alpha_s),
        rate,
        str(len(fit.bends) + 1),
        f"{fit.relative_error:.1%}",
        "" if fit.large_error is None else f"{fit.large_error:.1%}",
        f"{fit.spread:.1%}",
        "yes" if fit.loaded else "",
        format_seconds(fit.cpu_s(2**20)),
    )
